"""Carries a plan out in memory, with numpy and nothing of the writers' input and output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from safetensors import deserialize
from weightbus.schemas.dtypes import ITEM_BYTES
from weightbus.writers.conversion.kinds import Geometry
from weightbus.writers.plan_types import Piece, Plan, Source
from weightbus.writers.regions import view_of

Items = npt.NDArray[Any]
ITEMS: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64,
}  # fmt: skip


class Raw(NamedTuple):
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def execute(plan: Plan, bytes_of: Callable[[Source], bytes]) -> dict[str, Raw]:
    """All tensors of a plan's shard files, parsed by safetensors itself."""
    found: dict[str, Raw] = {}
    for file in shard_files(plan, bytes_of).values():
        for name, entry in deserialize(file):
            assert name not in found
            found[name] = Raw(entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
    return found


def shard_files(plan: Plan, bytes_of: Callable[[Source], bytes]) -> dict[str, bytes]:
    """All shard files of a plan, by name.

    Every source's bytes are asked for once. Each byte of each file must be written exactly once;
    a plan that breaks this fails here.
    """
    files = [np.zeros(shard.nbytes, np.uint8) for shard in plan.shards]
    written = [np.zeros(shard.nbytes, np.uint8) for shard in plan.shards]
    for shard, file, count in zip(plan.shards, files, written, strict=True):
        file[: len(shard.header)] = np.frombuffer(shard.header, np.uint8)
        count[: len(shard.header)] += 1
    for source in plan.sources.values():
        if source.shard is None:
            continue
        size = ITEM_BYTES[source.dtype]
        local = np.frombuffer(bytes_of(source), ITEMS[size])
        for piece in source.pieces:
            target = plan.targets[piece.target]
            assert target.shard == source.shard
            assert target.dtype == source.dtype
            span = slice(target.offset, target.offset + target.nbytes)
            copy_piece(piece, local, files[target.shard][span].view(ITEMS[size]))
            marks = written[target.shard][span].view(ITEMS[size])
            ones = np.full(local.shape, int.from_bytes(b"\x01" * size, "little"), ITEMS[size])
            copy_piece(piece, ones, marks, add=True)
    for shard, count in zip(plan.shards, written, strict=True):
        assert (count == 1).all(), f"{shard.file}: a byte was not written exactly once"
    return {shard.file: file.tobytes() for shard, file in zip(plan.shards, files, strict=True)}


def copy_piece(piece: Piece, source: Items, target: Items, *, add: bool = False) -> None:
    """One piece, with bounds checked."""
    src_last = (
        piece.src_offset
        + (piece.rows - 1) * piece.src_row_step
        + (piece.cols - 1) * piece.src_col_step
    )
    dst_last = (
        piece.dst_offset
        + (piece.rows - 1) * piece.dst_row_step
        + (piece.cols - 1) * piece.dst_col_step
    )
    assert 0 <= piece.src_offset <= src_last < source.size
    assert 0 <= piece.dst_offset <= dst_last < target.size
    size = source.itemsize
    taken = as_strided(
        source[piece.src_offset :],
        (piece.rows, piece.cols),
        (piece.src_row_step * size, piece.src_col_step * size),
        writeable=False,
    )
    put = as_strided(
        target[piece.dst_offset :],
        (piece.rows, piece.cols),
        (piece.dst_row_step * size, piece.dst_col_step * size),
    )
    if add:
        put += taken
    else:
        put[...] = taken


def differing(found: Mapping[str, Raw], wanted: Mapping[str, Raw]) -> list[str]:
    """Names that stand in one of the two only, or differ in dtype, shape or a byte."""
    return sorted(name for name in found.keys() | wanted.keys()
                  if found.get(name) != wanted.get(name))  # fmt: skip


def apply_geometry(geometry: Geometry, whole: Items) -> list[Items]:
    """What a rule's moves make of a whole tensor, by slot; untouched elements are 0."""
    view = whole.reshape(view_of(whole.shape))
    made = [np.zeros(output.shape, whole.dtype) for output in geometry.outputs]
    for slot, src, dst, transposed, _ in geometry.moves:
        target = made[slot].reshape(view_of(made[slot].shape))
        taken = view[src.row : src.row + src.rows, src.col : src.col + src.cols]
        target[
            dst.row : dst.last_row + 1 : dst.row_step, dst.col : dst.last_col + 1 : dst.col_step
        ] = taken.T if transposed else taken
    return made
