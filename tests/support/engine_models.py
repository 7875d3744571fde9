"""Tiny random models for real engines, and what transformers says about them in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from weightbus.demo.megatron_cpu.origin import make_origin
from weightbus.demo.megatron_cpu.sizes import Kind, TinyRun

TOKENS = [[5, 77, 130, 9, 250, 18, 33, 201, 64, 7, 91, 140], [300, 2, 45, 45, 160, 11, 8, 222]]
_SPREAD = 0.08
"""Wide enough that two seeds differ by more than 1 in some log-probability."""


def tiny_model(folder: Path, kind: Kind, seed: int) -> Path:
    """A bf16 checkpoint folder with a tokenizer; every weight, norms too, depends on the seed."""
    make_origin(folder, TinyRun(kind=kind, bf16=True))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random) * _SPREAD
            parameter.copy_(noise if parameter.ndim > 1 else 1.0 + noise)
    model.save_pretrained(folder)
    return folder


def reference_logprobs(folder: Path) -> list[Any]:
    """Teacher-forced log-probabilities of TOKENS by fp32 transformers: one [length - 1] per row."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rows: list[Any] = []
    with torch.no_grad():
        for row in TOKENS:
            tokens = torch.tensor([row])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1].double(), -1)
            rows.append(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].numpy())
    return rows


def difference(one: list[Any], other: list[Any]) -> float:
    """The largest difference of two results of `reference_logprobs`."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
