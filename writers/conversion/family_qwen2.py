"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): as Llama, with biases on q, k and v."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms
from .family import Table

TABLE = Table(
    name="qwen2",
    model_types=("qwen2",),
    rules=outer() + decoder(pre_norms, grouped_attention, dense_mlp),
    derived_head_dim=True,
)
