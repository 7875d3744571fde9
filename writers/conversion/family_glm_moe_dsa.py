"""GLM-5 (GlmMoeDsaForCausalLM): DeepSeek-V3.2's algebra under its own model_type."""

from __future__ import annotations

from .blocks import LATENT_PAIRS
from .family import Table
from .family_deepseek_v32 import RULES

TABLE = Table(name="glm_moe_dsa", model_types=("glm_moe_dsa",), rules=RULES, pairs=LATENT_PAIRS)
