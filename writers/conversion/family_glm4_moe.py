"""GLM-4.5 and GLM-4.6 (Glm4MoeForCausalLM): query groups with biases and norms, experts, MTP."""

from __future__ import annotations

from . import blocks, blocks_experts
from .family import Table

LAYER = (
    blocks.pre_norms,
    blocks.grouped_attention,
    blocks.qk_norms,
    blocks.dense_mlp,
    blocks_experts.experts,
    blocks_experts.router_bias,
    blocks_experts.shared_experts,
)

TABLE = Table(
    name="glm4_moe",
    model_types=("glm4_moe",),
    rules=blocks.outer(mtp_copies=True) + blocks.decoder(*LAYER) + blocks.mtp(*LAYER),
    derived_head_dim=True,
)
