"""Stopping a writer: at any moment, twice, while it waits; nothing is left and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from support.bus_servers import PATIENCE_S, eventually
from support.writer_leaks import nothing_left, open_files
from support.writer_versions import check_no_left_over, check_version, make_origin, outcomes
from support.writer_world import WriterWorld
from weightbus.bus.memory import MemoryBus
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.errors import BusClosedError
from weightbus.schemas.events import VersionKey
from weightbus.writers.service import Writer
from weightbus.writers.steps import Step


class Gate:
    """Tells the test that a step is reached; a thread that takes it waits for the test's leave."""

    def __init__(self, step: Step) -> None:
        self.reached_it = asyncio.Event()
        self.leave = threading.Event()
        self._step, self._loop = step, asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def reached(self, step: Step, key: VersionKey) -> None:
        if step is not self._step:
            return
        self._loop.call_soon_threadsafe(self.reached_it.set)
        if threading.get_ident() != self._thread:  # the loop itself must not wait
            assert self.leave.wait(PATIENCE_S)


async def reached(gate: Gate) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await gate.reached_it.wait()


async def stopped(writer: Writer, gate: Gate | None = None) -> None:
    """Stop it, with a step under way that ends only after the stop has begun."""
    stop = asyncio.create_task(writer.stop())
    await asyncio.sleep(0)
    if gate is not None:
        gate.leave.set()
    async with asyncio.timeout(PATIENCE_S):
        await stop


@pytest.fixture
def world(tmp_path: Path) -> WriterWorld:
    return WriterWorld(tmp_path / "versions", 1)


@pytest.mark.parametrize("step", list(Step), ids=lambda step: step.value)
async def test_stop_at_any_step_leaves_nothing_and_loses_nothing(
    step: Step, tmp_path: Path, world: WriterWorld
) -> None:
    tensors = make_origin(tmp_path / "origin")
    async with await MemoryBus.connect(world.server) as bus:
        gate = Gate(step)
        with nothing_left(tmp_path):
            writer = Writer(bus, world.config(0), gate)
            run = asyncio.create_task(writer.run())
            await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
            await reached(gate)
            await stopped(writer, gate)
            await run
            del run
    async with world.running() as bus:
        complete = await world.complete(bus)
        assert await outcomes(bus) == [complete]
    check_version(complete, tensors)
    check_no_left_over(world.root, [complete.version])


@pytest.mark.parametrize("step", [Step.COPY, Step.SYNC_SHARD, Step.COPY_ASSETS, Step.PLAN])
async def test_cancelling_run_is_stopping(step: Step, tmp_path: Path, world: WriterWorld) -> None:
    make_origin(tmp_path / "origin")
    async with await MemoryBus.connect(world.server) as bus:
        gate = Gate(step)
        with nothing_left(tmp_path):
            run = asyncio.create_task(Writer(bus, world.config(0), gate).run())
            await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
            await reached(gate)
            run.cancel()
            gate.leave.set()
            await asyncio.wait({run}, timeout=PATIENCE_S)
            assert run.cancelled()
            del run


async def test_stop_before_run_and_twice_and_together(tmp_path: Path, world: WriterWorld) -> None:
    async with await MemoryBus.connect(world.server) as bus:
        with nothing_left(tmp_path):
            early = Writer(bus, world.config(0))
            await early.stop()
            async with asyncio.timeout(PATIENCE_S):
                await early.run()
            writer = Writer(bus, world.config(0))
            run = asyncio.create_task(writer.run())
            await eventually((world.root / "run").is_dir)
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(writer.stop(), writer.stop())
                await writer.stop()
                await run
            del run


async def test_a_second_stop_does_not_interrupt_the_closing(
    tmp_path: Path, world: WriterWorld
) -> None:
    make_origin(tmp_path / "origin")
    async with await MemoryBus.connect(world.server) as bus:
        gate = Gate(Step.COPY)
        with nothing_left(tmp_path):
            writer = Writer(bus, world.config(0), gate)
            run = asyncio.create_task(writer.run())
            await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
            await reached(gate)
            stops = [asyncio.create_task(writer.stop()) for _ in range(3)]
            await asyncio.sleep(0)
            assert not any(stop.done() for stop in stops)  # a copy is under way
            gate.leave.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(run, *stops)
            del run, stops


async def test_stop_while_a_full_disk_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 1, storage_deadline_s=600.0)
    tried = threading.Event()

    def full(*_arguments: int) -> None:
        tried.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    async with await MemoryBus.connect(world.server) as bus:
        with nothing_left(tmp_path):
            writer = Writer(bus, world.config(0))
            run = asyncio.create_task(writer.run())
            await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
            await eventually(tried.is_set)
            await stopped(writer)
            await run
            del run
        assert await outcomes(bus) == []


@pytest.mark.parametrize("step", [Step.ANNOUNCE_SHARD, Step.ANNOUNCE_COMPLETE, Step.PLAN])
async def test_stop_while_the_server_is_away(
    step: Step, tmp_path: Path, world: WriterWorld
) -> None:
    tensors = make_origin(tmp_path / "origin")

    class Away(Gate):
        def reached(self, step: Step, key: VersionKey) -> None:
            if step is self._step:
                world.server.disconnect()
            super().reached(step, key)

    async with await MemoryBus.connect(world.server) as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        gate = Away(step)
        with nothing_left(tmp_path):
            writer = Writer(bus, world.config(0), gate)
            run = asyncio.create_task(writer.run())
            await reached(gate)
            await stopped(writer, gate)
            await run
            del run
    world.server.reconnect()
    async with world.running() as bus:
        complete = await world.complete(bus)
    check_version(complete, tensors)


async def test_a_bus_that_is_closed_ends_the_writer_by_name(
    tmp_path: Path, world: WriterWorld
) -> None:
    make_origin(tmp_path / "origin")
    bus = await MemoryBus.connect(world.server)
    gate = Gate(Step.COPY)
    with nothing_left(tmp_path):
        writer = Writer(bus, world.config(0), gate)
        run = asyncio.create_task(writer.run())
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        await reached(gate)
        await bus.close()
        gate.leave.set()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(BusClosedError):
                await run
        del run


async def test_versions_leave_nothing_open_in_a_writer_that_lives(
    tmp_path: Path, world: WriterWorld
) -> None:
    """Files of an ended version would keep a trainer's staging memory."""
    origin = tmp_path / "origin"
    make_origin(origin)
    async with world.running() as bus:
        for number in range(3):
            await publish_hf_folder(origin, "run", bus, number)
            await world.complete(bus, number)
            assert [path for path in open_files() if path.is_relative_to(tmp_path)] == []
