"""DeepSeek-V3 (DeepseekV3ForCausalLM): MLA, dense first layers, experts, MTP."""

from __future__ import annotations

from . import blocks
from .family import Table

LAYER = (
    blocks.pre_norms,
    blocks.latent_attention,
    blocks.dense_mlp,
    blocks.experts,
    blocks.router_bias,
    blocks.shared_experts,
)

TABLE = Table(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    rules=blocks.outer(mtp_copies=True) + blocks.decoder(*LAYER) + blocks.mtp(*LAYER),
    pairs=blocks.LATENT_PAIRS,
)
