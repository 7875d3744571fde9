"""Placing tensors in a slot, and cutting the slot into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightbus.producers.chunks import Placed, place, plan_chunks, region_bytes
from weightbus.schemas.errors import ConfigError
from weightbus.schemas.events import MAX_CHUNK_TENSORS

lengths = st.lists(st.integers(0, 5000), max_size=60)


@given(sizes=lengths)
def test_tensors_lie_behind_each_other_and_aligned(sizes: list[int]) -> None:
    placed = place(enumerate(sizes))
    assert [(part.index, part.length) for part in placed] == list(enumerate(sizes))
    assert all(part.offset % 64 == 0 for part in placed)
    at = 0
    for part in placed:
        assert at <= part.offset < at + 64
        at = part.end
    assert region_bytes(placed) == at


@given(sizes=lengths, target=st.integers(1, 8000), most=st.integers(1, 10))
def test_chunks_hold_every_tensor_once_and_stay_small(
    sizes: list[int], target: int, most: int
) -> None:
    placed = place(enumerate(sizes))
    chunks = plan_chunks(placed, target, most)
    assert [part for chunk in chunks for part in chunk.tensors] == list(placed)
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert len(chunk.tensors) <= most
        assert len(chunk.tensors) == 1 or chunk.length <= target
        assert chunk.offset == chunk.tensors[0].offset
        assert chunk.offset + chunk.length == chunk.tensors[-1].end


def test_no_tensors_are_no_chunks() -> None:
    assert plan_chunks(()) == ()
    assert region_bytes(()) == 0


def test_a_chunk_names_no_more_tensors_than_an_event_may() -> None:
    placed = [Placed(index, index, 1) for index in range(MAX_CHUNK_TENSORS + 1)]
    assert [len(chunk.tensors) for chunk in plan_chunks(placed)] == [MAX_CHUNK_TENSORS, 1]


@pytest.mark.parametrize(("target", "most"), [(0, 1), (1, 0), (1, MAX_CHUNK_TENSORS + 1)])
def test_impossible_chunks_are_refused(target: int, most: int) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        plan_chunks((), target, most)
