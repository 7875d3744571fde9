"""Moving bytes: local tensors into shards, hashed on the way, a block at a time.

Two ways, by the plan's `Target.streamed`:

* A streamed target consists of runs. Each source is read once, front to back, when it arrives;
  its runs are written to their final offsets. Every run is an extent of its own.
* Any other target is put together when its last source has arrived (writers.row_blocks), and is
  one extent.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ..schemas.digest import Hasher
from ..schemas.dtypes import ITEM_BYTES
from ..schemas.errors import DigestMismatchError, OriginError
from ..schemas.manifest import Extent
from .assembly import Arrival
from .plan_types import Piece, Source, Target
from .shard_file import ShardFile
from .sources import SourceReader

_CACHED_BYTES = 256 * 1024
"""Small enough for the second-level cache of a core."""


class CopyStoppedError(Exception):
    """The version ended while its bytes were being moved."""


class PlacedExtent(NamedTuple):
    """An extent and where it begins in its target, in bytes."""

    offset: int
    extent: Extent


class Input(NamedTuple):
    """A source that has arrived."""

    source: Source
    arrival: Arrival

    def where(self) -> dict[str, object]:
        """For errors."""
        return {
            "tensor": self.source.name,
            "rank": self.source.rank,
            "chunk": self.arrival.chunk,
            "sequence": self.arrival.sequence,
        }

    def check(self, digest: str) -> None:
        """Raise DigestMismatchError when the bytes are not the published ones."""
        if digest != self.arrival.digest:
            raise DigestMismatchError(
                "the bytes of a tensor are not those that its producer published",
                where={
                    **self.where(),
                    "uri": self.arrival.location.uri,
                    "published": self.arrival.digest,
                    "found": digest,
                },
                next_step="the staging place was overwritten or damaged; the version is aborted, "
                "publish the next one",
            )


@dataclass
class Copier:
    """Reused memory and open files of one IO thread."""

    block_bytes: int
    reader: SourceReader = field(default_factory=SourceReader)

    def __post_init__(self) -> None:
        self._in = memoryview(bytearray(self.block_bytes))
        self._out = memoryview(bytearray(self.block_bytes))

    def let_go(self) -> None:
        """A version has ended: close the sources that do not last."""
        self.reader.let_go()

    def close(self) -> None:
        """Close every source; it opens again when needed."""
        self.reader.close()

    def in_block(self, nbytes: int) -> memoryview:
        """Reused memory for reading; new memory if a row needs more than a block."""
        return self._in[:nbytes] if nbytes <= len(self._in) else memoryview(bytearray(nbytes))

    def out_block(self, nbytes: int) -> memoryview:
        """Reused memory for writing, as `in_block`."""
        return self._out[:nbytes] if nbytes <= len(self._out) else memoryview(bytearray(nbytes))

    def take(self, item: Input, offset: int, nbytes: int) -> memoryview:
        """Bytes of a source: where they lie, or read into reused memory.

        Raises:
            SourceError, StorageError: they cannot be read.
        """
        arrival = item.arrival
        at, where = arrival.offset + offset, item.where()
        seen = self.reader.view(arrival.location, at, nbytes, where)
        if seen is not None:
            return seen
        block = self.in_block(nbytes)
        self.reader.read_into(arrival.location, at, block, where)
        return block

    def blocks(
        self, item: Input, stop: threading.Event, step_bytes: int
    ) -> Iterator[tuple[int, memoryview]]:
        """A source front to back, as (offset, block); the block is reused. Verifies at the end.

        Raises:
            CopyStoppedError: `stop` was set.
            SourceError, StorageError: it cannot be read, or is not what was published.
        """
        hasher = Hasher()
        for at in range(0, item.source.nbytes, step_bytes):
            if stop.is_set():
                raise CopyStoppedError
            block = self.take(item, at, min(step_bytes, item.source.nbytes - at))
            hasher.update(block)
            yield at, block
        item.check(hasher.digest())

    def stream(
        self,
        item: Input,
        targets: Sequence[Target],
        file: ShardFile,
        stop: threading.Event,
    ) -> dict[int, list[PlacedExtent]]:
        """Write a source's runs to their final offsets, and verify the source.

        Args:
            item: the source and where its bytes are.
            targets: the plan's targets.
            file: the shard of all of them.
            stop: ends it early, between two blocks.

        Returns:
            per target number, the extents that were written.

        Raises:
            CopyStoppedError: `stop` was set.
            SourceError: its bytes are not there or not the published ones.
            StorageError, CommitError: the shard cannot be written.
        """
        size = ITEM_BYTES[item.source.dtype]
        runs = sorted(
            (
                _Run(piece, targets[piece.target].offset, size)
                for piece in item.source.pieces
                if targets[piece.target].streamed
            ),
            key=lambda run: run.begin,
        )
        # One run that is the whole source: its digest is the source's own.
        single = len(runs) == 1 and runs[0].end == item.source.nbytes and not runs[0].begin
        first = 0
        # What is hashed twice and then written is looked at three times: it must stay in the cache.
        step = self.block_bytes if single else min(self.block_bytes, _CACHED_BYTES)
        for at, block in self.blocks(item, stop, step):
            end = at + len(block)
            while first < len(runs) and runs[first].end <= at:
                first += 1
            for run in islice(runs, first, None):
                if run.begin >= end:
                    break
                if run.end <= at:
                    continue  # it ended before a run that began before it
                skipped = max(run.begin, at) - run.begin
                part = block[run.begin + skipped - at : run.end - at]
                if not single:
                    run.hasher.update(part)
                file.write(run.place + skipped, part)
        placed: dict[int, list[PlacedExtent]] = {}
        for run in runs:
            digest = item.arrival.digest if single else run.hasher.digest()
            extent = Extent(length=run.end - run.begin, digest=digest)
            entry = PlacedExtent(run.offset, extent)
            placed.setdefault(run.target, []).append(entry)
        return placed

    def copy_base(
        self, path: Path, offset: int, target: Target, file: ShardFile, stop: threading.Event
    ) -> list[PlacedExtent]:
        """Take a whole target from a file of the origin checkpoint, as it is.

        Args:
            path: the origin's safetensors file.
            offset: the tensor's first byte in it.
            target: the HF tensor.
            file: its shard.
            stop: ends it early, between two blocks.

        Raises:
            CopyStoppedError: `stop` was set.
            OriginError: the file cannot be read, or ends too early.
            StorageError, CommitError: the shard cannot be written.
        """
        hasher = Hasher()
        where = {"tensor": target.name, "file": path}
        try:
            with path.open("rb", buffering=0) as source:
                for at in range(0, target.nbytes, self.block_bytes):
                    if stop.is_set():
                        raise CopyStoppedError
                    block = self.in_block(min(self.block_bytes, target.nbytes - at))
                    done = 0
                    while done < len(block):
                        count = os.preadv(source.fileno(), [block[done:]], offset + at + done)
                        if count == 0:
                            raise OriginError(
                                "a file of the origin checkpoint ends too early",
                                where=where,
                                next_step="the origin was changed while it was in use: restore it",
                            )
                        done += count
                    hasher.update(block)
                    file.write(target.offset + at, block)
        except OSError as error:
            raise OriginError(
                f"a file of the origin checkpoint cannot be read: {error.strerror}",
                where=where,
                next_step="let the writers read the whole origin checkpoint",
            ) from error
        return [PlacedExtent(0, Extent(length=target.nbytes, digest=hasher.digest()))]


class _Run:
    """A piece that is one run, in bytes: `begin` to `end` of the source, `place` in the file."""

    __slots__ = ("begin", "end", "hasher", "offset", "place", "target")

    def __init__(self, piece: Piece, target_offset: int, size: int) -> None:
        self.target = piece.target
        self.begin = piece.src_offset * size
        self.end = self.begin + piece.elements * size
        self.offset = piece.dst_offset * size
        self.place = target_offset + self.offset
        self.hasher = Hasher()


def merge_extents(placed: Mapping[int, Sequence[PlacedExtent]], number: int) -> tuple[Extent, ...]:
    """A target's extents in file order; none for a tensor without elements."""
    entries = sorted(placed.get(number, ()), key=lambda entry: entry.offset)
    return tuple(entry.extent for entry in entries)
