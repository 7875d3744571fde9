"""Streamed targets: each source is read once, its runs land at their offsets, all is verified."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.writer_copies import HEADER, NEVER, Staged, run, shard, source, target
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import DigestMismatchError, OriginError, SourceTruncatedError
from weightbus.schemas.manifest import Extent
from weightbus.writers.copy import Copier, CopyStoppedError, PlacedExtent, merge_extents
from weightbus.writers.plan_types import Source, Target

WHOLE = source((3, 5), [run(0, 0, 0, 15)])
# Rows of groups: two of target 0, one of target 1, twice; and padding that nobody wants.
SPLIT = source(
    (8, 5),
    [run(0, 0, 0, 10), run(1, 10, 0, 5), run(0, 15, 10, 10), run(1, 25, 5, 5)],
)


def targets_of(one: Source, *shapes: tuple[int, ...]) -> list[Target]:
    made: list[Target] = []
    offset = len(HEADER)
    for number, shape in enumerate(shapes):
        made.append(target(number, shape, offset, [one], streamed=True))
        offset += made[-1].nbytes
    return made


def streamed(
    one: Source, targets: Sequence[Target], folder: Path, block_bytes: int
) -> tuple[Staged, dict[int, list[PlacedExtent]], bytes]:
    staged = Staged(folder / "staged", [one])
    copier = Copier(block_bytes)
    file = shard(folder / "shard", sum(made.nbytes for made in targets))
    placed = copier.stream(staged.inputs[0], targets, file, NEVER)
    file.close()
    copier.close()
    return staged, placed, (folder / "shard").read_bytes()


@pytest.mark.parametrize("block_bytes", [1, 7, 10, 30, 1 << 20])
def test_a_source_that_is_one_run_is_hashed_once(block_bytes: int, tmp_path: Path) -> None:
    targets = targets_of(WHOLE, (3, 5))
    staged, placed, found = streamed(WHOLE, targets, tmp_path, block_bytes)
    data = staged.data[WHOLE.key]
    assert found == HEADER + data
    assert placed == {0: [PlacedExtent(0, Extent(length=30, digest=digest_of(data)))]}


@pytest.mark.parametrize("block_bytes", [1, 7, 10, 30, 1 << 20])
def test_every_run_is_an_extent_of_its_own(block_bytes: int, tmp_path: Path) -> None:
    targets = targets_of(SPLIT, (4, 5), (2, 5))
    staged, placed, found = streamed(SPLIT, targets, tmp_path, block_bytes)
    at = len(HEADER)
    for made in targets:
        number = made.group
        wanted = staged.expected(number, made.shape)
        assert found[at : at + made.nbytes] == wanted
        at += made.nbytes
        begin = 0
        extents = merge_extents(placed, number)
        assert len(extents) == 2
        for extent in extents:
            assert extent.digest == digest_of(wanted[begin : begin + extent.length])
            begin += extent.length
        assert begin == made.nbytes


def test_extents_are_merged_in_file_order_and_may_be_none() -> None:
    first, second = (Extent(length=size, digest=digest_of(b"x" * size)) for size in (2, 4))
    placed = {0: [PlacedExtent(2, second), PlacedExtent(0, first)]}
    assert merge_extents(placed, 0) == (first, second)
    assert merge_extents(placed, 1) == ()


def test_an_empty_source_is_verified_too(tmp_path: Path) -> None:
    empty = source((0, 5), [])
    _, placed, found = streamed(empty, [], tmp_path, 8)
    assert placed == {}
    assert found == HEADER


@pytest.mark.parametrize("at", [0, 29, 70], ids=["start", "middle", "padding that is dropped"])
def test_other_bytes_than_published_are_named(at: int, tmp_path: Path) -> None:
    staged = Staged(tmp_path / "staged", [SPLIT])
    staged.flip(staged.inputs[0], at)
    targets = targets_of(SPLIT, (4, 5), (2, 5))
    file = shard(tmp_path / "shard", 60)
    with pytest.raises(DigestMismatchError) as info:
        Copier(16).stream(staged.inputs[0], targets, file, NEVER)
    file.close()
    assert "tensor=tensor0, rank=0, chunk=3, sequence=7" in str(info.value)
    assert "publish the next one" in str(info.value)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    staged = Staged(tmp_path / "staged", [WHOLE])
    with staged.path.open("r+b") as file:
        file.truncate(20)
    made = shard(tmp_path / "shard", 30)
    with pytest.raises(SourceTruncatedError, match="the file ends at byte 20"):
        Copier(1 << 20).stream(staged.inputs[0], targets_of(WHOLE, (3, 5)), made, NEVER)
    made.close()


def test_it_stops_between_two_blocks(tmp_path: Path) -> None:
    staged = Staged(tmp_path / "staged", [WHOLE])
    stop = threading.Event()
    copier = Copier(10)
    seen = copier.blocks(staged.inputs[0], stop, 10)
    assert next(seen)[0] == 0
    stop.set()
    with pytest.raises(CopyStoppedError):
        next(seen)


def test_blocks_are_reused_memory_unless_a_row_is_wider() -> None:
    copier = Copier(16)
    assert copier.in_block(8).obj is copier.in_block(16).obj
    assert copier.out_block(8).obj is not copier.in_block(8).obj
    assert len(copier.in_block(17)) == 17
    assert len(copier.out_block(17)) == 17


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
def test_a_target_is_taken_from_the_origin_as_it_is(block_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "origin").write_bytes(b"skip" + bytes(range(30)) + b"more")
    made = target(0, (3, 5), len(HEADER), [], streamed=True)
    file = shard(tmp_path / "shard", 30)
    placed = Copier(block_bytes).copy_base(tmp_path / "origin", 4, made, file, NEVER)
    file.close()
    assert (tmp_path / "shard").read_bytes() == HEADER + bytes(range(30))
    assert placed == [PlacedExtent(0, Extent(length=30, digest=digest_of(bytes(range(30)))))]


def test_an_origin_that_changed_is_named(tmp_path: Path) -> None:
    made = target(0, (3, 5), len(HEADER), [], streamed=True)
    file = shard(tmp_path / "shard", 30)
    with pytest.raises(OriginError, match="cannot be read: No such file") as info:
        Copier(8).copy_base(tmp_path / "origin", 0, made, file, NEVER)
    assert info.value.where["tensor"] == "target0"
    (tmp_path / "origin").write_bytes(b"short")
    with pytest.raises(OriginError, match="ends too early"):
        Copier(8).copy_base(tmp_path / "origin", 0, made, file, NEVER)
    stop = threading.Event()
    stop.set()
    with pytest.raises(CopyStoppedError):
        Copier(8).copy_base(tmp_path / "origin", 0, made, file, stop)
    file.close()
