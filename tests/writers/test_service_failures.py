"""What ends a version, and what it says: tensor, rank, file, next step; and nothing is left."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.bus_servers import eventually
from support.conversion_megatron import Grid
from support.writer_megatron import DENSE, MegatronVersion, save_origin, stage
from support.writer_versions import check_no_left_over, check_version, make_origin, outcomes
from support.writer_world import WriterWorld
from weightbus.bus.memory import MemoryBus
from weightbus.bus.subjects import subject_of
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.codec import encode
from weightbus.schemas.errors import OutputFolderError, StorageError
from weightbus.schemas.events import (
    AnyEvent,
    AttemptOpened,
    ChunkReady,
    LayoutPublished,
    ProducerSealed,
    VersionAborted,
    VersionKey,
    VersionOpened,
)
from weightbus.writers.shard_file import ShardFile
from weightbus.writers.steps import Step


@dataclass
class Story:
    """A run with two writers and a version of two ranks that a test bends."""

    folder: Path
    world: WriterWorld
    bus: MemoryBus

    @property
    def root(self) -> Path:
        return self.folder / "versions"

    def version(self, number: int = 0, attempt: int = 1) -> MegatronVersion:
        return stage(
            DENSE, Grid(tp=2), self.folder / "staging", self.folder / "origin",
            weight_version=number, attempt=attempt,
        )  # fmt: skip

    async def aborted(self, error: str, *texts: str, known: int = 0) -> VersionAborted:
        """The next outcome, and that nothing of it is left."""
        outcome = await self.world.outcome(self.bus, known)
        assert isinstance(outcome, VersionAborted), outcome
        assert outcome.error == error, outcome
        for text in texts:
            assert text in outcome.message, outcome.message
        return outcome

    async def goes_on(self, known: int = 1, attempt: int = 1) -> None:
        """The next version is complete: the failure ended one version, not the writers."""
        version = self.version(known, attempt)
        await version.publish(self.bus)
        complete = await self.world.complete(self.bus, known)
        check_version(complete, version.wanted)
        check_no_left_over(self.root, [complete.version])
        assert len(await outcomes(self.bus)) == known + 1


@asynccontextmanager
async def story_in(folder: Path, **options: Any) -> AsyncGenerator[Story]:
    save_origin(DENSE, folder / "origin")
    world = WriterWorld(folder / "versions", 2, **{"max_shard_bytes": 12_000, **options})
    async with world.running() as bus:
        yield Story(folder, world, bus)


JUNK = b"\xc1"


def _one(events: list[AnyEvent], kind: type[Any], number: int = 0) -> Any:
    return [event for event in events if isinstance(event, kind)][number]


# ---------------------------------------------------------------------------------- sources


async def test_a_flipped_byte(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        staged = tmp_path / "staging" / "rank1_v0"
        data = bytearray(staged.read_bytes())
        data[len(data) // 2] ^= 1
        staged.write_bytes(data)
        await version.publish(story.bus)
        await story.aborted(
            "DigestMismatchError", "not those that its producer published", "rank=1", "tensor=",
            "rank1_v0", "Next: ",
        )  # fmt: skip
        await story.goes_on()


async def test_a_truncated_source(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        os.truncate(tmp_path / "staging" / "rank0_v0", 1000)
        await version.publish(story.bus)
        await story.aborted("SourceTruncatedError", "bytes too early", "rank=0", "rank0_v0")
        await story.goes_on()


async def test_a_missing_source(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        (tmp_path / "staging" / "rank0_v0").unlink()
        await version.publish(story.bus)
        await story.aborted("SourceMissingError", "the file of a chunk is not there", "rank=0")
        await story.goes_on()


async def test_a_location_that_this_release_cannot_read(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        chunk = _one(version.by_rank[0], ChunkReady)
        elsewhere = chunk.location.model_copy(update={"uri": "s3://bucket/key"})
        events = [
            event.model_copy(update={"location": elsewhere}) if event == chunk else event
            for event in version.events()
        ]
        await version.publish(story.bus, events)
        await story.aborted("SourceError", "cannot read from 's3://bucket/key'")
        await story.goes_on()


# ---------------------------------------------------------------------------------- events


async def test_a_lost_chunk(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        lost = _one(version.by_rank[1], ChunkReady, 1)
        await version.publish(story.bus, [event for event in version.events() if event != lost])
        await story.aborted("PairingError", "a producer sealed the version with", "rank=1")
        await story.goes_on()


async def test_tensors_that_are_left_out_are_named(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        lost = _one(version.by_rank[1], ChunkReady, 1)
        sealed = _one(version.by_rank[1], ProducerSealed)
        said = sealed.model_copy(
            update={
                "chunks": sealed.chunks - 1,
                "tensors": sealed.tensors - len(lost.tensors),
                "nbytes": sealed.nbytes - sum(tensor.length for tensor in lost.tensors),
            }
        )
        events = [said if event == sealed else event for event in version.events() if event != lost]
        await version.publish(story.bus, events)
        name = version.layouts[1].tensors[lost.tensors[0].index].name
        await story.aborted("PairingError", "not whole", name, "rank 1")
        await story.goes_on()


async def test_replicas_that_have_drifted_apart(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        sealed = _one(version.by_rank[1], ProducerSealed)
        index = next(
            number for number, tensor in enumerate(version.layouts[1].tensors) if not tensor.owned
        )
        other = {"index": index, "digest": "xxh3-128:" + "0" * 32}
        said = ProducerSealed.model_validate({**sealed.model_dump(), "replicas": (other,)})
        events = [said if event == sealed else event for event in version.events()]
        await version.publish(story.bus, events)
        name = version.layouts[1].tensors[index].name
        await story.aborted("ReplicaMismatchError", name, "rank 0 (owner)", "rank 1")
        await story.goes_on()


@pytest.mark.parametrize("data", [JUNK, b"\x80", b""], ids=["no msgpack", "no version", "empty"])
async def test_what_is_no_event_on_a_versions_subject(data: bytes, tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        events = version.events()
        await version.publish(story.bus, events[:5])
        await story.bus.publish_once(subject_of(events[5]), data)
        outcome = await story.aborted(
            "MalformedEventError" if data != b"\x80" else "UnknownSchemaVersionError",
            "subject=wb.run.1.0.",
        )
        assert outcome.version == version.key
        await story.goes_on()


async def test_an_event_on_the_subject_of_another(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        chunk = _one(version.by_rank[0], ChunkReady)
        strange = subject_of(chunk).replace("wb.run.1.0.", "wb.run.1.9.")
        await version.publish(story.bus)
        await story.bus.publish_once(strange, encode(chunk))
        outcomes_seen = [await story.world.outcome(story.bus, known) for known in range(2)]
        by_version = {one.version.weight_version: one for one in outcomes_seen}
        assert by_version[0].kind == "version-complete"
        strange_one = by_version[9]
        assert isinstance(strange_one, VersionAborted)
        assert "stands on a subject that is not its own" in strange_one.message


async def test_what_is_no_outcome_on_an_outcomes_subject(tmp_path: Path) -> None:
    """Nobody can end the version any more: the writers drop it, and go on."""
    async with story_in(tmp_path) as story:
        version = story.version()
        await story.bus.publish_once("wb.run.1.0.outcome", JUNK)
        await version.publish(story.bus)
        await story.world.tidy()
        later = story.version(1)
        await later.publish(story.bus)

        await eventually(
            lambda: all(
                writer.numbers()["versions_complete_total"] == 1
                for writer in story.world.writers.values()
            )
        )
        await story.world.tidy()
        check_no_left_over(story.root, [later.key])


async def test_strange_subjects_and_attempts_do_not_stop_writers(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        for subject in ("wb.run.strange", "wb.run.x.y.z", "wb.run.-1.-2.opened"):
            await story.bus.publish_once(subject, JUNK)
        await story.bus.publish_once("wb.run.7.-.attempt", JUNK)
        await story.goes_on(0)
        numbers = [writer.numbers() for writer in story.world.writers.values()]
        assert {one["malformed_events_total"] for one in numbers} == {4.0}


async def test_a_layout_that_is_no_event_ends_the_attempts_versions(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        events = version.events()
        layout = _one(events, LayoutPublished)
        await story.bus.publish_once(subject_of(layout), JUNK)
        await version.publish(story.bus, [event for event in events if event != layout])
        await story.aborted("MalformedEventError", "wb.run.1.-.layout.0")
        second = story.version(0, attempt=2)
        await second.publish(story.bus)
        check_version(await story.world.complete(story.bus, 1), second.wanted)


async def test_a_version_opened_for_another_number_of_producers(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        events = [
            event.model_copy(update={"producers": 3}) if isinstance(event, VersionOpened) else event
            for event in version.events()
        ]
        await version.publish(story.bus, events)
        await story.aborted("VersionConflictError", "opened for 3 producers, its attempt has 2")
        await story.goes_on()


# ---------------------------------------------------------------------------------- attempts


async def test_a_certificate_that_is_refused_lists_every_difference(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        smaller = dataclasses.replace(DENSE, layers=1)
        version = stage(smaller, Grid(tp=2), tmp_path / "staging", tmp_path / "origin")
        await version.publish(story.bus)
        outcome = await story.aborted("CoverageError")
        missing = [name for name in story.version().wanted if name.startswith("model.layers.1.")]
        assert len(missing) > 5
        assert all(name in outcome.message for name in missing)
        await story.goes_on(1, attempt=2)


async def test_an_unknown_parameter(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        layout = version.layouts[0]
        strange = layout.tensors[0].model_copy(update={"name": "decoder.surprise.weight"})
        bent = layout.model_copy(update={"tensors": (strange, *layout.tensors[1:])})
        version.layouts[0] = bent
        events = [
            event.model_copy(update={"layout_digest": bent.digest()})
            if isinstance(event, LayoutPublished) and event.rank == 0
            else event
            for event in version.events()
        ]
        await version.publish(story.bus, events)
        await story.aborted("UnknownParameterError", "decoder.surprise.weight")
        await story.goes_on(1, attempt=2)


async def test_an_origin_that_is_not_there(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        events = [
            event.model_copy(update={"origin": "/nowhere"})
            if isinstance(event, AttemptOpened)
            else event
            for event in version.events()
        ]
        await version.publish(story.bus, events)
        await story.aborted("OriginError", "/nowhere")
        await story.goes_on(1, attempt=2)


async def test_a_restarted_trainer_supersedes_unfinished_versions(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        first, second = story.version(), story.version(0, attempt=2)
        await first.publish(story.bus, first.events()[:-1])
        await second.publish(story.bus)
        seen = [await story.world.outcome(story.bus, known) for known in range(2)]
        by_attempt = {one.version.attempt: one for one in seen}
        aborted, complete = by_attempt[1], by_attempt[2]
        assert isinstance(aborted, VersionAborted)
        assert aborted.error == "VersionAbortedError"
        assert "the trainer restarted as attempt 2" in aborted.message
        assert not isinstance(complete, VersionAborted)
        check_version(complete, second.wanted)
        late = story.version(1, attempt=1)
        await late.publish(story.bus, late.by_rank[0])
        await story.aborted("VersionAbortedError", "restarted as attempt 2", known=2)
        check_no_left_over(story.root, [complete.version])


class _AbortAt:
    """The version gets another outcome just before a step of the commit."""

    def __init__(self, server: Any, step: Step, key: VersionKey) -> None:
        self._server, self._step = server, step
        self.outcome = VersionAborted(version=key, error="TestError", message="too late", by="test")

    def reached(self, step: Step, key: VersionKey) -> None:
        if step is self._step and key == self.outcome.version:
            with self._server.lock:
                self._server.store(subject_of(self.outcome), encode(self.outcome), once=True)
            self._server.changed()


@pytest.mark.parametrize(
    "step",
    [Step.COPY, Step.COMMIT, Step.COPY_ASSETS, Step.WRITE_MANIFEST, Step.RENAME,
     Step.ANNOUNCE_COMPLETE],
    ids=lambda step: step.value,
)  # fmt: skip
async def test_an_abort_that_comes_during_the_commit(step: Step, tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        version = story.version()
        story.world.steps = _AbortAt(story.world.server, step, version.key)
        await version.publish(story.bus)
        await story.aborted("TestError", "too late")
        # The committer itself may be the last to see the abort, and to take away what it made.
        visible = story.root / "run" / "attempt_0001" / "weight_v000000"
        await eventually(lambda: not visible.exists())
        await story.world.tidy()
        await story.goes_on()


# ---------------------------------------------------------------------------------- disks


@contextmanager
def _failing(
    monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int
) -> Generator[list[int]]:
    """The n first calls of an os function fail."""
    calls: list[int] = []
    real: Callable[..., Any] = getattr(os, name)

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) <= times:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        yield calls


@pytest.mark.parametrize(
    ("name", "code"),
    [("posix_fallocate", errno.ENOSPC), ("pwrite", errno.ENOSPC), ("pwrite", errno.EIO),
     ("fdatasync", errno.EIO), ("fsync", errno.ENOSPC)],
)  # fmt: skip
async def test_a_disk_that_recovers(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with story_in(tmp_path) as story:
        with _failing(monkeypatch, name, code, 3) as calls:
            await story.goes_on(0)
        assert len(calls) > 3


async def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with story_in(tmp_path, storage_deadline_s=0.3) as story:
        with _failing(monkeypatch, "posix_fallocate", errno.ENOSPC, 10**9):
            await story.version().publish(story.bus)
            await story.aborted(
                "StorageError", "cannot allocate", "No space left on device", "errno=ENOSPC"
            )
        await story.goes_on()


async def test_bytes_that_the_disk_lost_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed sync the page cache says clean: the whole file is made again."""
    real = ShardFile.sync
    lost: list[Path] = []

    def lossy(file: ShardFile) -> None:
        if not lost:
            lost.append(file.path)
            size = os.fstat(file._file).st_size
            os.pwrite(file._file, bytes(size), 0)
            raise StorageError("lost", where={"file": file.path})
        real(file)

    monkeypatch.setattr(ShardFile, "sync", lossy)
    async with story_in(tmp_path) as story:
        await story.goes_on(0)
    assert lost


async def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    async with story_in(tmp_path) as story:
        await story.goes_on(0)
        (story.root / "run" / "attempt_0002").write_text("in the way")
        await story.version(0, attempt=2).publish(story.bus)
        await story.aborted("CommitError", "attempt_0002", "may write to", known=1)


# ---------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("relation", ["is", "lies inside", "contains"])
@pytest.mark.parametrize("told", ["by option", "by the trainer"])
async def test_output_and_origin_must_lie_apart(told: str, relation: str, tmp_path: Path) -> None:
    origin = tmp_path / "models" / "origin"
    origin.parent.mkdir()
    make_origin(origin)
    root = {"is": origin, "lies inside": origin / "out", "contains": origin.parent}[relation]
    before = sorted(path for path in origin.rglob("*"))
    options: dict[str, Any] = {"origin": origin} if told == "by option" else {}
    world = WriterWorld(root, 1, **options)
    async with world.running() as bus:
        if told == "by option":
            await eventually(lambda: world.failure is not None)
            assert isinstance(world.failure, OutputFolderError)
            assert f"the output folder {relation} the origin checkpoint" in str(world.failure)
            assert sorted(path for path in origin.rglob("*")) == before
            return
        await publish_hf_folder(origin, "run", bus, 0)
        outcome = await world.outcome(bus)
    assert isinstance(outcome, VersionAborted)
    assert outcome.error == "OutputFolderError"
    assert f"the output folder {relation} the origin checkpoint" in outcome.message
    shards = [path for path in (root / "run").rglob("*") if path.suffix == ".safetensors"]
    assert shards == []
    assert json.loads((origin / "config.json").read_text()) == {"model_type": "llama"}
