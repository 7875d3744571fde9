"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): DeepSeek-V3's algebra under its own model_type."""

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
    name="glm4_moe_lite",
    model_types=("glm4_moe_lite",),
    rules=blocks.outer(mtp_copies=True) + blocks.decoder(*LAYER) + blocks.mtp(*LAYER),
    pairs=blocks.LATENT_PAIRS,
)
