"""A survey against the origin checkpoint: names, shapes, dtypes, and what nobody produces."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from .conversion.family import Family
from .expectation import Expectation, Expected
from .plan_differences import DifferenceKind, difference
from .plan_surveyed import PLAIN_FLOATS, DTypePolicy, MissingPolicy, Survey, Surveyed

_LAYER = re.compile(r"^(.*?\b(?:layers|blocks)\.\d+)\.")


def compare(
    result: Survey,
    expectation: Expectation,
    family: Family,
    missing: MissingPolicy,
    dtype: DTypePolicy,
) -> None:
    """Add every difference from the expectation to a survey, and what is copied from the origin."""
    trained = _trained(result)
    for name, expected in expectation.tensors.items():
        target = result.targets.get(name)
        if target is None:
            _absent(name, expectation, family, missing, trained, result)
        else:
            _compare_one(target, expected, dtype, result)
    for name, target in result.targets.items():
        if name not in expectation.tensors:
            sources = ", ".join(supply.whole.name for supply in target.supplies)
            detail = f"made of {sources}, the origin checkpoint does not have it"
            result.differences.append(
                difference(DifferenceKind.EXTRA_TENSOR, name, _ranks(target), detail)
            )


def _compare_one(target: Surveyed, expected: Expected, dtype: DTypePolicy, result: Survey) -> None:
    name = target.name
    if expected.shape not in (None, target.shape):
        detail = f"{list(target.shape)}, the origin has {list(expected.shape)}"
        result.differences.append(
            difference(DifferenceKind.WRONG_SHAPE, name, _ranks(target), detail)
        )
    if expected.dtype not in (None, target.dtype):
        detail = f"{target.dtype}, the origin has {expected.dtype}"
        if dtype == "exact" or not {target.dtype, expected.dtype} <= PLAIN_FLOATS:
            result.differences.append(
                difference(DifferenceKind.WRONG_DTYPE, name, _ranks(target), detail)
            )
        else:
            result.notes.append(
                difference(DifferenceKind.OTHER_DTYPE, name, _ranks(target), detail)
            )


def _absent(
    name: str,
    expectation: Expectation,
    family: Family,
    missing: MissingPolicy,
    trained: Collection[str],
    result: Survey,
) -> None:
    """Follow the policy for a tensor that nobody produces."""
    reason = family.unwritten_reason(name)
    if reason is not None:
        result.notes.append(difference(DifferenceKind.OMITTED, name, (), reason))
    elif missing == "omit":
        result.notes.append(difference(DifferenceKind.OMITTED, name, (), "no rank holds it"))
    elif missing == "copy":
        _copy(name, expectation, family, trained, result)
    else:
        detail = "the origin checkpoint has it, no rank holds anything that becomes it"
        result.differences.append(difference(DifferenceKind.MISSING_TENSOR, name, (), detail))


def _copy(
    name: str,
    expectation: Expectation,
    family: Family,
    trained: Collection[str],
    result: Survey,
) -> None:
    """Take the origin's tensor, unless it belongs to something that is trained."""
    layer = _layer_of(name)
    if layer in trained or name in family.indispensable:
        what = "the rest of its layer is trained" if layer in trained else "every layer needs it"
        detail = f"nobody produces it and {what}: a copy of the origin's would be stale"
        result.differences.append(difference(DifferenceKind.STALE_COPY, name, (), detail))
        return
    expected, place = expectation.tensors[name], expectation.places.get(name)
    if place is None or expected.dtype is None or expected.shape is None:
        detail = "it would be copied from the origin checkpoint, whose files are not there"
        result.notes.append(difference(DifferenceKind.COPIED, name, (), detail))
        return
    if math.prod(expected.shape) == 0:
        detail = f"shape {list(expected.shape)} has no elements"
        result.differences.append(difference(DifferenceKind.EMPTY_TENSOR, name, (), detail))
        return
    result.notes.append(
        difference(DifferenceKind.COPIED, name, (), f"from the origin checkpoint's {place.file}")
    )
    result.targets[name] = Surveyed(name, expected.dtype, expected.shape, [])
    result.copies[name] = place


def _trained(result: Survey) -> set[str]:
    """Layers of which something is produced; a repeated embedding alone does not count."""
    found: set[str] = set()
    for name, target in result.targets.items():
        layer = _layer_of(name)
        if layer is not None and any(
            move.slot == supply.slot and not move.copy
            for supply in target.supplies
            for move in supply.conversion.geometry.moves
        ):
            found.add(layer)
    return found


def _layer_of(name: str) -> str | None:
    match = _LAYER.match(name)
    return None if match is None else match[1]


def _ranks(target: Surveyed) -> set[int]:
    return {rank for supply in target.supplies for rank in supply.whole.ranks}
