"""Every family against transformers: the same bits under every layout, and the same answers.

The Megatron tensors come from tests/support/conversion_wholes.py, which knows the formulas and not
the rules; the names and shapes that ranks hold from writers/described.py, which knows neither.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.conversion_rehearsal import (
    assert_same_model,
    differing_tensors,
    expected_of,
    rehearse,
    write_checkpoint,
)
from support.conversion_tiny import (
    CONFIGS,
    LAYERS,
    MULTIMODAL,
    Weights,
    config_of,
    hf_config,
    logits,
    multimodal_config,
    save_origin,
)
from support.conversion_wholes import Inverse, Wholes
from weightbus.schemas.layout import Layout
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.dims import text_config
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation

PADDED = 4
"""The vocabulary of 250 is padded to a multiple of 4 tp."""
LAYOUTS = {
    "one rank": "",
    "tp2": "tp=2,spec=local,grouped=0",
    "tp4, fewer groups": "tp=4",
    "pp2 tp2": "pp=2,tp=2",
    "pp3 uneven": "pp=3,chunk_layers=2+1+1,spec=local",
    "vpp": "pp=2,vpp=2",
    "ep2 etp2": "tp=2,ep=2,etp=2",
    "ep4 tp2 dp2": "tp=2,ep=4,dp=2",
    "ep4 local": "ep=4,spec=local,grouped=0,dp=8",
}


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


DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "glm4", "mimo")
CASES = [
    pytest.param(family, text, id=f"{family}-{name}")
    for family in (*CONFIGS, "mimo")
    for name, text in LAYOUTS.items()
    if not (family in DENSE and name.startswith("ep"))
]


def text_for(family: str) -> str:
    return "tp=2,pp=2" if family in DENSE else "tp=2,pp=2,ep=2"


@pytest.mark.parametrize(("family", "text"), CASES)
def test_the_same_bits_under_every_layout(family: str, text: str) -> None:
    origin = origin_of(family)
    layouts, wholes = ranks_of(origin, family, text), wholes_of(origin, family, text)
    assert_same_model(layouts, wholes)
    _, files = rehearse(layouts, wholes, expected_of(origin.weights), family_of(origin.config))
    assert differing_tensors(files, origin.weights) == []


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_loads_them_and_answers_alike(family: str, tmp_path: Path) -> None:
    save_origin(hf_config(family), tmp_path / "origin")
    origin = origin_of(family)
    text = text_for(family)
    layouts, wholes = ranks_of(origin, family, text), wholes_of(origin, family, text)
    plan, files = rehearse(
        layouts, wholes, Expectation.from_folder(tmp_path / "origin"), family_of(origin.config)
    )
    write_checkpoint(tmp_path / "out", tmp_path / "origin", plan, files)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "origin"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_oss", "glm4_moe"])
def test_a_tied_model_has_no_head(family: str, tmp_path: Path) -> None:
    weights = save_origin(hf_config(family, tie_word_embeddings=True), tmp_path / "origin")
    assert "lm_head.weight" not in weights
    origin = Origin(config_of(tmp_path / "origin"), weights)
    text = "tp=2,pp=2"
    layouts, wholes = ranks_of(origin, family, text), wholes_of(origin, family, text)
    assert_same_model(layouts, wholes)
    copies = [layout for layout in layouts if layout.producer.pp_rank == 1]
    names = {tensor.name for layout in copies for tensor in layout.tensors}
    assert "embedding.word_embeddings.weight" in names
    plan, files = rehearse(
        layouts, wholes, Expectation.from_folder(tmp_path / "origin"), family_of(origin.config)
    )
    write_checkpoint(tmp_path / "out", tmp_path / "origin", plan, files)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "origin"))


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain names", "language_model."])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_language_models_of_multimodal_checkpoints(
    family: str, wrapped: bool, tmp_path: Path
) -> None:
    weights = save_origin(multimodal_config(family, tied=wrapped), tmp_path / "origin")
    language = {name: value for name, value in weights.items() if ".visual." not in name}
    assert 0 < len(language) < len(weights)
    origin = Origin(config_of(tmp_path / "origin"), weights)
    prefix = "model.language_model."
    layouts = ranks_of(origin, family, "tp=2,pp=2")
    wholes = wholes_of(origin, family, "tp=2,pp=2", prefix=prefix)
    assert_same_model(layouts, wholes)
    if wrapped:
        layouts = [
            layout.model_copy(
                update={
                    "tensors": tuple(
                        tensor.model_copy(update={"name": f"language_model.{tensor.name}"})
                        for tensor in layout.tensors
                    )
                }
            )
            for layout in layouts
        ]
        wholes = {f"language_model.{name}": value for name, value in wholes.items()}
    _, files = rehearse(layouts, wholes, expected_of(language), family_of(origin.config))
    assert differing_tensors(files, language) == []


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


@pytest.mark.parametrize("child", ["transformer_layer", "mtp_model_layer"])
@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "qwen3_next",
     "qwen3_5", "qwen3_5_moe", "mimo"],
)  # fmt: skip
def test_mtp_layers_under_both_names_of_the_layer_inside(family: str, child: str) -> None:
    origin = mtp_origin(family)
    text = text_for(family)
    layouts = ranks_of(origin, family, text, mtp=1)
    wholes = wholes_of(origin, family, text, mtp=1)
    assert_same_model(layouts, wholes)
    renamed = [
        layout.model_copy(
            update={
                "tensors": tuple(
                    tensor.model_copy(
                        update={"name": tensor.name.replace("transformer_layer", child)}
                    )
                    for tensor in layout.tensors
                )
            }
        )
        for layout in layouts
    ]
    wholes = {name.replace("transformer_layer", child): value for name, value in wholes.items()}
    _, files = rehearse(renamed, wholes, expected_of(origin.weights), family_of(origin.config))
    assert differing_tensors(files, origin.weights) == []
