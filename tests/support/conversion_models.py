"""Tiny random transformers models, saved as checkpoint folders: the judge of names and shapes.

Their dims are those of the Megatron fixtures (tests/fixtures/README.md).
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from weightbus.schemas.hf_folder import read_config
from weightbus.writers.expectation import Expectation, Expected

LAYERS, EXPERTS, VOCAB, HIDDEN = 4, 4, 250, 64

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_GQA: dict[str, Any] = {**_BASE, "num_key_value_heads": 2, "head_dim": 32}
_MLA: dict[str, Any] = {
    **_BASE, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1,
}  # fmt: skip
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA),
    "qwen2": ("Qwen2Config", {**_BASE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", _GQA),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_GQA,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_MLA, "first_k_dense_replace": 1}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_MLA, "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1)},
    ),
}
FAMILIES = tuple(_CONFIGS)


@dataclass(frozen=True)
class Origin:
    """A saved tiny model: its config.json as parsed and what its files hold."""

    config: dict[str, object]
    expectation: Expectation


def hf_config(family: str, **changes: object) -> Any:
    """A transformers config object."""
    name, values = _CONFIGS[family]
    return getattr(transformers, name)(**{**values, **changes})


def save_model(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a random model of this config into a folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)


@functools.cache
def origin_of(family: str, *, tied: bool = False, q_lora: bool = True) -> Origin:
    """A family's origin checkpoint; `q_lora` False leaves the latent query projection out."""
    changes: dict[str, object] = {} if q_lora else {"q_lora_rank": None}
    with tempfile.TemporaryDirectory() as folder:
        save_model(hf_config(family, tie_word_embeddings=tied, **changes), Path(folder))
        return Origin(read_config(Path(folder)), Expectation.from_folder(Path(folder)))


def with_mtp(origin: Origin) -> Origin:
    """The same with one MTP layer behind the decoder, as DeepSeek and GLM store it.

    transformers does not build MTP layers; their names are those of the public checkpoints:
    the last decoder layer's, and enorm, hnorm, eh_proj, shared_head.norm.
    """
    tensors = dict(origin.expectation.tensors)
    last, mtp = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    for name, expected in origin.expectation.tensors.items():
        if name.startswith(last):
            tensors[mtp + name.removeprefix(last)] = expected
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{mtp}{norm}.weight"] = Expected("F32", (HIDDEN,))
    tensors[f"{mtp}eh_proj.weight"] = Expected("F32", (HIDDEN, 2 * HIDDEN))
    config = {**origin.config, "num_nextn_predict_layers": 1}
    return Origin(config, Expectation.of(tensors))


def with_mtp_copies(origin: Origin) -> Origin:
    """The same with embedding and head repeated in the MTP layer, as DeepSeek-V3's files have."""
    tensors = dict(origin.expectation.tensors)
    mtp = f"model.layers.{LAYERS}."
    tensors[f"{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{mtp}shared_head.head.weight"] = tensors["lm_head.weight"]
    return Origin(origin.config, Expectation.of(tensors))
