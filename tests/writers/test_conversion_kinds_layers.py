"""Kinds of gated, sparse and linear attention and of fused experts: loops over the formulas.

Every formula is written here element by element; the rules move boxes of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.conversion_executor import apply_geometry
from weightbus.schemas.errors import ConversionError
from weightbus.writers.conversion.dims import Dims
from weightbus.writers.conversion.family import Family, Rule, Table
from weightbus.writers.conversion.kinds import Either, Kind, Refused, Rename
from weightbus.writers.conversion.kinds_attention import (
    ColumnHalvesSwapped,
    GatedQkvSplit,
    IndexerTurned,
    LinearConvolution,
    LinearInput,
)
from weightbus.writers.conversion.kinds_experts import (
    InterleavedExperts,
    IntoExperts,
    TransposedExperts,
)
from weightbus.writers.regions import cover_of, view_of

H, G, D = 6, 3, 5
CONFIG: dict[str, object] = {
    "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D, "num_experts": 3,
    "index_head_dim": 7, "qk_rope_head_dim": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 4, "linear_value_head_dim": 5,
}  # fmt: skip
DIMS = Dims(CONFIG)
Array = npt.NDArray[Any]


def whole(*shape: int, start: int = 1) -> Array:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.uint32).reshape(shape)


def applied(kind: Kind, value: Array) -> list[Array]:
    geometry = kind.geometry(value.shape, DIMS)
    assert cover_of([move.src for move in geometry.moves], *view_of(value.shape)).exact
    return apply_geometry(geometry, value)


def all_experts(kind: Kind, values: list[Array]) -> Array:
    """Every expert at its rows of one fused tensor; elements that nobody fills are 0."""
    geometry = kind.geometry(values[0].shape, DIMS)
    (output,) = geometry.outputs
    made = np.zeros(output.shape, np.uint32)
    view = made.reshape(view_of(output.shape))
    for expert, value in enumerate(values):
        part = apply_geometry(geometry, value)[0].reshape(view.shape)
        (down,) = geometry.per_expert
        view += np.roll(part, expert * down, 0)
    return made


@pytest.mark.parametrize("tail", [(), (7,)], ids=["bias", "weight"])
def test_gated_attention(tail: tuple[int, ...]) -> None:
    r = H // G
    value = whole(G * (2 * r + 2) * D, *tail)
    q = np.zeros((2 * H * D, *tail), np.uint32)
    k, v = np.zeros((2, G * D, *tail), np.uint32)
    for g in range(G):
        for s in range(2 * r + 2):
            for e in range(D):
                row = value[(g * (2 * r + 2) + s) * D + e]
                if s < 2 * r:
                    gate, i = divmod(s, r)
                    q[((g * r + i) * 2 + gate) * D + e] = row
                elif s == 2 * r:
                    k[g * D + e] = row
                else:
                    v[g * D + e] = row
    found = applied(GatedQkvSplit("q", "k", "v"), value)
    assert all(np.array_equal(a, b) for a, b in zip(found, (q, k, v), strict=True))


def test_gated_attention_by_hand() -> None:
    # One group of 2 heads, head dim 1: rows q0 q1 g0 g1 k v -> q0 g0 q1 g1.
    config = {**CONFIG, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 1}
    geometry = GatedQkvSplit("q", "k", "v").geometry((6,), Dims(config))
    q, k, v = apply_geometry(geometry, np.array([10, 11, 20, 21, 30, 40], np.uint32))
    assert (q.tolist(), k.tolist(), v.tolist()) == ([10, 20, 11, 21], [30], [40])


@pytest.mark.parametrize("shape", [(14, 5), (7, 6), (7,)])
def test_an_indexer_has_its_rotated_rows_first(shape: tuple[int, ...]) -> None:
    value = whole(*shape)
    wanted = np.zeros_like(value)
    for row in range(shape[0]):
        head, at = divmod(row, 7)
        # Rows 0..3 of a Megatron head are plain, rows 4..6 rotated.
        wanted[head * 7 + (at + 3 if at < 4 else at - 4)] = value[row]
    assert np.array_equal(applied(IndexerTurned("x"), value)[0], wanted)


def test_halves_of_public_indexers_are_swapped() -> None:
    dims = Dims({"index_head_dim": 128, "qk_rope_head_dim": 64})
    value = whole(256, 3)
    (found,) = apply_geometry(IndexerTurned("x").geometry(value.shape, dims), value)
    viewed = value.reshape(2, 128, 3)
    wanted = np.concatenate([viewed[:, 64:], viewed[:, :64]], 1).reshape(256, 3)
    assert np.array_equal(found, wanted)


def test_column_halves_are_swapped() -> None:
    value = whole(3, 10)
    (found,) = applied(ColumnHalvesSwapped("x"), value)
    assert np.array_equal(found, value[:, [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]])


def linear_parts(cols: int = 3) -> dict[str, Array]:
    sizes = {"q": 8, "k": 8, "v": 30, "z": 30, "b": 6, "a": 6}
    return {
        name: whole(size, cols, start=1000 * (number + 1))
        for number, (name, size) in enumerate(sizes.items())
    }


def test_separate_linear_inputs() -> None:
    parts = linear_parts()
    found = applied(LinearInput(("qkv", "z", "b", "a"), separate=True),
                    np.concatenate(list(parts.values())))  # fmt: skip
    wanted = [np.concatenate([parts["q"], parts["k"], parts["v"]]), *(parts[n] for n in "zba")]
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_joined_linear_inputs_are_grouped_by_key_head() -> None:
    parts = linear_parts()
    found = applied(LinearInput(("qkvz", "ba"), separate=False),
                    np.concatenate(list(parts.values())))  # fmt: skip
    qkvz: list[Array] = []
    ba: list[Array] = []
    for head in range(2):
        for name, rows in (("q", 4), ("k", 4), ("v", 15), ("z", 15)):
            qkvz += [parts[name][head * rows + row] for row in range(rows)]
        for name in "ba":
            ba += [parts[name][head * 3 + row] for row in range(3)]
    assert np.array_equal(found[0], np.stack(qkvz))
    assert np.array_equal(found[1], np.stack(ba))


def test_linear_tensors_are_cut_block_by_block() -> None:
    joined = LinearInput(("qkvz", "ba"), separate=False).geometry((88, 3), DIMS)
    assert joined.blocks == (8, 8, 30, 30, 6, 6)
    geometry = LinearConvolution("x").geometry((46, 1, 4), DIMS)
    assert geometry.blocks == (8, 8, 30)
    value = whole(46, 1, 4)
    assert np.array_equal(apply_geometry(geometry, value)[0], value)


def test_interleaved_experts() -> None:
    experts = [whole(8, 3, start=100 * (e + 1)) for e in range(3)]
    found = all_experts(InterleavedExperts("x"), experts)
    assert found.shape == (3, 3, 8)
    for e in range(3):
        for t in (0, 1):
            for i in range(4):
                for j in range(3):
                    assert found[e, j, 2 * i + t] == experts[e][t * 4 + i, j]


def test_interleaved_expert_biases() -> None:
    experts = [whole(8, start=100 * (e + 1)) for e in range(3)]
    found = all_experts(InterleavedExperts("x"), experts)
    assert found.shape == (3, 8)
    for e in range(3):
        assert found[e, 0::2].tolist() == experts[e][:4].tolist()
        assert found[e, 1::2].tolist() == experts[e][4:].tolist()


def test_transposed_experts() -> None:
    experts = [whole(5, 4, start=100 * (e + 1)) for e in range(3)]
    found = all_experts(TransposedExperts("x"), experts)
    assert found.shape == (3, 4, 5)
    assert all(np.array_equal(found[e], experts[e].T) for e in range(3))


@pytest.mark.parametrize("shape", [(6, 5), (6,)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_experts_one_behind_the_other(shape: tuple[int, ...], blocks: int) -> None:
    experts = [whole(*shape, start=100 * (e + 1)) for e in range(3)]
    found = all_experts(IntoExperts("x", blocks), experts)
    assert np.array_equal(found, np.stack(experts))
    geometry = IntoExperts("x", blocks).geometry(shape, DIMS)
    assert geometry.blocks == ((3, 3) if blocks == 2 else ())


def test_a_tensor_that_stays_one_can_be_cut_in_halves() -> None:
    assert Rename("x", blocks=2).geometry((12, 7), DIMS).blocks == (6, 6)


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (GatedQkvSplit("q", "k", "v"), (60, 4), "2 query, 2 gate, a key and a value"),
        (IndexerTurned("x"), (8, 4), "heads of 7 with 3 rotated"),
        (ColumnHalvesSwapped("x"), (4, 5), "no two halves"),
        (ColumnHalvesSwapped("x"), (4,), "no two halves"),
        (LinearInput(("a", "b"), separate=False), (87, 3), "have 88 rows"),
        (LinearConvolution("x"), (47, 1, 4), "have 46 channels"),
        (InterleavedExperts("x"), (7, 3), "as many up rows"),
        (TransposedExperts("x"), (7,), "two dims"),
        (IntoExperts("x", 2), (7, 3), "2 equal blocks"),
        (Rename("x", blocks=2), (7, 3), "2 equal blocks"),
        (Refused("because"), (3,), "cannot be converted: because"),
    ],
)
def test_shapes_that_do_not_fit(kind: Kind, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        kind.geometry(shape, DIMS)


def test_the_origin_chooses_between_two_forms() -> None:
    marker = "model.layers.{l}.fused"
    kind = Either(marker, Rename(marker), Rename("model.layers.{l}.apart"))
    family = Family(Table("f", (), (Rule("decoder.layers.{l}.x", kind),)), CONFIG)

    def name_for(*origin: str) -> str:
        conversion = family.fitted(origin).convert("decoder.layers.3.x", (2,))
        assert conversion is not None
        return conversion.names[0]

    assert name_for() == name_for("other") == "model.layers.3.apart"
    assert name_for("model.layers.0.fused") == "model.layers.3.fused"
    embedding = "model.language_model.embed_tokens.weight"
    assert name_for(embedding) == "model.language_model.layers.3.apart"
    fused = "model.language_model.layers.1.fused"
    assert name_for(embedding, fused) == "model.language_model.layers.3.fused"
    old = ("language_model.model.embed_tokens.weight", "language_model.model.layers.1.fused")
    assert name_for(*old) == "language_model.model.layers.3.fused"
