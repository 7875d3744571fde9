"""The way back from the same rules: as the hand-written one, and there and back without a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conversion_executor import shard_files
from support.conversion_hypothesis import UNHURRIED
from support.conversion_rehearsal import differing_tensors, expected_of
from support.conversion_wholes import GARBAGE, Inverse
from weightbus.schemas.errors import ConversionError, UnknownParameterError
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank, Part
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.inverse import local_items, local_tensors
from weightbus.writers.described import Parallel, described_layouts
from weightbus.writers.expectation import Expectation
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_survey import survey
from weightbus.writers.plan_types import Plan

Array = npt.NDArray[Any]
BRIEF = settings(UNHURRIED, max_examples=8)


def files_of(plan: Plan, held: dict[tuple[int, int], Array]) -> dict[str, bytes]:
    return shard_files(plan, lambda source: held[source.key].tobytes())


FAMILIES = (
    "llama", "qwen2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4", "glm4_moe", "deepseek_v3",
    "glm_moe_dsa", "minimax_m2", "gpt_oss", "mimo",
)  # fmt: skip
"""One per set of rules; the others share theirs."""
WITH_MTP = ("qwen3_5", "glm4_moe", "deepseek_v3", "glm_moe_dsa", "mimo", "qwen3_next")


@st.composite
def configs(draw: st.DrawFn) -> dict[str, object]:
    """A config of every family at once, with sizes of which no two are equal."""
    sizes = iter(draw(st.permutations([4 * n for n in range(1, 16)])))
    groups = draw(st.sampled_from([1, 2, 3]))
    heads = 4 * groups
    key_heads = draw(st.integers(1, 3))
    rope = next(sizes)
    return {
        "hidden_size": next(sizes), "intermediate_size": next(sizes), "head_dim": next(sizes),
        "moe_intermediate_size": next(sizes), "shared_expert_intermediate_size": next(sizes),
        "num_hidden_layers": draw(st.integers(1, 3)), "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": draw(st.integers(30, 60)),
        "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "n_shared_experts": 2,
        "q_lora_rank": next(sizes), "kv_lora_rank": next(sizes), "qk_rope_head_dim": rope,
        "qk_nope_head_dim": next(sizes), "v_head_dim": next(sizes),
        "index_head_dim": rope + draw(st.integers(1, 9)), "index_n_heads": draw(st.integers(1, 3)),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        "linear_key_head_dim": draw(st.integers(2, 5)),
        "linear_value_head_dim": draw(st.integers(6, 9)), "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2, "first_k_dense_replace": 1, "attention_bias": True,
        "use_qk_norm": True, "tie_word_embeddings": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def layouts_text(draw: st.DrawFn) -> Parallel:
    ep, etp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1)]))
    return Parallel(
        tp=draw(st.sampled_from([1, 2, 4])), pp=draw(st.integers(1, 3)),
        vpp=draw(st.integers(1, 2)), ep=ep, etp=etp, spec=draw(st.sampled_from(["te", "local"])),
        grouped=draw(st.booleans()), vocab_multiple=4, dtype="F32",
    )  # fmt: skip


def random_weights(layouts: list[Layout], config: dict[str, object], name: str) -> dict[str, Array]:
    """A checkpoint of the names and shapes that the rules lead to, without optional copies."""
    found = survey(layouts, Expectation.of({}), family_of(config, name))
    rng = np.random.default_rng(3)
    return {
        target: rng.standard_normal(spec.shape).astype(np.float32)
        for target, spec in sorted(found.targets.items())
    }


@pytest.mark.parametrize("name", FAMILIES)
@BRIEF
@given(config=configs(), parallel=layouts_text())
def test_there_and_back_for_any_dims_and_layout(
    name: str, config: dict[str, object], parallel: Parallel
) -> None:
    dense = name in ("llama", "qwen3_5", "glm4", "mimo")
    update: dict[str, object] = {"mtp_layers": 1 if name in WITH_MTP else 0}
    if dense:
        update |= {"ep": 1, "etp": 1}
    parallel = parallel.model_copy(update=update)
    config = {**config, "model_type": name}
    layouts = described_layouts(parallel, config, name)
    weights = random_weights(layouts, config, name)
    expectation = expected_of(weights)
    family = family_of(config, name).fitted(weights)
    held = {
        (local.rank, local.number): local.items
        for layout in layouts
        for local in local_tensors(layout, weights.__getitem__, family)
    }
    plan = build_plan(layouts, expectation, family_of(config, name), writers=2)
    for layout in layouts:
        for index, tensor in enumerate(layout.tensors):
            assert held[layout.producer.rank, index].shape == tensor.shape
    assert differing_tensors(files_of(plan, held), weights) == []
    # Replicas get the same bytes.
    by_part: dict[tuple[str, int], Array] = {}
    for layout in layouts:
        for index, tensor in enumerate(layout.tensors):
            items = held[layout.producer.rank, index]
            first = by_part.setdefault((tensor.name, tensor.part.index), items)
            assert np.array_equal(first, items)


HAND_WRITTEN = {"qwen3_next": 0, "qwen3_5": 1, "glm4_moe": 1, "glm_moe_dsa": 1, "minimax_m2": 0,
                "gpt_oss": 0, "mimo": 1, "glm4": 0, "qwen2_moe": 0}  # fmt: skip


@pytest.mark.parametrize("name", HAND_WRITTEN)
@BRIEF
@given(config=configs(), spec=st.sampled_from(["te", "local"]), grouped=st.booleans())
def test_wholes_are_those_of_the_hand_written_way_back(
    name: str, config: dict[str, object], spec: str, grouped: bool
) -> None:
    config = {**config, "model_type": name}
    text = f"spec={spec},grouped={int(grouped)},vocab_multiple=64,dtype=F32"
    parallel = Parallel.parse(f"{text},mtp_layers={HAND_WRITTEN[name]}")
    layout = described_layouts(parallel, config, name)[0]
    weights = random_weights([layout], config, name)
    family = family_of(config, name).fitted(weights)
    inverse = Inverse(weights, config, name, spec == "te", grouped, 64)
    wanted = inverse.wholes(HAND_WRITTEN[name])
    found = {
        local.tensor.name: local.items.view(np.float32)
        for local in local_tensors(layout, weights.__getitem__, family)
    }
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        # Padding is garbage in the tests' wholes and zeros in ours.
        plain = np.where(value == GARBAGE, 0, value).astype(np.float32)
        assert np.array_equal(found[tensor], plain), tensor


def one(name: str, *shape: int, index: int = 0, count: int = 1) -> LocalTensor:
    part = Part(index=index, count=count)
    return LocalTensor(name=name, dtype="F32", shape=shape, part=part)


def test_a_tied_head_is_the_embedding_and_padding_is_zeros() -> None:
    family = family_of({"model_type": "qwen3", "vocab_size": 5, "tie_word_embeddings": True})
    embedding = np.arange(1, 16, dtype=np.float32).reshape(5, 3)
    for name in ("output_layer.weight", "language_model.embedding.word_embeddings.weight"):
        tensor = one(name, 4, 3, index=1, count=2)
        items = local_items(tensor, {"model.embed_tokens.weight": embedding}.__getitem__, family)
        wanted = np.concatenate([embedding[4:], np.zeros((3, 3), np.float32)])
        assert np.array_equal(items.view(np.float32), wanted)


def test_all_unknown_names_are_told_at_once() -> None:
    layout = Layout(
        naming="megatron", producer=ParallelRank(rank=3), tensors=(one("a.b", 3), one("c.d", 3))
    )
    with pytest.raises(UnknownParameterError, match=r"2 parameters .*: a\.b, c\.d.*rank=3"):
        list(local_tensors(layout, {}.__getitem__, family_of({"model_type": "qwen3"})))
    with pytest.raises(UnknownParameterError, match=r"no rule for a\.b"):
        local_items(one("a.b", 3), {}.__getitem__, family_of({"model_type": "qwen3"}))


def test_checkpoints_that_do_not_fit() -> None:
    family = family_of({"model_type": "qwen3"})
    tensor = one("decoder.final_layernorm.weight", 3)
    with pytest.raises(ConversionError, match=r"no tensor model\.norm\.weight"):
        local_items(tensor, {}.__getitem__, family)
    for other in (np.zeros(4, np.float32), np.zeros(3, np.float16)):
        with pytest.raises(ConversionError, match=r"model\.norm\.weight has shape"):
            local_items(tensor, {"model.norm.weight": other}.__getitem__, family)
