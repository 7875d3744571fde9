"""Qwen3.5's language model with experts (Qwen3_5MoeForConditionalGeneration).

Public files hold a layer's experts in fused tensors, but those of MTP layers one by one; each is
written as the origin has it. The vision tower is nobody's rule.
"""

from __future__ import annotations

from . import blocks, blocks_experts, blocks_linear
from .family import Table
from .family_qwen3_5 import INPUTS
from .kinds import Rename

LAYER = (
    blocks.pre_norms,
    blocks.gated_attention,
    blocks.qk_norms,
    blocks_experts.experts_in_either_form,
    blocks_experts.gated_shared_expert,
)

TABLE = Table(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe", "qwen3_5_moe_text"),
    rules=blocks.outer()
    + blocks.decoder(*LAYER)
    + blocks_linear.native_linear_attention(*INPUTS)
    + blocks_linear.megatron_linear_attention(*INPUTS, separate=True)
    + blocks.mtp(*LAYER, names=blocks.qwen_mtp(Rename("mtp.fc.weight"))),
)
