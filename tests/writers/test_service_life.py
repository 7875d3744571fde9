"""A writer's start and stop: early, twice, in the middle of a copy; threads and files are gone."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from support.bus_servers import PATIENCE_S, eventually
from support.writer_versions import RUN, check_no_left_over, check_version, make_origin
from support.writer_world import WriterWorld
from weightbus.bus.interface import Message
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.errors import BusClosedError, BusUnavailableError
from weightbus.schemas.events import VersionKey
from weightbus.writers.config import WriterConfig
from weightbus.writers.service import Writer
from weightbus.writers.steps import Step


class Gate:
    """Holds the first thread that takes a step until it is opened."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.waiting, self.opened = threading.Event(), threading.Event()

    def reached(self, step: Step, key: VersionKey) -> None:
        if step is self._step and not self.waiting.is_set():
            self.waiting.set()
            assert self.opened.wait(PATIENCE_S)


def config(root: Path) -> WriterConfig:
    return WriterConfig(run_id=RUN, index=0, count=1, root=root, max_shard_bytes=60_000)


def threads() -> list[str]:
    """A writer's threads; other roles have theirs."""
    names = [one.name for one in threading.enumerate()]
    return [name for name in names if name.startswith("weightbus-") and name != "weightbus-bus"]


def open_under(folder: Path) -> list[str]:
    found: list[str] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


async def test_stop_before_run_and_twice(tmp_path: Path) -> None:
    async with await MemoryBus.connect() as bus:
        writer = Writer(bus, config(tmp_path / "versions"))
        await writer.stop()
        await writer.run()  # nothing to do any more
        writer = Writer(bus, config(tmp_path / "versions"))
        running = asyncio.create_task(writer.run())
        await eventually((tmp_path / "versions" / RUN).exists)
        await asyncio.gather(writer.stop(), writer.stop())
        await running
        await writer.stop()
    assert threads() == []


@pytest.mark.parametrize("step", [Step.COPY, Step.SYNC_SHARD, Step.RENAME], ids=lambda s: s.value)
async def test_stop_waits_for_the_step_that_it_meets(step: Step, tmp_path: Path) -> None:
    """A thread cannot be interrupted: after stop() nothing is written any more."""
    tensors = make_origin(tmp_path / "origin")
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:
        gate = Gate(step)
        writer = Writer(bus, config(tmp_path / "versions"), gate)
        running = asyncio.create_task(writer.run())
        await publish_hf_folder(tmp_path / "origin", RUN, bus, 0)
        await eventually(gate.waiting.is_set)
        stopping = asyncio.create_task(writer.stop())
        done, _ = await asyncio.wait({stopping, running}, timeout=0.05)
        assert not done
        gate.opened.set()
        await asyncio.wait_for(asyncio.gather(stopping, running), PATIENCE_S)
        assert threads() == []
        assert open_under(tmp_path / "versions") == []
    world = WriterWorld(tmp_path / "versions", 1)
    world.server = server
    async with world.running() as bus:
        complete = await world.complete(bus)
    check_version(complete, tensors)
    check_no_left_over(tmp_path / "versions", [complete.version])


async def test_a_cancelled_run_closes_everything(tmp_path: Path) -> None:
    make_origin(tmp_path / "origin")
    async with await MemoryBus.connect() as bus:
        gate = Gate(Step.COPY)
        writer = Writer(bus, config(tmp_path / "versions"), gate)
        running = asyncio.create_task(writer.run())
        await publish_hf_folder(tmp_path / "origin", RUN, bus, 0)
        await eventually(gate.waiting.is_set)
        running.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert threads() == []
    assert open_under(tmp_path / "versions") == []


async def test_a_bus_that_is_closed_ends_the_writer_by_name(tmp_path: Path) -> None:
    async with await MemoryBus.connect() as bus:
        writer = Writer(bus, config(tmp_path / "versions"))
        running = asyncio.create_task(writer.run())
        await eventually((tmp_path / "versions" / RUN).exists)
        await bus.close()
        with pytest.raises(BusClosedError):
            await asyncio.wait_for(running, PATIENCE_S)
    assert threads() == []


async def test_a_server_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Shards are filled while nobody answers; what has to be said is said afterwards."""
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2, bus_timeout_s=0.05)
    gate = Gate(Step.ANNOUNCE_SHARD)
    gate.opened.set()

    class Away:
        """The server goes away before the first announcement."""

        def reached(self, step: Step, key: VersionKey) -> None:
            if step is Step.ANNOUNCE_SHARD and not gate.waiting.is_set():
                world.server.disconnect()
            gate.reached(step, key)

    world.steps = Away()
    async with world.running() as bus:
        await publish_hf_folder(tmp_path / "origin", RUN, bus, 0)
        await eventually(gate.waiting.is_set)
        world.server.reconnect()
        complete = await world.complete(bus)
    check_version(complete, tensors)


async def test_closed_files_and_sources_after_each_version(tmp_path: Path) -> None:
    make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2)
    async with world.running() as bus:
        for number in range(3):
            await publish_hf_folder(tmp_path / "origin", RUN, bus, number)
            await world.complete(bus, number)
            await eventually(lambda: open_under(tmp_path) == [])


async def test_a_server_that_is_away_at_the_start(tmp_path: Path) -> None:
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 1)
    async with await MemoryBus.connect(world.server) as bus:
        await publish_hf_folder(tmp_path / "origin", RUN, bus, 0)
    asked: list[str] = []

    class Deaf(MemoryBus):
        """The first three questions get no answer."""

        async def last(self, subject_filter: str, *, timeout_s: float = 10.0) -> Message | None:
            asked.append(subject_filter)
            if len(asked) <= 3:
                raise BusUnavailableError("no answer")
            return await super().last(subject_filter, timeout_s=timeout_s)

    async with await Deaf.connect(world.server) as bus:
        writer = world.writers[0] = Writer(bus, config(tmp_path / "versions"))
        running = asyncio.create_task(writer.run())
        complete = await world.complete(bus)
        await writer.stop()
        await running
    check_version(complete, tensors)
    assert len(asked) > 3
