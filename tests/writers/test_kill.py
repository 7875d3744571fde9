"""kill -9 of writers and of the server, at any moment of a version: same bytes, one outcome."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.bus_servers import connected_bus, new_server
from support.writer_process import DEADLINE_S, WriterProcess, writer_process
from support.writer_versions import (
    RUN,
    check_no_left_over,
    check_version,
    make_origin,
    next_outcome,
    outcomes,
)
from weightbus.bus.interface import Bus
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.events import VersionComplete

NBYTES = 96 * 1024 * 1024
COUNT = 2
KILLS = 20
OPTIONS: dict[str, object] = {"max_shard_bytes": NBYTES // 5, "commit_grace_s": 0.5}


async def _life(
    stack: AsyncExitStack, url: str, root: Path, index: int, kill_at: int = 0
) -> WriterProcess:
    return await stack.enter_async_context(
        writer_process(url, root, index=index, count=COUNT, kill_at=kill_at, **OPTIONS)
    )


async def _killed(life: WriterProcess, outcome: asyncio.Task[VersionComplete], step: int) -> bool:
    """Let a writer live until it kills itself, or kill it some moments after it has said `step`.

    False when the version is complete before that; the writer is stopped then.
    """
    line = asyncio.create_task(life.line_with(f"step {step} "))
    await asyncio.wait({line, outcome}, return_when=asyncio.FIRST_COMPLETED)
    if line.done() and line.result() is not None:
        life.process.kill()
    elif not line.done():
        life.process.terminate()
    await line
    return await life.ended() == -9


async def _complete(bus: Bus, known: int) -> VersionComplete:
    outcome = await next_outcome(bus, known, DEADLINE_S)
    assert isinstance(outcome, VersionComplete), outcome
    return outcome


@pytest.mark.slow
async def test_twenty_kills_of_writers_change_no_byte(tmp_path: Path) -> None:
    chance = random.Random(20)
    origin, root = tmp_path / "origin", tmp_path / "versions"
    tensors = make_origin(origin, NBYTES, layers=24)
    kills, complete = 0, list[VersionComplete]()
    with new_server(tmp_path / "store") as server:
        async with connected_bus(server) as bus, AsyncExitStack() as stack:
            while kills < KILLS:
                victim = chance.randrange(COUNT)
                other = await _life(stack, server.url, root, 1 - victim)
                await publish_hf_folder(origin, RUN, bus, len(complete))
                outcome = asyncio.create_task(_complete(bus, len(complete)))
                for _ in range(5):
                    moment, outside = chance.randrange(1, 25), chance.random() < 0.5
                    # Killed by itself exactly at a step, or from outside somewhere behind one.
                    life = await _life(stack, server.url, root, victim, 0 if outside else moment)
                    if not await _killed(life, outcome, moment):
                        break
                    kills += 1
                last = await _life(stack, server.url, root, victim)
                complete.append(await outcome)
                await other.has_cleaned_up(complete[-1], started_before=True)
                await last.has_cleaned_up(complete[-1], started_before=False)
                for life in (other, last):
                    await life.stop()
                check_version(complete[-1], tensors)
                check_no_left_over(root, [one.version for one in complete])
            assert await outcomes(bus) == complete


async def test_the_server_dies_and_comes_back_in_the_middle_of_a_version(tmp_path: Path) -> None:
    chance = random.Random(7)
    origin, root = tmp_path / "origin", tmp_path / "versions"
    tensors = make_origin(origin, NBYTES, layers=24)
    with new_server(tmp_path / "store") as server:
        async with connected_bus(server) as bus, AsyncExitStack() as stack:
            lives = [await _life(stack, server.url, root, index) for index in range(COUNT)]
            await publish_hf_folder(origin, RUN, bus, 0)
            for life in lives:
                assert await life.line_with(f"step {chance.randrange(3, 12)} ") is not None
                server.kill()
                await asyncio.to_thread(server.restart)
            complete = await _complete(bus, 0)
            for life in lives:
                await life.has_cleaned_up(complete, started_before=True)
                await life.stop()
            check_version(complete, tensors)
            check_no_left_over(root, [complete.version])
            assert await outcomes(bus) == [complete]
