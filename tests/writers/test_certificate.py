"""The certificate finds every way in which layouts, rules and origin can disagree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from support.conversion_megatron import Grid, Model, expectation_of, layouts_of
from weightbus.schemas.dtypes import DType
from weightbus.schemas.errors import CoverageError, UnknownParameterError
from weightbus.schemas.layout import Layout, LocalTensor, Part
from weightbus.writers.certificate import Certificate, certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.dims import Dims
from weightbus.writers.conversion.family import Family, Rule
from weightbus.writers.conversion.kinds import Geometry, Kind, Output, Rename
from weightbus.writers.expectation import Expectation, Expected
from weightbus.writers.plan_differences import Difference, DifferenceKind
from weightbus.writers.regions import Move, box

K = DifferenceKind

MODEL = Model(norms=True)
GRID = Grid(tp=2, pp=2, dp=2)
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.final_layernorm.weight"
FAMILY = family_of(MODEL.config, "qwen3")


def change(
    layouts: list[Layout], name: str, edit: Callable[[LocalTensor], LocalTensor | None],
    ranks: tuple[int, ...] = (),
) -> list[Layout]:  # fmt: skip
    """Edit one tensor on some ranks (all if none are named); None removes it."""
    out: list[Layout] = []
    for layout in layouts:
        chosen = not ranks or layout.producer.rank in ranks
        tensors = [
            edit(tensor) if chosen and tensor.name == name else tensor for tensor in layout.tensors
        ]
        kept = tuple(tensor for tensor in tensors if tensor is not None)
        out.append(layout.model_copy(update={"tensors": kept}))
    return out


def add(layouts: list[Layout], tensor: LocalTensor, rank: int = 0) -> list[Layout]:
    return [
        layout.model_copy(update={"tensors": (*layout.tensors, tensor)})
        if layout.producer.rank == rank
        else layout
        for layout in layouts
    ]


def updated(**changes: object) -> Callable[[LocalTensor], LocalTensor]:
    return lambda tensor: tensor.model_copy(update=changes)


def check(
    layouts: list[Layout], expectation: Expectation | None = None, family: Family = FAMILY,
    **options: Any,
) -> Certificate:  # fmt: skip
    expected = expectation_of(MODEL) if expectation is None else expectation
    return certify(layouts, expected, family, **options)


def kinds(certificate: Certificate) -> set[K]:
    return {difference.kind for difference in certificate.differences}


def only(certificate: Certificate) -> Difference:
    assert len(certificate.differences) == 1, certificate.render()
    return certificate.differences[0]


def test_a_whole_model_is_certified() -> None:
    certificate = check(layouts_of(MODEL, GRID))
    assert certificate.ok
    certificate.require()
    assert certificate.producers == 8
    assert certificate.sources == len(MODEL.shapes())
    assert certificate.targets == len(expectation_of(MODEL).tensors)
    assert [str(note) for note in certificate.notes] == [
        "left out of its source: embedding.word_embeddings.weight: vocabulary padding: "
        "rows 37..47, columns 0..39 (rank 0-3)",
        "left out of its source: output_layer.weight: vocabulary padding: "
        "rows 37..47, columns 0..39 (rank 4-7)",
    ]
    assert "holds" in certificate.render()


# ------------------------------------------------------------------------ what ranks hold


def test_a_part_that_no_rank_holds() -> None:
    found = only(check(change(layouts_of(MODEL, GRID), FC1, lambda _: None, (1, 3))))
    assert (found.kind, found.tensor, found.ranks) == (K.MISSING_PART, FC1, ())
    assert found.detail == "nobody publishes part 1 of 2 or holds it"


def test_a_part_without_an_owner() -> None:
    found = only(check(change(layouts_of(MODEL, GRID), FC1, updated(owned=False), (1, 3))))
    assert (found.kind, found.ranks) == (K.MISSING_PART, (1, 3))
    assert "these ranks hold it, none as its owner" in found.detail


def test_a_part_with_two_owners() -> None:
    found = only(check(change(layouts_of(MODEL, GRID), FC1, updated(owned=True), (0, 2))))
    assert found[:3] == (K.DUPLICATE_PART, FC1, (0, 2))


def test_both_parts_with_two_owners_are_two_findings() -> None:
    layouts = change(layouts_of(MODEL, GRID), FC1, updated(owned=True), (0, 1, 2, 3))
    assert [d.ranks for d in check(layouts).differences] == [(0, 2), (1, 3)]


def test_one_rank_that_lists_a_name_twice() -> None:
    layouts = layouts_of(MODEL, Grid())
    again = next(tensor for tensor in layouts[0].tensors if tensor.name == NORM)
    found = only(check(add(layouts, again)))
    assert (found.kind, found.ranks) == (K.DUPLICATE_NAME, (0,))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (updated(dtype="BF16"), "rank 3 says BF16 [24, 40] = part of 2"),
        (updated(shape=(24, 39)), "rank 3 says F32 [24, 39] = part of 2"),
        (updated(part=Part(dim=0, index=1, count=2)), "rank 3 says F32 [24, 40] = part of 2 along"),
        (updated(part=Part(dim=1, index=1, count=2)), "part of 2 along dim 1"),
        (updated(part=Part(dim=0, index=1, count=4, blocks=(24, 24))), "part of 4"),
        (updated(part=Part()), "rank 3 says F32 [24, 40] whole"),
    ],
)
def test_ranks_that_disagree(edit: Callable[[LocalTensor], LocalTensor], says: str) -> None:
    found = only(check(change(layouts_of(MODEL, GRID), FC1, edit, (3,))))
    assert (found.kind, found.tensor, found.ranks) == (K.DISAGREEMENT, FC1, (3,))
    assert says in found.detail
    assert "rank 0 says F32 [24, 40] = part of 2 along dim 0 in blocks [24, 24]" in found.detail


def test_two_layouts_of_one_rank() -> None:
    layouts = layouts_of(MODEL, Grid())
    found = check([*layouts, *layouts])
    assert found.differences[0][:3] == (K.DUPLICATE_PRODUCER, "", (0,))


def test_mixed_namings() -> None:
    layouts = layouts_of(MODEL, Grid(tp=2))
    layouts[1] = layouts[1].model_copy(update={"naming": "hf"})
    assert only(check(layouts))[:3] == (K.MIXED_NAMING, "", (1,))


def test_gate_and_up_that_were_not_cut_one_by_one() -> None:
    def naive(tensor: LocalTensor) -> LocalTensor:
        part = Part(dim=0, index=tensor.part.index, count=2)
        return tensor.model_copy(update={"part": part})

    found = only(check(change(layouts_of(MODEL, GRID), FC1, naive)))
    assert found.kind is K.BAD_PARTITION
    assert found.detail == "cut along dim 0 in blocks [], its rule knows blocks [24, 24]"


def test_blocks_where_the_rule_knows_none() -> None:
    def blocked(tensor: LocalTensor) -> LocalTensor:
        part = Part(dim=1, index=tensor.part.index, count=2, blocks=(12, 12))
        return tensor.model_copy(update={"part": part})

    found = only(check(change(layouts_of(MODEL, GRID), FC2, blocked)))
    assert found.kind is K.BAD_PARTITION


def test_one_block_is_no_block() -> None:
    def blocked(tensor: LocalTensor) -> LocalTensor:
        part = Part(dim=0, index=tensor.part.index, count=2, blocks=(48,))
        return tensor.model_copy(update={"part": part})

    name = "embedding.word_embeddings.weight"
    assert check(change(layouts_of(MODEL, GRID), name, blocked)).ok


# ------------------------------------------------------------------------ names of the origin


def test_unknown_parameters_are_listed_all_at_once() -> None:
    layouts = layouts_of(MODEL, GRID)
    for rank, name in ((0, "decoder.layers.0.mlp.linear_fc3.weight"), (2, "vision.patch.weight")):
        layouts = add(layouts, LocalTensor(name=name, dtype="F32", shape=(3,)), rank)
    certificate = check(change(layouts, NORM, lambda _: None))
    with pytest.raises(UnknownParameterError) as caught:
        certificate.require()
    message = str(caught.value)
    assert "2 parameters that the family has no rule for, 1 other differences" in message
    assert "unknown parameter: decoder.layers.0.mlp.linear_fc3.weight" in message
    assert "nearest: decoder.layers.{l}.mlp.linear_fc" in message
    assert "unknown parameter: vision.patch.weight: family qwen3 has no rule for it" in message
    assert "missing HF tensor: model.norm.weight" in message
    assert "family=qwen3" in message
    assert "Next: add rules" in message


def test_a_missing_tensor_is_refused_or_omitted() -> None:
    layouts = change(layouts_of(MODEL, GRID), NORM, lambda _: None)
    found = only(check(layouts))
    assert (found.kind, found.tensor) == (K.MISSING_TENSOR, "model.norm.weight")
    omitted = check(layouts, missing="omit")
    assert omitted.ok
    assert (K.OMITTED, "model.norm.weight", (), "no rank holds it") in omitted.notes
    assert "note: omitted: model.norm.weight: no rank holds it" in omitted.render()


def test_an_extra_tensor_is_refused() -> None:
    layouts = add(
        layouts_of(MODEL, GRID),
        LocalTensor(name="decoder.layers.2.input_layernorm.weight", dtype="F32", shape=(40,)),
        3,
    )
    found = only(check(layouts))
    assert found[:3] == (K.EXTRA_TENSOR, "model.layers.2.input_layernorm.weight", (3,))
    assert "made of decoder.layers.2.input_layernorm.weight" in found.detail


def with_expected(name: str, expected: Expected) -> Expectation:
    return Expectation.of({**expectation_of(MODEL).tensors, name: expected})


def test_a_wrong_shape_is_refused() -> None:
    found = only(check(layouts_of(MODEL, GRID), with_expected("model.norm.weight",
                                                             Expected("F32", (39,)))))  # fmt: skip
    assert found[:3] == (K.WRONG_SHAPE, "model.norm.weight", (4, 5, 6, 7))
    assert found.detail == "[40], the origin has [39]"


def test_another_dtype_is_noted_or_refused() -> None:
    expectation = with_expected("model.norm.weight", Expected("BF16", (40,)))
    noted = check(layouts_of(MODEL, GRID), expectation)
    assert noted.ok
    note = next(note for note in noted.notes if note.kind is K.OTHER_DTYPE)
    assert (note.tensor, note.detail) == ("model.norm.weight", "F32, the origin has BF16")
    refused = only(check(layouts_of(MODEL, GRID), expectation, dtype="exact"))
    assert refused[:2] == (K.WRONG_DTYPE, "model.norm.weight")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8"])
def test_a_quantized_origin_is_refused_by_every_policy(dtype: DType) -> None:
    expectation = with_expected("model.norm.weight", Expected(dtype, (40,)))
    found = only(check(layouts_of(MODEL, GRID), expectation, missing="omit", dtype="source"))
    assert found[:2] == (K.WRONG_DTYPE, "model.norm.weight")
    assert found.detail == f"F32, the origin has {dtype}"


def test_a_router_bias_must_be_fp32() -> None:
    model = Model(latent=True, experts=4)
    name = "decoder.layers.1.mlp.router.expert_bias"
    layouts = change(layouts_of(model, Grid()), name, updated(dtype="BF16"))
    family = family_of(model.config, "deepseek_v3")
    found = only(check(layouts, expectation_of(model), family))
    assert found[:2] == (K.WRONG_DTYPE, "model.layers.1.mlp.gate.e_score_correction_bias")
    assert found.detail == f"{name} is BF16, its rule knows F32 only"


def test_tensors_that_a_family_never_writes_are_notes() -> None:
    model = dataclasses.replace(MODEL, norms=False, tied=True)
    expectation = Expectation.of(
        {
            **expectation_of(model).tensors,
            "lm_head.weight": Expected("F32", (37, 40)),
            "model.layers.0.self_attn.rotary_emb.inv_freq": Expected("F32", (5,)),
        }
    )
    certificate = check(
        layouts_of(model, Grid(pp=2)), expectation, family_of(model.config, "llama")
    )
    assert certificate.ok
    assert {note.tensor: note.detail for note in certificate.notes if note.kind is K.OMITTED} == {
        "lm_head.weight": "the head is tied to the embedding",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "computed from rope_theta",
    }
    copy = next(note for note in certificate.notes if note.tensor == "output_layer.weight")
    assert copy.detail.startswith("copy of the tied embedding: rows 0..47")


def test_both_namings_of_one_norm_write_it_twice() -> None:
    layouts = add(
        layouts_of(MODEL, Grid()),
        LocalTensor(
            name="decoder.layers.0.mlp.linear_fc1.layer_norm_weight", dtype="F32", shape=(40,)
        ),
    )
    found = only(check(layouts))
    assert found[:2] == (K.TARGET_OVERLAP, "model.layers.0.post_attention_layernorm.weight")
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in found.detail
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in found.detail


def test_sources_of_one_tensor_that_do_not_fit_together() -> None:
    layouts = add(
        layouts_of(MODEL, Grid()),
        LocalTensor(
            name="decoder.layers.0.mlp.linear_fc1.layer_norm_weight", dtype="BF16", shape=(40,)
        ),
    )
    assert only(check(layouts)).kind is K.TARGET_CONFLICT


def test_a_shape_that_does_not_fit_its_rule() -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    layouts = change(layouts_of(MODEL, Grid()), name, updated(shape=(100, 40)))
    certificate = check(layouts)
    found = certificate.differences[0]
    assert (found.kind, found.tensor) == (K.RULE_REFUSED, name)
    assert "3 query groups of 2 + 2 heads of 10 rows are 120 rows" in found.detail
    assert kinds(certificate) == {K.RULE_REFUSED, K.MISSING_TENSOR}


# ------------------------------------------------------------------------ wrong rules


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A rule kind with a mistake: moves of a [40] norm that are given as they are."""

    moves: tuple[Move, ...]

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        return Geometry((Output("model.norm.weight", shape),), self.moves)


def with_rules(wrong: dict[str, Kind], name: str = "qwen3", model: Model = MODEL) -> Family:
    table = family_of(model.config, name).table
    rules = tuple(Rule(rule.pattern, wrong.get(rule.pattern, rule.kind)) for rule in table.rules)
    assert sum(a != b for a, b in zip(rules, table.rules, strict=True)) == len(wrong)
    return Family(dataclasses.replace(table, rules=rules), model.config)


FULL = box(0, 0, 40, 1)


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ((Move(0, box(0, 0, 39, 1), box(0, 0, 39, 1)),), {K.SOURCE_UNUSED, K.TARGET_UNCOVERED}),
        ((Move(0, box(0, 0, 20, 1), box(0, 0, 20, 1)), Move(0, box(19, 0, 21, 1), FULL)),
         {K.SOURCE_OVERLAP, K.TARGET_OVERLAP, K.OUT_OF_BOUNDS}),
        ((Move(0, FULL, box(1, 0, 40, 1)),), {K.OUT_OF_BOUNDS, K.TARGET_UNCOVERED}),
        ((Move(0, box(0, 0, 41, 1), box(0, 0, 41, 1)),), {K.OUT_OF_BOUNDS}),
        ((Move(0, FULL, FULL), Move(0, FULL, FULL, copy=True)), {K.TARGET_OVERLAP}),
        ((Move(0, FULL, box(0, 0, 1, 40)),), {K.OUT_OF_BOUNDS, K.TARGET_UNCOVERED}),
    ],
)  # fmt: skip
def test_rules_that_lose_or_double_elements(moves: tuple[Move, ...], expected: set[K]) -> None:
    family = with_rules({NORM: Wrong(moves)})
    assert kinds(check(layouts_of(MODEL, GRID), family=family)) == expected


def test_padding_that_is_not_cut() -> None:
    family = with_rules({"embedding.word_embeddings.weight": Rename("model.embed_tokens.weight")})
    found = only(check(layouts_of(MODEL, GRID), family=family))
    assert found[:2] == (K.WRONG_SHAPE, "model.embed_tokens.weight")
    assert found.detail == "[48, 40], the origin has [37, 40]"


def test_a_layer_that_is_off_by_one() -> None:
    pattern = "decoder.layers.{l}.pre_mlp_layernorm.weight"

    def shifted(tensor: LocalTensor) -> LocalTensor:
        return tensor.model_copy(update={"name": pattern.replace("{l}", "2")})

    layouts = change(layouts_of(MODEL, GRID), pattern.replace("{l}", "1"), shifted)
    certificate = check(layouts)
    assert [(d.kind, d.tensor) for d in certificate.differences] == [
        (K.MISSING_TENSOR, "model.layers.1.post_attention_layernorm.weight"),
        (K.EXTRA_TENSOR, "model.layers.2.post_attention_layernorm.weight"),
    ]


def test_experts_that_are_numbered_per_rank() -> None:
    model = Model(norms=True, experts=4, grouped=True)
    layouts = layouts_of(model, Grid(dp=2, ep=2))
    for expert in (2, 3):
        for layer in range(model.layers):
            for fc in (1, 2):
                to = f"decoder.layers.{layer}.mlp.experts.linear_fc{fc}.weight"
                layouts = change(layouts, f"{to}{expert}", updated(name=f"{to}{expert - 2}"), (1,))
    certificate = check(layouts, expectation_of(model), family_of(model.config, "qwen3_moe"))
    assert kinds(certificate) == {K.DUPLICATE_PART, K.MISSING_TENSOR}
    assert len([d for d in certificate.differences if d.kind is K.DUPLICATE_PART]) == 8


def test_norms_of_query_and_key_value_that_are_swapped() -> None:
    model = Model(latent=True, experts=4)
    m, h = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."
    swapped: dict[str, Kind] = {
        f"{m}q_layernorm.weight": Rename(f"{h}kv_a_layernorm.weight"),
        f"{m}kv_layernorm.weight": Rename(f"{h}q_a_layernorm.weight"),
    }
    family = with_rules(swapped, "deepseek_v3", model)
    certificate = check(layouts_of(model, Grid()), expectation_of(model), family)
    assert kinds(certificate) == {K.WRONG_SHAPE}
    assert len(certificate.differences) == 2 * model.layers


# ------------------------------------------------------------------------ the message


def test_a_refusal_lists_every_difference() -> None:
    layouts = change(layouts_of(MODEL, GRID), NORM, lambda _: None)
    certificate = check(change(layouts, FC1, updated(owned=False), (1, 3)))
    with pytest.raises(CoverageError) as caught:
        certificate.require()
    assert "does not hold, 2 differences" in str(caught.value)
    for difference in certificate.differences:
        assert str(difference) in str(caught.value)
        assert str(difference) in certificate.render()
    assert "REFUSED: 2 differences" in certificate.render()
    assert "nothing was written" in caught.value.next_step


def test_very_many_differences_share_lines() -> None:
    model = Model(norms=True, experts=100)
    certificate = check([], expectation_of(model), family_of(model.config, "qwen3_moe"))
    assert len(certificate.differences) > 600
    with pytest.raises(CoverageError) as caught:
        certificate.require()
    message = str(caught.value)
    assert len(message) < 4096
    assert ("missing HF tensor: model.layers.0.mlp.experts.0.down_proj.weight" in message) is True
    assert "199 more of the form model.layers.#.mlp.experts.#.down_proj.weight" in message
    assert "the last model.layers.1.mlp.experts.99.down_proj.weight" in message
    assert len(certificate.render().splitlines()) == 1 + len(certificate.differences)


def test_no_layouts_at_all() -> None:
    certificate = check([])
    assert kinds(certificate) == {K.MISSING_TENSOR}
    assert certificate.producers == 0


def test_ranks_are_told_as_ranges() -> None:
    text = str(Difference(K.MISSING_PART, "x", (0, 1, 2, 3, 8, 10, 11), "why"))
    assert text == "missing part: x: why (rank 0-3, 8, 10-11)"
