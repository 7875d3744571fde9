"""Layouts of 40 dumps of real ranks: names, parts, owners and bytes."""

import hashlib
from collections import defaultdict
from dataclasses import replace

import pytest
from support.megatron_fixtures import (
    FixtureGroup,
    chunk_records,
    fixture_groups,
    group_named,
    layouts_of,
    local_bytes,
    rank_record,
    sizes_of,
)
from weightbus.producers.megatron_layout import (
    ChunkRecord,
    RankRecord,
    TensorRecord,
    build_layout,
)
from weightbus.producers.megatron_partition import ModelSizes
from weightbus.producers.ownership import ParallelSizes
from weightbus.schemas.errors import ConfigError, LayoutError, UnknownPartitionError
from weightbus.schemas.layout import Layout, ParallelRank, Part

SIZES = ModelSizes(hidden=8, heads=2, kv_groups=1, head_dim=4, ffn=16)
ONE = RankRecord(ParallelRank(rank=0), ParallelSizes())
each_group = pytest.mark.parametrize("group", fixture_groups(), ids=lambda group: group.name)


def test_all_layouts_are_there() -> None:
    assert len(fixture_groups()) == 40


@each_group
def test_names_and_parts_are_those_of_the_ranks(group: FixtureGroup) -> None:
    for dump, layout in zip(group.ranks, layouts_of(group), strict=True):
        recorded = [param for chunk in dump["chunks"] for param in chunk["params"]]
        held = [tensor for tensor in layout.tensors if "expert_bias" not in tensor.name]
        assert len(held) == len(recorded)
        by_name = {(tensor.name, tensor.local_name): tensor for tensor in held}
        for param in recorded:
            tensor = by_name[param["global_name"], param["name"]]
            kind, dim, world = param["rule"]
            assert tensor.shape == tuple(param["shape"])
            assert tensor.part.count == (1 if kind == "rep" else world)
            assert tensor.part.count == 1 or tensor.part.dim == dim
            assert len(tensor.part.blocks) == (2 if kind == "glu" else 0)
            tied_head = group.tied and tensor.name == "output_layer.weight"
            if not tied_head:  # its value is the embedding's
                assert hashlib.sha256(local_bytes(tensor)).hexdigest() == param["sha256"]


@each_group
def test_owned_parts_cover_every_whole_once(group: FixtureGroup) -> None:
    parts: defaultdict[str, list[Part]] = defaultdict(list)
    layouts = layouts_of(group)
    for layout in layouts:
        for tensor in layout.tensors:
            if tensor.owned:
                parts[tensor.name].append(tensor.part)
    assert set(parts) == {tensor.name for layout in layouts for tensor in layout.tensors}
    for name, own in parts.items():
        assert len({(part.dim, part.count, part.blocks) for part in own}) == 1, name
        assert sorted(part.index for part in own) == list(range(own[0].count)), name


@each_group
def test_owners_share_the_bytes_of_a_stage(group: FixtureGroup) -> None:
    stages: defaultdict[int, list[Layout]] = defaultdict(list)
    for layout in layouts_of(group):
        stages[layout.producer.pp_rank].append(layout)
    for ranks in stages.values():
        largest = max(tensor.nbytes for layout in ranks for tensor in layout.tensors)
        loads = [layout.owned_bytes for layout in ranks]
        assert max(loads) - min(loads) <= largest


def test_buffers_that_count_are_held_and_counters_are_not() -> None:
    [layout] = layouts_of(group_named("0.16.1_mla_local_tp1pp1vpp0ep1etp1w1"))
    names = [tensor.name for tensor in layout.tensors]
    assert "decoder.layers.3.mlp.router.expert_bias" in names
    assert not [name for name in names if "local_tokens_per_expert" in name]


def test_the_second_embedding_of_an_mtp_stage_is_owned_by_nobody() -> None:
    group = group_named("0.19.2_mla_te_tp1pp2vpp0ep1etp1w2_grouped_mtp1")
    owners = [
        [tensor.owned for tensor in layout.tensors if "word_embeddings" in tensor.name]
        for layout in layouts_of(group)
    ]
    assert owners == [[True], [False]]


@pytest.mark.parametrize(
    ("local", "chunk"),
    [
        ("output_layer.weight", ChunkRecord((), pre_process=False, tied=True)),
        ("embedding.word_embeddings.weight", ChunkRecord((), pre_process=False)),
    ],
)
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_copy_of_the_embedding_is_a_part_of_it_that_is_not_owned(
    prefix: str, local: str, chunk: ChunkRecord
) -> None:
    record = TensorRecord(prefix + local, "F32", (8, 8))
    [tensor] = build_layout([replace(chunk, tensors=(record,))], ONE, SIZES).tensors
    assert tensor.name == prefix + "embedding.word_embeddings.weight"
    assert tensor.local_name == prefix + local
    assert not tensor.owned


def test_a_head_of_its_own_is_no_copy() -> None:
    chunk = ChunkRecord((TensorRecord("output_layer.weight", "F32", (8, 8)),), pre_process=False)
    assert build_layout([chunk], ONE, SIZES).tensors[0].owned


def test_every_unknown_partition_is_listed() -> None:
    dump = group_named("0.16.1_qwen3_local_tp2pp1vpp0ep1etp2w2").ranks[1]
    strange = ChunkRecord(
        (
            TensorRecord("decoder.layers.0.mixer.conv1d", "F32", (3, 3)),
            TensorRecord("decoder.layers.0.mlp.linear_fc2.weight", "F32", (64, 47)),
        )
    )
    chunks = [*chunk_records(dump), strange]
    with pytest.raises(UnknownPartitionError) as caught:
        build_layout(chunks, rank_record(dump, 2), sizes_of(dump))
    message = str(caught.value)
    assert "2 tensors" in message
    assert "decoder.layers.0.mixer.conv1d (3, 3): no rule knows this name" in message
    assert "linear_fc2.weight (64, 47): dim 1 has 47 elements, neither 96 nor one of 2" in message
    assert "partition_rules" in message
    assert caught.value.where == {"rank": 1}


def test_two_tensors_of_one_name_are_refused() -> None:
    chunk = ChunkRecord((TensorRecord("decoder.final_layernorm.weight", "F32", (8,)),))
    with pytest.raises(LayoutError, match=r"one global name: decoder\.final_layernorm\.weight"):
        build_layout([chunk, chunk], ONE, SIZES)


def test_grids_that_do_not_fit_are_refused() -> None:
    rank = RankRecord(ParallelRank(rank=0), ParallelSizes(tp=2, dp=2, ep=3))
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        build_layout([ChunkRecord(())], rank, SIZES)
