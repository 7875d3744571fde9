"""Replicas compared by digest: which differences are found, and how they are told."""

import pytest
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import LayoutError
from weightbus.schemas.events import VersionKey
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank, Part
from weightbus.writers.replicas import compare_replicas, mismatch

A, B, C = (digest_of(text) for text in (b"a", b"b", b"c"))
KEY = VersionKey(run_id="run", attempt=1, weight_version=7)


def tensor(
    name: str, *, owned: bool = True, local: str = "", part: Part | None = None
) -> LocalTensor:
    return LocalTensor(
        name=name, dtype="U8", shape=(4,), owned=owned, local_name=local, part=part or Part()
    )


def layout(rank: int, *tensors: LocalTensor) -> Layout:
    return Layout(naming="megatron", producer=ParallelRank(rank=rank), tensors=tensors)


def test_equal_replicas_are_no_difference() -> None:
    layouts = [layout(0, tensor("norm")), layout(1, tensor("norm", owned=False))]
    assert compare_replicas(layouts, {0: {0: A}, 1: {0: A}}) == []
    assert compare_replicas(layouts, {0: {0: A}}) == []  # nobody hashed it this time
    assert compare_replicas(layouts, {}) == []


def test_a_tied_copy_that_has_drifted_is_named_with_its_ranks() -> None:
    layouts = [
        layout(0, tensor("x"), tensor("embedding", local="embedding.weight")),
        layout(3, tensor("embedding", owned=False, local="output_layer.weight")),
    ]
    [found] = compare_replicas(layouts, {3: {0: B}, 0: {0: C, 1: A}})
    assert found.tensor == "embedding"
    assert [(holder.rank, holder.owned) for holder in found.holders] == [(0, True), (3, False)]
    text = str(mismatch(KEY, [found]))
    assert (
        f"embedding: {A[-8:]} on rank 0 (owner) != {B[-8:]} on rank 3 (output_layer.weight)" in text
    )
    assert "version=run/1/v000007" in text


def test_the_owner_is_named_first_and_equal_ranks_together() -> None:
    copies = [tensor("e", owned=False) for _ in range(3)]
    layouts = [*(layout(rank, copy) for rank, copy in enumerate(copies)), layout(3, tensor("e"))]
    [found] = compare_replicas(layouts, {0: {0: B}, 1: {0: B}, 2: {0: A}, 3: {0: A}})
    assert str(found) == (
        f"e: {A[-8:]} on ranks 3 (owner), 2 (replica) != {B[-8:]} on ranks 0 (replica), 1 (replica)"
    )


def test_only_the_same_part_is_compared() -> None:
    parts = [Part(dim=0, index=index, count=2) for index in (0, 1)]
    layouts = [
        layout(0, tensor("w", part=parts[0])),
        layout(1, tensor("w", part=parts[1])),
        layout(2, tensor("w", part=parts[1], owned=False)),
    ]
    assert compare_replicas(layouts, {0: {0: A}, 1: {0: B}, 2: {0: B}}) == []
    [found] = compare_replicas(layouts, {0: {0: A}, 1: {0: B}, 2: {0: A}})
    assert str(found).startswith("w part 1 of 2: ")
    # A tensor that one rank holds whole has the same bytes whatever dim it could be cut along.
    whole = [layout(0, tensor("n", part=Part(dim=1))), layout(1, tensor("n", owned=False))]
    assert len(compare_replicas(whole, {0: {0: A}, 1: {0: B}})) == 1


def test_a_digest_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="a digest of tensor number 1, the layout has 1"):
        compare_replicas([layout(0, tensor("x"))], {0: {1: A}})
    with pytest.raises(LayoutError, match="tensor number 0, the layout has 0"):
        compare_replicas([layout(0, tensor("x"))], {5: {0: A}})


def test_many_differences_are_counted() -> None:
    names = [tensor(f"t{n:02}", owned=False) for n in range(12)]
    layouts = [layout(rank, *names) for rank in (0, 1)]
    found = compare_replicas(
        layouts, {0: dict.fromkeys(range(12), A), 1: dict.fromkeys(range(12), B)}
    )
    assert [difference.tensor for difference in found] == [name.name for name in names]
    assert "; 2 more" in str(mismatch(KEY, found))
