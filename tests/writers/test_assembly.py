"""The pairing state: what waits for what, in any order; contradictions; an empty end."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.writer_plans import KEY, plan_of
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import LayoutError, PairingError, VersionConflictError
from weightbus.schemas.events import (
    ChunkReady,
    ChunkTensor,
    Location,
    ProducerSealed,
    ReplicaDigest,
    ShardPersisted,
    VersionOpened,
)
from weightbus.writers.assembly import Assembly, sources_of_shard
from weightbus.writers.plan_types import Plan

A, B = digest_of(b"a"), digest_of(b"b")
PAIR = {"q_a_proj and 1 more": [(0, 0), (1, 0)], "norm": [(0, 1)], "mlp": [(1, 1), (0, 2)]}


def chunk(rank: int, number: int, *indices: int, length: int = 8, digest: str = A) -> ChunkReady:
    return ChunkReady(
        version=KEY, rank=rank, chunk=number,
        location=Location(uri="shm://arena", offset=0, length=1000),
        tensors=tuple(
            ChunkTensor(index=index, offset=8 * place, length=length, digest=digest)
            for place, index in enumerate(indices)
        ),
    )  # fmt: skip


def sealed(rank: int, chunks: int, tensors: int, nbytes: int | None = None) -> ProducerSealed:
    return ProducerSealed(
        version=KEY, rank=rank, chunks=chunks, tensors=tensors,
        nbytes=8 * tensors if nbytes is None else nbytes,
    )  # fmt: skip


def shard_event(plan: Plan, number: int = 0, **changes: object) -> ShardPersisted:
    file = plan.shards[number]
    fields: dict[str, object] = {
        "version": KEY, "plan_digest": plan.digest, "writer": file.writer,
        "writers": plan.writers, "shard": number, "shards": len(plan.shards), "file": file.file,
        "nbytes": file.nbytes, "digest": A, "table_digest": B,
    }  # fmt: skip
    return ShardPersisted.model_validate({**fields, **changes})


def assembly(plan: Plan | None = None, ranks: Sequence[int] = (0, 1)) -> Assembly:
    return Assembly(KEY, plan_of(PAIR) if plan is None else plan, ranks)


EVENTS: list[ChunkReady | ProducerSealed] = [
    chunk(0, 0, 0), chunk(0, 1, 1, 2), sealed(0, 2, 3), chunk(1, 0, 0), chunk(1, 1, 1),
    sealed(1, 2, 2),
]  # fmt: skip


def give(state: Assembly, event: ChunkReady | ProducerSealed, sequence: int = 1) -> None:
    if isinstance(event, ChunkReady):
        state.chunk(event, sequence)
    else:
        state.seal(event, sequence)


def orders() -> list[tuple[int, ...]]:
    """Every order in which each rank's own events keep theirs."""
    return [
        order
        for order in itertools.permutations(range(6))
        if max(order.index(0), order.index(1)) < order.index(2)
        and max(order.index(3), order.index(4)) < order.index(5)
    ]


@pytest.mark.parametrize("order", orders(), ids=lambda order: "".join(map(str, order)))
def test_a_pair_on_two_ranks_is_whole_when_its_last_half_arrives(order: tuple[int, ...]) -> None:
    state = assembly()
    for place, number in enumerate(order):
        give(state, EVENTS[number])
        seen = set(order[: place + 1])
        assert state.whole(0) == ({0, 3} <= seen)
        assert state.whole(1) == (1 in seen)
        assert state.whole(2) == ({1, 4} <= seen)
        assert {wait.group.index for wait in state.waiting()} == {
            group for group in range(3) if not state.whole(group)
        }
        assert state.sealed == ({2, 5} <= seen)
    state.clear()
    assert state.empty


def test_the_halves_in_adjacent_chunks_of_one_rank_either_order() -> None:
    plan = plan_of({"pair": [(0, 0), (0, 1)]})
    for first, second in ((0, 1), (1, 0)):
        state = assembly(plan, [0])
        assert [a.key for a in state.chunk(chunk(0, first, first), 1)] == [(0, first)]
        [wait] = state.waiting()
        assert (wait.arrived, wait.missing) == (((0, first),), ((0, second),))
        assert not state.has_all([(0, 0), (0, 1)])
        state.chunk(chunk(0, second, second), 2)
        assert state.waiting() == []
        assert state.has_all([(0, 0), (0, 1)])


def test_doubled_events_are_nothing_new() -> None:
    chance = random.Random(1)
    for _ in range(20):
        state, arrivals = assembly(), 0
        plan = plan_of(PAIR)
        for event in EVENTS:
            for again in range(chance.randrange(1, 4)):
                if isinstance(event, ChunkReady):
                    found = state.chunk(event, 5)
                    assert not (again and found)
                    arrivals += len(found)
                else:
                    state.seal(event, 5)
        assert arrivals == 5
        for _ in range(2):
            state.shard(shard_event(plan), 9)
        assert state.persisted


def test_an_arrival_says_where_the_bytes_are() -> None:
    state = assembly()
    [_, arrival] = state.chunk(chunk(0, 1, 1, 2), 42)
    assert arrival == state.arrival((0, 2))
    assert (arrival.offset, arrival.length, arrival.digest) == (8, 8, A)
    assert (arrival.chunk, arrival.sequence, arrival.location.uri) == (1, 42, "shm://arena")
    assert state.arrival((1, 0)) is None


def test_digests_of_published_tensors_and_of_replicas() -> None:
    state = assembly(plan_of({"one": [(0, 0)]}))
    state.chunk(chunk(0, 0, 0), 1)
    state.seal(sealed(0, 1, 1), 2)
    replica = ReplicaDigest(index=4, digest=B)
    state.seal(sealed(1, 0, 0).model_copy(update={"replicas": (replica,)}), 3)
    assert state.digests() == {0: {0: A}, 1: {4: B}}


# ---------------------------------------------------------------------------------- refusals


def test_a_tensor_twice_in_different_chunks() -> None:
    state = assembly()
    state.chunk(chunk(0, 0, 0), 1)
    with pytest.raises(VersionConflictError, match="stands in chunks 0 and 1 of one producer") as e:
        state.chunk(chunk(0, 1, 1, 0), 2)
    assert "two processes publish as one producer" in str(e.value)
    assert "rank=0" in str(e.value)
    assert state.arrival((0, 1)) is None  # a refused chunk leaves nothing


def test_a_tensor_twice_in_one_chunk() -> None:
    with pytest.raises(VersionConflictError, match="stands in chunks 3 and 3"):
        assembly().chunk(chunk(0, 3, 0, 0), 1)


def test_another_chunk_of_the_same_number() -> None:
    state = assembly()
    state.chunk(chunk(0, 0, 0), 1)
    with pytest.raises(VersionConflictError, match="chunk 0 comes from a producer that has publi"):
        state.chunk(chunk(0, 0, 0, digest=B), 2)


def test_a_chunk_after_the_seal() -> None:
    state = assembly()
    state.chunk(chunk(0, 0, 0), 1)
    state.seal(sealed(0, 1, 1), 2)
    with pytest.raises(VersionConflictError, match="producer that has sealed the version"):
        state.chunk(chunk(0, 1, 1), 3)


def test_a_tensor_that_the_layout_does_not_publish() -> None:
    with pytest.raises(LayoutError, match="does not publish") as error:
        assembly().chunk(chunk(0, 0, 99), 7)
    assert "index=99" in str(error.value)
    assert "sequence=7" in str(error.value)


def test_a_tensor_of_another_size() -> None:
    with pytest.raises(LayoutError, match="holds 4 bytes of a tensor of 8") as error:
        assembly().chunk(chunk(0, 0, 0, length=4), 1)
    assert "tensor=q_a_proj" in str(error.value)


@pytest.mark.parametrize(
    "seal", [sealed(0, 2, 1), sealed(0, 1, 2, 8), sealed(0, 1, 1, 9)],
    ids=["chunks", "tensors", "bytes"],
)  # fmt: skip
def test_a_seal_that_counts_otherwise(seal: ProducerSealed) -> None:
    state = assembly()
    state.chunk(chunk(0, 0, 0), 1)
    with pytest.raises(PairingError, match="in the stream are 1 of 1, 8 bytes") as error:
        state.seal(seal, 2)
    assert "chunk events were lost or purged" in str(error.value)


def test_a_second_seal_with_other_numbers() -> None:
    state = assembly()
    state.chunk(chunk(0, 0, 0), 1)
    state.seal(sealed(0, 1, 1), 2)
    with pytest.raises(VersionConflictError, match="twice, with other numbers"):
        state.seal(sealed(0, 1, 1, 7), 3)


def test_a_seal_of_a_stranger() -> None:
    with pytest.raises(VersionConflictError, match="and has no layout"):
        assembly().seal(sealed(9, 0, 0), 1)


def test_a_group_that_still_waits_when_everybody_has_sealed() -> None:
    state = assembly(plan_of(PAIR, unused=[(1, 5)]))
    state.chunk(chunk(0, 0, 0, 1), 1)
    state.chunk(chunk(1, 0, 1), 2)
    state.seal(sealed(0, 1, 2), 3)
    with pytest.raises(PairingError, match="2 groups and 1 single tensors are not whole") as error:
        state.seal(sealed(1, 1, 1), 4)
    text = str(error.value)
    assert "q_a_proj and 1 more waits for q_a_proj and 1 more (1, 0) of rank 1 (1 arrived)" in text
    assert "mlp waits for mlp (0, 2) of rank 0 (1 arrived)" in text
    assert "unused (1, 5) of rank 1" in text


def test_many_missing_tensors_are_counted_behind_the_first() -> None:
    plan = plan_of({f"group {number}": [(0, number)] for number in range(50)})
    with pytest.raises(PairingError, match=r"50 groups .* and 38 more"):
        assembly(plan, [0]).seal(sealed(0, 0, 0), 1)


def test_a_version_opened_for_others() -> None:
    state = assembly()
    state.opened(VersionOpened(version=KEY, producers=2), 1)
    with pytest.raises(VersionConflictError, match="for 3 producers, its attempt has 2"):
        state.opened(VersionOpened(version=KEY, producers=3), 2)


@pytest.mark.parametrize(
    "change",
    [{"plan_digest": B}, {"writers": 4}, {"shards": 9}, {"writer": 1}, {"file": "other"},
     {"nbytes": 1}, {"shard": 5, "shards": 9}],
    ids=str,
)  # fmt: skip
def test_a_shard_of_another_plan(change: dict[str, Any]) -> None:
    plan = plan_of(PAIR)
    with pytest.raises(VersionConflictError, match="works by another plan") as error:
        assembly(plan).shard(shard_event(plan, **change), 1)
    assert "start all writers of a run with the same release, count, shard size" in str(error.value)


def test_a_shard_twice_with_other_bytes() -> None:
    plan = plan_of(PAIR)
    state = assembly(plan)
    state.shard(shard_event(plan), 1)
    with pytest.raises(VersionConflictError, match="persisted twice, with other bytes"):
        state.shard(shard_event(plan, digest=B), 2)


def test_persisted_needs_every_shard_and_every_seal() -> None:
    plan = plan_of(PAIR, shards=2, writers=2)
    state = assembly(plan)
    for shard in (1, 0):
        assert not state.persisted
        state.shard(shard_event(plan, shard), 1)
    assert [event.shard for event in state.shards] == [0, 1]
    assert not state.persisted
    for event in EVENTS:
        give(state, event)
    assert state.persisted
    assert {one.key for one in sources_of_shard(plan, 0)} == {(0, 0), (1, 0), (1, 1), (0, 2)}
