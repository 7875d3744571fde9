"""Copies against an executor of pieces in numpy: any blocks, any steps; digests of one pass."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.writer_plans import inputs, piece, source, target, wanted
from weightbus.schemas.digest import combine, digest_of
from weightbus.schemas.errors import (
    ConversionError,
    DigestMismatchError,
)
from weightbus.schemas.manifest import Extent
from weightbus.writers.copy import Copier, Input, PlacedExtent, merge_extents
from weightbus.writers.plan_types import Piece, Source, Target
from weightbus.writers.row_blocks import assemble, bands_of
from weightbus.writers.shard_file import ShardFile

HEADER = b"h" * 16
BLOCKS = [4096, 4100, 64, 4]
GO = threading.Event()


class Made(NamedTuple):
    """Bytes of a target, and its extents."""

    data: bytes
    extents: tuple[Extent, ...]


def check(made: Made, data: bytes) -> None:
    """The bytes are these, and the extents' digests are those of the bytes."""
    assert made.data == data
    at = 0
    for extent in made.extents:
        assert extent.digest == digest_of(data[at : at + extent.length])
        at += extent.length
    assert at == len(data)


def shard(folder: Path, targets: Sequence[Target]) -> ShardFile:
    end = max(one.offset + one.nbytes for one in targets)
    return ShardFile(folder / "shard", end, HEADER, write_behind=False)


def streamed(
    items: Sequence[Input], targets: Sequence[Target], folder: Path, block: int
) -> list[Made]:
    """Stream every source; what each target is then."""
    copier, file = Copier(block), shard(folder, targets)
    placed: dict[int, list[PlacedExtent]] = {}
    for item in items:
        for number, extents in copier.stream(item, targets, file, GO).items():
            placed.setdefault(number, []).extend(extents)
    copier.close()
    file.close()
    data = (folder / "shard").read_bytes()
    assert data.startswith(HEADER)
    return [
        Made(data[one.offset : one.offset + one.nbytes], merge_extents(placed, number))
        for number, one in enumerate(targets)
    ]


def assembled(
    items: Sequence[Input], one: Target, folder: Path, block: int, number: int = 0
) -> Made:
    copier, file = Copier(block), shard(folder, [one])
    extents = assemble(copier, one, number, items, file, GO)
    copier.close()
    file.close()
    data = (folder / "shard").read_bytes()[one.offset :]
    return Made(data, merge_extents({number: extents}, number))


# ---------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("block", BLOCKS)
def test_a_source_that_is_one_run(block: int, tmp_path: Path) -> None:
    one = source([piece(0, 1, 3000, (0, 3000, 1), (0, 3000, 1))], 3000)
    items = inputs([one], tmp_path)
    [made] = streamed([items[0, 0]], [target((3000,), [one])], tmp_path, block)
    check(made, wanted([one], items, (3000,)))
    # No second hash: the extent's digest is the one that the producer published.
    assert made.extents == (Extent(length=12_000, digest=items[0, 0].arrival.digest),)


@pytest.mark.parametrize("block", BLOCKS)
def test_runs_to_two_targets_with_a_part_left_out(block: int, tmp_path: Path) -> None:
    """Gate rows, then up rows; the last rows are padding."""
    gate = piece(0, 1, 1100, (0, 1100, 1), (0, 1100, 1))
    up = piece(1, 1, 900, (1100, 900, 1), (0, 900, 1))
    one = source([gate, up], 2500)
    targets = [target((1100,), [one]), target((900,), [one], 1, offset=16 + 4400)]
    items = inputs([one], tmp_path)
    for number, made in enumerate(streamed([items[0, 0]], targets, tmp_path, block)):
        check(made, wanted([one], items, targets[number].shape, number))


@pytest.mark.parametrize("block", BLOCKS)
def test_runs_in_any_order_that_overlap_in_the_source(block: int, tmp_path: Path) -> None:
    """Swapped halves, and a second copy of the first rows under another name."""
    parts = [
        piece(0, 1, 500, (500, 500, 1), (0, 500, 1)),
        piece(0, 1, 500, (0, 500, 1), (500, 500, 1)),
        piece(1, 1, 1000, (0, 1000, 1), (0, 1000, 1)),
        piece(2, 1, 70, (30, 70, 1), (0, 70, 1)),
    ]
    one = source(parts, 1000)
    targets = [
        target((1000,), [one]), target((1000,), [one], 1, offset=4016),
        target((70,), [one], 2, offset=8016),
    ]  # fmt: skip
    items = inputs([one], tmp_path)
    for number, made in enumerate(streamed([items[0, 0]], targets, tmp_path, block)):
        check(made, wanted([one], items, targets[number].shape, number))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_ranks_give_extents_in_file_order(order: tuple[int, int], tmp_path: Path) -> None:
    sources = [
        source([piece(0, 1, 200, (0, 200, 1), (rank * 200, 200, 1))], 200, rank=rank)
        for rank in range(2)
    ]
    items = inputs(sources, tmp_path)
    [made] = streamed([items[rank, 0] for rank in order], [target((400,), sources)], tmp_path, 4096)
    check(made, wanted(sources, items, (400,)))
    assert [extent.digest for extent in made.extents] == [
        items[rank, 0].arrival.digest for rank in range(2)
    ]
    assert combine(extent.digest for extent in made.extents) != digest_of(made.data)


# ---------------------------------------------------------------------------------- row blocks


def columns(ranks: int, rows: int, cols: int) -> list[Source]:
    """A row-parallel weight: each rank has some columns of every row."""
    return [
        source(
            [piece(0, rows, cols, (0, cols, 1), (rank * cols, ranks * cols, 1))],
            rows * cols,
            rank=rank,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("ranks", "rows", "cols"), [(2, 33, 50), (4, 3, 7), (3, 1, 11)])
def test_row_parallel_columns(block: int, ranks: int, rows: int, cols: int, tmp_path: Path) -> None:
    """Also with blocks that are smaller than a row."""
    sources = columns(ranks, rows, cols)
    items = inputs(sources, tmp_path)
    shape = (rows, ranks * cols)
    made = assembled(list(items.values()), target(shape, sources), tmp_path, block)
    check(made, wanted(sources, items, shape))
    assert len(made.extents) == 1


@pytest.mark.parametrize("block", BLOCKS)
def test_a_transpose(block: int, tmp_path: Path) -> None:
    rows, cols = 23, 31
    sources = [source([piece(0, rows, cols, (0, cols, 1), (0, 1, rows))], rows * cols)]
    items = inputs(sources, tmp_path)
    made = assembled(list(items.values()), target((cols, rows), sources), tmp_path, block)
    check(made, wanted(sources, items, (cols, rows)))
    data = np.frombuffer(made.data, np.uint32).reshape(cols, rows)
    flat = np.frombuffer(wanted(sources, items, (cols, rows)), np.uint32)
    assert (data.T.reshape(-1) == flat.reshape(cols, rows).T.reshape(-1)).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_interleaved_rows_and_a_run_in_one_target(block: int, tmp_path: Path) -> None:
    """Even rows from one rank, odd rows from another, the rest as one run that begins mid-row."""
    cols = 10
    even = source([piece(0, 4, cols, (0, cols, 1), (0, 2 * cols, 1))], 40, rank=0)
    odd = source([piece(0, 4, cols, (0, cols, 1), (cols, 2 * cols, 1))], 43, rank=1)
    head = source([piece(0, 1, 3, (0, 3, 1), (80, 3, 1))], 3, rank=2)
    tail = source([piece(0, 1, 27, (2, 27, 1), (83, 27, 1))], 29, rank=3)
    sources = [even, odd, head, tail]
    items = inputs(sources, tmp_path)
    made = assembled(list(items.values()), target((11, cols), sources), tmp_path, block)
    check(made, wanted(sources, items, (11, cols)))


def random_story(seed: int) -> tuple[list[Source], tuple[int, int]]:
    """A matrix cut into boxes; each is held by a source, whole, transposed or with steps."""
    chance = random.Random(seed)
    rows, cols = chance.randrange(2, 30), chance.randrange(2, 30)
    row_cuts = sorted({0, rows, *(chance.randrange(rows) for _ in range(2))})
    col_cuts = sorted({0, cols, *(chance.randrange(cols) for _ in range(2))})
    pieces: list[tuple[Piece, int]] = []
    for top, bottom in itertools.pairwise(row_cuts):
        for left, right in itertools.pairwise(col_cuts):
            h, w = bottom - top, right - left
            pad = chance.randrange(3)
            to = (top * cols + left, cols, 1)
            if chance.random() < 0.4:  # held transposed
                part = piece(0, w, h, (pad, h, 1), (to[0], 1, cols))
            else:
                part = piece(0, h, w, (pad, w + pad, 1), to)
            last = (
                part.src_offset + (part.rows - 1) * part.src_row_step
                + (part.cols - 1) * part.src_col_step
            )  # fmt: skip
            pieces.append((part, last + 1 + chance.randrange(3)))
    return [source([part], size, rank=rank) for rank, (part, size) in enumerate(pieces)], (
        rows, cols,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_boxes(seed: int, tmp_path: Path) -> None:
    sources, shape = random_story(seed)
    items = inputs(sources, tmp_path, seed=seed)
    order = random.Random(seed).sample(list(items.values()), len(items))
    one = target(shape, sources)
    made = assembled(order, one, tmp_path, random.Random(seed).choice(BLOCKS))
    check(made, wanted(sources, items, shape))


def test_a_piece_that_fits_no_rows_is_a_named_error() -> None:
    with pytest.raises(ConversionError, match="does not lie in the rows of a matrix") as error:
        bands_of(piece(0, 1, 4, (0, 4, 1), (8, 4, 3)), 10)
    assert "mistake in a conversion rule" in str(error.value)


# ---------------------------------------------------------------------------------- refusals


def damaged(item: Input) -> None:
    path = Path(item.arrival.location.uri.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[3 + item.source.nbytes // 2] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["in order", "held"])
def test_a_flipped_bit_in_row_blocks(kind: str, rank: int, tmp_path: Path) -> None:
    sources = columns(2, 30, 40)
    if kind == "held":
        sources[1] = source([piece(0, 40, 30, (0, 30, 1), (40, 1, 80))], 1200, rank=1)
    items = inputs(sources, tmp_path)
    damaged(items[rank, 0])
    with pytest.raises(DigestMismatchError, match="not those that its producer published"):
        assembled(list(items.values()), target((30, 80), sources), tmp_path, 4096)


def test_a_padding_byte_is_verified_too(tmp_path: Path) -> None:
    """Bytes that no target takes still belong to the published tensor."""
    one = source([piece(0, 3, 5, (0, 5, 1), (0, 5, 1))], 1000)
    [item] = inputs([one], tmp_path).values()
    damaged(item)
    with pytest.raises(DigestMismatchError):
        streamed([item], [target((3, 5), [one])], tmp_path, 4096)
