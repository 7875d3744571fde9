"""Plans: right bytes for any dims and parallel layout, the same in every writer."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversion_executor import differing, execute
from support.conversion_hypothesis import UNHURRIED
from support.conversion_megatron import (
    Grid,
    Model,
    expectation_of,
    layouts_of,
    local_bytes,
    wanted_of,
)
from weightbus.schemas.errors import CoverageError, UnknownParameterError
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank
from weightbus.schemas.safetensors_format import build_header
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.family import Family
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import FORMAT, build_plan
from weightbus.writers.plan_types import Plan

QWEN3 = Model(norms=True, te=True)
MLA = Model(latent=True, experts=4, dense_layers=1, mtp="transformer_layer")


def family(model: Model, name: str = "") -> Family:
    default = "deepseek_v3" if model.latent else "qwen3_moe" if model.experts else "qwen3"
    return family_of(model.config, name if name else default)


def plan_of(model: Model, grid: Grid, *, writers: int = 2, shard: int = 1 << 14) -> Plan:
    return build_plan(
        layouts_of(model, grid), expectation_of(model), family(model), writers=writers,
        max_shard_bytes=shard,
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> tuple[str, Model, Grid]:
    """A family, a model of dims that are never square, a parallel layout that fits them."""
    name = draw(st.sampled_from(("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")))
    tp = draw(st.sampled_from((1, 2, 4)))
    dp = draw(st.sampled_from((1, 2)))
    layers = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    per_group = draw(st.integers(1, 3))
    experts = 4 if name in ("qwen3_moe", "deepseek_v3") else 0
    model = Model(
        hidden=draw(st.sampled_from((5, 7, 9))), layers=layers, groups=groups,
        heads=groups * per_group, head_dim=4 * draw(st.integers(1, 2)),
        ffn=4 * draw(st.integers(4, 6)), expert_ffn=draw(st.integers(10, 13)),
        vocab=draw(st.integers(17, 20)), padded_vocab=20, experts=experts,
        dense_layers=draw(st.integers(0, 1)), bias=name == "qwen2",
        norms=name in ("qwen3", "qwen3_moe"), latent=name == "deepseek_v3",
        tied=draw(st.booleans()) and name != "deepseek_v3",
        q_lora=draw(st.booleans()), te=draw(st.booleans()), grouped=draw(st.booleans()),
        mtp=draw(st.sampled_from(("", "transformer_layer", "mtp_model_layer")))
        if name == "deepseek_v3" else "",
    )  # fmt: skip
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if (tp * dp) % n == 0]))
    return name, model, Grid(tp=tp, pp=draw(st.integers(1, layers)), dp=dp, ep=ep)


@settings(UNHURRIED, max_examples=60)
@given(models(), st.integers(1, 3))
def test_bytes_of_any_model_on_any_layout(case: tuple[str, Model, Grid], writers: int) -> None:
    name, model, grid = case
    layouts = layouts_of(model, grid)
    plan = build_plan(
        layouts, expectation_of(model), family(model, name), writers=writers,
        max_shard_bytes=1 << 12,
    )  # fmt: skip
    found = execute(plan, lambda source: local_bytes(source, layouts))
    assert differing(found, wanted_of(model)) == []


def test_kv_groups_fewer_than_tp_ranks() -> None:
    model = dataclasses.replace(QWEN3, groups=2, heads=4, head_dim=6)
    layouts = layouts_of(model, Grid(tp=4))
    plan = build_plan(layouts, expectation_of(model), family(model), writers=1)
    found = execute(plan, lambda source: local_bytes(source, layouts))
    assert differing(found, wanted_of(model)) == []


def test_the_order_of_layouts_does_not_matter() -> None:
    layouts = layouts_of(MLA, Grid(tp=2, pp=2, dp=2, ep=2))
    shuffled = random.Random(7).sample(layouts, len(layouts))
    first, second = (
        build_plan(given_layouts, expectation_of(MLA), family(MLA), writers=3)
        for given_layouts in (layouts, shuffled)
    )
    assert first == second


def test_the_digest_tells_plans_apart() -> None:
    base = plan_of(QWEN3, Grid(tp=2))
    others = [
        plan_of(QWEN3, Grid(tp=4)),
        plan_of(QWEN3, Grid(tp=2), writers=3),
        plan_of(QWEN3, Grid(tp=2), shard=1 << 20),
        plan_of(dataclasses.replace(QWEN3, vocab=36), Grid(tp=2)),
        plan_of(dataclasses.replace(QWEN3, te=False), Grid(tp=2)),
    ]
    assert len({plan.digest for plan in (base, *others)}) == 6
    assert base.digest == plan_of(QWEN3, Grid(tp=2)).digest
    assert base.digest.startswith("xxh3-128:")


def test_the_digest_of_a_known_plan_stays() -> None:
    # Writers of two releases must not disagree: whoever changes this changes plan.FORMAT as well.
    assert FORMAT == "weightbus-plan-2"
    assert (
        plan_of(MLA, Grid(tp=2, pp=2, dp=2, ep=2)).digest
        == "xxh3-128:16f4c4c7fc5f3aff55e7c64419895856"
    )


def test_indices_and_offsets_fit_together() -> None:
    plan = plan_of(MLA, Grid(tp=2, pp=2), writers=3)
    assert plan.writers == 3
    assert plan.total_size == sum(target.nbytes for target in plan.targets)
    for shard in plan.shards:
        tensors = [plan.targets[number] for number in shard.targets]
        assert shard.writer == shard.index % 3
        assert shard.file == f"model-{shard.index + 1:05d}-of-{len(plan.shards):05d}.safetensors"
        assert shard.header == build_header(
            [(t.name, t.dtype, t.shape) for t in tensors], {"format": "pt"}
        )
        at = len(shard.header)
        for tensor in tensors:
            assert (tensor.shard, tensor.offset) == (shard.index, at)
            at += tensor.nbytes
        assert shard.nbytes == at
    assert [s for w in range(3) for s in plan.shards_of(w)] == sorted(
        plan.shards, key=lambda shard: (shard.writer, shard.index)
    )
    numbers = sorted(number for shard in plan.shards for number in shard.targets)
    assert numbers == list(range(len(plan.targets)))


def test_sources_targets_and_groups_name_each_other() -> None:
    plan = plan_of(MLA, Grid(tp=2, pp=2, dp=2, ep=2))
    feeding: dict[int, set[tuple[int, int]]] = {}
    for key, source in plan.sources.items():
        assert source.key == key
        for piece in source.pieces:
            feeding.setdefault(piece.target, set()).add(key)
            assert plan.targets[piece.target].shard == source.shard
    for number, target in enumerate(plan.targets):
        assert set(target.sources) == feeding[number]
        assert target.sources == tuple(sorted(target.sources))
        assert number in plan.groups[target.group].targets
        runs = [
            piece.is_run
            for key in target.sources
            for piece in plan.sources[key].pieces
            if piece.target == number
        ]
        assert target.streamed == all(runs)
    for group in plan.groups:
        assert set(group.sources) == {
            key for number in group.targets for key in plan.targets[number].sources
        }
        assert len({plan.targets[number].shard for number in group.targets}) == 1


def test_only_row_parallel_targets_are_not_streamed() -> None:
    plan = plan_of(MLA, Grid(tp=2))
    strided = {target.name.split(".", 3)[-1] for target in plan.targets if not target.streamed}
    assert strided == {
        "self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight",
    }  # fmt: skip


def test_the_declared_pair_is_one_group_on_different_stages_too() -> None:
    plan = plan_of(MLA, Grid(tp=2, pp=2, dp=2))
    groups = {target.name: target.group for target in plan.targets}
    for layer in range(MLA.layers + 1):
        to = f"model.layers.{layer}.self_attn."
        assert groups[f"{to}q_a_proj.weight"] == groups[f"{to}kv_a_proj_with_mqa.weight"]
        assert groups[f"{to}q_a_proj.weight"] != groups[f"{to}q_b_proj.weight"]
    pair = plan.groups[groups["model.layers.0.self_attn.q_a_proj.weight"]]
    assert pair.name == "model.layers.0.self_attn.kv_a_proj_with_mqa.weight and 1 more"
    assert len(pair.targets) == 2


def test_targets_of_one_source_are_one_group() -> None:
    plan = plan_of(QWEN3, Grid())
    groups = {target.name: target.group for target in plan.targets}
    to = "model.layers.0."
    assert len({groups[f"{to}self_attn.{p}_proj.weight"] for p in "qkv"}) == 1
    assert groups[f"{to}mlp.gate_proj.weight"] == groups[f"{to}mlp.up_proj.weight"]
    assert groups[f"{to}mlp.gate_proj.weight"] != groups[f"{to}mlp.down_proj.weight"]


def test_a_tied_copy_is_never_read() -> None:
    model = dataclasses.replace(QWEN3, tied=True)
    plan = plan_of(model, Grid(pp=2))
    dropped = [source for source in plan.sources.values() if source.shard is None]
    assert [source.name for source in dropped] == ["output_layer.weight"]
    assert dropped[0].pieces == ()
    assert "lm_head.weight" not in {target.name for target in plan.targets}


def test_hugging_face_names_pass_and_keep_their_pairs() -> None:
    tensors = {
        "model.layers.0.self_attn.q_a_proj.weight": (3, 5),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (4, 5),
        "model.vision.conv.weight": (2, 3, 4, 5),
    }
    layout = Layout(
        naming="hf",
        producer=ParallelRank(rank=0),
        tensors=tuple(
            LocalTensor(name=name, dtype="BF16", shape=shape) for name, shape in tensors.items()
        ),
    )
    expected = Expectation.of({name: ("BF16", shape) for name, shape in tensors.items()})
    plan = build_plan([layout], expected, family(MLA), writers=2)
    assert {target.name: target.shape for target in plan.targets} == tensors
    assert [len(group.targets) for group in plan.groups] == [2, 1]
    assert all(piece.is_run for source in plan.sources.values() for piece in source.pieces)


def test_a_plan_without_a_certificate_is_refused() -> None:
    layouts = layouts_of(QWEN3, Grid(tp=2))[:1]
    with pytest.raises(CoverageError, match="nobody publishes part 1 of 2"):
        build_plan(layouts, expectation_of(QWEN3), family(QWEN3), writers=1)


def test_a_plan_with_unknown_names_is_refused() -> None:
    model = dataclasses.replace(QWEN3, bias=False)
    unknown = LocalTensor(name="decoder.layers.0.mlp.gizmo.weight", dtype="F32", shape=(3,))
    layouts = layouts_of(model, Grid())
    layout = layouts[0].model_copy(update={"tensors": (*layouts[0].tensors, unknown)})
    with pytest.raises(UnknownParameterError, match=r"decoder\.layers\.0\.mlp\.gizmo\.weight"):
        build_plan([layout], expectation_of(model), family(model), writers=1)
