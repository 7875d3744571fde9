"""MiMo (MiMoForCausalLM): Qwen2 with MTP layers of its own."""

from __future__ import annotations

from . import blocks
from .family import Table

LAYER = (blocks.pre_norms, blocks.grouped_attention, blocks.dense_mlp)

TABLE = Table(
    name="mimo",
    model_types=("mimo",),
    rules=blocks.outer() + blocks.decoder(*LAYER) + blocks.mtp(*LAYER, names=blocks.MIMO_MTP),
    derived_head_dim=True,
)
