"""Digests: xxh3-128, written `xxh3-128:<32 hex digits>`.

xxh3 guards against truncation, flips, stale and mixed bytes at memory speed; it is not a signature.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

PREFIX = "xxh3-128:"


class Hasher:
    """An incremental xxh3-128."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes; any C-contiguous buffer."""
        self._state.update(data)

    def digest(self) -> str:
        """The digest of everything added so far."""
        return PREFIX + self._state.hexdigest()


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """The digest of one buffer."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)


def combine(digests: Iterable[str]) -> str:
    """The digest of a sequence of digests: of their texts, joined by newlines.

    Used for a tensor that is written in several extents and for a shard made of tensors: each byte
    is hashed once, while it is copied, whatever the order in which the parts arrive.
    """
    return digest_of("\n".join(digests).encode())
