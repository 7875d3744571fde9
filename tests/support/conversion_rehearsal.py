"""A described parallel layout with bytes: wholes cut for every rank, planned, put together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load
from support.conversion_executor import shard_files
from support.conversion_megatron import local_bytes
from weightbus.schemas.layout import Layout
from weightbus.writers.conversion.family import Family
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_types import Plan

Array = npt.NDArray[Any]


def expected_of(weights: Mapping[str, Array]) -> Expectation:
    """What a checkpoint with these tensors would say."""
    return Expectation.of({name: ("F32", value.shape) for name, value in weights.items()})


def assert_same_model(layouts: list[Layout], wholes: Mapping[str, Array]) -> None:
    """The description and the hand-written way back name the same whole tensors."""
    described = {t.name: t.whole_shape for layout in layouts for t in layout.tensors}
    assert described == {name: value.shape for name, value in wholes.items()}


def rehearse(
    layouts: list[Layout],
    wholes: Mapping[str, Array],
    expectation: Expectation,
    family: Family,
    *,
    writers: int = 2,
) -> tuple[Plan, dict[str, bytes]]:
    """The plan and its files, for ranks that hold parts of these wholes."""
    plan = build_plan(layouts, expectation, family, writers=writers, max_shard_bytes=1 << 17)
    files = shard_files(
        plan, lambda source: local_bytes(source, layouts, lambda name, _: wholes[name])
    )
    return plan, files


def differing_tensors(files: Mapping[str, bytes], weights: Mapping[str, Array]) -> list[str]:
    """Names that stand in only one of the two, or differ in a bit."""
    found = {name: value for data in files.values() for name, value in load(data).items()}
    names = found.keys() ^ weights.keys()
    return sorted(names) + [
        name
        for name in sorted(found.keys() & weights.keys())
        if found[name].dtype != weights[name].dtype
        or not np.array_equal(found[name], weights[name])
    ]


def write_checkpoint(out: Path, origin: Path, plan: Plan, files: Mapping[str, bytes]) -> None:
    """A folder that transformers can load."""
    out.mkdir()
    shutil.copy(origin / "config.json", out)
    for name, data in files.items():
        (out / name).write_bytes(data)
    weight_map = {target.name: plan.shards[target.shard].file for target in plan.targets}
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
