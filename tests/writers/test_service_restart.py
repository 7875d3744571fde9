"""A crash just before each named step, with one to three writers: same bytes, one outcome."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.bus_servers import eventually
from support.conversion_megatron import Grid
from support.writer_megatron import LATENT, save_origin, stage
from support.writer_versions import check_no_left_over, check_version, make_origin, outcomes
from support.writer_world import CrashOnce, WriterWorld
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.writers.steps import Step


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("step", list(Step), ids=lambda step: step.value)
async def test_a_crash_at_any_step_changes_nothing(step: Step, count: int, tmp_path: Path) -> None:
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", count)
    world.steps = crash = CrashOnce(step)
    async with world.running() as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        first = await world.complete(bus)
        assert crash.crashes == 1
        await eventually(lambda: world.lives == count + 1)
        await publish_hf_folder(tmp_path / "origin", "run", bus, 1)
        second = await world.complete(bus, 1)
        assert await outcomes(bus) == [first, second]
    check_no_left_over(tmp_path / "versions", [first.version, second.version])
    for complete in (first, second):
        check_version(complete, tensors)


@pytest.mark.parametrize("seed", range(6))
async def test_crashes_while_assembled_targets_are_made(seed: int, tmp_path: Path) -> None:
    """Row-parallel and paired tensors of several ranks; the crash comes after some copies."""
    chance = random.Random(seed)
    save_origin(LATENT, tmp_path / "origin")
    version = stage(LATENT, Grid(tp=2, pp=2), tmp_path / "staging", tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2, max_shard_bytes=12_000)
    world.steps = crash = CrashOnce(Step.COPY, skip=chance.randrange(20))
    async with world.running() as bus:
        await version.publish(bus, version.events(chance))
        complete = await world.complete(bus)
        assert crash.crashes == 1
    check_version(complete, version.wanted)
    check_no_left_over(tmp_path / "versions", [complete.version])
