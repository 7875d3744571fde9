"""Every family against transformers: the same bits under every layout, and the same answers.

The Megatron tensors come from tests/support/conversion_wholes.py, which knows the formulas and not
the rules; the names and shapes that ranks hold from writers/described.py, which knows neither.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.conversion_origins import (
    DENSE,
    Origin,
    mtp_origin,
    origin_of,
    ranks_of,
    text_for,
    wholes_of,
)
from support.conversion_rehearsal import (
    assert_same_model,
    differing_tensors,
    expected_of,
    rehearse,
    write_checkpoint,
)
from support.conversion_tiny import (
    CONFIGS,
    MULTIMODAL,
    Weights,
    config_of,
    hf_config,
    logits,
    multimodal_config,
    save_origin,
)
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.expectation import Expectation

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


CASES = [
    pytest.param(family, text, id=f"{family}-{name}")
    for family in (*CONFIGS, "mimo")
    for name, text in LAYOUTS.items()
    if not (family in DENSE and name.startswith("ep"))
]


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


def fused(weights: Weights) -> Weights:
    """Decoder experts as public Qwen3.5 files hold them: [experts, 2I, h] and [experts, h, I]."""
    out: Weights = {}
    for name, value in weights.items():
        found = re.fullmatch(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            out[name] = value
        elif found[2] == "0" and found[3] == "down_proj":
            downs = [weights[f"{found[1]}.{e}.down_proj.weight"] for e in range(4)]
            ups = [
                np.concatenate([weights[f"{found[1]}.{e}.{p}_proj.weight"] for p in ("gate", "up")])
                for e in range(4)
            ]
            out[f"{found[1]}.down_proj"], out[f"{found[1]}.gate_up_proj"] = map(
                np.stack, (downs, ups)
            )
    return out


@pytest.mark.parametrize("text", ["", "tp=2,pp=2,ep=2,etp=2", "ep=4,spec=local,grouped=0"])
def test_experts_fused_in_the_decoder_and_one_by_one_in_mtp(text: str) -> None:
    family = "qwen3_5_moe"
    origin = mtp_origin(family)
    fused_origin = Origin(origin.config, fused(origin.weights))
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused_origin.weights
    assert "mtp.layers.0.mlp.experts.0.up_proj.weight" in fused_origin.weights
    layouts = ranks_of(fused_origin, family, text, mtp=1)
    wholes = wholes_of(fused_origin, family, text, mtp=1)
    assert_same_model(layouts, wholes)
    expectation = expected_of(fused_origin.weights)
    _, files = rehearse(layouts, wholes, expectation, family_of(origin.config))
    assert differing_tensors(files, fused_origin.weights) == []


def test_transformers_loads_fused_experts_and_answers_alike(tmp_path: Path) -> None:
    family, text = "qwen3_5_moe", "tp=2,pp=2,ep=2"
    weights = fused(save_origin(hf_config(family), tmp_path / "origin"))
    origin = Origin(config_of(tmp_path / "origin"), weights)
    layouts, wholes = ranks_of(origin, family, text), wholes_of(origin, family, text)
    expectation = expected_of(weights)
    plan, files = rehearse(layouts, wholes, expectation, family_of(origin.config))
    write_checkpoint(tmp_path / "out", tmp_path / "origin", plan, files)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "origin"))
