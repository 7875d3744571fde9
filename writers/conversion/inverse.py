"""The way back: Hugging Face tensors to the bytes that each Megatron rank holds.

The same rules, read from right to left: it seeds the ranks of a trainer from a checkpoint, and
tests go there and back with it. Pure, on numpy arrays; dtypes are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...schemas.dtypes import ITEM_BYTES, DType
from ...schemas.errors import ConversionError, UnknownParameterError
from ...schemas.layout import Layout, LocalTensor
from ..regions import Grid, held_boxes, view_of
from .family import MEGATRON_WRAPPER, Conversion, Family

Array: TypeAlias = npt.NDArray[Any]
Fetch: TypeAlias = Callable[[str], Array]
"""The HF tensor of a name, in its shape; raises KeyError if there is none."""

_UNSIGNED: Final[dict[int, type[np.unsignedinteger[Any]]]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64,
}  # fmt: skip
_HEAD: Final = "output_layer.weight"
_EMBEDDING: Final = "embedding.word_embeddings.weight"


class Local(NamedTuple):
    """One local tensor of one rank: number `number` of its layout.

    `items` has the local shape; its elements are unsigned integers of the dtype's size, whose
    bytes are the tensor's.
    """

    rank: int
    number: int
    tensor: LocalTensor
    items: Array


def local_tensors(layout: Layout, fetch: Fetch, family: Family) -> Iterator[Local]:
    """Everything that one rank holds, made from a checkpoint, in the layout's order.

    Vocabulary padding is zeros. A tied model's copy of the embedding, under the head's name too, is
    the embedding.

    Args:
        layout: what the rank holds.
        fetch: gives HF tensors by name; each needed one is asked for once per local tensor.
        family: the rules, fitted to the checkpoint (`Family.fitted`).

    Raises:
        UnknownParameterError: names that no rule knows, all of them at once.
        ConversionError: an HF tensor is absent, or has another shape or item size.
    """
    unknown = [t.name for t in layout.tensors if _conversion(t, family) is None]
    if unknown:
        raise UnknownParameterError(
            f"{len(unknown)} parameters that the family has no rule for: {', '.join(unknown)}",
            where={"family": family.name, "rank": layout.producer.rank},
            next_step="add rules for these names to the family's table",
        )
    for number, tensor in enumerate(layout.tensors):
        yield Local(layout.producer.rank, number, tensor, local_items(tensor, fetch, family))


def local_items(tensor: LocalTensor, fetch: Fetch, family: Family) -> Array:
    """One local tensor, made from a checkpoint; see `local_tensors`."""
    conversion = _conversion(tensor, family)
    if conversion is None:
        raise UnknownParameterError(f"the family has no rule for {tensor.name}")
    whole = _whole(tensor, conversion, fetch)
    shape = tensor.whole_shape
    view = whole.reshape(view_of(shape))
    made = np.empty(tensor.shape, whole.dtype)
    flat = made.reshape(-1)
    for held in held_boxes(tensor.part, shape):
        taken = view[held.row : held.row + held.rows, held.col : held.col + held.cols]
        for row in range(held.rows):
            start = held.offset + row * held.row_stride
            flat[start : start + held.cols] = taken[row]
    return made


def _conversion(tensor: LocalTensor, family: Family) -> Conversion | None:
    name = tensor.name.removeprefix(MEGATRON_WRAPPER)
    if family.dims.tied and name == _HEAD:
        name = _EMBEDDING
    return family.convert(name, tensor.whole_shape)


def _whole(tensor: LocalTensor, conversion: Conversion, fetch: Fetch) -> Array:
    """The whole Megatron tensor: every move backwards."""
    geometry = conversion.geometry
    whole = np.zeros(tensor.whole_shape, _UNSIGNED[ITEM_BYTES[tensor.dtype]])
    view = whole.reshape(view_of(tensor.whole_shape))
    wanted = sorted({move.slot for move in geometry.moves if not move.copy})
    for slot in wanted:
        output = geometry.outputs[slot]
        source = _fetched(conversion.names[slot], output.shape, tensor.dtype, fetch)
        down = conversion.rows[slot] if conversion.rows else 0
        for move in geometry.moves:
            if move.slot != slot or move.copy:
                continue
            taken = _taken(source, move.dst, down)
            src = move.src
            view[src.row : src.row + src.rows, src.col : src.col + src.cols] = (
                taken.T if move.transposed else taken
            )
    return whole


def _taken(source: Array, grid: Grid, down: int) -> Array:
    return source[
        grid.row + down : grid.last_row + down + 1 : grid.row_step,
        grid.col : grid.last_col + 1 : grid.col_step,
    ]


def _fetched(name: str, shape: tuple[int, ...], dtype: DType, fetch: Fetch) -> Array:
    """An HF tensor as the matrix of its items."""
    try:
        found = fetch(name)
    except KeyError as error:
        raise ConversionError(
            f"the checkpoint has no tensor {name}",
            next_step="give the checkpoint that the family and the config belong to",
        ) from error
    size = ITEM_BYTES[dtype]
    if found.shape != shape or found.dtype.itemsize != size:
        raise ConversionError(
            f"{name} has shape {list(found.shape)} with items of {found.dtype.itemsize} bytes, "
            f"the layout needs {list(shape)} with items of {size} ({dtype})",
            next_step="give a checkpoint of the layout's dtype and of the same model",
        )
    return np.ascontiguousarray(found).view(_UNSIGNED[size]).reshape(view_of(shape))
