"""Public models' configs certify without weights, under layouts of hundreds of ranks.

tests/fixtures/configs holds the numbers of their config.json files on which shapes depend. What a
version must contain is transformers' word (models on the meta device, in their saved form).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from weightbus.writers.certificate import certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation
from weightbus.writers.expected_transformers import expectation_of_config
from weightbus.writers.plan_differences import DifferenceKind

CONFIGS = Path(__file__).parents[1] / "fixtures/configs"
CASES = {
    "deepseek-v3": ("tp=8,pp=16,ep=32", "tp=1,pp=8,ep=64,spec=local,grouped=0"),
    "kimi-k2": ("tp=8,pp=8,ep=32", "tp=4,pp=16,vpp=2,ep=16"),
    "glm-4.5": ("tp=8,pp=4,ep=16", "tp=4,pp=23,ep=32,etp=1"),
    "glm-4.7-flash": ("tp=4,pp=2,ep=8", "tp=2,pp=3,ep=4,etp=2,spec=local"),
    "qwen3-235b-a22b": ("tp=4,pp=4,ep=16", "tp=8,pp=2,vpp=4,ep=32"),
    "qwen3-next-80b-a3b": ("tp=2,pp=4,ep=8", "tp=1,pp=1,ep=16"),
    "qwen2.5-0.5b": ("tp=2,pp=2", "", "tp=1,pp=3,chunk_layers=7+9+8,spec=local"),
    "gpt-oss-120b": ("tp=8,pp=4,ep=8", "tp=2,ep=4,etp=2,spec=local,grouped=0"),
    "minimax-m2": ("tp=8,pp=2,ep=32", "tp=4,pp=1,ep=8"),
}
BYTES = {
    "deepseek-v3": 1342.0e9, "kimi-k2": 2052.8e9, "glm-4.5": 705.6e9, "glm-4.7-flash": 59.9e9,
    "qwen3-235b-a22b": 470.2e9, "qwen3-next-80b-a3b": 159.3e9, "qwen2.5-0.5b": 0.988e9,
    "gpt-oss-120b": 233.7e9, "minimax-m2": 457.4e9,
}  # fmt: skip
"""Two bytes per parameter without MTP: 671B, 1026B, 353B, 30B, 235B, 80B, 0.49B, 117B, 229B."""


def test_every_config_has_its_layouts() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_public_models_certify(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    expectation = expectation_of_config(config)
    family = family_of(config)
    sizes = [
        _elements(spec.shape) * (4 if spec.dtype == "F32" else 2)
        for spec in expectation.tensors.values()
        if spec.shape is not None
    ]
    assert sum(sizes) == pytest.approx(BYTES[name], rel=0.01)
    for text in CASES[name]:
        layouts = described_layouts(Parallel.parse(text), config, family.name)
        found = certify(layouts, expectation, family)
        assert found.ok, found.render()[:2000]
        assert found.targets == len(expectation.tensors)
        assert ("lm_head.weight" in expectation.tensors) != (name == "qwen2.5-0.5b")


def test_a_forgotten_rank_is_told() -> None:
    config = json.loads((CONFIGS / "glm-4.7-flash.json").read_text())
    layouts = described_layouts(Parallel.parse("tp=4,pp=2,ep=8"), config, "glm4_moe_lite")
    found = certify(layouts[:-1], expectation_of_config(config), family_of(config))
    kinds = {difference.kind for difference in found.differences}
    assert kinds == {DifferenceKind.MISSING_TENSOR}


def test_mtp_that_is_trained_and_not_expected_is_told() -> None:
    config = json.loads((CONFIGS / "glm-4.7-flash.json").read_text())
    layouts = described_layouts(Parallel.parse("ep=8,mtp_layers=1"), config, "glm4_moe_lite")
    found = certify(layouts, expectation_of_config(config), family_of(config))
    assert {difference.kind for difference in found.differences} == {DifferenceKind.EXTRA_TENSOR}
    more = {difference.tensor for difference in found.differences}
    expected = expectation_of_config(config)
    names = {**dict.fromkeys(more, (None, None)), **expected.tensors}
    assert certify(layouts, Expectation.of(names), family_of(config)).ok


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
