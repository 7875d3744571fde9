"""The numbers of a Hugging Face config.json that conversion rules work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from ...schemas.errors import OriginError

_EXPERTS: Final = ("num_experts", "n_routed_experts", "num_local_experts")
_MTP_LAYERS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that speaks of the language model: `text_config`, or all of it."""
    nested = config.get("text_config")
    return cast("Mapping[str, object]", nested) if isinstance(nested, dict) else config


@dataclass(frozen=True, slots=True)
class Dims:
    """Dimensions of one model, read from its config when a rule asks for them.

    Args:
        config: the parsed config.json; numbers of a multimodal model stand in its `text_config`.
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
        config = text_config(self.config)
        if "num_key_value_heads" in config and config["num_key_value_heads"] is None:
            return self.heads
        return self._number("num_key_value_heads")

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        if self.derived_head_dim and text_config(self.config).get("head_dim") is None:
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
        config = text_config(self.config)
        key = next((key for key in _MTP_LAYERS if config.get(key) is not None), None)
        return 0 if key is None else self._number(key)

    @property
    def experts(self) -> int:
        """Routed experts of one layer; families call the number by three names."""
        config = text_config(self.config)
        return self._number(next((key for key in _EXPERTS if key in config), _EXPERTS[0]))

    @property
    def index_head_dim(self) -> int:
        """Elements of one head of a DSA indexer."""
        return self._number("index_head_dim")

    @property
    def rope_dim(self) -> int:
        """Elements of a head that MLA and its indexer rotate."""
        return self._number("qk_rope_head_dim")

    @property
    def linear_key_heads(self) -> int:
        """Key (and query) heads of linear attention."""
        return self._number("linear_num_key_heads")

    @property
    def linear_value_heads(self) -> int:
        """Value heads of linear attention."""
        return self._number("linear_num_value_heads")

    @property
    def linear_key_dim(self) -> int:
        """Elements of one key head of linear attention."""
        return self._number("linear_key_head_dim")

    @property
    def linear_value_dim(self) -> int:
        """Elements of one value head of linear attention."""
        return self._number("linear_value_head_dim")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding. Absent means no, in all families of today.

        A multimodal config says it beside its `text_config`; what stands inside only counts where
        the outside is silent.
        """
        outer = self.config.get("tie_word_embeddings")
        if outer is None:
            outer = text_config(self.config).get("tie_word_embeddings")
        return outer is True

    def _number(self, key: str) -> int:
        value = text_config(self.config).get(key)
        if type(value) is not int or value < 0:
            raise OriginError(
                f"config.json has no usable {key} (it says {value!r}), a conversion rule needs it",
                where={"model_type": self.config.get("model_type")},
                next_step="complete the config.json of the origin checkpoint",
            )
        return value
