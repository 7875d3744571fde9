"""Weights by name: a function of a tensor's global name, so every layout holds the same model."""

from __future__ import annotations

import functools
import re
import zlib

import torch

from ...schemas.layout import Part

_ALIASES = (
    # The two spec namings of one norm or expert must give one value.
    (r"self_attention\.linear_qkv\.layer_norm_weight|input_layernorm\.weight", "@in_ln"),
    (r"mlp\.linear_fc1\.layer_norm_weight|pre_mlp_layernorm\.weight", "@pre_ln"),
    (r"linear_q_up_proj\.layer_norm_weight", "q_layernorm.weight"),
    (r"linear_kv_up_proj\.layer_norm_weight", "kv_layernorm.weight"),
    (r"experts\.linear_fc([12])\.weight(\d+)$", r"experts.local_experts.\2.linear_fc\1.weight"),
)


@functools.cache
def value_of(global_name: str, whole_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of a global Megatron name.

    Norm weights are random around 1: at exactly 1 a swapped norm would stay unseen.
    """
    alias = global_name
    for pattern, replacement in _ALIASES:
        alias = re.sub(pattern, replacement, alias)
    generator = torch.Generator().manual_seed(zlib.crc32(alias.encode()))
    value = torch.randn(whole_shape, generator=generator)
    if len(whole_shape) > 1 or "expert_bias" in global_name:
        return (0.1 * value).to(dtype)
    return (1 + 0.2 * value).to(dtype)


def cut_whole(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a whole tensor, as `schemas.layout.Part` defines it."""
    if part.count == 1:
        return whole
    blocks = whole.split(list(part.blocks), part.dim) if part.blocks else (whole,)
    return torch.cat([block.chunk(part.count, part.dim)[part.index] for block in blocks], part.dim)
