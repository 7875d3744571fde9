"""Owners: one for every part, agreed without talking, balanced by bytes."""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from weightbus.producers.ownership import Coordinates, Holding, ParallelSizes, owned


@st.composite
def grids(draw: st.DrawFn) -> ParallelSizes:
    ep, etp, edp = (draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    ranks = ep * etp * edp
    tp = draw(st.sampled_from([size for size in (1, 2, 3, 4) if ranks % size == 0]))
    return ParallelSizes(tp=tp, dp=ranks // tp, ep=ep, etp=etp, edp=edp)


holdings = st.lists(
    st.builds(Holding, nbytes=st.integers(0, 10_000), expert=st.booleans(), cut=st.booleans()),
    max_size=40,
)


def coordinates(sizes: ParallelSizes) -> list[Coordinates]:
    """Every rank of a stage, in Megatron's default order."""
    return [
        Coordinates(
            tp_rank=rank % sizes.tp,
            dp_rank=rank // sizes.tp,
            etp_rank=rank % sizes.etp,
            ep_rank=rank // sizes.etp % sizes.ep,
            edp_rank=rank // (sizes.etp * sizes.ep),
        )
        for rank in range(sizes.stage_ranks)
    ]


def part_key(index: int, holding: Holding, at: Coordinates) -> tuple[int, ...]:
    """What a rank holds of tensor `index`: ranks with the same key hold the same bytes."""
    if holding.expert:
        return (index, at.ep_rank, at.etp_rank if holding.cut else 0)
    return (index, at.tp_rank if holding.cut else 0)


def assert_one_owner(
    sizes: ParallelSizes, tensors: list[Holding], ranks: list[Coordinates]
) -> None:
    owners: Counter[tuple[int, ...]] = Counter()
    parts: set[tuple[int, ...]] = set()
    for at in ranks:
        for index, (holding, mine) in enumerate(
            zip(tensors, owned(tensors, sizes, at), strict=True)
        ):
            key = part_key(index, holding, at)
            parts.add(key)
            owners[key] += mine
    assert set(owners) == parts
    assert all(count == 1 for count in owners.values())


@given(sizes=grids(), tensors=holdings)
def test_every_part_has_exactly_one_owner(sizes: ParallelSizes, tensors: list[Holding]) -> None:
    assert_one_owner(sizes, tensors, coordinates(sizes))


@given(sizes=grids(), tensors=holdings, shuffle=st.randoms())
def test_another_rank_order_changes_the_balance_only(
    sizes: ParallelSizes, tensors: list[Holding], shuffle: Random
) -> None:
    dense = coordinates(sizes)
    experts = coordinates(sizes)
    shuffle.shuffle(experts)
    ranks = [
        replace(at, ep_rank=other.ep_rank, etp_rank=other.etp_rank, edp_rank=other.edp_rank)
        for at, other in zip(dense, experts, strict=True)
    ]
    assert_one_owner(sizes, tensors, ranks)


@given(sizes=grids(), tensors=st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_replicated_tensors_are_balanced(sizes: ParallelSizes, tensors: list[int]) -> None:
    held = [Holding(nbytes, expert=False, cut=False) for nbytes in tensors]
    loads = [
        sum(nbytes for nbytes, mine in zip(tensors, owned(held, sizes, at), strict=True) if mine)
        for at in coordinates(sizes)
    ]
    assert sum(loads) == sum(tensors)
    assert max(loads) - min(loads) <= max(tensors)


def test_the_order_of_equal_tensors_decides() -> None:
    sizes = ParallelSizes(tp=1, dp=2, edp=2)
    held = [Holding(10, expert=False, cut=True)] * 4
    assert owned(held, sizes, Coordinates(dp_rank=0)) == (True, False, True, False)
    assert owned(held, sizes, Coordinates(dp_rank=1, edp_rank=1)) == (False, True, False, True)
