"""gpt-oss (GptOssForCausalLM): sinks, biases, fused experts with gate and up interleaved."""

from __future__ import annotations

from .blocks import decoder, grouped_attention, outer, pre_norms, sinks
from .blocks_experts import interleaved_experts
from .family import Table

TABLE = Table(
    name="gpt_oss",
    model_types=("gpt_oss",),
    rules=outer() + decoder(pre_norms, grouped_attention, sinks, interleaved_experts),
)
