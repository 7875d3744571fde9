"""Digests of live torch tensors, where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from ..schemas.digest import Hasher, digest_of
from ..schemas.errors import MissingDependencyError
from ..schemas.layout import Layout
from .torch_source import TORCH_DTYPES, TensorGetter

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

BLOCK_BYTES = 4 * 1024 * 1024


class TorchDigests:
    """Digests of the tensors of a layout, by index.

    Args:
        layout: what is held.
        getters: one for each tensor of the layout, in its order.
    """

    def __init__(self, layout: Layout, getters: Sequence[TensorGetter]) -> None:
        self._layout, self._getters = layout, tuple(getters)

    def __call__(self, index: int) -> str:
        """The digest of a tensor as it is now, in the layout's dtype, row-major.

        A tensor on a CPU is hashed in place. Others come through a block of memory.
        """
        wanted = TORCH_DTYPES[self._layout.tensors[index].dtype]
        tensor = self._getters[index]().detach().to(wanted).contiguous()
        flat = tensor.view(-1).view(torch.uint8)
        if flat.device.type == "cpu":
            return digest_of(flat.numpy().data)
        hasher, block = Hasher(), torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for start in range(0, flat.numel(), BLOCK_BYTES):
            piece = flat[start : start + BLOCK_BYTES]
            here = block[: piece.numel()]
            here.copy_(piece)
            hasher.update(here.numpy().data)
        return hasher.digest()
