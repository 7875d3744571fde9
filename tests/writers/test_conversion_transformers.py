"""transformers loads what a plan writes, and answers as the model that the weights came from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from support.conversion_executor import shard_files
from support.conversion_inverse import megatron_of
from support.conversion_megatron import Grid, Model, layouts_of, local_bytes
from support.conversion_models import FAMILIES, LAYERS, VOCAB, hf_config, save_model
from weightbus.schemas.hf_folder import read_config
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_types import Plan

BASE = Model(layers=LAYERS, heads=4, groups=2, vocab=VOCAB, padded_vocab=256)
MODELS = {
    "llama": BASE,
    "qwen2": dataclasses.replace(BASE, bias=True),
    "qwen3": dataclasses.replace(BASE, norms=True),
    "qwen3_moe": dataclasses.replace(BASE, norms=True, experts=4),
    "deepseek_v3": dataclasses.replace(BASE, latent=True, experts=4, dense_layers=1),
    "glm4_moe_lite": dataclasses.replace(BASE, latent=True, experts=4, dense_layers=1),
}


def logits(folder: Path) -> torch.Tensor:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    model, info = loaded
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    tokens = torch.arange(1, 2 * 16 + 1).reshape(2, 16) * 7 % VOCAB
    with torch.no_grad():
        return model.eval()(tokens).logits


def randomised(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Give norms and biases random values too: at 1 and 0, swapped ones would stay unseen."""
    rng = np.random.default_rng(5)
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if value.ndim == 1:
            weights[name] = (value + 0.2 * rng.standard_normal(value.shape)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@pytest.mark.parametrize("te", [False, True], ids=["local", "te"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_there_and_back(family: str, te: bool, tmp_path: Path) -> None:
    origin, out = tmp_path / "origin", tmp_path / "out"
    save_model(hf_config(family, tie_word_embeddings=family == "qwen2"), origin)
    weights = randomised(origin)
    config = read_config(origin)
    model = dataclasses.replace(MODELS[family], te=te, grouped=te, tied=family == "qwen2")
    wholes = megatron_of(weights, model, model.shapes())
    grid = Grid(tp=2, pp=2, dp=2, ep=2)
    layouts = layouts_of(model, grid, {name: value.shape for name, value in wholes.items()})
    plan = build_plan(
        layouts, Expectation.from_folder(origin), family_of(config), writers=2,
        max_shard_bytes=1 << 18,
    )  # fmt: skip
    files = shard_files(plan, lambda source: local_bytes(source, layouts, lambda n, _: wholes[n]))
    write_folder(out, origin, plan, files)
    found = {name: value for file in files for name, value in load_file(out / file).items()}
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)
    assert torch.equal(logits(out), logits(origin))


def write_folder(out: Path, origin: Path, plan: Plan, files: dict[str, bytes]) -> None:
    out.mkdir()
    shutil.copy(origin / "config.json", out)
    for name, data in files.items():
        (out / name).write_bytes(data)
    weight_map = {target.name: plan.shards[target.shard].file for target in plan.targets}
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
