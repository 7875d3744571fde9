"""The pairing state: order, repetition, contradictions, and what a message names."""

from __future__ import annotations

import itertools
import random

import pytest
from support.conversion_megatron import Grid
from support.writer_megatron import LATENT
from support.writer_parts import KEY, chunk_of, persisted_of, plan_of, seal_of
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import LayoutError, PairingError, VersionConflictError
from weightbus.schemas.events import ChunkReady, ReplicaDigest, VersionOpened
from weightbus.writers.assembly import Assembly, sources_of_shard
from weightbus.writers.plan_types import Plan

PLAN, LAYOUTS = plan_of(LATENT, Grid(tp=2, pp=2))
RANKS = (0, 1, 2, 3)
Q_DOWN, KV_DOWN = (
    f"decoder.layers.0.self_attention.linear_{half}_down_proj.weight" for half in ("q", "kv")
)


def assembly(plan: Plan = PLAN) -> Assembly:
    return Assembly(KEY, plan, RANKS)


def keys_of(rank: int, plan: Plan = PLAN) -> list[tuple[int, int]]:
    return sorted(key for key in plan.sources if key[0] == rank)


def key_named(name: str, plan: Plan = PLAN) -> tuple[int, int]:
    """The one source of that name."""
    (key,) = (key for key, source in plan.sources.items() if source.name == name)
    return key


def all_chunks(rank: int, size: int = 3) -> list[ChunkReady]:
    keys = keys_of(rank)
    return [
        chunk_of(PLAN, number, *keys[at : at + size])
        for number, at in enumerate(range(0, len(keys), size))
    ]


def fill(made: Assembly, *, but: tuple[int, int] | None = None) -> None:
    """Everything of every rank, sealed; without one source."""
    for rank in RANKS:
        chunks = [
            chunk_of(PLAN, number, key)
            for number, key in enumerate(key for key in keys_of(rank) if key != but)
        ]
        for chunk in chunks:
            made.chunk(chunk, 1)
        made.seal(seal_of(rank, *chunks), 2)


# ---- order


@pytest.mark.parametrize("seed", range(5))
def test_any_order_between_producers_gives_the_same_state(seed: int) -> None:
    chance = random.Random(seed)
    queues = [all_chunks(rank) for rank in RANKS]
    seals = [seal_of(rank, *queue) for rank, queue in enumerate(queues)]
    made = assembly()
    while any(queues):
        rank = chance.choice([rank for rank in RANKS if queues[rank]])
        made.chunk(queues[rank].pop(chance.randrange(len(queues[rank]))), 1)
        if not queues[rank]:
            made.seal(seals[rank], 2)
    assert made.sealed
    assert made.waiting() == []
    assert made.has_all(PLAN.sources)
    assert all(made.whole(group.index) for group in PLAN.groups)


def test_a_chunk_returns_what_is_new_with_its_place() -> None:
    first, second = keys_of(0)[:2]
    made = assembly()
    arrivals = made.chunk(chunk_of(PLAN, 4, first, second), 17)
    assert [arrival.key for arrival in arrivals] == [first, second]
    assert arrivals[1].offset == PLAN.sources[first].nbytes
    assert arrivals[1].length == PLAN.sources[second].nbytes
    assert (arrivals[0].chunk, arrivals[0].sequence) == (4, 17)
    assert made.arrival(second) == arrivals[1]
    assert made.arrival(keys_of(1)[0]) is None
    assert made.digests() == {0: {key[1]: made_.digest for key, made_ in zip(
        (first, second), arrivals, strict=True)}}  # fmt: skip


# ---- repetition


def test_every_event_twice_is_nothing_new() -> None:
    made = assembly()
    opened = VersionOpened(version=KEY, producers=4)
    made.opened(opened, 1)
    made.opened(opened, 1)
    for rank in RANKS:
        chunks = all_chunks(rank)
        for chunk in chunks:
            assert made.chunk(chunk, 1) != []
            assert made.chunk(chunk, 2) == []
        for _ in range(2):
            made.seal(seal_of(rank, *chunks), 3)
        assert made.chunk(chunks[0], 4) == []  # late, after the seal
    for shard in PLAN.shards:
        assert not made.persisted
        for _ in range(2):
            made.shard(persisted_of(PLAN, shard), 5)
    assert made.persisted
    assert [event.shard for event in made.shards] == [shard.index for shard in PLAN.shards]


def test_shards_before_the_seal_do_not_make_it_committable() -> None:
    made = assembly()
    for shard in reversed(PLAN.shards):
        made.shard(persisted_of(PLAN, shard), 1)
    assert not made.persisted
    fill(made)
    assert made.persisted
    assert [event.shard for event in made.shards] == [shard.index for shard in PLAN.shards]


# ---- pairing


@pytest.mark.parametrize("order", [(Q_DOWN, KV_DOWN), (KV_DOWN, Q_DOWN)])
def test_the_halves_of_a_pair_come_in_adjacent_chunks(order: tuple[str, str]) -> None:
    halves = [key_named(name) for name in order]
    group = next(group for group in PLAN.groups if set(halves) <= set(group.sources))
    made = assembly()
    made.chunk(chunk_of(PLAN, 0, halves[0]), 1)
    assert not made.whole(group.index)
    (wait,) = (wait for wait in made.waiting() if wait.group == group)
    assert wait.arrived == (halves[0],)
    assert wait.missing == (halves[1],)
    made.chunk(chunk_of(PLAN, 1, halves[1]), 2)
    assert made.whole(group.index)
    assert group.index not in {wait.group.index for wait in made.waiting()}


def test_the_halves_of_a_pair_come_from_different_ranks() -> None:
    layouts = [
        layout.model_copy(
            update={
                "tensors": tuple(
                    # Rank 0 holds both; from now on rank 1 publishes the second.
                    tensor.model_copy(update={"owned": layout.producer.rank == 1})
                    if tensor.name == KV_DOWN
                    else tensor
                    for tensor in layout.tensors
                )
            }
        )
        for layout in LAYOUTS
    ]
    plan, _ = plan_of(LATENT, Grid(tp=2, pp=2), layouts=layouts)
    halves = key_named(Q_DOWN, plan), key_named(KV_DOWN, plan)
    assert [key[0] for key in halves] == [0, 1]
    for first, second in itertools.permutations(halves):
        made = assembly(plan)
        group = next(group for group in plan.groups if first in group.sources)
        assert second in group.sources
        made.chunk(chunk_of(plan, 0, first), 1)
        assert not made.whole(group.index)
        made.chunk(chunk_of(plan, 0, second), 2)
        assert made.whole(group.index)
    shards = {plan.sources[key].shard for key in halves}
    assert len(shards) == 1  # one writer reads both
    (shard,) = shards
    assert shard is not None
    assert {*halves} <= {source.key for source in sources_of_shard(plan, shard)}


def test_waiting_names_every_group_at_first() -> None:
    made = assembly()
    waits = made.waiting()
    assert [wait.group for wait in waits] == list(PLAN.groups)
    assert all(wait.arrived == () and wait.missing == wait.group.sources for wait in waits)


def test_a_version_of_which_a_half_is_missing_says_which() -> None:
    with pytest.raises(PairingError) as caught:
        fill(assembly(), but=key_named(KV_DOWN))
    message = str(caught.value)
    assert "1 groups and 0 single tensors are not whole" in message
    assert f"waits for {KV_DOWN} of rank 0 (1 arrived)" in message
    assert "a producer left out tensors of its layout" in message


def test_many_missing_tensors_are_counted() -> None:
    made = assembly()
    for rank in RANKS[:-1]:
        made.seal(seal_of(rank), 1)
    with pytest.raises(PairingError, match=r"every producer has sealed .* and \d+ more"):
        made.seal(seal_of(3), 2)


# ---- contradictions


def test_opened_for_another_number_of_producers() -> None:
    with pytest.raises(
        VersionConflictError, match=r"opened for 3 producers, its attempt has 4.*sequence=9"
    ):
        assembly().opened(VersionOpened(version=KEY, producers=3), 9)


def test_another_chunk_of_the_same_number() -> None:
    first, second = keys_of(0)[:2]
    made = assembly()
    made.chunk(chunk_of(PLAN, 0, first), 1)
    with pytest.raises(
        VersionConflictError, match="chunk 0 comes from a producer that has published another"
    ):
        made.chunk(chunk_of(PLAN, 0, second), 2)


def test_a_chunk_behind_the_seal() -> None:
    first, second = keys_of(0)[:2]
    made = assembly()
    chunk = chunk_of(PLAN, 0, first)
    made.chunk(chunk, 1)
    made.seal(seal_of(0, chunk), 2)
    with pytest.raises(VersionConflictError, match="a producer that has sealed the version"):
        made.chunk(chunk_of(PLAN, 1, second), 3)


@pytest.mark.parametrize("same_chunk", [True, False])
def test_a_tensor_in_two_chunks(same_chunk: bool) -> None:
    first, second = keys_of(0)[:2]
    made = assembly()
    if not same_chunk:
        made.chunk(chunk_of(PLAN, 0, first), 1)
    keys = (second, first, first) if same_chunk else (second, first)
    with pytest.raises(VersionConflictError, match=r"a tensor stands in chunks \d and 1") as caught:
        made.chunk(chunk_of(PLAN, 1, *keys), 2)
    assert PLAN.sources[first].name in str(caught.value)
    assert made.arrival(second) is None  # nothing of a refused chunk is kept


def test_a_tensor_that_the_layout_does_not_have() -> None:
    chunk = chunk_of(PLAN, 0, keys_of(0)[0])
    strange = chunk.tensors[0].model_copy(update={"index": 999})
    with pytest.raises(LayoutError, match=r"layout does not publish.*index=999"):
        assembly().chunk(chunk.model_copy(update={"tensors": (strange,)}), 1)


def test_a_tensor_that_the_rank_does_not_own() -> None:
    index = next(i for i, tensor in enumerate(LAYOUTS[1].tensors) if not tensor.owned)
    chunk = chunk_of(PLAN, 0, keys_of(1)[0])
    other = chunk.tensors[0].model_copy(update={"index": index})
    with pytest.raises(LayoutError, match="layout does not publish"):
        assembly().chunk(chunk.model_copy(update={"tensors": (other,)}), 1)


def test_a_tensor_of_another_size() -> None:
    key = keys_of(0)[0]
    chunk = chunk_of(PLAN, 0, key)
    short = chunk.tensors[0].model_copy(update={"length": 8})
    with pytest.raises(LayoutError, match="holds 8 bytes of a tensor of") as caught:
        assembly().chunk(chunk.model_copy(update={"tensors": (short,)}), 1)
    assert f"tensor={PLAN.sources[key].name}" in str(caught.value)
    assert "different models" in str(caught.value)


def test_a_seal_that_announces_what_is_not_there() -> None:
    chunks = all_chunks(0)
    made = assembly()
    for chunk in chunks[1:]:
        made.chunk(chunk, 1)
    with pytest.raises(PairingError, match=rf"sealed the version with {len(chunks)} chunks") as c:
        made.seal(seal_of(0, *chunks), 2)
    assert f"in the stream are {len(chunks) - 1} of" in str(c.value)
    assert "lost or purged" in str(c.value)
    assert not made.sealed


def test_a_second_seal_with_other_numbers() -> None:
    made = assembly()
    made.seal(seal_of(0), 1)
    with pytest.raises(VersionConflictError, match="sealed the version twice, with other numbers"):
        made.seal(seal_of(0, all_chunks(0)[0]), 2)


def test_a_seal_of_somebody_without_a_layout() -> None:
    with pytest.raises(VersionConflictError, match="sealed the version and has no layout"):
        assembly().seal(seal_of(4), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan_digest": digest_of(b"other")}, "works by another plan"),
        ({"writers": 3}, "writer 0 of 3 works by another plan .* than this one of 2"),
        ({"shards": 99}, "works by another plan"),
        ({"shard": 99}, "works by another plan"),
        ({"writer": 1}, "works by another plan"),
        ({"file": "model.safetensors"}, "works by another plan"),
        ({"nbytes": 1}, "works by another plan"),
    ],
)
def test_a_shard_of_another_plan(change: dict[str, object], message: str) -> None:
    event = persisted_of(PLAN, PLAN.shards[0]).model_copy(update=change)
    with pytest.raises(VersionConflictError, match=message) as caught:
        assembly().shard(event, 1)
    assert "same release, count, shard size" in str(caught.value)


def test_a_shard_twice_with_other_bytes() -> None:
    event = persisted_of(PLAN, PLAN.shards[0])
    made = assembly()
    made.shard(event, 1)
    with pytest.raises(VersionConflictError, match="persisted twice, with other bytes"):
        made.shard(event.model_copy(update={"digest": digest_of(b"other")}), 2)


# ---- replicas, the end


def test_digests_of_replicas_stand_beside_those_of_owners() -> None:
    made = assembly()
    seen = ReplicaDigest(index=3, digest=digest_of(b"seen"))
    chunk = chunk_of(PLAN, 0, keys_of(1)[0])
    made.chunk(chunk, 1)
    made.seal(seal_of(1, chunk).model_copy(update={"replicas": (seen,)}), 2)
    assert made.digests() == {1: {chunk.tensors[0].index: chunk.tensors[0].digest, 3: seen.digest}}


def test_nothing_is_left_after_clear() -> None:
    made = assembly()
    fill(made)
    for shard in PLAN.shards:
        made.shard(persisted_of(PLAN, shard), 1)
    assert not made.empty
    made.clear()
    assert made.empty
    assert made.waiting() == []
    assert made.shards == []
    assert not made.sealed
    assert not made.has_all(keys_of(0)[:1])


def test_a_half_is_not_left_after_clear() -> None:
    made = assembly()
    made.chunk(chunk_of(PLAN, 0, key_named(Q_DOWN)), 1)
    made.clear()
    assert made.empty
    assert made.arrival(key_named(Q_DOWN)) is None
