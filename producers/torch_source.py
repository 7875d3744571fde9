"""Tensors of a live torch program, copied into the arena where they lie on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..schemas.dtypes import DType
from ..schemas.errors import LayoutError, MissingDependencyError
from ..schemas.layout import Layout
from .chunks import Placed
from .staging import Slot

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

DTYPE_CODES: Final[dict[torch.dtype, DType]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES: Final = {code: dtype for dtype, code in DTYPE_CODES.items()}

TensorGetter = Callable[[], torch.Tensor]
"""Gives the tensor as it is now: optimizers and wrappers may put a new one in its place."""


def dtype_code(name: str, dtype: torch.dtype) -> DType:
    """The safetensors code of a torch dtype.

    Raises:
        LayoutError: no file format of ours can hold it.
    """
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise LayoutError(
            f"tensor {name} has dtype {dtype}, which safetensors cannot hold",
            where={"tensor": name},
            next_step=f"use one of {', '.join(sorted(str(known) for known in DTYPE_CODES))}",
        )
    return code


class TorchSource:
    """A `TensorSource` of torch tensors.

    Args:
        layout: what is held.
        getters: one for each tensor of the layout, in its order.
    """

    def __init__(self, layout: Layout, getters: Sequence[TensorGetter]) -> None:
        self._layout = layout
        self._getters = tuple(getters)
        self._views: dict[int, list[tuple[int, torch.Tensor]]] = {}

    @property
    def layout(self) -> Layout:
        """What is held."""
        return self._layout

    def fill(self, slot: Slot, placed: Sequence[Placed]) -> None:
        """Copy every placed tensor into the slot.

        Raises:
            LayoutError: a tensor has another shape than the layout says.
        """
        views = self._views.get(slot.number)
        if views is None:
            views = self._views[slot.number] = self._make_views(slot, placed)
        with torch.no_grad():
            for index, view in views:
                tensor = self._getters[index]().detach()
                if tensor.shape != view.shape:
                    raise self._changed(index, tensor)
                # From a GPU this waits for the copy, which runs behind the optimizer's step on the
                # current stream. A buffer that became wider or narrower is converted.
                view.copy_(tensor)

    def forget(self) -> None:
        """Drop the views of the arena."""
        self._views.clear()

    def _make_views(self, slot: Slot, placed: Sequence[Placed]) -> list[tuple[int, torch.Tensor]]:
        views: list[tuple[int, torch.Tensor]] = []
        for part in placed:
            tensor = self._layout.tensors[part.index]
            if part.length == 0:
                continue
            flat = torch.frombuffer(
                slot.buffer[part.offset : part.end], dtype=TORCH_DTYPES[tensor.dtype]
            )
            views.append((part.index, flat.view(tensor.shape)))
        return views

    def _changed(self, index: int, tensor: torch.Tensor) -> LayoutError:
        expected = self._layout.tensors[index]
        return LayoutError(
            f"tensor {expected.name} has become {tuple(tensor.shape)}, the layout says "
            f"{expected.shape}",
            where={"tensor": expected.local_name, "rank": self._layout.producer.rank},
            next_step="make a new publisher after changing the model",
        )
