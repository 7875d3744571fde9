"""DeepSeek-V3 (DeepseekV3ForCausalLM): MLA, dense first layers, experts, MTP."""

from __future__ import annotations

from . import blocks, blocks_experts
from .family import Table

LAYER = (
    blocks.pre_norms,
    blocks.latent_attention,
    blocks.dense_mlp,
    blocks_experts.experts,
    blocks_experts.router_bias,
    blocks_experts.shared_experts,
)
RULES = blocks.outer(mtp_copies=True) + blocks.decoder(*LAYER) + blocks.mtp(*LAYER)

TABLE = Table(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    rules=RULES,
    pairs=blocks.LATENT_PAIRS,
)
