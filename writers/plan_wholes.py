"""From what single ranks hold to whole tensors, with every disagreement between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..schemas.dtypes import DType
from ..schemas.layout import Layout, LocalTensor, Part
from .plan_differences import Difference, DifferenceKind, difference

Holding = tuple[int, int, LocalTensor]
"""(rank, index in its layout, tensor)."""


class Whole(NamedTuple):
    """One whole tensor: `owners` publish its parts, in order of (part, rank)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    part: Part
    owners: tuple[Holding, ...]
    ranks: tuple[int, ...]


def collect(layouts: Sequence[Layout]) -> tuple[list[Whole], list[Difference]]:
    """All whole tensors by name, and what is wrong with the parts that ranks hold.

    A tensor with a difference is still returned, as its first holder describes it, so that one
    finding does not cause others.
    """
    differences = _producers(layouts)
    held: dict[str, list[Holding]] = {}
    for layout in sorted(layouts, key=lambda layout: layout.producer.rank):
        rank = layout.producer.rank
        for index, tensor in enumerate(layout.tensors):
            held.setdefault(tensor.name, []).append((rank, index, tensor))
    wholes: list[Whole] = []
    for name in sorted(held):
        whole, found = _whole(name, held[name])
        wholes.append(whole)
        differences += found
    return wholes, differences


def _producers(layouts: Sequence[Layout]) -> list[Difference]:
    found: list[Difference] = []
    by_rank: dict[int, int] = {}
    for layout in layouts:
        rank = layout.producer.rank
        by_rank[rank] = by_rank.get(rank, 0) + 1
    found += [
        difference(DifferenceKind.DUPLICATE_PRODUCER, "", [rank], f"{count} layouts of one rank")
        for rank, count in sorted(by_rank.items())
        if count > 1
    ]
    hf = sorted(layout.producer.rank for layout in layouts if layout.naming == "hf")
    if hf and len(hf) < len(layouts):
        detail = "these ranks publish Hugging Face names, the others Megatron names"
        found.append(difference(DifferenceKind.MIXED_NAMING, "", hf, detail))
    return found


def _whole(name: str, held: list[Holding]) -> tuple[Whole, list[Difference]]:
    first = held[0][2]
    shape, part = first.whole_shape, first.part
    found: list[Difference] = []
    odd = [entry for entry in held if _cut_of(entry[2]) != _cut_of(first)] if held[1:] else []
    if odd:
        detail = (
            f"rank {held[0][0]} says {_describe(first)}, rank {odd[0][0]} says "
            f"{_describe(odd[0][2])}"
        )
        found.append(
            difference(DifferenceKind.DISAGREEMENT, name, [rank for rank, _, _ in odd], detail)
        )
    by_part: dict[int, list[Holding]] = {}
    for entry in held:
        if entry[2].owned:
            by_part.setdefault(entry[2].part.index, []).append(entry)
    if not odd:
        found += _parts(name, held, by_part, part.count)
    owners = tuple(entry for number in sorted(by_part) for entry in by_part[number])
    ranks = tuple(sorted({rank for rank, _, _ in held}))
    return Whole(name, first.dtype, shape, part, owners, ranks), found


def _parts(
    name: str, held: list[Holding], by_part: dict[int, list[Holding]], count: int
) -> list[Difference]:
    if len(by_part) == count and all(len(owners) == 1 for owners in by_part.values()):
        return []
    found: list[Difference] = []
    for number in range(count):
        owners = by_part.get(number, [])
        if not owners:
            holders = [rank for rank, _, tensor in held if tensor.part.index == number]
            detail = f"nobody publishes part {number} of {count}" + (
                "; these ranks hold it, none as its owner" if holders else " or holds it"
            )
            found.append(difference(DifferenceKind.MISSING_PART, name, holders, detail))
        elif len(owners) > 1:
            ranks = [rank for rank, _, _ in owners]
            kind = (
                DifferenceKind.DUPLICATE_PART
                if len(set(ranks)) > 1
                else DifferenceKind.DUPLICATE_NAME
            )
            detail = f"part {number} of {count} has {len(owners)} owners"
            found.append(difference(kind, name, ranks, detail))
    return found


def blocks_of(part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks that a cut goes by; one block is none."""
    return part.blocks if len(part.blocks) > 1 or sum(part.blocks) not in (0, shape[0]) else ()


def _cut_of(tensor: LocalTensor) -> tuple[object, ...]:
    """Everything that must be the same on all ranks."""
    part = tensor.part
    if part.count == 1:
        return (tensor.dtype, tensor.shape, 1)
    return (tensor.dtype, tensor.shape, part.count, part.dim, part.blocks)


def _describe(tensor: LocalTensor) -> str:
    part = tensor.part
    text = f"{tensor.dtype} {list(tensor.shape)}"
    if part.count == 1:
        return text + " whole"
    text += f" = part of {part.count} along dim {part.dim}"
    return text + (f" in blocks {list(part.blocks)}" if part.blocks else "")
