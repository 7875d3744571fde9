"""Qwen2-MoE (Qwen2MoeForCausalLM): Qwen2 with experts and a gated shared expert."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms
from .blocks_experts import experts, gated_shared_expert
from .family import Table

TABLE = Table(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    rules=outer() + decoder(pre_norms, grouped_attention, dense_mlp, experts, gated_shared_expert),
    derived_head_dim=True,
)
