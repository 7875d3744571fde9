"""What a config.json says about a model's structure, in one vocabulary for all families.

Used to describe a Megatron model without a trainer (`writers.described_model`). It knows the
families' configs, and nothing of their conversion rules: what it leads to is checked against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, cast

from ..schemas.errors import OriginError, UnknownFamilyError
from .conversion.dims import Dims, text_config

Attention: TypeAlias = Literal["groups", "gated", "latent"]
Bias: TypeAlias = Literal["never", "always", "config"]


@dataclass(frozen=True, slots=True)
class Structure:
    """How one family's Megatron model is built.

    Attributes:
        attention: of the layers that are not linear.
        linear: some layers have linear attention (Hugging Face's own module).
        joined_linear_input: linear attention has inputs qkvz and ba instead of qkv, z, b, a.
        qkv_bias: biases of the fused input; `config` goes by `attention_bias`.
        out_bias: attention's output has a bias too, whenever the input has.
        norms: of query and key heads: none, one per head, one over all heads.
        moe: has layers with experts.
        experts_ffn: the config key of an expert's width.
        shared: shared experts: none, Qwen's gated one, DeepSeek's.
        router: the router's extra tensor: none, the fp32 balancing bias, a plain bias.
        expert_bias: experts have biases.
        sandwich, sinks, indexer: GLM-4's norms, gpt_oss's sinks, DSA's indexer.
        derived_head_dim: see conversion.dims.
    """

    attention: Attention = "groups"
    linear: bool = False
    joined_linear_input: bool = False
    qkv_bias: Bias = "never"
    out_bias: bool = False
    norms: Literal["none", "head", "all"] = "none"
    moe: bool = False
    experts_ffn: str = "moe_intermediate_size"
    shared: Literal["none", "qwen", "deepseek"] = "none"
    router: Literal["plain", "balanced", "biased"] = "plain"
    expert_bias: bool = False
    mlp_bias: bool = False
    sandwich: bool = False
    sinks: bool = False
    indexer: bool = False
    derived_head_dim: bool = False


_LATENT: Final = Structure(attention="latent", moe=True, shared="deepseek", router="balanced")
_SPARSE: Final = Structure(
    attention="latent", moe=True, shared="deepseek", router="balanced", indexer=True
)
_LLAMA: Final = Structure(qkv_bias="config", out_bias=True, mlp_bias=True, derived_head_dim=True)
_QWEN3: Final = Structure(qkv_bias="config", out_bias=True, norms="head")
_QWEN3_MOE: Final = Structure(qkv_bias="config", out_bias=True, norms="head", moe=True)
_GATED: Final = Structure(
    attention="gated", linear=True, norms="head", qkv_bias="config", out_bias=True
)
_GATED_MOE: Final = replace(_GATED, moe=True, shared="qwen")

STRUCTURES: Final[Mapping[str, Structure]] = {
    "llama": _LLAMA,
    "mistral": Structure(derived_head_dim=True),
    "qwen2": Structure(qkv_bias="always", derived_head_dim=True),
    "mimo": Structure(qkv_bias="always", derived_head_dim=True),
    "qwen2_moe": Structure(qkv_bias="always", moe=True, shared="qwen", derived_head_dim=True),
    "qwen3": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_next": replace(_GATED_MOE, joined_linear_input=True),
    "qwen3_5": _GATED,
    "qwen3_5_moe": _GATED_MOE,
    "glm4": Structure(qkv_bias="config", sandwich=True, derived_head_dim=True),
    "glm4_moe": Structure(
        derived_head_dim=True,
        qkv_bias="config", norms="head", moe=True, shared="deepseek", router="balanced"
    ),
    "glm4_moe_lite": _LATENT,
    "deepseek_v3": _LATENT,
    "kimi_k2": _LATENT,
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "minimax_m2": Structure(
        norms="all", moe=True, experts_ffn="intermediate_size", router="balanced"
    ),
    "gpt_oss": Structure(
        qkv_bias="config", out_bias=True, moe=True, experts_ffn="intermediate_size",
        router="biased", expert_bias=True, sinks=True,
    ),
}  # fmt: skip
_INTERVAL: Final = 4
"""Every fourth layer of a model with linear attention has full attention, unless it says more."""


class ModelConfig:
    """One model's numbers and layer kinds.

    Args:
        config: the config.json.
        family: the family's name.

    Raises:
        UnknownFamilyError: no structure is known for the family.
        OriginError (each property): the config lacks the number.
    """

    def __init__(self, config: Mapping[str, object], family: str) -> None:
        found = STRUCTURES.get(family)
        if found is None:
            raise UnknownFamilyError(
                f"family {family!r} cannot be described without a trainer; known: "
                f"{', '.join(sorted(STRUCTURES))}",
                next_step="certify from the layouts that a trainer publishes",
            )
        self.structure = found
        self.dims = Dims(config, found.derived_head_dim)
        self._text = text_config(config)

    def number(self, key: str) -> int:
        """A number that the model cannot be without."""
        value = self._text.get(key)
        if type(value) is not int or value < 0:
            raise OriginError(
                f"config.json has no usable {key} (it says {value!r}), the model cannot be "
                "described without it",
                next_step="complete the config.json",
            )
        return value

    def flag(self, key: str) -> bool:
        """A switch; absent means off."""
        return self._text.get(key) is True

    @property
    def q_lora(self) -> int | None:
        """Width of MLA's latent query; None without one."""
        return None if self._text.get("q_lora_rank") is None else self.number("q_lora_rank")

    @property
    def qkv_bias(self) -> bool:
        """Whether attention's input has biases."""
        bias = self.structure.qkv_bias
        if bias == "config" and self._text.get("model_type") == "gpt_oss":
            return self._text.get("attention_bias") is not False
        return bias == "always" or (bias == "config" and self.flag("attention_bias"))

    @property
    def head_norms(self) -> bool:
        """Whether query and key heads have norms; GLM-4.5 and MiniMax say so in the config."""
        if "use_qk_norm" in self._text:
            return self.structure.norms != "none" and self.flag("use_qk_norm")
        return self.structure.norms != "none" and self._text.get("model_type") != "glm4_moe"

    @property
    def shared_ffn(self) -> int:
        """Width of the shared experts together."""
        if self.structure.shared == "qwen":
            return self.number("shared_expert_intermediate_size")
        return self.number("n_shared_experts") * self.number(self.structure.experts_ffn)

    def is_linear(self, layer: int) -> bool:
        """Whether the layer has linear attention."""
        if not self.structure.linear:
            return False
        kinds = self._list("layer_types")
        if kinds is not None:
            return kinds[layer] == "linear_attention"
        given = self._text.get("full_attention_interval")
        return (layer + 1) % (given if type(given) is int else _INTERVAL) != 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        if not self.structure.moe:
            return False
        if self.structure.shared == "deepseek":
            kinds = self._list("mlp_layer_types")
            first = self._text.get("first_k_dense_replace")
            if kinds is not None:
                return kinds[layer] == "sparse"
            return layer >= (first if type(first) is int else 0)
        step = self._text.get("decoder_sparse_step")
        odd = layer in (self._list("mlp_only_layers") or ())
        return not odd and not (type(step) is int and (layer + 1) % step)

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer has an indexer of its own, or shares an earlier layer's."""
        if not self.structure.indexer:
            return False
        kinds = self._list("indexer_types")
        return kinds is None or kinds[layer] == "full"

    def _list(self, key: str) -> list[object] | None:
        value = self._text.get(key)
        return cast("list[object]", value) if isinstance(value, list) else None
