"""Several ranks' sources in streamed targets: halves of each, any order of arrival, mixed kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.writer_copies import HEADER, NEVER, Staged, run, shard, source, target
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import DigestMismatchError
from weightbus.schemas.manifest import Extent
from weightbus.writers.copy import Copier, PlacedExtent, merge_extents
from weightbus.writers.plan_types import Piece, Source

GATE_AND_UP = [
    source((4, 5), [run(0, 0, 10 * rank, 10), run(1, 10, 10 * rank, 10)], rank=rank)
    for rank in range(3)
]
HALF_BYTES = 60  # 6 x 5 BF16


def grouped(rank: int) -> Source:
    """Two groups of (2 query rows, key row, value row), each 5 wide; two ranks."""
    pieces: list[Piece] = []
    for group in range(2):
        begin, whole = 20 * group, 2 * rank + group
        pieces.append(run(0, begin, 10 * whole, 10))
        pieces.append(run(1, begin + 10, 5 * whole, 5))
        pieces.append(run(2, begin + 15, 5 * whole, 5))
    return source((8, 5), pieces, rank=rank)


@pytest.mark.parametrize("arrivals", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("block_bytes", [3, 16, 1 << 20])
def test_halves_of_three_ranks_land_in_one_target_each(
    block_bytes: int, arrivals: tuple[int, ...], tmp_path: Path
) -> None:
    targets = [
        target(number, (6, 5), len(HEADER) + HALF_BYTES * number, GATE_AND_UP, streamed=True)
        for number in range(2)
    ]
    staged = Staged(tmp_path / "staged", GATE_AND_UP)
    copier = Copier(block_bytes)
    file = shard(tmp_path / "shard", 2 * HALF_BYTES)
    placed: dict[int, list[PlacedExtent]] = {0: [], 1: []}
    for rank in arrivals:
        for number, extents in copier.stream(staged.inputs[rank], targets, file, NEVER).items():
            placed[number] += extents
    file.close()
    copier.close()
    found = (tmp_path / "shard").read_bytes()[len(HEADER) :]
    for number in range(2):
        wanted = staged.expected(number, (6, 5))
        assert found[HALF_BYTES * number :][:HALF_BYTES] == wanted
        assert merge_extents(placed, number) == tuple(
            Extent(length=20, digest=digest_of(wanted[at : at + 20])) for at in (0, 20, 40)
        )


@pytest.mark.parametrize("block_bytes", [7, 30, 1 << 20])
def test_groups_of_two_ranks_are_parted_into_three_targets(
    block_bytes: int, tmp_path: Path
) -> None:
    sources = [grouped(rank) for rank in range(2)]
    shapes = [(8, 5), (4, 5), (4, 5)]
    targets = [
        target(number, shape, len(HEADER) + offset, sources, streamed=True)
        for number, (shape, offset) in enumerate(zip(shapes, (0, 80, 120), strict=True))
    ]
    staged = Staged(tmp_path / "staged", sources)
    copier = Copier(block_bytes)
    file = shard(tmp_path / "shard", 160)
    for item in staged.inputs:
        copier.stream(item, targets, file, NEVER)
    file.close()
    copier.close()
    wanted = b"".join(staged.expected(number, shape) for number, shape in enumerate(shapes))
    assert (tmp_path / "shard").read_bytes() == HEADER + wanted


def test_pieces_of_targets_that_are_put_together_later_are_left_out(tmp_path: Path) -> None:
    """A source may feed both kinds; its one run here is not the whole of it."""
    mixed = source((4, 5), [run(0, 0, 0, 10), Piece(1, 2, 5, 10, 5, 1, 0, 10, 1)])
    targets = [
        target(0, (2, 5), len(HEADER), [mixed], streamed=True),
        target(1, (2, 10), len(HEADER) + 20, [mixed], streamed=False),
    ]
    staged = Staged(tmp_path / "staged", [mixed])
    file = shard(tmp_path / "shard", 60)
    placed = Copier(8).stream(staged.inputs[0], targets, file, NEVER)
    file.close()
    data = staged.data[mixed.key][:20]
    assert (tmp_path / "shard").read_bytes() == HEADER + data + bytes(40)
    assert placed == {0: [PlacedExtent(0, Extent(length=20, digest=digest_of(data)))]}


@pytest.mark.parametrize("rank", range(3))
def test_the_rank_whose_bytes_are_others_is_named(rank: int, tmp_path: Path) -> None:
    targets = [
        target(number, (6, 5), len(HEADER) + HALF_BYTES * number, GATE_AND_UP, streamed=True)
        for number in range(2)
    ]
    staged = Staged(tmp_path / "staged", GATE_AND_UP)
    staged.flip(staged.inputs[rank], at=39)
    copier = Copier(16)
    file = shard(tmp_path / "shard", 2 * HALF_BYTES)
    for other in {0, 1, 2} - {rank}:
        copier.stream(staged.inputs[other], targets, file, NEVER)
    with pytest.raises(DigestMismatchError, match=f"tensor=tensor0, rank={rank}, chunk=3, seq"):
        copier.stream(staged.inputs[rank], targets, file, NEVER)
    file.close()
    copier.close()
