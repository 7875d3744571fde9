"""Which part of the whole: by name, shape and the model's sizes."""

import pytest
from weightbus.producers.megatron_partition import (
    ModelSizes,
    NoPartitionError,
    PartitionRule,
    Place,
    part_of,
)
from weightbus.schemas.layout import Part

SIZES = ModelSizes(
    hidden=64, heads=4, kv_groups=2, head_dim=32, ffn=96, moe_ffn=48, shared_ffn=40,
    q_lora=24, kv_lora=16, qk_nope=16, qk_rope=8, v_head=None, padded_vocab=256,
)  # fmt: skip
LAYER = "decoder.layers.3."
SECOND = Place(2, 1)


def _part(name: str, *shape: int, place: Place = SECOND) -> Part:
    return part_of(name, shape, SIZES, place)


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("embedding.word_embeddings.weight", (128, 64), Part(dim=0, index=1, count=2)),
        ("output_layer.weight", (128, 64), Part(dim=0, index=1, count=2)),
        (LAYER + "self_attention.linear_qkv.weight", (128, 64), Part(dim=0, index=1, count=2)),
        (LAYER + "self_attention.linear_qkv.bias", (128,), Part(dim=0, index=1, count=2)),
        (LAYER + "self_attention.linear_qkv.layer_norm_weight", (64,), Part()),
        (LAYER + "self_attention.linear_proj.weight", (64, 64), Part(dim=1, index=1, count=2)),
        (LAYER + "self_attention.q_layernorm.weight", (32,), Part()),
        (
            LAYER + "self_attention.core_attention.softmax_offset",
            (2,),
            Part(dim=0, index=1, count=2),
        ),
        (LAYER + "mlp.linear_fc1.weight", (96, 64), Part(dim=0, index=1, count=2, blocks=(96, 96))),
        (LAYER + "mlp.linear_fc1.layer_norm_weight", (64,), Part()),
        (LAYER + "mlp.linear_fc2.weight", (64, 48), Part(dim=1, index=1, count=2)),
        (LAYER + "mlp.linear_fc2.bias", (64,), Part()),
        (
            LAYER + "mlp.experts.linear_fc1.weight3",
            (48, 64),
            Part(dim=0, index=1, count=2, blocks=(48, 48)),
        ),
        (LAYER + "mlp.experts.linear_fc2.weight3", (64, 24), Part(dim=1, index=1, count=2)),
        (
            LAYER + "mlp.experts.local_experts.3.linear_fc2.weight",
            (64, 24),
            Part(dim=1, index=1, count=2),
        ),
        (
            LAYER + "mlp.shared_experts.linear_fc1.weight",
            (40, 64),
            Part(dim=0, index=1, count=2, blocks=(40, 40)),
        ),
        (LAYER + "mlp.shared_experts.gate_weight", (1, 64), Part()),
        (LAYER + "mlp.router.weight", (4, 64), Part()),
        (LAYER + "mlp.router.expert_bias", (4,), Part()),
        ("mtp.layers.0.eh_proj.weight", (32, 128), Part(dim=0, index=1, count=2)),
        ("mtp.layers.0.enorm.weight", (64,), Part()),
        ("mtp.layers.0.final_layernorm.weight", (64,), Part()),
    ],
)
def test_one_of_two_parts(name: str, shape: tuple[int, ...], part: Part) -> None:
    assert _part(name, *shape) == part


def test_mla_down_projections_are_cut_or_whole_as_their_shape_says() -> None:
    name = LAYER + "self_attention.linear_kv_down_proj.weight"
    assert _part(name, 24, 64) == Part()
    assert _part(name, 12, 64) == Part(dim=0, index=1, count=2)


def test_a_gated_projection_says_its_blocks_even_when_it_is_whole() -> None:
    part = _part(LAYER + "mlp.linear_fc1.weight", 192, 64, place=Place(1, 0))
    assert part == Part(blocks=(96, 96))


def test_an_ungated_model_has_no_halves() -> None:
    sizes = ModelSizes(hidden=64, heads=4, kv_groups=2, head_dim=32, ffn=96, gated=False)
    part = part_of(LAYER + "mlp.linear_fc1.weight", (48, 64), sizes, SECOND)
    assert part == Part(dim=0, index=1, count=2)


def test_more_tensor_parallel_ranks_than_kv_groups() -> None:
    part = part_of(LAYER + "self_attention.linear_qkv.weight", (64, 64), SIZES, Place(4, 3))
    assert part == Part(dim=0, index=3, count=4)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (LAYER + "mixer.in_proj.weight", (7, 7), "no rule knows this name, and there are 2 tensor"),
        (LAYER + "mlp.experts.weight1", (64, 7), "there are 2 expert-tensor-parallel ranks"),
        (
            LAYER + "mlp.linear_fc2.weight",
            (64, 40),
            "dim 1 has 40 elements, neither 96 nor one of 2",
        ),
        (LAYER + "mlp.linear_fc2.weight", (64,), "cut along dim 1, but the shape is"),
    ],
)
def test_what_nobody_knows_is_not_guessed(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(NoPartitionError, match=message):
        _part(name, *shape)


def test_an_unknown_name_on_one_rank_is_whole() -> None:
    assert _part(LAYER + "mixer.in_proj.weight", 7, 7, place=Place(1, 0)) == Part()


def test_rules_of_the_user_come_first() -> None:
    rule = PartitionRule(r"\.mixer\.in_proj\.weight$", 0, lambda _: 14)
    part = part_of(LAYER + "mixer.in_proj.weight", (7, 7), SIZES, SECOND, [rule])
    assert part == Part(dim=0, index=1, count=2)
