"""Hugging Face -> whole Megatron tensors, written by hand and used by tests only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from support.conversion_megatron import Model

Array = npt.NDArray[Any]

_SAME = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}
_MLP = re.compile(
    r"(mlp\.(?:shared_experts\.|experts\.)?)(?:local_experts\.(\d+)\.)?"
    r"linear_fc([12])\.weight(\d*)"
)


def megatron_of(hf: Mapping[str, Array], model: Model, names: Iterable[str]) -> dict[str, Array]:
    """The Megatron tensors of these names, made of a whole HF checkpoint."""
    return {name: _one(name, hf, model) for name in names}


def _one(name: str, hf: Mapping[str, Array], model: Model) -> Array:
    if name == "embedding.word_embeddings.weight":
        return _padded(hf["model.embed_tokens.weight"], model)
    if name == "output_layer.weight":
        head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
        return _padded(hf[head], model)
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    assert found, name
    return _of_layer(f"model.layers.{found[1]}.", found[2], hf, model)


def _of_layer(to: str, rest: str, hf: Mapping[str, Array], model: Model) -> Array:
    if rest == "self_attention.q_layernorm.weight":
        return hf[f"{to}self_attn.{'q_a_layernorm' if model.latent else 'q_norm'}.weight"]
    if rest in _SAME:
        return hf[to + _SAME[rest]]
    if fused := re.fullmatch(r"self_attention\.linear_qkv\.(weight|bias)", rest):
        return _fused([hf[f"{to}self_attn.{p}_proj.{fused[1]}"] for p in "qkv"], model.groups)
    mlp = _MLP.fullmatch(rest)
    assert mlp, rest
    expert = mlp[2] if mlp[2] is not None else mlp[4]
    at = to + mlp[1] + (f"{expert}." if expert else "")
    if mlp[3] == "2":
        return hf[f"{at}down_proj.weight"]
    return np.concatenate([hf[f"{at}gate_proj.weight"], hf[f"{at}up_proj.weight"]])


def _padded(rows: Array, model: Model) -> Array:
    garbage = np.full((model.padded_vocab - rows.shape[0], rows.shape[1]), 1e6, rows.dtype)
    return np.concatenate([rows, garbage])


def _fused(parts: list[Array], groups: int) -> Array:
    shared = [np.split(part, groups) for part in parts]
    return np.concatenate([part for group in zip(*shared, strict=True) for part in group])
