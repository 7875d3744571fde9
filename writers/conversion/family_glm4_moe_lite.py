"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): DeepSeek-V3's algebra under its own model_type."""

from __future__ import annotations

from .blocks import LATENT_PAIRS
from .family import Table
from .family_deepseek_v3 import RULES

TABLE = Table(name="glm4_moe_lite", model_types=("glm4_moe_lite",), rules=RULES, pairs=LATENT_PAIRS)
