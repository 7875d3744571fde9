"""Qwen3-MoE (Qwen3MoeForCausalLM): Qwen3 with experts; dense layers where the config says so."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms, qk_norms
from .blocks_experts import experts
from .family import Table

TABLE = Table(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    rules=outer() + decoder(pre_norms, grouped_attention, qk_norms, dense_mlp, experts),
)
