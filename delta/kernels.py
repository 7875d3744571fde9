"""The loops of `gap-ulp`, in numpy or compiled by numba; both give the same bytes.

Steps count representable values. The bits of a float are mapped to integers that are ordered like
the floats, `o(b) = b ^ ((b >> top) & low)` with an arithmetic shift: all bits but the sign are
flipped when the sign is set. The map is its own inverse and a bijection over every bit pattern, so
NaN, infinities, -0.0 and denormals need no special case.
"""

from __future__ import annotations

import functools
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ..schemas.errors import MissingDependencyError
from .buffers import U8, Words

GO_ON = 255
"""In the gap stream: 255 elements without a change, and the gap goes on."""
RAW = 255
"""In the step stream: the new value itself stands in the raw values."""
BLOCK_ITEMS = 1 << 18
Backend: TypeAlias = Literal["auto", "numba", "numpy"]


class Kernels(Protocol):
    """The two loops. Arrays of one tensor have the same length and 2- or 4-byte items."""

    @property
    def name(self) -> str:
        """The backend's name."""
        ...

    def scan(self, old: Words, new: Words, limit: int) -> tuple[int, U8, U8, Words] | None:
        """Find the changes.

        Returns:
            how many, the gaps, the steps and the raw values; None when there are more than `limit`.
        """
        ...

    def patch(self, data: Words, gaps: U8, steps: U8, raws: Words) -> None:
        """Apply streams that `gap_ulp` has checked to the old values, in place."""
        ...


class NumpyKernels:
    """Vectorised over blocks that stay in the cache."""

    name = "numpy"

    def scan(self, old: Words, new: Words, limit: int) -> tuple[int, U8, U8, Words] | None:
        """See `Kernels`."""
        found: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        count = 0
        for at in range(0, old.size, BLOCK_ITEMS):
            end = at + BLOCK_ITEMS
            places = np.flatnonzero(old[at:end] != new[at:end])
            count += places.size
            if count > limit:
                return None
            if places.size:
                found.append(places + at)
        where = np.concatenate(found) if found else np.zeros(0, np.int64)
        values = new[where]
        step = _ordered(values) - _ordered(old[where])
        code = np.where(step < 0, -2 * step - 1, 2 * step) - 1
        small = code < RAW
        steps = np.where(small, code, RAW).astype(np.uint8)
        return count, _gap_stream(where), steps, values[~small]

    def patch(self, data: Words, gaps: U8, steps: U8, raws: Words) -> None:
        """See `Kernels`."""
        ends = gaps != GO_ON
        where = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(steps.size)
        code = steps.astype(np.int64) + 1
        step = np.where(code & 1, -(code + 1) // 2, code // 2)
        bits = 8 * data.itemsize
        moved = (_ordered(data[where]) + step) & ((1 << bits) - 1)
        values = _unordered(moved, bits).astype(data.dtype)
        values[steps == RAW] = raws
        data[where] = values


def _ordered(words: Words) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    signed = words.view(f"<i{words.itemsize}").astype(np.int64)
    return signed ^ ((signed >> 63) & ((1 << (8 * words.itemsize - 1)) - 1))


def _unordered(
    moved: np.ndarray[tuple[int], np.dtype[np.int64]], bits: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.where(moved >> (bits - 1), moved ^ ((1 << (bits - 1)) - 1), moved)


def _gap_stream(where: np.ndarray[tuple[int], np.dtype[np.int64]]) -> U8:
    gaps = np.diff(where, prepend=-1) - 1
    longer = gaps // GO_ON
    stream = np.full(where.size + int(longer.sum()), GO_ON, np.uint8)
    stream[np.cumsum(longer + 1) - 1] = gaps % GO_ON
    return stream


@functools.cache
def kernels(backend: Backend = "auto") -> Kernels:
    """The loops; `auto` takes numba where it is installed.

    Raises:
        MissingDependencyError: `numba` was asked for and is not installed.
    """
    if backend == "numpy":
        return NumpyKernels()
    try:
        from .kernels_numba import NumbaKernels  # noqa: PLC0415 - an optional extra, 0.6 CPU-s
    except ImportError as error:
        if backend == "auto":
            return NumpyKernels()
        raise MissingDependencyError(
            "numba is not installed", next_step="pip install 'weightbus[delta]'"
        ) from error
    return NumbaKernels()
