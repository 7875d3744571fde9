"""What cannot be done right is refused by name: by the certificate, before a byte."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.conversion_executor import shard_files
from support.conversion_megatron import local_bytes
from weightbus.schemas.errors import CoverageError, OriginError
from weightbus.schemas.layout import Layout, LocalTensor
from weightbus.writers.certificate import Certificate, certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation, Place
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_differences import DifferenceKind
from weightbus.writers.plan_survey import survey

CONFIG: dict[str, Any] = {
    "hidden_size": 40, "intermediate_size": 28, "head_dim": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50, "num_experts": 4,
    "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "index_head_dim": 14,
    "index_n_heads": 5, "first_k_dense_replace": 1, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip


def layouts_of(name: str, text: str = "vocab_multiple=4") -> list[Layout]:
    return described_layouts(Parallel.parse(text), {**CONFIG, "model_type": name}, name)


def expectation_of(name: str, **more: tuple[int, ...]) -> Expectation:
    found = survey(layouts_of(name), Expectation.of({}), family_of(CONFIG, name))
    tensors = {key: (spec.dtype, spec.shape) for key, spec in found.targets.items()}
    extra = {key.replace("__", "."): ("BF16", shape) for key, shape in more.items()}
    places = {key: Place("base.safetensors", 64) for key in (*tensors, *extra)}
    return Expectation.of({**tensors, **extra}, places)  # pyright: ignore[reportArgumentType] - a literal dtype


def with_tensors(layout: Layout, *tensors: LocalTensor, without: str = "-") -> Layout:
    kept = tuple(t for t in layout.tensors if without not in t.name)
    return layout.model_copy(update={"tensors": (*kept, *tensors)})


def one(name: str, *shape: int, **fields: Any) -> LocalTensor:
    return LocalTensor(name=name, dtype=fields.get("dtype", "BF16"), shape=shape)


def refused(found: Certificate, kind: DifferenceKind) -> list[str]:
    assert not found.ok
    return [str(difference) for difference in found.differences if difference.kind is kind]


def test_megatrons_own_linear_attention_names_its_output_norm() -> None:
    (layout,) = layouts_of("qwen3_5")
    own = "decoder.layers.0.self_attention."
    native = with_tensors(
        layout,
        one(f"{own}in_proj.layer_norm_weight", 40), one(f"{own}in_proj.weight", 144, 40),
        one(f"{own}conv1d.weight", 80, 1, 4), one(f"{own}A_log", 4), one(f"{own}dt_bias", 4),
        one(f"{own}out_norm.weight", 14), one(f"{own}out_proj.weight", 40, 56),
        without="layers.0.self_attention",
    )  # fmt: skip
    found = certify([native], expectation_of("qwen3_5"), family_of(CONFIG, "qwen3_5"))
    (text,) = refused(found, DifferenceKind.RULE_REFUSED)
    assert "out_norm.weight" in text
    assert "centred on zero" in text
    # Everything else of the layer has its rule.
    others = [d for d in found.differences if d.kind is not DifferenceKind.RULE_REFUSED]
    assert [d.tensor for d in others] == ["model.layers.0.linear_attn.norm.weight"]


def test_megatron_cores_own_indexer_is_refused_by_name() -> None:
    (layout,) = layouts_of("deepseek_v32")
    name = "decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"
    changed = with_tensors(layout, one(name, 14, 40), without="layers.0.self_attention.wk.")
    expected = expectation_of("deepseek_v32")
    found = certify([changed], expected, family_of(CONFIG, "deepseek_v32"))
    (text,) = refused(found, DifferenceKind.RULE_REFUSED)
    assert name in text
    assert "last in 0.16 and first in later releases" in text


def test_a_router_bias_in_bf16_is_refused() -> None:
    (layout,) = layouts_of("deepseek_v3")
    name = "decoder.layers.1.mlp.router.expert_bias"
    changed = with_tensors(layout, one(name, 4), without="expert_bias")
    expected = expectation_of("deepseek_v3")
    found = certify([changed], expected, family_of(CONFIG, "deepseek_v3"))
    (text,) = refused(found, DifferenceKind.WRONG_DTYPE)
    assert "its rule knows F32 only" in text


def test_a_vision_tower_is_an_unknown_name() -> None:
    (layout,) = layouts_of("qwen3_vl")
    name = "vision_model.decoder.layers.0.mlp.linear_fc1.weight"
    changed = with_tensors(layout, one(name, 4, 3))
    found = certify([changed], expectation_of("qwen3_vl"), family_of(CONFIG, "qwen3_vl"))
    (text,) = refused(found, DifferenceKind.UNKNOWN_PARAMETER)
    assert name in text


def test_two_mtp_layers_cannot_share_one_projection() -> None:
    layouts = layouts_of("qwen3_5", "vocab_multiple=4,mtp_layers=2")
    one_layer = layouts_of("qwen3_5", "vocab_multiple=4,mtp_layers=1")
    names = survey(one_layer, Expectation.of({}), family_of(CONFIG, "qwen3_5")).targets
    expected = Expectation.of(dict.fromkeys(names, (None, None)))
    found = certify(layouts, expected, family_of(CONFIG, "qwen3_5"))
    assert any("mtp.fc.weight" in text for text in refused(found, DifferenceKind.TARGET_OVERLAP))


def test_tensors_without_elements_are_refused() -> None:
    (layout,) = layouts_of("qwen3")
    changed = with_tensors(layout, one("decoder.final_layernorm.weight", 0), without="final_")
    found = certify([changed], expectation_of("qwen3"), family_of(CONFIG, "qwen3"))
    (text,) = refused(found, DifferenceKind.EMPTY_TENSOR)
    assert "shape [0] has no elements" in text


def test_copies_stand_in_the_plan_and_in_its_digest() -> None:
    layouts = layouts_of("qwen3", "tp=2,vocab_multiple=4")
    expected = expectation_of("qwen3", model__visual__w=(3, 5), mtp__norm__weight=(7,))
    family = family_of(CONFIG, "qwen3")
    with pytest.raises(CoverageError, match=r"missing HF tensor: mtp\.norm\.weight"):
        build_plan(layouts, expected, family, writers=1)
    plans = {
        policy: build_plan(layouts, expected, family, writers=2, missing=policy)
        for policy in ("copy", "omit")
    }
    copies = plans["copy"].copies
    assert {plans["copy"].targets[c.target].name for c in copies} == {
        "model.visual.w", "mtp.norm.weight",
    }  # fmt: skip
    assert {(copy.file, copy.offset) for copy in copies} == {("base.safetensors", 64)}
    for copy in copies:
        target = plans["copy"].targets[copy.target]
        assert (target.sources, target.streamed) == ((), True)
        assert plans["copy"].groups[target.group].sources == ()
    assert plans["omit"].copies == ()
    assert plans["copy"].digest != plans["omit"].digest
    moved = Expectation.of(
        dict(expected.tensors), {key: Place("other.safetensors", 64) for key in expected.places}
    )
    other = build_plan(layouts, moved, family, writers=2, missing="copy")
    assert other.digest != plans["copy"].digest
    without = expectation_of("qwen3")
    digests = {
        build_plan(layouts, without, family, writers=1, missing=policy).digest
        for policy in ("refuse", "copy", "omit")
    }
    assert len(digests) == 3


def test_all_other_bytes_of_a_plan_with_copies_come_from_sources() -> None:
    layouts = layouts_of("qwen3", "tp=2,vocab_multiple=4")
    expected = expectation_of("qwen3", model__visual__w=(3, 5))
    plan = build_plan(layouts, expected, family_of(CONFIG, "qwen3"), writers=1, missing="copy")

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return np.full(shape, len(name), np.uint16)

    with pytest.raises(AssertionError, match="not written exactly once"):
        shard_files(plan, lambda source: local_bytes(source, layouts, value))
    (copy,) = plan.copies
    target = plan.targets[copy.target]
    header = json.loads(plan.shards[target.shard].header[8:])
    begin, end = header[target.name]["data_offsets"]
    assert end - begin == target.nbytes == 30


@pytest.mark.parametrize(
    ("without", "name", "why"),
    [
        ("layers.1.input_layernorm", "model.layers.1.input_layernorm.weight", "rest of its layer"),
        ("linear_kv_down", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", "rest of its"),
        ("final_layernorm", "model.norm.weight", "every layer needs it"),
        ("output_layer", "lm_head.weight", "every layer needs it"),
        ("word_embeddings", "model.embed_tokens.weight", "every layer needs it"),
    ],
)
def test_a_copy_beside_trained_tensors_is_stale(without: str, name: str, why: str) -> None:
    (layout,) = layouts_of("deepseek_v3", "spec=local,vocab_multiple=4")
    changed = with_tensors(layout, without=without)
    expected = expectation_of("deepseek_v3")
    family = family_of(CONFIG, "deepseek_v3")
    found = certify([changed], expected, family, missing="copy")
    texts = refused(found, DifferenceKind.STALE_COPY)
    assert any(name in text and why in text for text in texts)


def test_an_index_alone_can_promise_copies_and_not_plan_them() -> None:
    layouts = layouts_of("qwen3")
    names = [*expectation_of("qwen3").tensors, "mtp.norm.weight"]
    expected = Expectation.of(dict.fromkeys(names, (None, None)))
    found = certify(layouts, expected, family_of(CONFIG, "qwen3"), missing="copy")
    assert found.ok
    assert found.copied == 0
    assert "whose files are not there" in found.render()
    with pytest.raises(OriginError, match="a plan needs the origin's headers"):
        build_plan(layouts, expected, family_of(CONFIG, "qwen3"), writers=1, missing="copy")
