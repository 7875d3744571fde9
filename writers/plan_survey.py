"""The whole-space view of a version: what every tensor becomes, and all that is wrong with it.

The certificate shows a survey to people; the plan is cut out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..schemas.errors import ConversionError, LayoutError
from ..schemas.layout import Layout
from .conversion.family import Family
from .conversion.kinds import Geometry
from .expectation import Expectation
from .plan_compare import compare
from .plan_differences import Difference, DifferenceKind, difference
from .plan_surveyed import DTypePolicy, MissingPolicy, Supply, Survey, Surveyed
from .plan_wholes import Whole, blocks_of, collect
from .regions import Cover, Grid, Move, cover_of, held_boxes, view_of

__all__ = ["DTypePolicy", "MissingPolicy", "Supply", "Survey", "Surveyed", "survey"]


def survey(
    layouts: Sequence[Layout],
    expectation: Expectation,
    family: Family,
    *,
    missing: MissingPolicy = "refuse",
    dtype: DTypePolicy = "source",
) -> Survey:
    """Convert every whole tensor in thought, and compare the result with the expectation.

    Raises:
        OriginError: the config lacks a number that a rule needs.
    """
    result = Survey()
    result.wholes, result.differences = collect(layouts)
    family = family.fitted(expectation.tensors)
    if layouts and all(layout.naming == "hf" for layout in layouts):
        family = family.identity()
    checked: dict[int, list[tuple[DifferenceKind, str]]] = {}
    for whole in result.wholes:
        _convert(whole, family, expectation, result, checked)
    for target in result.targets.values():
        _check_target(target, result)
    compare(result, expectation, family, missing, dtype)
    return result


def _convert(
    whole: Whole,
    family: Family,
    expectation: Expectation,
    result: Survey,
    checked: dict[int, list[tuple[DifferenceKind, str]]],
) -> None:
    """Apply the whole tensor's rule, check the rule's moves, and register its targets."""
    try:
        conversion = family.convert(whole.name, whole.shape)
    except ConversionError as error:
        result.differences.append(
            difference(DifferenceKind.RULE_REFUSED, whole.name, whole.ranks, error.what)
        )
        return
    if conversion is None:
        near = family.nearest(whole.name)
        detail = f"family {family.name} has no rule for it" + (
            f"; nearest: {', '.join(near)}" if near else ""
        )
        result.differences.append(
            difference(DifferenceKind.UNKNOWN_PARAMETER, whole.name, whole.ranks, detail)
        )
        return
    if math.prod(whole.shape) == 0:
        result.differences.append(
            difference(
                DifferenceKind.EMPTY_TENSOR, whole.name, whole.ranks,
                f"shape {list(whole.shape)} has no elements",
            )
        )  # fmt: skip
        return
    geometry = conversion.geometry
    # Geometries live as long as the family, and equal shapes of one rule share theirs.
    found = checked.get(id(geometry))
    if found is None:
        found = checked[id(geometry)] = _check_geometry(geometry, whole.shape)
    result.differences += [difference(k, whole.name, whole.ranks, text) for k, text in found]
    result.differences += _check_cut(whole, geometry)
    result.notes += [
        difference(DifferenceKind.LEFT_OUT, whole.name, whole.ranks, f"{left.reason}: {left.box}")
        for left in geometry.left
    ]
    result.conversions[whole.name] = conversion
    for slot, (output, name) in enumerate(zip(geometry.outputs, conversion.names, strict=True)):
        if output.optional and name not in expectation.tensors:
            continue
        if output.dtype not in (None, whole.dtype):
            detail = f"{whole.name} is {whole.dtype}, its rule knows {output.dtype} only"
            result.differences.append(
                difference(DifferenceKind.WRONG_DTYPE, name, whole.ranks, detail)
            )
        supply = Supply(whole, conversion, slot)
        target = result.targets.get(name)
        if target is None:
            result.targets[name] = Surveyed(name, whole.dtype, output.shape, [supply])
        else:
            target.supplies.append(supply)


def _check_cut(whole: Whole, geometry: Geometry) -> list[Difference]:
    """Whether ranks cut the tensor as its rule supposes: a GLU block by block, others at once."""
    part = whole.part
    if part.count == 1:
        return []
    try:
        held_boxes(part, whole.shape)
    except LayoutError as error:
        return [difference(DifferenceKind.BAD_PARTITION, whole.name, whole.ranks, error.what)]
    blocks = blocks_of(part, whole.shape) if part.dim == 0 else part.blocks
    wanted = geometry.blocks if part.dim == 0 else ()
    if blocks == wanted:
        return []
    detail = (
        f"cut along dim {part.dim} in blocks {list(blocks)}, its rule knows blocks {list(wanted)}"
    )
    return [difference(DifferenceKind.BAD_PARTITION, whole.name, whole.ranks, detail)]


def _check_geometry(geometry: Geometry, shape: tuple[int, ...]) -> list[tuple[DifferenceKind, str]]:
    """Source elements: each moved once or left out. Targets are checked from all their sources."""
    primary = [move for move in geometry.moves if not move.copy]
    taken = [move.src for move in primary] + [left.box for left in geometry.left]
    cover = cover_of(taken, *view_of(shape))
    found = [
        (DifferenceKind.SOURCE_OVERLAP, f"{taken[a]} and {taken[b]} share elements")
        for a, b in cover.overlaps
    ]
    found += [
        (DifferenceKind.OUT_OF_BOUNDS, f"{taken[n]} of shape {list(shape)}") for n in cover.outside
    ]
    if cover.uncovered:
        found.append(
            (
                DifferenceKind.SOURCE_UNUSED,
                f"{cover.uncovered} elements, the first in row {cover.first_gap}",
            )
        )
    for move in geometry.moves:
        lands = (move.dst.cols, move.dst.rows) if move.transposed else move.dst[2:4]
        if lands != move.src[2:4]:
            found.append((DifferenceKind.OUT_OF_BOUNDS, f"{move.src} does not fit onto {move.dst}"))
    return found


def _check_target(target: Surveyed, result: Survey) -> None:
    """Every element of the target is produced exactly once, by sources that agree about it."""
    first = target.supplies[0]
    for supply in target.supplies[1:]:
        shape = supply.conversion.geometry.outputs[supply.slot].shape
        if (shape, supply.whole.dtype) != (target.shape, target.dtype):
            detail = (
                f"{first.whole.name} gives {target.dtype} {list(target.shape)}, "
                f"{supply.whole.name} gives {supply.whole.dtype} {list(shape)}"
            )
            result.differences.append(
                difference(DifferenceKind.TARGET_CONFLICT, target.name, supply.whole.ranks, detail)
            )
            return
    moves = [(move, supply.whole.name) for supply in target.supplies for move in _moves_of(supply)]
    grids = [move.dst for move, _ in moves]
    rows, cols = view_of(target.shape)
    if len(grids) == 1 and grids[0] == Grid(0, 0, rows, cols):
        return
    cover = cover_of(grids, rows, cols)
    if not cover.exact:
        ranks = {rank for supply in target.supplies for rank in supply.whole.ranks}
        result.differences += [
            difference(kind, target.name, ranks, text) for kind, text in _uncover(cover, moves)
        ]


def _moves_of(supply: Supply) -> list[Move]:
    """The moves into one output, at the rows that the tensor's index (its expert) fills."""
    geometry, rows = supply.conversion.geometry, supply.conversion.rows
    moves = [move for move in geometry.moves if move.slot == supply.slot]
    if not rows or rows[supply.slot] == 0:
        return moves
    down = rows[supply.slot]
    return [move._replace(dst=move.dst._replace(row=move.dst.row + down)) for move in moves]


def _uncover(cover: Cover, moves: list[tuple[Move, str]]) -> list[tuple[DifferenceKind, str]]:
    found = [
        (
            DifferenceKind.TARGET_OVERLAP,
            f"{moves[a][0].dst} from {moves[a][1]} and {moves[b][0].dst} from {moves[b][1]}",
        )
        for a, b in cover.overlaps
    ]
    found += [
        (DifferenceKind.OUT_OF_BOUNDS, f"{moves[n][0].dst} from {moves[n][1]}")
        for n in cover.outside
    ]
    if cover.uncovered:
        text = f"{cover.uncovered} elements, the first in row {cover.first_gap}"
        found.append((DifferenceKind.TARGET_UNCOVERED, text))
    return found
