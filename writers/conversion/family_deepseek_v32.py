"""DeepSeek-V3.2 (DeepseekV32ForCausalLM): DeepSeek-V3 with sparse attention's indexer."""

from __future__ import annotations

from . import blocks, blocks_linear, family_deepseek_v3
from .family import Table

LAYER = (*family_deepseek_v3.LAYER, blocks_linear.indexer)
RULES = blocks.outer(mtp_copies=True) + blocks.decoder(*LAYER) + blocks.mtp(*LAYER)

TABLE = Table(
    name="deepseek_v32", model_types=("deepseek_v32",), rules=RULES, pairs=blocks.LATENT_PAIRS
)
