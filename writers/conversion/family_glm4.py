"""GLM-4 (Glm4ForCausalLM): four norms per layer, gate and up in one tensor, q/k/v biases."""

from __future__ import annotations

from .blocks import decoder, fused_mlp, grouped_attention, outer, pre_norms, sandwich_norms
from .family import Table

TABLE = Table(
    name="glm4",
    model_types=("glm4",),
    rules=outer() + decoder(pre_norms, grouped_attention, fused_mlp, sandwich_norms),
    derived_head_dim=True,
)
