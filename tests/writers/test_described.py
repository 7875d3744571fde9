"""Described layouts: what real Megatron ranks hold, and the descriptions that cannot be."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.conversion_models import origin_of
from support.megatron_fixtures import FixtureGroup, fixture_groups, layouts_of
from weightbus.schemas.errors import ConfigError, OriginError, UnknownFamilyError
from weightbus.schemas.layout import Layout, Part
from weightbus.writers.conversion.catalogue import tables
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.described_config import STRUCTURES, ModelConfig

FAMILIES = {"qwen3": "qwen3", "qwen3moe": "qwen3_moe", "mla": "deepseek_v3",
            "mla_yarn": "glm4_moe_lite"}  # fmt: skip
Held = dict[str, tuple[tuple[int, ...], Part]]


def held_by(layout: Layout) -> Held:
    """Names, shapes and parts of one rank, the layer inside MTP under one name."""
    return {
        tensor.name.replace("mtp_model_layer", "transformer_layer"): (
            tuple(tensor.shape),
            tensor.part if tensor.part.count > 1 else Part(),
        )
        for tensor in layout.tensors
    }


def description_of(group: FixtureGroup) -> Parallel:
    sizes: dict[str, Any] = group.ranks[0]["layout"]
    return Parallel(
        tp=sizes["tp"], pp=sizes["pp"], vpp=sizes["vpp"] or 1, ep=sizes["ep"], dp=sizes["dp"],
        etp=sizes["etp"] if "mla" in group.kind or "moe" in group.kind else 1,
        vocab_multiple=256 // sizes["tp"], spec=group.ranks[0]["spec"],
        grouped=sizes["grouped"], mtp_layers=1 if group.mtp else 0,
    )  # fmt: skip


@pytest.mark.parametrize("group", fixture_groups(), ids=lambda group: group.name)
def test_ranks_hold_what_real_megatron_ranks_hold(group: FixtureGroup) -> None:
    family = FAMILIES[group.kind]
    config = {**origin_of(family, tied=group.tied).config}
    real = layouts_of(group)
    described = described_layouts(description_of(group), config, family)
    assert len(described) == len(real)
    for wanted, found in zip(real, described, strict=True):
        assert held_by(found) == held_by(wanted)


def test_every_part_has_one_owner() -> None:
    config = origin_of("deepseek_v3").config
    text = "tp=2,pp=2,ep=2,etp=2,dp=4,vocab_multiple=4"
    owners: dict[tuple[str, int], int] = {}
    for layout in described_layouts(Parallel.parse(text), config, "deepseek_v3"):
        for tensor in layout.tensors:
            key = (tensor.name, tensor.part.index)
            owners[key] = owners.get(key, 0) + tensor.owned
    assert set(owners.values()) == {1}


def test_the_smallest_data_parallel_size_has_room_for_the_experts() -> None:
    parallel = Parallel.parse("tp=8,pp=16,ep=32")
    assert (parallel.data, parallel.stage_ranks, parallel.ranks) == (4, 32, 512)
    assert Parallel.parse("").ranks == 1
    assert Parallel.parse("ep=4,etp=2,tp=3").data == 8


def test_chunks_are_shared_out_evenly_or_as_told() -> None:
    sizes = [len(chunk) for chunk in Parallel.parse("pp=3,vpp=2").chunks(10)]
    assert sizes == [2, 2, 2, 2, 1, 1]
    told = Parallel.parse("pp=3,chunk_layers=1+5+4").chunks(10)
    assert [(chunk.start, chunk.stop) for chunk in told] == [(0, 1), (1, 6), (6, 10)]
    for wrong in ("pp=3,chunk_layers=1+5", "pp=3,chunk_layers=1+5+5"):
        with pytest.raises(ConfigError, match=r"chunks of .* layers, the pipeline has 3 chunks"):
            Parallel.parse(wrong).chunks(10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "not of the form key=value"),
        ("tp=2,cp=4", "names cp, which nobody knows"),
        ("tp=0", "tp: Input should be greater than or equal to 1"),
        ("tp=two", "tp: Input should be a valid integer"),
        ("spec=mine", "spec: Input should be 'te' or 'local'"),
    ],
)
def test_descriptions_that_cannot_be_parsed(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Parallel.parse(text)


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("deepseek_v3", "ep=3", "4 experts cannot be shared out to ep=3"),
        ("qwen3", "ep=2", "a model without experts cannot be shared out to ep=2"),
        ("deepseek_v3", "ep=4,dp=6", "a stage of tp * dp = 6 ranks is no multiple of"),
        ("qwen3", "tp=5", "cannot be cut into 5"),
    ],
)
def test_sizes_that_do_not_divide(family: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        described_layouts(Parallel.parse(text), origin_of(family).config, family)


def test_families_and_configs_that_cannot_be_described() -> None:
    with pytest.raises(UnknownFamilyError, match="'gpt2' cannot be described without a trainer"):
        ModelConfig({}, "gpt2")
    with pytest.raises(OriginError, match="no usable hidden_size"):
        described_layouts(Parallel(), {"num_hidden_layers": 2}, "qwen3")


def test_every_family_of_the_catalogue_can_be_described() -> None:
    assert set(STRUCTURES) == set(tables())
