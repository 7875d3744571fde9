"""The plan: a pure function of layouts, expectation, family and writer count (see plan_types)."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schemas.digest import Hasher
from ..schemas.dtypes import ITEM_BYTES, DType
from ..schemas.errors import OriginError
from ..schemas.layout import Layout
from .certificate import certificate_of
from .conversion.family import Conversion, Family
from .conversion.kinds import Geometry
from .expectation import Expectation
from .plan_survey import DTypePolicy, MissingPolicy, Survey, survey
from .plan_types import BaseCopy, Group, Piece, Plan, Shard, Source, Target
from .plan_wholes import Whole
from .regions import Cut, cut_all, held_boxes, view_of
from .shards import (
    DEFAULT_MAX_SHARD_BYTES,
    ShardFile,
    ShardTensor,
    connected,
    file_name,
    file_of,
    share_out,
)

FORMAT = "weightbus-plan-2"
"""Part of every plan's digest; changes whenever the same input gives other bytes."""

Key = tuple[int, int]
_Cached = tuple[int, int, tuple[int, ...]]


def build_plan(
    layouts: Sequence[Layout],
    expectation: Expectation,
    family: Family,
    *,
    writers: int,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    missing: MissingPolicy = "refuse",
    dtype: DTypePolicy = "source",
) -> Plan:
    """Plan a version: which bytes of which local tensor go to which place of which shard.

    The order of `layouts` does not matter; every writer computes the same plan.

    Args:
        layouts: every producer's layout.
        expectation: the origin checkpoint's tensors.
        family: the conversion rules, bound to the model's config.
        writers: how many writers share the shards.
        max_shard_bytes: see `writers.shards.share_out`.
        missing: see `writers.certificate.certify`.
        dtype: see `writers.certificate.certify`.

    Raises:
        UnknownParameterError: names that no rule knows.
        CoverageError: the certificate does not hold.
        OriginError: the config lacks a number that a rule needs, or the expectation shapes.
        ConfigError: a writer count or shard size that cannot work.
    """
    nameless = next((n for n, e in expectation.tensors.items() if e.shape is None), None)
    if nameless is not None:
        raise OriginError(
            f"a plan needs the origin's headers, of {nameless} only the name is known",
            next_step="give the origin checkpoint's folder with its safetensors files",
        )
    found = survey(layouts, expectation, family, missing=missing, dtype=dtype)
    certificate_of(found, len(layouts), family.name, missing).require()
    tensors = {
        name: ShardTensor(
            name, target.dtype, target.shape, math.prod(target.shape) * ITEM_BYTES[target.dtype]
        )
        for name, target in found.targets.items()
    }
    groups = groups_of(found, family)
    sizes = {names[0]: sum(tensors[name].nbytes for name in names) for names in groups}
    by_first = {names[0]: names for names in groups}
    shared = share_out(sizes, writers=writers, max_shard_bytes=max_shard_bytes)
    files = [
        file_of(tensors[name] for first in firsts for name in by_first[first]) for firsts in shared
    ]
    return _assemble(found, groups, files, writers, (family.name, missing))


def groups_of(found: Survey, family: Family) -> list[tuple[str, ...]]:
    """The HF tensors that travel together, each group sorted, in order of their first names."""
    return connected(found.targets, _links(found, family))


def _links(found: Survey, family: Family) -> list[tuple[str, ...]]:
    """What holds targets together: a common source tensor, a declared pair."""
    links = [
        names
        for conversion in found.conversions.values()
        if len(names := tuple(name for name in conversion.names if name in found.targets)) > 1
    ]
    pairs: dict[tuple[int, str], list[str]] = {}
    for name in found.targets:
        key = family.pair_of(name)
        if key is not None:
            pairs.setdefault(key, []).append(name)
    return links + [tuple(names) for names in pairs.values()]


@dataclass(slots=True)
class _Numbers:
    """Where each target is: its number in the plan and its shard, by name."""

    target: dict[str, int]
    shard: dict[str, int]


def _assemble(
    found: Survey,
    groups: Sequence[tuple[str, ...]],
    files: Sequence[ShardFile],
    writers: int,
    choice: tuple[str, MissingPolicy],
) -> Plan:
    """Number targets in file order, cut the moves with the parts, and put the plan together."""
    numbers = _Numbers({}, {})
    for shard, file in enumerate(files):
        for tensor in file.tensors:
            numbers.target[tensor.name] = len(numbers.target)
            numbers.shard[tensor.name] = shard
    sources = _sources(found, numbers)
    feeding: list[list[Key]] = [[] for _ in numbers.target]
    streamed = [True] * len(feeding)
    for key, source in sources.items():
        for piece in source.pieces:
            if not feeding[piece.target] or feeding[piece.target][-1] != key:
                feeding[piece.target].append(key)
            if not piece.is_run:
                streamed[piece.target] = False
    group_of = {name: number for number, names in enumerate(groups) for name in names}
    targets: list[Target] = []
    for shard, file in enumerate(files):
        for tensor, offset in zip(file.tensors, file.offsets, strict=True):
            number = len(targets)
            targets.append(
                Target(
                    tensor.name, tensor.dtype, tensor.shape, shard, offset, group_of[tensor.name],
                    tuple(feeding[number]), streamed[number],
                )
            )  # fmt: skip
    shards = _shards(files, writers)
    made = tuple(
        _group(number, names, [numbers.target[name] for name in names], targets)
        for number, names in enumerate(groups)
    )
    copies = tuple(
        BaseCopy(numbers.target[name], *found.copies[name])
        for name in sorted(found.copies, key=numbers.target.__getitem__)
    )
    return Plan(
        digest=_digest((*choice, writers), sources, targets, shards, copies),
        family=choice[0],
        writers=writers,
        sources=sources,
        targets=tuple(targets),
        groups=made,
        shards=shards,
        total_size=sum(target.nbytes for target in targets),
        copies=copies,
    )


def _shards(files: Sequence[ShardFile], writers: int) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    first = 0
    for index, file in enumerate(files):
        last = first + len(file.tensors)
        shards.append(
            Shard(
                index,
                file_name(index, len(files)),
                index % writers,
                file.header,
                file.nbytes,
                tuple(range(first, last)),
            )
        )
        first = last
    return tuple(shards)


def _group(
    number: int, names: tuple[str, ...], indices: Sequence[int], targets: Sequence[Target]
) -> Group:
    first, *others = names
    more = f" and {len(others)} more" if others else ""
    sources = sorted({key for index in indices for key in targets[index].sources})
    return Group(number, first + more, tuple(sorted(indices)), tuple(sources))


def _sources(found: Survey, numbers: _Numbers) -> dict[Key, Source]:
    """Every owned local tensor with its pieces, by (rank, index)."""
    cache: dict[_Cached, tuple[Cut, ...]] = {}
    columns: dict[int, list[int]] = {}
    entries: list[tuple[Key, Source]] = []
    for whole in found.wholes:
        conversion = found.conversions[whole.name]
        geometry = conversion.geometry
        # Slots whose optional copy is not wanted have no number.
        slots = [numbers.target.get(name, -1) for name in conversion.names]
        shard = next((numbers.shard[n] for n in conversion.names if n in numbers.shard), None)
        for rank, index, tensor in whole.owners:
            part = tensor.part
            cached: _Cached = (id(geometry), part.index, (part.count, part.dim, *part.blocks))
            cuts = cache.get(cached)
            if cuts is None:
                cuts = cache[cached] = _cut(geometry, whole, part.index, columns)
            pieces = tuple(
                Piece(slots[slot], *rest)
                for slot, *rest in _moved_down(cuts, conversion, columns)
                if slots[slot] >= 0
            )
            entries.append(
                (
                    (rank, index),
                    Source(
                        rank, index, tensor.name, tensor.dtype, tensor.shape, pieces,
                        shard if pieces else None,
                    ),
                )
            )  # fmt: skip
    entries.sort(key=lambda entry: entry[0])
    return dict(entries)


def _moved_down(
    cuts: tuple[Cut, ...], conversion: Conversion, columns: dict[int, list[int]]
) -> Iterable[Cut]:
    """The cuts at the rows that the tensor's own index (its expert) fills."""
    if not any(conversion.rows):
        return cuts
    width = columns[id(conversion.geometry)]
    down = [rows * cols for rows, cols in zip(conversion.rows, width, strict=True)]
    return (cut._replace(dst_offset=cut.dst_offset + down[cut.slot]) for cut in cuts)


def _cut(
    geometry: Geometry, whole: Whole, index: int, columns: dict[int, list[int]]
) -> tuple[Cut, ...]:
    width = columns.get(id(geometry))
    if width is None:
        width = columns[id(geometry)] = [view_of(output.shape)[1] for output in geometry.outputs]
    part = whole.part.model_copy(update={"index": index})
    return cut_all(geometry.moves, held_boxes(part, whole.shape), width)


def _digest(
    choice: tuple[str, MissingPolicy, int],
    sources: dict[Key, Source],
    targets: Sequence[Target],
    shards: Sequence[Shard],
    copies: Sequence[BaseCopy],
) -> str:
    """Over everything that decides a byte of the output, or who writes it."""
    hasher = Hasher()
    family, missing, writers = choice
    hasher.update(f"{FORMAT}\n{family}\n{missing}\n{writers}\n".encode())
    dtypes: dict[DType, int] = {dtype: code for code, dtype in enumerate(sorted(ITEM_BYTES))}
    numbers = array("q")
    names: list[str] = []
    for source in sources.values():
        names.append(source.name)
        shard = -1 if source.shard is None else source.shard
        numbers.extend((source.rank, source.index, dtypes[source.dtype], shard))
        numbers.extend((len(source.shape), *source.shape, len(source.pieces)))
        for piece in source.pieces:
            numbers.extend(
                (
                    piece.target, piece.rows, piece.cols,
                    piece.src_offset, piece.src_row_step, piece.src_col_step,
                    piece.dst_offset, piece.dst_row_step, piece.dst_col_step,
                )
            )  # fmt: skip
    for target in targets:
        names.append(target.name)
        numbers.extend((target.shard, target.offset, target.group, len(target.shape)))
        numbers.extend(target.shape)
    if sys.byteorder == "big":
        numbers.byteswap()
    hasher.update("\n".join(names).encode())
    hasher.update(memoryview(numbers).cast("B"))
    for shard in shards:
        hasher.update(f"\n{shard.file} {shard.writer} {shard.nbytes}\n".encode())
        hasher.update(shard.header)
    for copy in copies:
        hasher.update(f"\ncopy {copy.target} {copy.file} {copy.offset}\n".encode())
    return hasher.digest()
