"""Tiny random transformers models of every family, with dims that tell a mistake from its mirror.

Hidden 40, 4 heads of 12 in 2 groups, MLP 28, experts 12, shared experts 20, vocabulary 250.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.numpy import load_file, save_file

Weights = dict[str, npt.NDArray[Any]]

LAYERS, VOCAB = 4, 250
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 28, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_HEADS: dict[str, Any] = {**_BASE, "head_dim": 12}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    **_BASE, **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_INDEXER: dict[str, Any] = {"index_head_dim": 14, "index_n_heads": 5, "index_topk": 8}
_DENSE_FIRST = ["dense"] + ["sparse"] * (LAYERS - 1)
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 14, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 20}
_VISION: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 40,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_HEADS, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", _HEADS),
    "qwen2": ("Qwen2Config", _BASE),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_BASE, **_EXPERTS, **_SHARED, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    ),
    "qwen3": ("Qwen3Config", {**_HEADS, "attention_bias": True}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_HEADS, **_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "qwen3_next": ("Qwen3NextConfig", {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED}),
    "qwen3_5": ("Qwen3_5TextConfig", {**_HEADS, **_LINEAR, "attention_bias": True}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED}),
    "glm4": ("Glm4Config", {**_HEADS, "attention_bias": True}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_HEADS, **_ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True,
         "attention_bias": True},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENT, "mlp_layer_types": _DENSE_FIRST}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "first_k_dense_replace": 1}),
    "kimi_k2": ("DeepseekV3Config", {**_LATENT, "first_k_dense_replace": 1}),
    "deepseek_v32": (
        "DeepseekV32Config", {**_LATENT, **_INDEXER, "mlp_layer_types": _DENSE_FIRST},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**_LATENT, **_INDEXER, "mlp_layer_types": _DENSE_FIRST,
         "indexer_types": ["full", "full", "shared", "full"]},
    ),
    "minimax_m2": ("MiniMaxM2Config", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
}  # fmt: skip
"""MiMo has no model in transformers; its decoder is Qwen2's."""

MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLConfig", _HEADS),
    "qwen3_5": ("Qwen3_5Config", {**_HEADS, **_LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", {**_HEADS, **_EXPERTS, **_LINEAR, **_SHARED}),
}


def hf_config(family: str, **changes: object) -> Any:
    """A text model's transformers config object."""
    name, values = CONFIGS[family]
    return getattr(transformers, name)(**{**values, **changes})


def multimodal_config(family: str, *, tied: bool = False) -> Any:
    """A vision and language model's config object."""
    name, values = MULTIMODAL[family]
    text = {**values, "tie_word_embeddings": tied}
    return getattr(transformers, name)(
        text_config=text, vision_config=dict(_VISION), tie_word_embeddings=tied
    )


def save_origin(config: Any, folder: Path) -> Weights:
    """Write a random model of this config into a folder, and return its tensors.

    Norms, biases and buffers get random values too: at 1 and 0, swapped ones would stay unseen.
    """
    auto = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        auto.from_config(config).float().save_pretrained(folder)
    rng = np.random.default_rng(5)
    weights = load_file(folder / "model.safetensors")
    for name in sorted(weights):
        value = weights[name]
        if value.ndim < 2 or value.min() == value.max():
            noise = 0.2 * rng.standard_normal(value.shape)
            weights[name] = (value + noise).astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json."""
    return json.loads((folder / "config.json").read_text())


def logits(folder: Path, *, multimodal: bool = False) -> torch.Tensor:
    """What transformers answers, having loaded every tensor and nothing else."""
    auto = (
        transformers.AutoModelForImageTextToText
        if multimodal
        else transformers.AutoModelForCausalLM
    )
    with contextlib.redirect_stderr(io.StringIO()):
        loaded: Any = auto.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
    model, info = loaded
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    tokens = torch.arange(1, 2 * 16 + 1).reshape(2, 16) * 7 % VOCAB
    with torch.no_grad():
        return model.eval()(tokens).logits
