"""The 40 layouts of real Megatron ranks: every one gives the same Hugging Face bytes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from support.conversion_executor import ITEMS, Raw, differing, execute
from support.conversion_models import Origin, origin_of, with_mtp
from support.conversion_oracle import convert
from support.megatron_fixtures import (
    TORCH_DTYPES,
    FixtureGroup,
    cut_whole,
    fixture_groups,
    layouts_of,
    value_of,
)
from weightbus.schemas.dtypes import ITEM_BYTES, DType
from weightbus.schemas.layout import Layout
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_types import Source

FAMILIES = {
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "mla": ("deepseek_v3", "glm4_moe_lite"),
    "mla_yarn": ("deepseek_v3", "glm4_moe_lite"),
}
CASES = [(group, family) for group in fixture_groups() for family in FAMILIES[group.kind]]


def whole_value(name: str, shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
    """The whole tensor, the same under both names of the layer inside an MTP layer."""
    alias = name.replace(".mtp_model_layer.", ".transformer_layer.")
    return value_of(alias, shape, TORCH_DTYPES[dtype])


def raw_items(
    value: torch.Tensor, dtype: DType
) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    return value.contiguous().view(torch.uint8).numpy().view(ITEMS[ITEM_BYTES[dtype]])


def origin_for(group: FixtureGroup, family: str) -> Origin:
    origin = origin_of(family, tied=group.tied)
    return with_mtp(origin) if group.mtp else origin


def converted(group: FixtureGroup, family: str, writers: int) -> dict[str, Raw]:
    layouts = layouts_of(group)
    origin = origin_for(group, family)
    plan = build_plan(
        layouts, origin.expectation, family_of(origin.config), writers=writers,
        max_shard_bytes=1 << 18,
    )  # fmt: skip
    by_rank = {layout.producer.rank: layout for layout in layouts}

    def bytes_of(source: Source) -> bytes:
        tensor = by_rank[source.rank].tensors[source.index]
        whole = whole_value(tensor.name, tensor.whole_shape, tensor.dtype)
        local = cut_whole(whole, tensor.part)
        assert tuple(local.shape) == source.shape
        return raw_items(local, tensor.dtype).tobytes()

    return execute(plan, bytes_of)


def oracle(layouts: list[Layout], origin: Origin, *, mla: bool) -> dict[str, Raw]:
    """What the formulas of the formats say, from whole tensors."""
    specs: dict[str, tuple[tuple[int, ...], DType]] = {
        tensor.name: (tensor.whole_shape, tensor.dtype)
        for layout in layouts
        for tensor in layout.tensors
    }
    wholes = {
        name: raw_items(whole_value(name, shape, dtype), dtype)
        for name, (shape, dtype) in specs.items()
    }
    made = convert(wholes, origin.config, mla=mla)
    codes: dict[int, str] = {2: "BF16", 4: "F32"}
    return {
        name: Raw(codes[value.dtype.itemsize], value.shape, value.tobytes())
        for name, value in made.items()
    }


def model_of(group: FixtureGroup, family: str) -> tuple[object, ...]:
    """Groups with equal answers hold the same model."""
    kind = group.kind.removesuffix("_yarn")
    return (family, kind, group.tied, group.mtp, group.name.endswith("_bf16"))


def rounded_alike(
    found: dict[str, Raw], other: dict[str, Raw]
) -> tuple[dict[str, Raw], dict[str, Raw]]:
    """Megatron's own norms stay fp32 in a bf16 model, TransformerEngine's do not: round those."""
    odd = {name for name in found if found[name].dtype != other[name].dtype}
    assert all("norm" in name for name in odd)

    def rounded(name: str, raw: Raw) -> Raw:
        if name not in odd or raw.dtype == "BF16":
            return raw
        value = torch.frombuffer(bytearray(raw.data), dtype=torch.float32).bfloat16()
        return Raw("BF16", raw.shape, value.view(torch.uint8).numpy().tobytes())

    return (
        {name: rounded(name, raw) for name, raw in found.items()},
        {name: rounded(name, raw) for name, raw in other.items()},
    )


@functools.cache
def first_of_model(model: tuple[object, ...]) -> dict[str, Raw]:
    group, family = next(case for case in CASES if model_of(*case) == model)
    return converted(group, family, writers=1)


def test_all_layouts_are_there() -> None:
    assert len(fixture_groups()) == 40


@pytest.mark.parametrize(
    ("group", "family"), CASES, ids=[f"{group.name}-{family}" for group, family in CASES]
)
def test_bytes_are_those_of_the_formulas_and_of_every_other_layout(
    group: FixtureGroup, family: str
) -> None:
    origin = origin_for(group, family)
    wanted = oracle(layouts_of(group), origin, mla=group.kind.startswith("mla"))
    assert set(wanted) == set(origin.expectation.tensors)
    same_model = first_of_model(model_of(group, family))
    for writers in (1, 2, 3):
        found = converted(group, family, writers)
        assert differing(found, wanted) == []
        assert differing(*rounded_alike(found, same_model)) == []
