"""MiniMax-M2 (MiniMaxM2ForCausalLM): experts in every layer, norms over all heads at once."""

from __future__ import annotations

from .blocks import decoder, full_norms, grouped_attention, outer, pre_norms, qk_norms
from .blocks_experts import block_sparse_experts
from .family import Table

TABLE = Table(
    name="minimax_m2",
    model_types=("minimax_m2",),
    rules=outer()
    + decoder(pre_norms, grouped_attention, qk_norms, full_norms, block_sparse_experts),
    architectures=("MiniMaxM2ForCausalLM",),
)
