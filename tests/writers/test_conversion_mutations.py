"""Mistakes that no shape betrays: each is caught by comparing bytes with the formulas."""

from __future__ import annotations

import dataclasses

import pytest
from support.conversion_executor import differing, execute
from support.conversion_megatron import (
    Grid,
    Model,
    expectation_of,
    layouts_of,
    local_bytes,
    wanted_of,
)
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.conversion.dims import Dims
from weightbus.writers.conversion.family import Family, Rule
from weightbus.writers.conversion.kinds import Geometry, Kind, QkvSplit, Rename, Stacked
from weightbus.writers.plan import build_plan
from weightbus.writers.regions import Move, box

DENSE = Model(norms=True)
MOE = Model(norms=True, experts=4)
M, H = "decoder.layers.{l}.", "model.layers.{l}."


def differing_with(wrong: dict[str, Kind], model: Model, name: str) -> set[str]:
    """Names of layer 0 whose bytes differ when these rules replace the family's."""
    table = family_of(model.config, name).table
    rules = tuple(Rule(rule.pattern, wrong.get(rule.pattern, rule.kind)) for rule in table.rules)
    family = Family(dataclasses.replace(table, rules=rules), model.config)
    layouts = layouts_of(model, Grid(tp=2))
    # The certificate holds: names, shapes and coverage are right.
    plan = build_plan(layouts, expectation_of(model), family, writers=1)
    found = execute(plan, lambda source: local_bytes(source, layouts))
    names = differing(found, wanted_of(model))
    return {name.removeprefix("model.layers.0.") for name in names if ".layers.0." in name}


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """All query heads, then all key heads, then all value heads: not what Megatron stores."""

    right: QkvSplit

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        geometry = self.right.geometry(shape, dims)
        moves: list[Move] = []
        row = 0
        for slot, output in enumerate(geometry.outputs):
            rows, cols = output.shape[0], shape[-1]
            moves.append(Move(slot, box(row, 0, rows, cols), box(0, 0, rows, cols)))
            row += rows
        return Geometry(geometry.outputs, tuple(moves))


QKV = QkvSplit(*(f"{H}self_attn.{p}_proj.weight" for p in "qkv"))
SWAPPED_KV = QkvSplit(*(f"{H}self_attn.{p}_proj.weight" for p in "qvk"))
EXPERT = f"{M}mlp.experts.local_experts.{{e}}."


@pytest.mark.parametrize(
    ("model", "wrong", "names"),
    [
        (DENSE,
         {f"{M}mlp.linear_fc1.weight":
              Stacked((f"{H}mlp.up_proj.weight", f"{H}mlp.gate_proj.weight"))},
         {"mlp.up_proj.weight", "mlp.gate_proj.weight"}),
        (DENSE,
         {f"{M}self_attention.q_layernorm.weight": Rename(f"{H}self_attn.k_norm.weight"),
          f"{M}self_attention.k_layernorm.weight": Rename(f"{H}self_attn.q_norm.weight")},
         {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}),
        (DENSE,
         {f"{M}input_layernorm.weight": Rename(f"{H}post_attention_layernorm.weight"),
          f"{M}pre_mlp_layernorm.weight": Rename(f"{H}input_layernorm.weight")},
         {"input_layernorm.weight", "post_attention_layernorm.weight"}),
        (DENSE, {f"{M}self_attention.linear_qkv.weight": Blockwise(QKV)},
         {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}),
        (DENSE, {f"{M}self_attention.linear_qkv.weight": SWAPPED_KV},
         {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}),
        (MOE,
         {f"{EXPERT}linear_fc1.weight":
              Stacked((f"{H}mlp.experts.{{e}}.up_proj.weight",
                       f"{H}mlp.experts.{{e}}.gate_proj.weight"))},
         {f"mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("up", "gate")}),
    ],
    ids=["gate-up", "q-k-norm", "layer-norms", "blockwise-qkv", "k-v", "expert-gate-up"],
)  # fmt: skip
def test_a_swap_of_equal_shapes_shows_in_the_bytes(
    model: Model, wrong: dict[str, Kind], names: set[str]
) -> None:
    name = "qwen3_moe" if model.experts else "qwen3"
    assert differing_with({}, model, name) == set()
    assert differing_with(wrong, model, name) == names
