"""Layouts: parts of wholes, canonical bytes, refusals."""

import pytest
from pydantic import ValidationError
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank, Part


def test_the_whole_shape_follows_from_the_part() -> None:
    tensor = LocalTensor(
        name="w", dtype="BF16", shape=(6, 5), part=Part(dim=0, index=1, count=4, blocks=(12, 12))
    )
    assert tensor.whole_shape == (24, 5)
    assert tensor.nbytes == 60
    assert LocalTensor(name="n", dtype="F32", shape=(7,)).whole_shape == (7,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index": 2, "count": 2}, "part 2 of 2"),
        ({"count": 2, "blocks": (3,)}, "cannot be cut into 2"),
        ({"count": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_parts_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Part.model_validate(fields)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Part(dim=2, count=2), "cut along dim 2"),
        (Part(dim=0, count=2, blocks=(4, 4)), "give 4 rows, the shape .* says 6"),
    ],
)
def test_a_part_that_contradicts_the_shape_is_refused(part: Part, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LocalTensor(name="w", dtype="F32", shape=(6, 5), part=part)


def test_equal_layouts_have_one_digest_and_the_digest_sees_every_field() -> None:
    rank = ParallelRank(rank=1, tp_rank=1)
    tensor = LocalTensor(name="w", dtype="F32", shape=(6, 5))
    layout = Layout(naming="megatron", producer=rank, tensors=(tensor,))
    assert Layout.from_bytes(layout.to_bytes()) == layout
    assert Layout.from_bytes(layout.to_bytes()).digest() == layout.digest()
    others = [
        layout.model_copy(update={"producer": ParallelRank(rank=0, tp_rank=1)}),
        layout.model_copy(update={"tensors": (tensor.model_copy(update={"owned": False}),)}),
        layout.model_copy(update={"tensors": (tensor.model_copy(update={"shape": (5, 6)}),)}),
    ]
    assert len({layout.digest(), *(other.digest() for other in others)}) == 4


def test_only_owned_tensors_count_as_published_bytes() -> None:
    owned = LocalTensor(name="a", dtype="F32", shape=(3, 2))
    replica = LocalTensor(name="b", dtype="F32", shape=(9, 9), owned=False)
    layout = Layout(naming="hf", producer=ParallelRank(rank=0), tensors=(owned, replica))
    assert layout.owned_bytes == 24
