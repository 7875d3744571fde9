"""Views of raw bytes as arrays, without a copy where the memory allows it."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

U8: TypeAlias = npt.NDArray[np.uint8]
RawBytes: TypeAlias = bytes | bytearray | memoryview | U8
"""Any C-contiguous buffer."""
Words: TypeAlias = npt.NDArray[Any]
"""Little-endian unsigned integers of 2, 4 or 8 bytes."""


def as_bytes(data: RawBytes) -> U8:
    """A flat view of a C-contiguous buffer's bytes; writable when the buffer is."""
    return np.frombuffer(data, dtype=np.uint8)


def view_of(data: RawBytes) -> memoryview:
    """The bytes as a flat memoryview."""
    return as_bytes(data).data


def as_words(data: U8, item_bytes: int) -> Words:
    """The bytes as unsigned integers; copied when they do not lie on an integer's boundary.

    Args:
        data: bytes [n * item_bytes].
        item_bytes: 2, 4 or 8.
    """
    words = data.view(f"<u{item_bytes}")
    return words if words.flags.aligned else words.copy()
