"""Hand-written Megatron -> Hugging Face formulas on whole tensors, apart from the rules.

The only things shared with the program are the names that the two formats have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


def split_qkv(fused: Array, heads: int, groups: int, dim: int) -> tuple[Array, Array, Array]:
    """Row (g(r+2)+s)d+e: s < r is query head gr+s, s = r key head g, s = r+1 value head g."""
    r = heads // groups
    tail = fused.shape[1:]
    q = np.empty((heads * dim, *tail), fused.dtype)
    k = np.empty((groups * dim, *tail), fused.dtype)
    v = np.empty((groups * dim, *tail), fused.dtype)
    for g in range(groups):
        for s in range(r + 2):
            for e in range(dim):
                row = fused[(g * (r + 2) + s) * dim + e]
                if s < r:
                    q[(g * r + s) * dim + e] = row
                elif s == r:
                    k[g * dim + e] = row
                else:
                    v[g * dim + e] = row
    return q, k, v


_MLA = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_NORMS = {
    "input_layernorm.weight": "input_layernorm",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm",
    "self_attention.k_layernorm.weight": "self_attn.k_norm",
}


def convert(
    wholes: Mapping[str, Array], config: Mapping[str, object], *, mla: bool
) -> dict[str, Array]:
    """The HF checkpoint of a whole Megatron model."""
    out: dict[str, Array] = {}
    layers = _number(config, "num_hidden_layers")
    layer_tensor = functools.partial(_layer, config=config, mla=mla, out=out)
    vocab = _number(config, "vocab_size")
    tied = config.get("tie_word_embeddings") is True
    for name, value in wholes.items():
        if name == "embedding.word_embeddings.weight":
            out["model.embed_tokens.weight"] = value[:vocab]
        elif name == "output_layer.weight":
            if not tied:
                out["lm_head.weight"] = value[:vocab]
        elif name == "decoder.final_layernorm.weight":
            out["model.norm.weight"] = value
        elif found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            layer_tensor(f"model.layers.{found[1]}.", found[2], value)
        elif found := re.fullmatch(
            r"mtp\.layers\.(\d+)\.(transformer_layer|mtp_model_layer)\.(.*)", name
        ):
            layer = layers + int(found[1])
            layer_tensor(f"model.layers.{layer}.", found[3], value)
        elif found := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)\.weight", name):
            own = {"final_layernorm": "shared_head.norm"}.get(found[2], found[2])
            out[f"model.layers.{layers + int(found[1])}.{own}.weight"] = value
        else:
            raise AssertionError(f"the oracle does not know {name}")
    return out


def _layer(
    to: str,
    name: str,
    value: Array,
    *,
    config: Mapping[str, object],
    mla: bool,
    out: dict[str, Array],
) -> None:
    expert = re.fullmatch(r"mlp\.experts\.linear_fc([12])\.weight(\d+)", name)
    sequential = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight", name)
    if name in _NORMS:
        out[f"{to}{_NORMS[name]}.weight"] = value
    elif name == "self_attention.q_layernorm.weight":
        out[f"{to}self_attn.{'q_a_layernorm' if mla else 'q_norm'}.weight"] = value
    elif name == "mlp.router.weight":
        out[f"{to}mlp.gate.weight"] = value
    elif name == "mlp.router.expert_bias":
        out[f"{to}mlp.gate.e_score_correction_bias"] = value
    elif expert:
        _fc(f"{to}mlp.experts.{expert[2]}.", expert[1], "weight", value, out)
    elif sequential:
        _fc(f"{to}mlp.experts.{sequential[1]}.", sequential[2], "weight", value, out)
    elif found := re.fullmatch(r"mlp\.(shared_experts\.)?linear_fc([12])\.(weight|bias)", name):
        _fc(f"{to}mlp.{found[1] or ''}", found[2], found[3], value, out)
    elif found := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", name):
        heads, groups = (
            _number(config, key) for key in ("num_attention_heads", "num_key_value_heads")
        )
        dim = value.shape[0] // (heads + 2 * groups)
        for part, rows in zip("qkv", split_qkv(value, heads, groups, dim), strict=True):
            out[f"{to}self_attn.{part}_proj.{found[1]}"] = rows
    elif found := re.fullmatch(r"self_attention\.(\w+)\.(weight|bias)", name):
        out[f"{to}self_attn.{_MLA[found[1]]}.{found[2]}"] = value
    else:
        raise AssertionError(f"the oracle does not know {name}")


def _fc(to: str, which: str, part: str, value: Array, out: dict[str, Array]) -> None:
    if which == "2":
        out[f"{to}down_proj.{part}"] = value
        return
    half = value.shape[0] // 2
    out[f"{to}gate_proj.{part}"] = value[:half]
    out[f"{to}up_proj.{part}"] = value[half:]


def _number(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int)
    return value
