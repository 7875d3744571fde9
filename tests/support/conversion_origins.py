"""Tiny origins of every family, ranks of described layouts, and the whole tensors they hold."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.conversion_tiny import LAYERS, Weights, config_of, hf_config, save_origin
from support.conversion_wholes import Inverse, Wholes
from weightbus.schemas.layout import Layout
from weightbus.writers.conversion.dims import text_config
from weightbus.writers.described import Parallel, described_layouts

PADDED = 4
"""The vocabulary of 250 is padded to a multiple of 4 tp."""
DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "glm4", "mimo")


class Origin(NamedTuple):
    """A tiny model: its config.json and its tensors."""

    config: dict[str, Any]
    weights: Weights


@functools.cache
def origin_of(family: str) -> Origin:
    """As transformers saves it; MiMo, which it does not know, from Qwen2's."""
    if family == "mimo":
        origin = origin_of("qwen2")
        return Origin({**origin.config, "model_type": "mimo"}, origin.weights)
    with tempfile.TemporaryDirectory() as folder:
        weights = save_origin(hf_config(family), Path(folder))
        config = config_of(Path(folder))
    if family == "kimi_k2":
        config["model_type"] = "kimi_k2"
    return Origin(config, weights)


def ranks_of(origin: Origin, family: str, text: str, *, mtp: int = 0) -> list[Layout]:
    parallel = Parallel.parse(text).model_copy(
        update={"vocab_multiple": PADDED, "dtype": "F32", "mtp_layers": mtp}
    )
    return described_layouts(parallel, origin.config, family)


def wholes_of(origin: Origin, family: str, text: str, *, mtp: int = 0, prefix: str = "") -> Wholes:
    parallel = Parallel.parse(text)
    multiple = PADDED * parallel.tp
    return Inverse(
        origin.weights, text_config(origin.config), family, parallel.spec == "te",
        parallel.grouped, -(-250 // multiple) * multiple, prefix if prefix else "model.",
    ).wholes(mtp)  # fmt: skip


def mtp_origin(family: str) -> Origin:
    """The same with one MTP layer, under the names of public checkpoints, full attention inside."""
    base = origin_of(family)
    last = f"model.layers.{LAYERS - 1}."
    if family == "mimo":
        inner = "model.mtp_layers.0."
        outer = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
        own = [f"{inner}{name}.weight" for name in outer]
    elif family.startswith("qwen3"):
        inner = "mtp.layers.0."
        outer = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
        own = [f"mtp.{name}.weight" for name in outer]
    else:
        inner = f"model.layers.{LAYERS}."
        outer = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        own = [f"{inner}{name}.weight" for name in outer]
    rng = np.random.default_rng(9)
    more = {
        inner + name.removeprefix(last): rng.standard_normal(value.shape).astype(np.float32)
        for name, value in base.weights.items()
        if name.startswith(last)
    }
    shapes = [(40,), (40,), (40,), (40, 80)]
    for name, shape in zip(own, shapes, strict=True):
        more[name] = rng.standard_normal(shape).astype(np.float32)
    return Origin(base.config, {**base.weights, **more})


def text_for(family: str) -> str:
    return "tp=2,pp=2" if family in DENSE else "tp=2,pp=2,ep=2"
