"""Mistral (MistralForCausalLM): as Llama."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms
from .family import Table

TABLE = Table(
    name="mistral",
    model_types=("mistral",),
    rules=outer() + decoder(pre_norms, grouped_attention, dense_mlp),
    derived_head_dim=True,
)
