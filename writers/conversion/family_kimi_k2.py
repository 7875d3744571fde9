"""Kimi-K2 (DeepseekV3ForCausalLM under its own model_type): DeepSeek-V3's algebra."""

from __future__ import annotations

from .blocks import LATENT_PAIRS
from .family import Table
from .family_deepseek_v3 import RULES

TABLE = Table(name="kimi_k2", model_types=("kimi_k2",), rules=RULES, pairs=LATENT_PAIRS)
