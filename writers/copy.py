"""Moving bytes: pieces of local tensors into shards, hashed on the way, a block at a time.

Two ways, by the plan's `Target.streamed`:

* A streamed target consists of runs. Each source is read once, front to back, when it arrives;
  its runs are written to their final offsets. Every run is an extent of its own.
* Any other target is put together when its last source has arrived: row block by row block in a
  reused block, then hashed and written as one extent. Where each source is one run that is
  spread over the target's rows (a row-parallel weight), it is read and verified in the same pass.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..schemas.digest import Hasher
from ..schemas.dtypes import ITEM_BYTES
from ..schemas.errors import DigestMismatchError
from ..schemas.manifest import Extent
from .assembly import Arrival
from .plan_types import Piece, Source, Target
from .shard_file import ShardFile
from .sources import SourceReader

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


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
                where={**self.where(), "uri": self.arrival.location.uri, "found": digest},
                next_step="the staging place was overwritten or damaged; the version is aborted, "
                "publish the next one",
            )


@dataclass
class Copier:
    """Reused memory and open files of one IO thread.

    `stop` ends a copy between two blocks with CopyStoppedError.
    """

    block_bytes: int
    reader: SourceReader = field(default_factory=SourceReader)

    def __post_init__(self) -> None:
        self._in = bytearray(self.block_bytes)
        self._out = bytearray(self.block_bytes)

    def close(self) -> None:
        """Close the source files."""
        self.reader.close()

    def _block(self, buffer: bytearray, nbytes: int) -> memoryview:
        # Only a row that is wider than a block makes it grow.
        if nbytes > len(buffer):
            buffer.extend(bytes(nbytes - len(buffer)))
        return memoryview(buffer)[:nbytes]

    # ---- streamed targets

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
            stop: ends it early.

        Returns:
            per target number, the extents that were written.

        Raises:
            SourceError: its bytes are not there or not the published ones.
            StorageError, CommitError: the shard cannot be written.
        """
        source = item.source
        size = ITEM_BYTES[source.dtype]
        runs = [piece for piece in source.pieces if targets[piece.target].streamed]
        # One run that is the whole source: its digest is the source's own.
        single = len(runs) == 1 and runs[0].elements * size == source.nbytes
        hashers = [Hasher() for _ in runs]
        whole = Hasher()
        first = 0
        for at in range(0, source.nbytes, self.block_bytes):
            if stop.is_set():
                raise CopyStoppedError
            block = self._block(self._in, min(self.block_bytes, source.nbytes - at))
            self.reader.read_into(
                item.arrival.location, item.arrival.offset + at, block, item.where()
            )
            whole.update(block)
            for number in range(first, len(runs)):
                piece = runs[number]
                begin, end = piece.src_offset * size, (piece.src_offset + piece.elements) * size
                if begin >= at + len(block):
                    break
                part = block[max(begin, at) - at : end - at]
                if not single:
                    hashers[number].update(part)
                target = targets[piece.target]
                skipped = max(begin, at) - begin
                file.write(target.offset + piece.dst_offset * size + skipped, part)
                if end <= at + len(block):
                    first = number + 1
        digest = whole.digest()
        item.check(digest)
        placed: dict[int, list[PlacedExtent]] = {}
        for piece, hasher in zip(runs, hashers, strict=True):
            extent = Extent(
                length=piece.elements * size, digest=digest if single else hasher.digest()
            )
            entry = PlacedExtent(piece.dst_offset * size, extent)
            placed.setdefault(piece.target, []).append(entry)
        return placed

    # ---- all other targets

    def assemble(
        self,
        target: Target,
        number: int,
        inputs: Sequence[Input],
        file: ShardFile,
        stop: threading.Event,
    ) -> list[PlacedExtent]:
        """Put a target together from all of its sources and write it.

        Args:
            target: the HF tensor.
            number: its number in the plan.
            inputs: all of its sources.
            file: its shard.
            stop: ends it early.

        Raises:
            SourceError, StorageError, CommitError: as `stream`.
        """
        columns = max(1, target.shape[-1]) if target.shape else 1
        feeds = [_feed(item, number, columns) for item in inputs]
        if all(feed is not None for feed in feeds):
            present = [feed for feed in feeds if feed is not None]
            digest = self._by_rows(target, columns, present, file, stop)
        else:
            digest = self._whole(target, number, inputs, file, stop)
        return [PlacedExtent(0, Extent(length=target.nbytes, digest=digest))]

    def _by_rows(
        self,
        target: Target,
        columns: int,
        feeds: Sequence[_Feed],
        file: ShardFile,
        stop: threading.Event,
    ) -> str:
        size = ITEM_BYTES[target.dtype]
        width = columns * size
        rows = target.nbytes // width
        step = max(1, self.block_bytes // width)
        hasher = Hasher()
        for top in range(0, rows, step):
            if stop.is_set():
                raise CopyStoppedError
            bottom = min(rows, top + step)
            block = self._block(self._out, (bottom - top) * width)
            table: Any = np.frombuffer(block, np.uint8).reshape(bottom - top, width)
            for feed in feeds:
                self._fill(table, top, bottom, feed, size)
            hasher.update(block)
            file.write(target.offset + top * width, block)
        for feed in feeds:
            feed.item.check(feed.hasher.digest())
        return hasher.digest()

    def _fill(self, table: Any, top: int, bottom: int, feed: _Feed, size: int) -> None:
        """Copy the feed's rows between `top` and `bottom` into their columns of the block."""
        piece = feed.piece
        first, last = max(top, feed.row), min(bottom, feed.row + piece.rows)
        if first >= last:
            return
        wide = piece.cols * size
        part = self._block(self._in, (last - first) * wide)
        offset = feed.item.arrival.offset + (first - feed.row) * wide
        self.reader.read_into(feed.item.arrival.location, offset, part, feed.item.where())
        feed.hasher.update(part)
        left = feed.column * size
        table[first - top : last - top, left : left + wide] = np.frombuffer(part, np.uint8).reshape(
            last - first, wide
        )

    def _whole(
        self,
        target: Target,
        number: int,
        inputs: Sequence[Input],
        file: ShardFile,
        stop: threading.Event,
    ) -> str:
        """Any pieces (transposes, interleaved rows): the target and one source at a time in memory.

        Only what no region walk can stream comes here; memory is that of one tensor.
        """
        item_type = _UINT[ITEM_BYTES[target.dtype]]
        result: Any = np.empty(target.nbytes // ITEM_BYTES[target.dtype], item_type)
        for item in inputs:
            values: Any = np.frombuffer(self._verified(item, stop), item_type)
            for piece in item.source.pieces:
                if piece.target == number:
                    _grid(result, piece, "dst")[...] = _grid(values, piece, "src")
        data = memoryview(result).cast("B")
        hasher = Hasher()
        for at in range(0, len(data), self.block_bytes):
            if stop.is_set():
                raise CopyStoppedError
            block = data[at : at + self.block_bytes]
            hasher.update(block)
            file.write(target.offset + at, block)
        return hasher.digest()

    def _verified(self, item: Input, stop: threading.Event) -> bytearray:
        data = bytearray(item.source.nbytes)
        hasher = Hasher()
        for at in range(0, len(data), self.block_bytes):
            if stop.is_set():
                raise CopyStoppedError
            block = memoryview(data)[at : at + self.block_bytes]
            self.reader.read_into(
                item.arrival.location, item.arrival.offset + at, block, item.where()
            )
            hasher.update(block)
        item.check(hasher.digest())
        return data


@dataclass
class _Feed:
    """A source that is one run, spread over `rows` rows of a target at (row, column)."""

    item: Input
    piece: Piece
    row: int
    column: int
    hasher: Hasher = field(default_factory=Hasher)


def _feed(item: Input, number: int, columns: int) -> _Feed | None:
    pieces = item.source.pieces
    if len(pieces) != 1 or pieces[0].target != number:
        return None
    piece = pieces[0]
    row, column = divmod(piece.dst_offset, columns)
    size = ITEM_BYTES[item.source.dtype]
    is_run = piece.src_offset == 0 and piece.elements * size == item.source.nbytes
    by_rows = piece.rows == 1 or (
        piece.src_row_step == piece.cols and piece.dst_row_step == columns
    )
    straight = piece.cols == 1 or (piece.src_col_step == 1 and piece.dst_col_step == 1)
    if not (is_run and by_rows and straight and column + piece.cols <= columns):
        return None
    return _Feed(item, piece, row, column)


def _grid(values: Any, piece: Piece, side: str) -> Any:
    """The piece's elements of a flat array as a [rows, cols] view."""
    offset: int = getattr(piece, f"{side}_offset")
    row_step: int = getattr(piece, f"{side}_row_step")
    col_step: int = getattr(piece, f"{side}_col_step")
    last = offset + (piece.rows - 1) * row_step + (piece.cols - 1) * col_step
    if not 0 <= offset <= last < values.size:
        raise IndexError(f"{side} of {piece} leaves a tensor of {values.size} elements")
    return np.lib.stride_tricks.as_strided(
        values[offset:],
        (piece.rows, piece.cols),
        (row_step * values.itemsize, col_step * values.itemsize),
    )


def merge_extents(placed: Mapping[int, Sequence[PlacedExtent]], number: int) -> tuple[Extent, ...]:
    """A target's extents in file order."""
    return tuple(entry.extent for entry in sorted(placed[number], key=lambda entry: entry.offset))
