"""The loops of `gap-ulp` compiled by numba (`weightbus[delta]`); kept in numba's cache on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

from .buffers import U8, Words

GO_ON = 255
RAW = 255
LINE_BYTES = 64
AHEAD_ITEMS = 4096


def _scan(  # noqa: PLR0912 - numba inlines no closures; one loop, eight arrays
    old8: Words, new8: Words, old: Words, new: Words, limit: int,
    gaps: U8, steps: U8, raws: Words,
) -> tuple[int, int, int]:  # fmt: skip
    # Eight bytes are compared at once; few of them differ.
    per = 8 // old.itemsize
    low = (1 << (8 * old.itemsize - 1)) - 1
    top = 8 * old.itemsize
    half = 1 << (top - 1)
    whole = old8.size
    zero, lane_mask = np.uint64(0), np.uint64(2 * half - 1)
    count, at_gap, at_raw, first = 0, 0, 0, 0
    for word in range(whole + 1):
        if word < whole:
            rest = old8[word] ^ new8[word]
            if rest == zero:
                continue
            begin = word * per
        else:  # the elements behind the last eight bytes
            rest = zero
            for tail in range(old.size - whole * per):
                differ = old[whole * per + tail] ^ new[whole * per + tail]
                rest |= np.uint64(differ) << np.uint64(tail * top)
            begin = whole * per
        while rest != zero:
            lane = 0  # of the first element that differs, without a branch per element
            for k in range(1, per):
                lane += (rest << np.uint64(64 - k * top)) == zero
            rest &= ~(lane_mask << np.uint64(lane * top))
            i = begin + lane
            a, b = np.int64(old[i]), np.int64(new[i])
            if count == limit:
                return -1, 0, 0
            gap = i - first
            while gap >= GO_ON:
                gaps[at_gap] = GO_ON
                at_gap += 1
                gap -= GO_ON
            gaps[at_gap] = gap
            at_gap += 1
            first = i + 1
            if a >= half:
                a = (a ^ low) - (half << 1)
            if b >= half:
                b = (b ^ low) - (half << 1)
            step = b - a
            code = -2 * step - 2 if step < 0 else 2 * step - 1
            if code < RAW:
                steps[count] = code
            else:
                steps[count] = RAW
                raws[at_raw] = new[i]
                at_raw += 1
            count += 1
    return count, at_gap, at_raw


def _patch(data: Words, gaps: U8, steps: U8, raws: Words) -> np.int64:
    top = 8 * data.itemsize
    half = 1 << (top - 1)
    low = half - 1
    mask = (half << 1) - 1
    at, count, at_raw = np.int64(0), 0, 0
    # Sparse changes defeat the hardware's prefetching: lines are touched in order ahead of them.
    touched, line, seen = np.int64(0), LINE_BYTES // data.itemsize, np.int64(0)
    for gap in gaps:
        at += gap
        if touched <= at:
            end = min(data.size, at + AHEAD_ITEMS)
            while touched < end:
                seen ^= np.int64(data[touched])
                touched += line
        if gap == GO_ON:
            continue
        code = np.int64(steps[count])
        if code == RAW:
            data[at] = raws[at_raw]
            at_raw += 1
        else:
            a = np.int64(data[at])
            if a >= half:
                a ^= low
            code += 1
            a += -((code + 1) >> 1) if code & 1 else code >> 1
            a &= mask
            if a >= half:
                a ^= low
            data[at] = a
        count += 1
        at += 1
    return seen  # so that the touching is not compiled away


def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    options = {"nogil": True, "boundscheck": False}
    jit = cast("Callable[..., Callable[..., Any]]", numba.njit)
    try:
        return jit(loop, cache=True, **options)
    except RuntimeError:  # no folder that the cache could be written to
        return jit(loop, **options)


class NumbaKernels:
    """One pass over the values, without the GIL."""

    name = "numba"

    def __init__(self) -> None:
        self._scan = _compiled(_scan)
        self._patch = _compiled(_patch)

    def scan(self, old: Words, new: Words, limit: int) -> tuple[int, U8, U8, Words] | None:
        """See `Kernels`."""
        limit = min(limit, old.size)
        gaps = np.empty(limit + old.size // GO_ON + 1, np.uint8)
        steps = np.empty(limit, np.uint8)
        raws = np.empty(limit, old.dtype)
        whole = old.size * old.itemsize // 8 * 8 // old.itemsize
        old8, new8 = old[:whole].view("<u8"), new[:whole].view("<u8")
        count, end, end_raw = self._scan(old8, new8, old, new, limit, gaps, steps, raws)
        if count < 0:
            return None
        return count, gaps[:end], steps[:count], raws[:end_raw]

    def patch(self, data: Words, gaps: U8, steps: U8, raws: Words) -> None:
        """See `Kernels`."""
        self._patch(data, gaps, steps, raws)
