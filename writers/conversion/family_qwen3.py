"""Qwen3 (Qwen3ForCausalLM): grouped-query attention with q and k norms."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms, qk_norms
from .family import Table

TABLE = Table(
    name="qwen3",
    model_types=("qwen3",),
    rules=outer() + decoder(pre_norms, grouped_attention, qk_norms, dense_mlp),
)
