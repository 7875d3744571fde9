"""Writers that do not fit together, and versions that end while a writer waits to commit them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.bus_servers import PATIENCE_S, eventually
from support.conversion_megatron import Grid
from support.writer_leaks import nothing_left
from support.writer_megatron import DENSE, LATENT, MegatronVersion, save_origin, stage
from support.writer_versions import (
    RUN,
    check_no_left_over,
    check_version,
    events_of,
    next_outcome,
    outcomes,
)
from support.writer_world import WriterWorld
from weightbus.bus.events import end_version, publish_event
from weightbus.bus.memory import MemoryBus
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import BusClosedError, VersionConflictError
from weightbus.schemas.events import (
    Outcome,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionKey,
)
from weightbus.writers.finish import Finisher
from weightbus.writers.paths import hidden_folders
from weightbus.writers.service import Writer


@dataclass
class HalfDone:
    """Two writers are configured, one lives: version 1 waits for shards of the other."""

    folder: Path
    world: WriterWorld
    bus: MemoryBus
    writer: Writer
    version: MegatronVersion
    missing: Sequence[ShardPersisted]
    run: asyncio.Task[None]

    async def announce_the_others(self) -> None:
        """The dead writer's shards are announced, last of all; their files are not there."""
        for event in self.missing:
            await publish_event(self.bus, event)

    async def caught_up(self) -> None:
        """The living writer has read everything."""
        last = await self.bus.last_sequence()
        await eventually(lambda: self.writer.numbers()["last_sequence"] >= last)

    async def outcome(self) -> Outcome:
        """Version 1's, when the living writer has cleaned up."""
        found = await next_outcome(self.bus, 1, PATIENCE_S)
        await eventually(lambda: self.writer.numbers()["versions_in_progress"] == 0)
        await eventually(lambda: hidden_folders(self.world.root.resolve(), RUN) == [])
        return found


def staged(folder: Path, number: int = 0, attempt: int = 1) -> MegatronVersion:
    return stage(
        DENSE, Grid(tp=2), folder / "staging", folder / "origin", weight_version=number,
        attempt=attempt,
    )  # fmt: skip


@asynccontextmanager
async def half_done(folder: Path, *, commit_grace_s: float) -> AsyncGenerator[HalfDone]:
    save_origin(DENSE, folder / "origin")
    world = WriterWorld(
        folder / "versions", 2, max_shard_bytes=12_000, commit_grace_s=commit_grace_s
    )
    async with world.running() as bus:  # what writer 1 says, it says again of version 1
        await staged(folder).publish(bus)
        await world.complete(bus)
        events = [event for event in await events_of(bus) if isinstance(event, ShardPersisted)]
    version = staged(folder, 1)
    shards = [event.model_copy(update={"version": version.key}) for event in events]
    async with (
        await MemoryBus.connect(world.server) as bus,
        await MemoryBus.connect(world.server) as own,
    ):
        writer = Writer(own, world.config(0), world)
        run = asyncio.create_task(writer.run())
        await version.publish(bus)
        mine = {event.shard for event in shards if event.writer == 0}
        assert mine
        await eventually(lambda: writer.numbers()["shards_persisted_total"] == len(mine))
        missing = [event for event in shards if event.writer == 1]
        yield HalfDone(folder, world, bus, writer, version, missing, run)
        await writer.stop()
        await run


# ---- a commit that waits


async def test_a_trainer_restarts_while_a_writer_waits_to_commit(tmp_path: Path) -> None:
    async with half_done(tmp_path, commit_grace_s=600.0) as story:
        await story.announce_the_others()
        await staged(tmp_path, attempt=2).publish(
            story.bus, staged(tmp_path, attempt=2).attempt_events
        )
        outcome = await story.outcome()
        assert isinstance(outcome, VersionAborted)
        assert outcome.version == story.version.key
        assert "the trainer restarted as attempt 2" in outcome.message
    complete = outcome.version.model_copy(update={"weight_version": 0})
    check_no_left_over(story.world.root, [complete])


async def test_another_writer_ends_the_version_while_one_waits(tmp_path: Path) -> None:
    async with half_done(tmp_path, commit_grace_s=600.0) as story:
        await story.announce_the_others()
        aborted = VersionAborted(
            version=story.version.key, error="StorageError", message="its disk", by="writer-1-of-2"
        )
        await end_version(story.bus, aborted)
        assert await story.outcome() == aborted


async def test_a_writer_that_waits_to_commit_can_be_stopped(tmp_path: Path) -> None:
    with nothing_left(tmp_path):
        async with half_done(tmp_path, commit_grace_s=600.0) as story:
            await story.announce_the_others()
            await story.caught_up()
        assert story.run.done()
        del story


async def test_a_commit_without_the_others_files_says_so(tmp_path: Path) -> None:
    """Each writer writes to a folder of its own: nobody has a whole version."""
    async with half_done(tmp_path, commit_grace_s=0.1) as story:
        await story.announce_the_others()
        outcome = await story.outcome()
        assert isinstance(outcome, VersionAborted)
        assert outcome.error == "CommitError"
        assert "its table is not in the version's folder" in outcome.message
        assert "same shared folder (--root)" in outcome.message


async def test_a_shard_that_somebody_else_announced_otherwise(tmp_path: Path) -> None:
    async with half_done(tmp_path, commit_grace_s=0.1) as story:
        bent = story.missing[0].model_copy(update={"plan_digest": digest_of(b"another")})
        await publish_event(story.bus, bent)
        outcome = await story.outcome()
        assert isinstance(outcome, VersionAborted)
        assert outcome.error == "VersionConflictError"
        assert "works by another plan" in outcome.message
        assert digest_of(b"another") in outcome.message


# ---- writers that do not fit together


async def test_writers_with_different_counts(tmp_path: Path) -> None:
    save_origin(DENSE, tmp_path / "origin")
    one = WriterWorld(tmp_path / "versions", 1, max_shard_bytes=12_000)
    two = WriterWorld(tmp_path / "versions", 2, max_shard_bytes=12_000)
    two.server = one.server
    version = staged(tmp_path)
    async with one.running() as bus, two.running():
        await version.publish(bus)
        outcome = await one.outcome(bus)
        await two.tidy()
        assert isinstance(outcome, VersionAborted)
        assert outcome.error == "VersionConflictError"
        assert "count" in outcome.message
        assert await outcomes(bus) == [outcome]
    check_no_left_over(one.root, [])
    async with one.running() as bus:
        await staged(tmp_path, 1).publish(bus)
        check_version(await one.complete(bus, 1), version.wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"writers": 2}, "another writer has announced this shard"),
        ({"writer": 1, "writers": 2}, "another writer has announced this shard"),
        ({"plan_digest": digest_of(b"plan")}, "an earlier life of this writer has announced"),
        ({"digest": digest_of(b"bytes")}, "an earlier life of this writer has announced"),
    ],
)
async def test_a_shard_that_was_announced_a_moment_before(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """The other's announcement has not come through the stream yet."""
    mine = ShardPersisted(
        version=VersionKey(run_id=RUN, attempt=1, weight_version=0), plan_digest=digest_of(b""),
        writer=0, writers=1, shard=0, shards=1, file="model-00001-of-00001.safetensors", nbytes=1,
        digest=digest_of(b""), table_digest=digest_of(b""),
    )  # fmt: skip
    world = WriterWorld(tmp_path, 1)
    async with await MemoryBus.connect(world.server) as bus:
        numbers = {"shards_persisted_total": 0.0, "persisted_bytes_total": 0.0}
        finisher = Finisher(bus, world.config(0), tmp_path, world, [], numbers)
        await publish_event(bus, mine.model_copy(update=change))
        with pytest.raises(VersionConflictError, match=message) as caught:
            await finisher.announce(mine)
        assert "shard=0" in str(caught.value)
        await finisher.close([])
    assert numbers["shards_persisted_total"] == 0.0


# ---- many


async def test_many_versions_in_flight(tmp_path: Path) -> None:
    """Chunks of five versions alternate; each version ends once, with its own bytes."""
    save_origin(LATENT, tmp_path / "origin")
    versions = [
        stage(
            LATENT, Grid(tp=2), tmp_path / "staging", tmp_path / "origin", weight_version=number,
            chunk_tensors=5,
        )
        for number in range(5)
    ]  # fmt: skip
    queues = [[event for rank in version.by_rank for event in rank] for version in versions]
    mixed = [queue[at] for at in range(len(queues[0])) for queue in queues]
    world = WriterWorld(tmp_path / "versions", 3, max_shard_bytes=12_000)
    async with world.running() as bus:
        # The layouts come last: nothing can be planned before.
        await versions[0].publish(bus, [*mixed, *versions[0].attempt_events])
        complete = [await world.complete(bus, known) for known in range(5)]
        assert await outcomes(bus) == complete
    assert sorted(one.version.weight_version for one in complete) == list(range(5))
    for one in complete:
        assert isinstance(one, VersionComplete)
        check_version(one, versions[0].wanted)
    check_no_left_over(world.root, [one.version for one in complete])


async def test_a_closed_bus_is_no_outcome(tmp_path: Path) -> None:
    """The writer ends by name; whoever starts again goes on with the version."""
    save_origin(DENSE, tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 1, max_shard_bytes=12_000)
    version = staged(tmp_path)
    bus = await MemoryBus.connect(world.server)
    run = asyncio.create_task(Writer(bus, world.config(0)).run())
    async with await MemoryBus.connect(world.server) as own:
        await version.publish(own, version.events()[:-1])
        await eventually((world.root / RUN / "attempt_0001").is_dir)
        await bus.close()
        with pytest.raises(BusClosedError):
            await run
        assert await outcomes(own) == []
    async with world.running() as again:
        await publish_event(again, version.events()[-1])
        check_version(await world.complete(again), version.wanted)
