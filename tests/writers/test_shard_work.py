"""One writer's shards of one version: every unit once, failing disks, an end at any time."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.conversion_megatron import Grid
from support.writer_lanes import Bench, bench
from support.writer_megatron import DENSE, LATENT
from weightbus.schemas.errors import DigestMismatchError, SourceMissingError, StorageError
from weightbus.schemas.events import ChunkReady
from weightbus.writers.copy import CopyStoppedError
from weightbus.writers.steps import Step

GRID = Grid(tp=2, pp=2)


class Failing:
    """A system call that fails `times` times, then works; `times` below 0: always fails."""

    def __init__(self, real: Callable[..., Any], number: int, times: int) -> None:
        self.calls = 0
        self._real, self._number, self._left = real, number, times
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> Any:
        with self._lock:
            self.calls += 1
            fails = self._left != 0
            if self._left > 0:
                self._left -= 1
        if fails:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*arguments)


def units(made: Bench) -> int:
    """How many units a version has: one per streamed source, one per target put together."""
    targets = made.plan.targets
    streams = sum(
        1
        for source in made.plan.sources.values()
        if any(targets[piece.target].streamed for piece in source.pieces)
    )
    return streams + sum(1 for target in targets if not target.streamed)


@pytest.mark.parametrize("io_threads", [1, 2, 5])
@pytest.mark.parametrize("model", [DENSE, LATENT], ids=["dense", "latent"])
async def test_every_unit_is_done_once_in_any_order(
    model: Any, io_threads: int, tmp_path: Path
) -> None:
    async with bench(model, GRID, tmp_path, io_threads=io_threads) as made:
        chunks = made.chunks
        random.Random(io_threads).shuffle(chunks)
        made.arrive(chunks)
        await made.done()
        made.check()
        assert made.steps.taken[Step.COPY] == units(made)
        assert made.steps.taken[Step.OPEN_SHARD] == len(made.plan.shards)


async def test_sources_that_come_together_make_their_target_once(tmp_path: Path) -> None:
    async with bench(DENSE, Grid(tp=2), tmp_path, chunk_tensors=400) as made:
        made.arrive(made.chunks)
        await made.done()
        made.check()
        assert made.steps.taken[Step.COPY] == units(made)


async def test_it_waits_for_the_last_source_and_for_nothing_else(tmp_path: Path) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        *first, last = made.chunks
        made.arrive(first)
        await made.done()
        announced = {event.shard for event in made.announced}
        missing = {
            made.plan.sources[(last.rank, tensor.index)].shard for tensor in last.tensors
        }  # fmt: skip
        assert announced == {shard.index for shard in made.plan.shards} - missing
        made.arrive([last])
        await made.done()
        made.check()


async def test_announced_shards_are_left_alone(tmp_path: Path) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        made.work.skip(0)
        made.work.skip(99)
        made.arrive(made.chunks)
        made.work.sealed()
        await made.done()
        assert {event.shard for event in made.announced} == {
            shard.index for shard in made.plan.shards[1:]
        }
        assert not (made.paths.partial / made.plan.shards[0].file).exists()


async def test_a_failed_sync_means_writing_the_whole_shard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system forgets which pages it could not write: a second sync alone would lie."""
    sync = Failing(os.fdatasync, errno.EIO, times=2)
    monkeypatch.setattr(os, "fdatasync", sync)
    async with bench(DENSE, GRID, tmp_path) as made:
        made.arrive(made.chunks)
        await made.done()
        made.check()
        shards = len(made.plan.shards)
        assert sync.calls == shards + 2
        assert made.steps.taken[Step.OPEN_SHARD] == shards + 2
        assert made.steps.taken[Step.COPY] > units(made)


async def test_a_disk_that_is_full_for_a_while_only_delays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        os, "posix_fallocate", Failing(os.posix_fallocate, errno.ENOSPC, times=2)
    )  # fmt: skip
    monkeypatch.setattr(os, "pwrite", Failing(os.pwrite, errno.ENOSPC, times=1))
    async with bench(DENSE, GRID, tmp_path) as made:
        made.arrive(made.chunks)
        await made.done()
        made.check()
    assert "No space left on device" in caplog.text
    assert "Trying again in" in caplog.text


@pytest.mark.parametrize("call", ["posix_fallocate", "fdatasync"])
async def test_a_disk_that_stays_full_is_given_up_at_the_deadline(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, Failing(getattr(os, call), errno.ENOSPC, times=-1))
    async with bench(DENSE, GRID, tmp_path, storage_deadline_s=0.3) as made:
        made.arrive(made.chunks)
        with pytest.raises(StorageError, match="No space left on device") as info:
            await made.done()
        assert "free space" in str(info.value)
        assert made.announced == []


async def test_what_a_killed_life_left_is_removed(tmp_path: Path) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        made.paths.partial.mkdir(parents=True)
        first = made.plan.shards[0].file
        (made.paths.partial / f".{first}.0badc0de.part").write_bytes(b"half")
        (made.paths.partial / first).write_bytes(b"an older life's")
        made.arrive(made.chunks)
        await made.done()
        made.check()


async def test_a_source_with_other_bytes_announces_nothing(tmp_path: Path) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        chunk = made.chunks[0]
        flip(chunk)
        made.arrive(made.chunks)
        with pytest.raises(DigestMismatchError) as info:
            await made.done()
        assert info.value.where["rank"] == chunk.rank
        assert info.value.where["chunk"] == chunk.chunk


async def test_a_source_that_is_gone_is_named(tmp_path: Path) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        for path in (tmp_path / "staging").iterdir():
            path.unlink()
        made.arrive(made.chunks)
        with pytest.raises(SourceMissingError):
            await made.done()
        assert made.announced == []


async def test_a_version_that_ended_is_copied_no_further_and_leaves_no_file_open(
    tmp_path: Path,
) -> None:
    async with bench(DENSE, GRID, tmp_path) as made:
        *first, last = made.chunks
        made.arrive(first)
        await made.done()
        opened = made.steps.taken[Step.OPEN_SHARD]
        await made.work.end()
        assert [name for name in open_files() if str(tmp_path) in name] == []
        made.arrive([last])
        with pytest.raises(CopyStoppedError):
            await made.done()
        await made.work.end()
        assert made.steps.taken[Step.OPEN_SHARD] == opened


def flip(chunk: ChunkReady) -> None:
    """Change the first byte of a chunk behind its producer's back."""
    path = Path(chunk.location.uri.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[chunk.location.offset + chunk.tensors[0].offset] ^= 1
    path.write_bytes(data)


def open_files() -> list[str]:
    """What this process has open."""
    names: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(entry.readlink()))
        except OSError:
            continue  # the listing's own
    return names
