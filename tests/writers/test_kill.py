"""kill -9 of writers and of the server, at any moment of a version: same bytes, one outcome."""

from __future__ import annotations

import asyncio
import itertools
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
from weightbus.bus.events import read_event
from weightbus.bus.interface import Bus
from weightbus.bus.subjects import run_filter
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.events import ShardPersisted, VersionComplete, VersionKey
from weightbus.writers.steps import Step

NBYTES = 96 * 1024 * 1024
COUNT = 2
KILLS = 20
SHARD_STEPS = [
    step.value for step in (Step.SYNC_SHARD, Step.NAME_SHARD, Step.WRITE_TABLE, Step.ANNOUNCE_SHARD)
]
COMMIT_STEPS = [
    step.value
    for step in (
        Step.COMMIT, Step.COPY_ASSETS, Step.WRITE_INDEX, Step.WRITE_MANIFEST, Step.RENAME,
        Step.ANNOUNCE_COMPLETE, Step.CLEAN_UP,
    )
]  # fmt: skip
OPTIONS: dict[str, object] = {"max_shard_bytes": NBYTES // 5, "commit_grace_s": 0.5}


async def _life(
    stack: AsyncExitStack, url: str, root: Path, index: int, kill_at: int | str = 0
) -> WriterProcess:
    return await stack.enter_async_context(
        writer_process(url, root, index=index, count=COUNT, kill_at=kill_at, **OPTIONS)
    )


async def _killed(life: WriterProcess, moment: int | str, *, outside: bool) -> bool:
    """Let a writer live until it kills itself, or kill it a little after it has said `moment`.

    False when the version is complete before that; the writer is stopped then.
    """
    text = f"step {moment} " if isinstance(moment, int) else f" {moment}"
    line = await life.line_with(text, " complete {", " 0 versions in progress")
    assert line is not None, life.lines[-20:]
    if text not in line:
        await life.stop()
        return False
    if outside and life.process.returncode is None:
        life.process.kill()
    assert await life.ended() == -9
    return True


async def _all_announced(bus: Bus, key: VersionKey, writer: int) -> None:
    """Return when a writer has announced all its shards of a version."""
    found = 0
    async with asyncio.timeout(DEADLINE_S), bus.read([run_filter(RUN)]) as reader:
        async for message in reader:
            event = read_event(message).event
            if isinstance(event, ShardPersisted) and (event.version, event.writer) == (key, writer):
                found += 1
                if found == len(range(writer, event.shards, COUNT)):
                    return


async def _complete(bus: Bus, known: int) -> VersionComplete:
    outcome = await next_outcome(bus, known, DEADLINE_S)
    assert isinstance(outcome, VersionComplete), outcome
    return outcome


@pytest.mark.slow
async def test_twenty_kills_of_writers_change_no_byte(tmp_path: Path) -> None:
    chance = random.Random(20)
    origin, root = tmp_path / "origin", tmp_path / "versions"
    tensors = make_origin(origin, NBYTES, layers=24)
    kills, complete = list[int | str](), list[VersionComplete]()
    with new_server(tmp_path / "store") as server:
        async with connected_bus(server) as bus, AsyncExitStack() as stack:
            rounds = itertools.cycle(COMMIT_STEPS)
            while len(kills) < KILLS:
                late = next(rounds)
                victim = chance.randrange(COUNT)
                other = await _life(stack, server.url, root, 1 - victim)
                key = await publish_hf_folder(origin, RUN, bus, len(complete))
                moments = [chance.randrange(1, 10), chance.choice(SHARD_STEPS), late]
                for moment in moments:
                    if moment == late:  # the victim announces the last shard, so it commits
                        await _all_announced(bus, key, 1 - victim)
                    # By itself: exactly there. From outside: somewhere behind it.
                    outside = moment != late and chance.random() < 0.5
                    kill_at = 0 if outside else moment
                    life = await _life(stack, server.url, root, victim, kill_at)
                    if not await _killed(life, moment, outside=outside):
                        break
                    kills.append(moment)
                last = await _life(stack, server.url, root, victim)
                complete.append(await _complete(bus, len(complete)))
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
