"""The numbers of a Hugging Face config.json that conversion rules work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...schemas.errors import OriginError


@dataclass(frozen=True, slots=True)
class Dims:
    """Dimensions of one model, read from its config when a rule asks for them.

    Args:
        config: the parsed config.json.
        derived_head_dim: the family's head_dim is hidden_size / num_attention_heads unless the
            config names another; other families always name it.

    Raises (each property):
        OriginError: the config lacks the number.
    """

    config: Mapping[str, object]
    derived_head_dim: bool = False

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self._number("num_attention_heads")

    @property
    def groups(self) -> int:
        """Query groups, which are the key/value heads; transformers reads null as all heads."""
        if "num_key_value_heads" in self.config and self.config["num_key_value_heads"] is None:
            return self.heads
        return self._number("num_key_value_heads")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        if self.derived_head_dim and self.config.get("head_dim") is None:
            return self._number("hidden_size") // self.heads
        return self._number("head_dim")

    @property
    def vocab(self) -> int:
        """Rows of the embedding, without Megatron's padding."""
        return self._number("vocab_size")

    @property
    def layers(self) -> int:
        """Decoder layers, without MTP layers."""
        return self._number("num_hidden_layers")

    @property
    def mtp_layers(self) -> int:
        """MTP layers that the config announces; 0 if it says nothing."""
        value = self.config.get("num_nextn_predict_layers")
        return 0 if value is None else self._number("num_nextn_predict_layers")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding. Absent means no, in all families of today."""
        return self.config.get("tie_word_embeddings") is True

    def _number(self, key: str) -> int:
        value = self.config.get(key)
        if type(value) is not int or value < 0:
            raise OriginError(
                f"config.json has no usable {key} (it says {value!r}), a conversion rule needs it",
                where={"model_type": self.config.get("model_type")},
                next_step="complete the config.json of the origin checkpoint",
            )
        return value
