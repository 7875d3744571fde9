"""Qwen3-Next (Qwen3NextForCausalLM): linear and gated attention, experts, a gated shared expert."""

from __future__ import annotations

from . import blocks, blocks_experts, blocks_linear
from .family import Table
from .kinds_attention import ColumnHalvesSwapped

LAYER = (
    blocks.pre_norms,
    blocks.gated_attention,
    blocks.qk_norms,
    blocks.dense_mlp,
    blocks_experts.experts,
    blocks_experts.gated_shared_expert,
)
INPUTS = ("in_proj_qkvz", "in_proj_ba")

# The column halves of MTP's projection are swapped, as trainers of this family store it; Qwen3.5,
# whose modules join their inputs in the same order, does not swap them.
TABLE = Table(
    name="qwen3_next",
    model_types=("qwen3_next",),
    rules=blocks.outer()
    + blocks.decoder(*LAYER)
    + blocks_linear.native_linear_attention(*INPUTS)
    + blocks_linear.megatron_linear_attention(*INPUTS, separate=False)
    + blocks.mtp(*LAYER, names=blocks.qwen_mtp(ColumnHalvesSwapped("mtp.fc.weight"))),
)
