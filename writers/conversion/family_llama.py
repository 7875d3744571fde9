"""Llama (LlamaForCausalLM): grouped-query attention, gated MLP."""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms
from .family import Table

TABLE = Table(
    name="llama",
    model_types=("llama",),
    rules=outer() + decoder(pre_norms, grouped_attention, dense_mlp),
    unwritten=(("self_attn.rotary_emb.inv_freq", "computed from rope_theta"),),
    derived_head_dim=True,
)
