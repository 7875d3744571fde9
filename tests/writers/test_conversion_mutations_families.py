"""Known mistakes in rules and in ranks, by family: the certificate or the bytes catch each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from support.conversion_origins import Origin, mtp_origin, origin_of, ranks_of, wholes_of
from support.conversion_rehearsal import differing_tensors, expected_of, rehearse
from weightbus.schemas.layout import Layout
from weightbus.writers.certificate import certify
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.dims import Dims
from weightbus.writers.conversion.family import Family, Rule
from weightbus.writers.conversion.kinds import Geometry, Kind, QkvSplit, Rename, VocabCut
from weightbus.writers.conversion.kinds_attention import ColumnHalvesSwapped
from weightbus.writers.conversion.kinds_experts import IntoExperts
from weightbus.writers.plan_differences import DifferenceKind
from weightbus.writers.regions import Move, view_of

TEXT = "tp=2,pp=2"
M, H = "decoder.layers.{l}.", "model.layers.{l}."


@dataclasses.dataclass(frozen=True)
class HalvesOfTheTarget:
    """A rule whose target gets its two halves of rows in the wrong order: up before gate."""

    right: Kind

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        geometry = self.right.geometry(shape, dims)
        rows = view_of(shape)[0]
        moves: list[Move] = []
        for move in geometry.moves:
            for half in (0, 1):
                height = move.src.rows // 2
                src = move.src._replace(row=move.src.row + half * height, rows=height)
                dst = move.dst._replace(row=(1 - half) * (rows // 2), rows=height)
                moves.append(move._replace(src=src, dst=dst))
        return geometry._replace(moves=tuple(moves))


@dataclasses.dataclass(frozen=True)
class GateBesideUp:
    """gpt_oss with up in the even columns."""

    right: Kind

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        geometry = self.right.geometry(shape, dims)
        swapped = [move._replace(dst=move.dst._replace(col=1 - move.dst.col))
                   for move in geometry.moves]  # fmt: skip
        return geometry._replace(moves=tuple(swapped))


@dataclasses.dataclass(frozen=True)
class OneExpertOff:
    """Fused experts, each in the place of the next but for the last, which takes the first's."""

    right: Kind

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        geometry = self.right.geometry(shape, dims)
        (output,) = geometry.outputs
        return geometry._replace(outputs=(output,), per_expert=(geometry.per_expert[0] // 2,))


def as_it_is(target: str) -> Callable[[Kind], Kind]:
    """A rename in the place of any rule."""

    def rename(right: Kind) -> Kind:
        assert not isinstance(right, Rename)
        return Rename(H + target)

    return rename


def mutated(family: Family, pattern: str, wrong: Callable[[Kind], Kind]) -> Family:
    rules = [
        Rule(rule.pattern, wrong(rule.kind)) if rule.pattern == pattern else rule
        for rule in family.table.rules
    ]
    assert tuple(rules) != family.table.rules
    table = dataclasses.replace(family.table, rules=tuple(rules))
    return Family(table, family.dims.config, family.home)


def wrong_bytes(origin: Origin, name: str, family: Family, *, mtp: int = 0) -> set[str]:
    """Names that differ in layer 1 (layer 0 of MTP); names, shapes and coverage are right."""
    layouts = ranks_of(origin, name, TEXT, mtp=mtp)
    wholes = wholes_of(origin, name, TEXT, mtp=mtp)
    _, files = rehearse(layouts, wholes, expected_of(origin.weights), family)
    found = differing_tensors(files, origin.weights)
    return {re.sub(r"^.*layers\.1\.", "", key) for key in found if ".layers.1." in key} | {
        key for key in found if ".layers." not in key or ".mtp" in key
    }


@pytest.mark.parametrize(
    ("name", "pattern", "wrong", "names"),
    [
        ("glm4", f"{M}mlp.linear_fc1.weight", HalvesOfTheTarget, {"mlp.gate_up_proj.weight"}),
        ("gpt_oss", f"{M}mlp.experts.linear_fc1.weight{{e}}", GateBesideUp,
         {"mlp.experts.gate_up_proj"}),
        ("gpt_oss", f"{M}mlp.experts.linear_fc1.bias{{e}}", GateBesideUp,
         {"mlp.experts.gate_up_proj_bias"}),
        ("deepseek_v32", f"{M}self_attention.wk.weight",
         as_it_is("self_attn.indexer.wk.weight"), {"self_attn.indexer.wk.weight"}),
        ("glm_moe_dsa", f"{M}self_attention.k_norm.bias",
         as_it_is("self_attn.indexer.k_norm.bias"), {"self_attn.indexer.k_norm.bias"}),
    ],
    ids=["glm4 up before gate", "gpt_oss columns", "gpt_oss bias", "indexer as it is",
         "indexer norm as it is"],
)  # fmt: skip
def test_wrong_rules_of_right_shapes_show_in_the_bytes(
    name: str, pattern: str, wrong: Callable[[Kind], Kind], names: set[str]
) -> None:
    origin = origin_of(name)
    family = family_of(origin.config)
    assert wrong_bytes(origin, name, family) == set()
    assert wrong_bytes(origin, name, mutated(family, pattern, wrong)) == names


@pytest.mark.parametrize("name", ["mimo", "qwen3_next", "qwen3_5", "deepseek_v3"])
def test_mtp_column_halves_show_in_the_bytes(name: str) -> None:
    origin = mtp_origin(name)
    family = family_of(origin.config)
    assert wrong_bytes(origin, name, family, mtp=1) == set()

    def other(kind: Kind) -> Kind:
        assert isinstance(kind, (Rename, ColumnHalvesSwapped))
        return (
            Rename(kind.to)
            if isinstance(kind, ColumnHalvesSwapped)
            else ColumnHalvesSwapped(kind.to)
        )

    changed = mutated(family, "mtp.layers.0.eh_proj.weight".replace(".0.", ".{i}."), other)
    layouts = ranks_of(origin, name, TEXT, mtp=1)
    wholes = wholes_of(origin, name, TEXT, mtp=1)
    _, files = rehearse(layouts, wholes, expected_of(origin.weights), changed)
    (found,) = differing_tensors(files, origin.weights)
    assert found.split(".")[-2] in ("fc", "input_proj", "eh_proj")


def kinds_for(name: str, family: Family, change: Callable[[Layout], Layout] | None = None) -> set[
    DifferenceKind
]:  # fmt: skip
    origin = origin_of(name)
    layouts = ranks_of(origin, name, TEXT)
    if change is not None:
        layouts = [change(layout) for layout in layouts]
    found = certify(layouts, expected_of(origin.weights), family)
    return {difference.kind for difference in found.differences}


def renamed(layout: Layout, change: Callable[[str], str]) -> Layout:
    tensors = tuple(
        tensor.model_copy(update={"name": change(tensor.name)}) for tensor in layout.tensors
    )
    return layout.model_copy(update={"tensors": tensors})


def next_layer(name: str) -> str:
    return re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) + 1), name)


FAMILIES = ("llama", "qwen3_next", "glm4", "deepseek_v3", "minimax_m2", "gpt_oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_off_by_one_are_refused(name: str) -> None:
    family = family_of(origin_of(name).config)
    found = kinds_for(name, family, lambda layout: renamed(layout, next_layer))
    assert DifferenceKind.MISSING_TENSOR in found
    assert DifferenceKind.EXTRA_TENSOR in found


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_that_is_not_cut_is_refused(name: str) -> None:
    family = family_of(origin_of(name).config)

    def uncut(kind: Kind) -> Kind:
        assert isinstance(kind, VocabCut)
        return Rename(kind.to)

    wrong = mutated(family, "embedding.word_embeddings.weight", uncut)
    assert kinds_for(name, wrong) == {DifferenceKind.WRONG_SHAPE}


def test_a_gated_attention_taken_as_plain_is_refused() -> None:
    family = family_of(origin_of("qwen3_5").config)
    for part in ("weight", "bias"):
        plain = QkvSplit(*(f"{H}self_attn.{p}_proj.{part}" for p in "qkv"))
        pattern = f"{M}self_attention.linear_qkv.{part}"
        wrong = mutated(family, pattern, lambda _, plain=plain: plain)
        assert DifferenceKind.RULE_REFUSED in kinds_for("qwen3_5", wrong)


def test_experts_at_the_wrong_offset_are_refused() -> None:
    family = family_of(origin_of("gpt_oss").config)
    wrong = mutated(family, f"{M}mlp.experts.linear_fc2.weight{{e}}", OneExpertOff)
    assert kinds_for("gpt_oss", wrong) == {
        DifferenceKind.TARGET_OVERLAP, DifferenceKind.TARGET_UNCOVERED,
    }  # fmt: skip
    # Not transposed: another shape. On square experts only the bytes would tell.
    plain = mutated(family, f"{M}mlp.experts.linear_fc2.weight{{e}}",
                    lambda _: IntoExperts(f"{H}mlp.experts.down_proj"))  # fmt: skip
    assert kinds_for("gpt_oss", plain) == {DifferenceKind.WRONG_SHAPE}


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_5_moe", "minimax_m2", "gpt_oss"])
def test_experts_counted_per_rank_are_refused_and_rotated_ones_show(name: str) -> None:
    origin = origin_of(name)
    family = family_of(origin.config)
    layouts = ranks_of(origin, name, "ep=2")
    local = [
        renamed(layout, lambda n: re.sub(r"(?<=weight)[23]$", lambda f: str(int(f[0]) - 2), n))
        for layout in layouts
    ]
    found = certify(local, expected_of(origin.weights), family)
    assert not found.ok
    wholes = wholes_of(origin, name, "ep=2")

    def rotated(tensor: str) -> str:
        return re.sub(r"(?<=\.weight)[0-3]$", lambda f: str((int(f[0]) + 1) % 4), tensor)

    shifted = {tensor: wholes[rotated(tensor)] for tensor in wholes}
    _, files = rehearse(layouts, shifted, expected_of(origin.weights), family)
    assert len(differing_tensors(files, origin.weights)) > 0
