"""Targets that are not made of runs: put together row block by row block, hashed, written.

The target is looked at as a matrix (as in writers.regions). For each block of its rows, every
source gives the elements that belong there. A source whose elements are used front to back (a
row-parallel weight: each rank has some columns of every row) is read, hashed and verified in the
same pass, a block at a time. Any other (a transpose, interleaved rows) is held whole and verified
while its rows are being made, so memory is that of one local tensor, not of the target.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..schemas.digest import Hasher
from ..schemas.dtypes import ITEM_BYTES
from ..schemas.errors import ConversionError
from ..schemas.manifest import Extent
from .copy import Copier, CopyStoppedError, Input, PlacedExtent
from .plan_types import Piece, Target
from .regions import view_of
from .shard_file import ShardFile

_ITEMS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Band(NamedTuple):
    """Lines of a piece: line i goes to target row `row + i * row_step`, in source order `src`.

    All in elements; element (i, j) lies at `src + i * src_row_step + j * src_col_step` in the
    source and in column `col + j * col_step` of its row.
    """

    rows: int
    cols: int
    src: int
    src_row_step: int
    src_col_step: int
    row: int
    row_step: int
    col: int
    col_step: int

    def lines(self, top: int, bottom: int) -> tuple[int, int]:
        """The lines that go to target rows from `top` to before `bottom`: (first, end)."""
        first = max(0, -(-(top - self.row) // self.row_step))
        end = min(self.rows, -(-(bottom - self.row) // self.row_step))
        return first, max(first, end)


def bands_of(piece: Piece, columns: int) -> tuple[Band, ...]:
    """A piece as lines of the rows of a matrix with `columns` columns.

    Raises:
        ConversionError: it is none (no rule makes such a piece).
    """
    row, col = divmod(piece.dst_offset, columns)
    if piece.is_run:
        return tuple(_run_bands(piece.src_offset, piece.elements, row, col, columns))
    down = (piece.rows, piece.src_row_step, piece.dst_row_step)
    right = (piece.cols, piece.src_col_step, piece.dst_col_step)
    for (rows, src_row, dst_row), (cols, src_col, dst_col) in ((down, right), (right, down)):
        below = rows == 1 or dst_row % columns == 0
        beside = col + (cols - 1) * dst_col < columns or cols == 1
        if below and beside:
            row_step = 1 if rows == 1 else dst_row // columns
            col_step = 1 if cols == 1 else dst_col
            return (
                Band(rows, cols, piece.src_offset, src_row, src_col, row, row_step, col, col_step),
            )
    if piece.rows == 1:
        raise ConversionError(
            f"{piece} does not lie in the rows of a matrix with {columns} columns",
            next_step="this is a mistake in a conversion rule: report it with the model's config",
        )
    lines = (
        replace(
            piece,
            rows=1,
            src_offset=piece.src_offset + number * piece.src_row_step,
            dst_offset=piece.dst_offset + number * piece.dst_row_step,
        )
        for number in range(piece.rows)
    )
    return tuple(band for line in lines for band in bands_of(line, columns))


def _run_bands(src: int, elements: int, row: int, col: int, columns: int) -> Iterator[Band]:
    """A run: the rest of its first row, whole rows, the start of its last row."""
    while elements:
        if col == 0 and elements >= columns:
            rows, cols = elements // columns, columns
        else:
            rows, cols = 1, min(columns - col, elements)
        yield Band(rows, cols, src, cols, 1, row, 1, col, 1)
        src, elements, row, col = src + rows * cols, elements - rows * cols, row + rows, 0


class _Feed:
    """One source of the target."""

    def __init__(self, item: Input, bands: Sequence[Band]) -> None:
        self.item = item
        self.bands = bands
        self.last_row = max(band.row + (band.rows - 1) * band.row_step for band in bands)
        self.size = ITEM_BYTES[item.source.dtype]
        self.hasher = Hasher()
        self.in_order = False
        self.held: Any = None

    def window(self, top: int, bottom: int) -> tuple[int, int]:
        """Source elements from the first to behind the last that these target rows need."""
        begin, end = -1, -1
        for band in self.bands:
            first, last = band.lines(top, bottom)
            if first < last:
                low = band.src + first * band.src_row_step
                high = (
                    band.src
                    + (last - 1) * band.src_row_step
                    + (band.cols - 1) * band.src_col_step
                    + 1
                )
                begin, end = low if begin < 0 else min(begin, low), max(end, high)
        return begin, end

    def look_ahead(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Find out whether the windows of all blocks are the whole source, front to back."""
        at = 0
        for top, bottom in blocks:
            begin, end = self.window(top, bottom)
            if begin < 0:
                continue
            if begin != at:
                return
            at = end
        self.in_order = at * self.size == self.item.source.nbytes

    def values(self, top: int, bottom: int, copier: Copier, stop: threading.Event) -> Any:
        """(source elements, number of the first one) for a block, or None if it needs none."""
        begin, end = self.window(top, bottom)
        if begin < 0:
            return None
        if self.in_order:
            block = copier.take(self.item, begin * self.size, (end - begin) * self.size)
            self.hasher.update(block)
            return np.frombuffer(block, _ITEMS[self.size]), begin
        if self.held is None:
            data = bytearray(self.item.source.nbytes)
            for at, block in copier.blocks(self.item, stop, copier.block_bytes):
                data[at : at + len(block)] = block
            self.held = np.frombuffer(data, _ITEMS[self.size])
        return self.held, 0

    def fill(
        self, table: Any, top: int, bottom: int, copier: Copier, stop: threading.Event
    ) -> None:
        """Put this source's elements into target rows `top` to `bottom`, which `table` holds."""
        found = self.values(top, bottom, copier, stop)
        if found is None:
            return
        values, begin = found
        for band in self.bands:
            first, last = band.lines(top, bottom)
            if first == last:
                continue
            row = band.row + first * band.row_step - top
            src = band.src + first * band.src_row_step - begin
            lines = table[row : row + (last - first - 1) * band.row_step + 1 : band.row_step]
            end = band.col + (band.cols - 1) * band.col_step + 1
            lines[:, band.col : end : band.col_step] = as_strided(
                values[src:],
                (last - first, band.cols),
                (band.src_row_step * self.size, band.src_col_step * self.size),
                writeable=False,
            )
        if bottom > self.last_row:
            self.held = None

    def check(self) -> None:
        """Verify what was read in order; what was held has been verified."""
        if self.in_order:
            self.item.check(self.hasher.digest())


def assemble(
    copier: Copier,
    target: Target,
    number: int,
    inputs: Sequence[Input],
    file: ShardFile,
    stop: threading.Event,
) -> list[PlacedExtent]:
    """Put a target together from all of its sources and write it.

    Args:
        copier: memory and files of this thread.
        target: the HF tensor.
        number: its number in the plan.
        inputs: all of its sources.
        file: its shard.
        stop: ends it early, between two blocks.

    Returns:
        its one extent.

    Raises:
        CopyStoppedError: `stop` was set.
        SourceError: bytes are not there or not the published ones.
        StorageError, CommitError: the shard cannot be written.
    """
    rows, columns = view_of(target.shape)
    size = ITEM_BYTES[target.dtype]
    step = max(1, copier.block_bytes // (columns * size)) if columns else 1
    blocks = [(top, min(rows, top + step)) for top in range(0, rows, step)] if columns else []
    feeds = [
        _Feed(item, [band for piece in item.source.pieces if piece.target == number
                     for band in bands_of(piece, columns)])
        for item in inputs
    ]  # fmt: skip
    for feed in feeds:
        feed.look_ahead(blocks)
    hasher = Hasher()
    for top, bottom in blocks:
        if stop.is_set():
            raise CopyStoppedError
        block = copier.out_block((bottom - top) * columns * size)
        table = np.frombuffer(block, _ITEMS[size]).reshape(bottom - top, columns)
        for feed in feeds:
            feed.fill(table, top, bottom, copier, stop)
        hasher.update(block)
        file.write(target.offset + top * columns * size, block)
    for feed in feeds:
        feed.check()
    return [PlacedExtent(0, Extent(length=target.nbytes, digest=hasher.digest()))]
