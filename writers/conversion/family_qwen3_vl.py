"""Qwen3-VL's language model (Qwen3VLForConditionalGeneration): Qwen3 under another prefix.

The vision tower is nobody's rule: what nobody trains is copied from the origin or left out.
"""

from __future__ import annotations

from .blocks import decoder, dense_mlp, grouped_attention, outer, pre_norms, qk_norms
from .family import Table

TABLE = Table(
    name="qwen3_vl",
    model_types=("qwen3_vl", "qwen3_vl_text"),
    rules=outer() + decoder(pre_norms, grouped_attention, qk_norms, dense_mlp),
)
