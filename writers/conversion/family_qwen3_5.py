"""Qwen3.5's language model, dense (Qwen3_5ForConditionalGeneration): linear and gated attention.

The vision tower is nobody's rule: what nobody trains is copied from the origin or left out.
"""

from __future__ import annotations

from . import blocks, blocks_linear
from .family import Table
from .kinds import Rename

LAYER = (blocks.pre_norms, blocks.gated_attention, blocks.qk_norms, blocks.dense_mlp)
INPUTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

TABLE = Table(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_text"),
    rules=blocks.outer()
    + blocks.decoder(*LAYER)
    + blocks_linear.native_linear_attention(*INPUTS)
    + blocks_linear.megatron_linear_attention(*INPUTS, separate=True)
    + blocks.mtp(*LAYER, names=blocks.qwen_mtp(Rename("mtp.fc.weight"))),
)
