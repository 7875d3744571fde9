"""Targets that are put together row block by row block: any pieces, any block size, same bytes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.writer_copies import HEADER, NEVER, Staged, run, shard, source, target
from weightbus.schemas.digest import digest_of
from weightbus.schemas.dtypes import DType
from weightbus.schemas.errors import ConversionError, DigestMismatchError
from weightbus.schemas.manifest import Extent
from weightbus.writers.copy import Copier, CopyStoppedError, Input, PlacedExtent
from weightbus.writers.plan_types import Piece, Source
from weightbus.writers.row_blocks import assemble, bands_of


def columns_of(rows: int, cuts: Sequence[int]) -> list[Source]:
    """A row-parallel weight: each source has some columns of every row."""
    width, sources, at = sum(cuts), list[Source](), 0
    for index, cols in enumerate(cuts):
        piece = Piece(0, rows, cols, 0, cols, 1, at, width, 1)
        sources.append(source((rows, cols), [piece], rank=index))
        at += cols
    return sources


def swapped(rows: int, half: int) -> list[Source]:
    """One source whose column halves change places (eh_proj of some families)."""
    both = 2 * half
    left = Piece(0, rows, half, 0, both, 1, half, both, 1)
    right = Piece(0, rows, half, half, both, 1, 0, both, 1)
    return [source((rows, both), [left, right])]


def transposed(rows: int, cols: int) -> list[Source]:
    """Each source is the transpose of half of the target's rows (fused experts)."""
    half = rows // 2
    return [
        source((cols, half), [Piece(0, cols, half, 0, half, 1, top * cols, 1, cols)], rank=rank)
        for rank, top in enumerate((0, half))
    ]


def interleaved(rows: int, cols: int) -> list[Source]:
    """Two sources take turns, row by row (gate and up)."""
    return [
        source(
            (rows // 2, cols),
            [Piece(0, rows // 2, cols, 0, cols, 1, first * cols, 2 * cols, 1)],
            rank=first,
        )
        for first in range(2)
    ]


def broken_runs(rows: int, cols: int) -> list[Source]:
    """Runs that begin and end in the middle of rows."""
    total = rows * cols
    cut = max(1, total // 2 - 1)
    return [
        source((cut,), [run(0, 0, 0, cut)], rank=0),
        source((total - cut,), [run(0, 0, cut, total - cut)], rank=1),
    ]


def padded(rows: int, cuts: Sequence[int]) -> list[Source]:
    """A row-parallel weight whose sources have rows that nobody wants."""
    return [
        source((rows + 2, one.shape[1]), one.pieces, rank=one.rank)
        for one in columns_of(rows, cuts)
    ]


SHAPES = {
    "columns": (columns_of(6, (3, 2, 3)), (6, 8)),
    "one column each": (columns_of(5, (1, 1)), (5, 2)),
    "swapped": (swapped(6, 4), (6, 8)),
    "transposed": (transposed(6, 8), (6, 8)),
    "transposed 3-D": (transposed(6, 8), (2, 3, 8)),
    "interleaved": (interleaved(6, 8), (6, 8)),
    "broken runs": (broken_runs(6, 8), (6, 8)),
    "vector": (interleaved(6, 1), (6,)),
    "padded": (padded(6, (3, 5)), (6, 8)),
}


def copied(
    sources: Sequence[Source], shape: tuple[int, ...], folder: Path, block_bytes: int,
    dtype: DType = "BF16",
) -> None:  # fmt: skip
    """Assemble target 0 and compare its bytes and its extent with another executor's."""
    made = target(0, shape, len(HEADER) + 3, sources, streamed=False, dtype=dtype)
    staged = Staged(folder / "staged", sources)
    copier = Copier(block_bytes)
    file = shard(folder / "shard", made.nbytes + 3)
    placed = assemble(copier, made, 0, staged.inputs, file, NEVER)
    file.close()
    copier.close()
    wanted = staged.expected(0, shape, dtype)
    assert (folder / "shard").read_bytes()[made.offset :] == wanted
    assert placed == [PlacedExtent(0, Extent(length=made.nbytes, digest=digest_of(wanted)))]


@pytest.mark.parametrize("block_bytes", [2, 16, 40, 1 << 20])
@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_piece_in_blocks_of_any_size(
    name: str, block_bytes: int, tmp_path: Path
) -> None:
    sources, shape = SHAPES[name]
    copied(sources, shape, tmp_path, block_bytes)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    data=st.data(),
    rows=st.integers(1, 9),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    block_bytes=st.integers(4, 200),
    dtype=st.sampled_from(["U8", "BF16", "F32", "I64"]),
)
def test_random_cells_of_random_sources(
    data: st.DataObject, rows: int, cuts: list[int], block_bytes: int, dtype: DType, tmp_path: Path
) -> None:
    """Columns are dealt to sources, rows cut into bands; each source stores them upside down."""
    width = sum(cuts)
    bands = data.draw(st.lists(st.integers(0, rows), max_size=3))
    edges = sorted({0, rows, *bands})
    owners = data.draw(st.lists(st.integers(0, 2), min_size=len(cuts), max_size=len(cuts)))
    sources: list[Source] = []
    for rank in sorted(set(owners)):
        pieces: list[Piece] = []
        at = 0
        for top, bottom in reversed(list(pairwise(edges))):
            left = 0
            for cols, owner in zip(cuts, owners, strict=True):
                if owner == rank:
                    count = bottom - top
                    pieces.append(Piece(0, count, cols, at, cols, 1, top * width + left, width, 1))
                    at += count * cols
                left += cols
        sources.append(source((at,), pieces, rank=rank, dtype=dtype))
    copied(sources, (rows, width), tmp_path, block_bytes, dtype)


def test_what_is_used_front_to_back_is_read_once_and_never_held(tmp_path: Path) -> None:
    sources, shape = SHAPES["columns"]
    made = target(0, shape, len(HEADER), sources, streamed=False)
    staged = Staged(tmp_path / "staged", sources)
    copier = Copier(32)
    reads: list[int] = []
    take = copier.take

    def counted(item: Input, offset: int, nbytes: int) -> memoryview:
        reads.append(nbytes)
        return take(item, offset, nbytes)

    copier.take = counted
    file = shard(tmp_path / "shard", made.nbytes)
    assemble(copier, made, 0, staged.inputs, file, NEVER)
    file.close()
    assert sum(reads) == made.nbytes
    assert max(reads) <= 32


@pytest.mark.parametrize("name", ["columns", "transposed"])
def test_other_bytes_than_published_are_named(name: str, tmp_path: Path) -> None:
    sources, shape = SHAPES[name]
    made = target(0, shape, len(HEADER), sources, streamed=False)
    staged = Staged(tmp_path / "staged", sources)
    staged.flip(staged.inputs[1], at=2)
    file = shard(tmp_path / "shard", made.nbytes)
    with pytest.raises(DigestMismatchError, match=r"not those that its producer published") as info:
        assemble(Copier(64), made, 0, staged.inputs, file, NEVER)
    file.close()
    where = info.value.where
    assert (where["tensor"], where["rank"], where["chunk"], where["sequence"]) == (
        "tensor0", 1, 3, 7,
    )  # fmt: skip
    assert where["found"] != where["published"]


@pytest.mark.parametrize("name", ["columns", "transposed"])
def test_it_stops_between_two_blocks(name: str, tmp_path: Path) -> None:
    sources, shape = SHAPES[name]
    made = target(0, shape, len(HEADER), sources, streamed=False)
    staged = Staged(tmp_path / "staged", sources)
    stop = threading.Event()
    stop.set()
    file = shard(tmp_path / "shard", made.nbytes)
    with pytest.raises(CopyStoppedError):
        assemble(Copier(64), made, 0, staged.inputs, file, stop)
    file.close()


def test_a_target_without_elements_writes_nothing(tmp_path: Path) -> None:
    made = target(0, (0, 4), len(HEADER), [], streamed=False)
    file = shard(tmp_path / "shard", 0)
    assert assemble(Copier(64), made, 0, [], file, NEVER) == [
        PlacedExtent(0, Extent(length=0, digest=digest_of(b"")))
    ]
    file.close()
    assert (tmp_path / "shard").read_bytes() == HEADER


def test_a_piece_that_no_rule_makes_is_refused() -> None:
    crooked = Piece(0, 1, 4, 0, 4, 1, 0, 4, 3)
    with pytest.raises(ConversionError, match="does not lie in the rows of a matrix with 5"):
        bands_of(crooked, 5)


def test_rows_that_cross_the_targets_rows_are_taken_line_by_line() -> None:
    piece = Piece(0, 2, 6, 0, 6, 1, 2, 12, 1)
    bands = bands_of(piece, 4)
    assert sum(band.rows * band.cols for band in bands) == piece.elements
    places = {
        (band.row + line * band.row_step) * 4 + band.col + col
        for band in bands
        for line in range(band.rows)
        for col in range(band.cols)
    }
    assert places == set(range(2, 8)) | set(range(14, 20))
