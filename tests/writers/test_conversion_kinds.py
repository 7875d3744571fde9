"""Every kind of rule against the formula of the format, in numpy, on shapes that are not square."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.conversion_executor import apply_geometry
from support.conversion_oracle import split_qkv
from weightbus.schemas.errors import ConversionError, OriginError
from weightbus.writers.conversion.dims import Dims
from weightbus.writers.conversion.kinds import (
    Drop,
    Kind,
    QkvSplit,
    Rename,
    Stacked,
    UnlessTied,
    VocabCut,
)
from weightbus.writers.regions import cover_of, view_of

CONFIG: dict[str, object] = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 5, "vocab_size": 17,
    "num_hidden_layers": 2,
}  # fmt: skip


def whole(*shape: int) -> npt.NDArray[Any]:
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint32).reshape(shape)


def applied(kind: Kind, value: npt.NDArray[Any], **changes: object) -> dict[str, npt.NDArray[Any]]:
    geometry = kind.geometry(value.shape, Dims({**CONFIG, **changes}))
    used = [move.src for move in geometry.moves if not move.copy]
    used += [left.box for left in geometry.left]
    assert cover_of(used, *view_of(value.shape)).exact
    names = [output.template for output in geometry.outputs]
    return dict(zip(names, apply_geometry(geometry, value), strict=True))


def same(found: dict[str, npt.NDArray[Any]], wanted: dict[str, npt.NDArray[Any]]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(found[name], wanted[name]) for name in wanted
    )


@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 5, 3)])
def test_rename(shape: tuple[int, ...]) -> None:
    value = whole(*shape)
    assert same(applied(Rename("x"), value), {"x": value})


@pytest.mark.parametrize("tail", [(), (7,)])
def test_qkv_split_of_weights_and_biases(tail: tuple[int, ...]) -> None:
    value = whole(3 * (2 + 2) * 5, *tail)
    q, k, v = split_qkv(value, heads=6, groups=3, dim=5)
    assert same(applied(QkvSplit("q", "k", "v"), value), {"q": q, "k": k, "v": v})


def test_qkv_split_by_hand() -> None:
    # 2 groups of 2 query heads, head dim 1: rows q0 q1 k0 v0 q2 q3 k1 v1.
    value = np.array([10, 11, 20, 30, 12, 13, 21, 31])
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1}
    found = applied(QkvSplit("q", "k", "v"), value, **changes)
    assert found["q"].tolist() == [10, 11, 12, 13]
    assert found["k"].tolist() == [20, 21]
    assert found["v"].tolist() == [30, 31]


def test_qkv_split_of_plain_heads() -> None:
    value = whole(4 * 3 * 5, 7)
    q, k, v = split_qkv(value, heads=4, groups=4, dim=5)
    changes = {"num_attention_heads": 4, "num_key_value_heads": None}
    found = applied(QkvSplit("q", "k", "v"), value, **changes)
    assert same(found, {"q": q, "k": k, "v": v})


def test_gate_rows_stand_before_up_rows() -> None:
    value = whole(12, 7)
    assert same(applied(Stacked(("gate", "up")), value), {"gate": value[:6], "up": value[6:]})


def test_gate_and_up_are_cut_one_by_one() -> None:
    geometry = Stacked(("gate", "up")).geometry((12, 7), Dims(CONFIG))
    assert geometry.blocks == (6, 6)
    assert Rename("x").geometry((12, 7), Dims(CONFIG)).blocks == ()


def test_vocabulary_is_cut() -> None:
    value = whole(24, 7)
    assert same(applied(VocabCut("x"), value), {"x": value[:17]})
    geometry = VocabCut("x").geometry((24, 7), Dims(CONFIG))
    assert [(str(left.box), left.reason) for left in geometry.left] == [
        ("rows 17..23, columns 0..6", "vocabulary padding")
    ]


def test_a_vocabulary_without_padding_is_whole() -> None:
    value = whole(17, 7)
    assert same(applied(VocabCut("x"), value), {"x": value})


@pytest.mark.parametrize(("announced", "layers"), [(None, (2,)), (1, (2,)), (2, (2, 3))])
def test_copies_for_mtp_layers_are_optional(announced: int | None, layers: tuple[int, ...]) -> None:
    value = whole(24, 7)
    kind = VocabCut("x", "model.layers.{m}.x")
    found = applied(kind, value, num_nextn_predict_layers=announced)
    names = ["x", *(f"model.layers.{layer}.x" for layer in layers)]
    assert same(found, dict.fromkeys(names, value[:17]))
    geometry = kind.geometry(value.shape, Dims({**CONFIG, "num_nextn_predict_layers": announced}))
    assert [output.optional for output in geometry.outputs] == [False] + [True] * len(layers)


def test_drop_and_tied_copies_write_nothing() -> None:
    value = whole(24, 7)
    assert applied(Drop("not needed"), value) == {}
    head = UnlessTied(VocabCut("head"))
    assert applied(head, value, tie_word_embeddings=True) == {}
    assert same(applied(head, value, tie_word_embeddings=False), {"head": value[:17]})
    assert same(applied(head, value), {"head": value[:17]})


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (Stacked(("gate", "up")), (7, 4), "2 equal blocks"),
        (Stacked(("gate", "up")), (), "2 equal blocks"),
        (QkvSplit("q", "k", "v"), (55, 4), "3 query groups of 2 [+] 2 heads of 5 rows are 60 rows"),
        (VocabCut("x"), (16, 4), "vocab_size is 17"),
    ],
)
def test_shapes_that_do_not_fit(kind: Kind, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        kind.geometry(shape, Dims(CONFIG))


def test_heads_that_cannot_be_shared_out() -> None:
    with pytest.raises(ConversionError, match="6 heads cannot be shared out to 4 query groups"):
        QkvSplit("q", "k", "v").geometry((70, 4), Dims({**CONFIG, "num_key_value_heads": 4}))


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (QkvSplit("q", "k", "v"), "num_attention_heads"),
        (QkvSplit("q", "k", "v"), "num_key_value_heads"),
        (QkvSplit("q", "k", "v"), "head_dim"),
        (VocabCut("x"), "vocab_size"),
        (VocabCut("x", "{m}"), "num_hidden_layers"),
    ],
)
def test_a_config_without_a_number_that_a_rule_needs(kind: Kind, missing: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(OriginError, match=f"no usable {missing}"):
        kind.geometry((60, 7), Dims(config))


@pytest.mark.parametrize("value", ["6", 6.0, -6, True, None])
def test_a_number_that_is_none(value: object) -> None:
    with pytest.raises(OriginError, match=r"no usable vocab_size \(it says"):
        VocabCut("x").geometry((60, 7), Dims({**CONFIG, "vocab_size": value}))


def test_the_head_dim_that_some_families_derive() -> None:
    config: dict[str, object] = {"hidden_size": 24, "num_attention_heads": 6}
    assert Dims(config, derived_head_dim=True).head_dim == 4
    assert Dims({**config, "head_dim": 5}, derived_head_dim=True).head_dim == 5
