"""The catalogue, and that each family's names are those of transformers' own saved models."""

from __future__ import annotations

import dataclasses
import re

import pytest
from support.conversion_executor import differing, execute
from support.conversion_megatron import Grid, Model, layouts_of, local_bytes, wanted_of
from support.conversion_models import (
    FAMILIES,
    LAYERS,
    Origin,
    origin_of,
    with_mtp,
    with_mtp_copies,
)
from weightbus.schemas.errors import ConfigError, CoverageError, OriginError, UnknownFamilyError
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank
from weightbus.writers.certificate import certify
from weightbus.writers.conversion.catalogue import family_for, family_of, tables
from weightbus.writers.conversion.family import Family, Rule, Table
from weightbus.writers.conversion.kinds import Rename
from weightbus.writers.expectation import Expectation, Expected
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_differences import DifferenceKind

GQA = Model(
    hidden=64, layers=LAYERS, heads=4, groups=2, head_dim=32, ffn=96, vocab=250, padded_vocab=256
)
MLA = dataclasses.replace(
    GQA, latent=True, experts=4, expert_ffn=48, dense_layers=1, groups=4
)  # fmt: skip
MODELS = {
    "llama": GQA,
    "qwen2": dataclasses.replace(GQA, bias=True, head_dim=16),
    "qwen3": dataclasses.replace(GQA, norms=True),
    "qwen3_moe": dataclasses.replace(GQA, norms=True, experts=4, expert_ffn=48),
}


def names_and_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: raw.shape for name, raw in wanted_of(model).items()}


def test_the_catalogue_has_the_families() -> None:
    assert set(FAMILIES) <= set(tables())
    for name in FAMILIES:
        assert family_of({"model_type": name}).name == name
        assert family_of({"model_type": "something else"}, name).name == name


@pytest.mark.parametrize(
    ("config", "name", "asked"),
    [
        ({"model_type": "gpt2"}, "", "model_type 'gpt2'"),
        ({}, "", "model_type None"),
        ({"model_type": "qwen3"}, "qwen33", "family 'qwen33'"),
    ],
)
def test_unknown_families_are_told_with_all_known_ones(
    config: dict[str, object], name: str, asked: str
) -> None:
    with pytest.raises(UnknownFamilyError, match=re.escape(asked)) as caught:
        family_of(config, name)
    assert all(known in str(caught.value) for known in FAMILIES)


@pytest.mark.parametrize("te", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_names_of_both_megatron_namings_become_those_of_transformers(
    family: str, tied: bool, te: bool
) -> None:
    model = dataclasses.replace(MODELS[family], tied=tied, te=te, grouped=te)
    origin = origin_of(family, tied=tied)
    assert origin.config["tie_word_embeddings"] is tied
    layouts = layouts_of(model, Grid(tp=2, pp=2))
    plan = build_plan(layouts, origin.expectation, family_of(origin.config), writers=2)
    found = execute(plan, lambda source: local_bytes(source, layouts))
    assert differing(found, wanted_of(model)) == []


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("q_lora", [True, False])
def test_latent_attention_with_and_without_a_latent_query(family: str, q_lora: bool) -> None:
    origin = origin_of(family, q_lora=q_lora)
    names = set(names_and_shapes(dataclasses.replace(MLA, q_lora=q_lora)))
    assert names == set(origin.expectation.tensors)
    assert (f"model.layers.{LAYERS - 1}.self_attn.q_proj.weight" in names) == (not q_lora)
    config = {**origin.config, **MLA.config}
    model = dataclasses.replace(MLA, q_lora=q_lora)
    for te in (False, True):
        layouts = layouts_of(dataclasses.replace(model, te=te), Grid(tp=2, ep=2))
        found = certify(layouts, origin.expectation, family_of(config, family))
        assert {d.kind for d in found.differences} <= {DifferenceKind.WRONG_SHAPE}


def mtp_origin(family: str) -> Origin:
    """An origin with the dims of MLA, one MTP layer and its copies; names from transformers."""
    origin = with_mtp_copies(with_mtp(origin_of(family)))
    shapes = names_and_shapes(dataclasses.replace(MLA, mtp="transformer_layer"))
    mtp = f"model.layers.{LAYERS}."
    shapes[f"{mtp}embed_tokens.weight"] = shapes["model.embed_tokens.weight"]
    shapes[f"{mtp}shared_head.head.weight"] = shapes["lm_head.weight"]
    assert set(shapes) == set(origin.expectation.tensors)
    expected = {
        name: Expected(spec.dtype, shapes[name])
        for name, spec in origin.expectation.tensors.items()
    }
    return Origin({**origin.config, **MLA.config}, Expectation.of(expected))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("child", ["transformer_layer", "mtp_model_layer"])
def test_mtp_layers_with_copies_of_embedding_and_head(family: str, child: str) -> None:
    origin = mtp_origin(family)
    model = dataclasses.replace(MLA, mtp=child)
    layouts = layouts_of(model, Grid(tp=2, pp=2))
    plan = build_plan(layouts, origin.expectation, family_of(origin.config, family), writers=2)
    found = execute(plan, lambda source: local_bytes(source, layouts))
    wanted = wanted_of(model)
    mtp = f"model.layers.{LAYERS}."
    wanted[f"{mtp}embed_tokens.weight"] = wanted["model.embed_tokens.weight"]
    wanted[f"{mtp}shared_head.head.weight"] = wanted["lm_head.weight"]
    assert differing(found, wanted) == []


def test_nearest_names_are_patterns_of_the_family() -> None:
    family = family_of({"model_type": "qwen3"})
    assert family.nearest("decoder.layers.11.mlp.linear_fc3.weight")[0] in (
        "decoder.layers.{l}.mlp.linear_fc1.weight",
        "decoder.layers.{l}.mlp.linear_fc2.weight",
    )
    assert family.nearest("zzz") == []


@pytest.mark.parametrize(
    "name",
    ["decoder.layers.007.input_layernorm.weight", "decoder.layers.x.input_layernorm.weight",
     "decoder.layers.-1.input_layernorm.weight", "prefix.decoder.final_layernorm.weight"],
)  # fmt: skip
def test_names_are_matched_whole(name: str) -> None:
    assert family_of({"model_type": "qwen3"}).convert(name, (3,)) is None


def test_indices_are_filled_in() -> None:
    family = family_of({"model_type": "deepseek_v3", "num_hidden_layers": 61})
    for source, target in (
        ("decoder.layers.12.mlp.experts.linear_fc2.weight255",
         "model.layers.12.mlp.experts.255.down_proj.weight"),
        ("mtp.layers.0.mtp_model_layer.mlp.experts.local_experts.7.linear_fc2.weight",
         "model.layers.61.mlp.experts.7.down_proj.weight"),
        ("mtp.layers.1.final_layernorm.weight", "model.layers.62.shared_head.norm.weight"),
    ):  # fmt: skip
        conversion = family.convert(source, (4, 3))
        assert conversion is not None
        assert conversion.names == (target,)


def test_a_table_with_two_rules_for_one_name_is_refused() -> None:
    rules = (Rule("a.{l}.b", Rename("x")), Rule("a.{e}.b", Rename("y")))
    with pytest.raises(ConfigError, match=r"two rules of family twice know a\.\{e\}\.b"):
        Family(Table("twice", (), rules), {})


def one_layout(naming: str, rank: int = 0) -> Layout:
    tensor = LocalTensor(name="model.norm.weight", dtype="F32", shape=(3,))
    return Layout.model_validate(
        {"naming": naming, "producer": ParallelRank(rank=rank), "tensors": (tensor,)}
    )


def test_hugging_face_names_need_no_family() -> None:
    family = family_for([one_layout("hf")], {"model_type": "something new"})
    conversion = family.convert("anything.weight", (3, 4))
    assert conversion is not None
    assert conversion.names == ("anything.weight",)
    assert family_for([one_layout("hf")], {"model_type": "qwen3"}).name == "qwen3"


def test_megatron_names_need_a_family() -> None:
    with pytest.raises(UnknownFamilyError, match="something new"):
        family_for([one_layout("megatron")], {"model_type": "something new"})
    assert family_for([one_layout("megatron")], {"model_type": "qwen3"}).name == "qwen3"


def test_a_family_that_is_asked_for_must_exist_for_hf_names_too() -> None:
    with pytest.raises(UnknownFamilyError, match="qwen33"):
        family_for([one_layout("hf")], {}, "qwen33")


def test_mixed_namings_are_refused() -> None:
    with pytest.raises(CoverageError, match="some producers publish Megatron names"):
        family_for([one_layout("hf"), one_layout("megatron", 1)], {"model_type": "qwen3"})


def test_a_config_without_layers_is_told_where_mtp_needs_them() -> None:
    family = family_of({"model_type": "deepseek_v3"})
    with pytest.raises(OriginError, match="num_hidden_layers"):
        family.convert("mtp.layers.0.enorm.weight", (3,))
