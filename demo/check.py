"""Does the engine answer as the trainer's own model does? Log-probabilities, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ..schemas.errors import EngineRefusedError

MAX_DIFFERENCE = 0.1
"""bf16 rounding stays below 0.03; other weights differ by more than 1 (natural logarithms)."""


def trainer_logprobs(logits_dir: Path, weight_version: int) -> Any:
    """Teacher-forced log-probabilities by Megatron itself: [batch, length - 1] float32."""
    tokens = np.load(logits_dir / "tokens.npy")
    logits = np.load(logits_dir / f"logits_v{weight_version:06d}.npy").astype(np.float64)
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], -1)[..., 0]


def engine_logprobs(url: str, tokens: Any, timeout_s: float = 60.0) -> tuple[Any, set[str]]:
    """The same from a running SGLang server, and the version labels of its answers."""
    rows: list[list[float]] = []
    labels: set[str] = set()
    with httpx.Client(base_url=url, trust_env=False, timeout=timeout_s) as client:
        for row in tokens.tolist():
            answer = client.post(
                "/generate",
                json={
                    "input_ids": row,
                    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                },
            )
            answer.raise_for_status()
            meta = answer.json()["meta_info"]
            labels.add(str(meta.get("weight_version", "")))
            rows.append([entry[0] for entry in meta["input_token_logprobs"][1:]])
    return np.array(rows), labels


def compare(url: str, logits_dir: Path, weight_version: int) -> tuple[float, set[str]]:
    """The largest difference between trainer and engine, and the engine's labels.

    Raises:
        EngineRefusedError: they differ by more than MAX_DIFFERENCE.
    """
    tokens = np.load(logits_dir / "tokens.npy")
    answers, labels = engine_logprobs(url, tokens)
    difference = float(np.abs(answers - trainer_logprobs(logits_dir, weight_version)).max())
    if difference > MAX_DIFFERENCE:
        raise EngineRefusedError(
            f"the engine's log-probabilities differ from the trainer's by {difference:.3f}",
            where={"weight_version": weight_version, "labels": sorted(labels)},
            next_step="compare the version directory with `weightbus verify`",
        )
    return difference, labels
