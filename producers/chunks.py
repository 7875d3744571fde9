"""Which tensors travel together: a pure plan of one producer's chunks and of its staging slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schemas.errors import ConfigError
from ..schemas.events import MAX_CHUNK_TENSORS

CHUNK_BYTES = 64 * 1024 * 1024
"""The size that a chunk aims at: large enough that events cost nothing, small enough to overlap."""

ALIGN_BYTES = 64
"""Where tensors begin in a slot: a multiple of a cache line and of every element size."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensor `index` of the layout lies at `offset` (bytes, from the start of the region)."""

    index: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk: its number and its tensors, in order of their offsets."""

    number: int
    tensors: tuple[Placed, ...]

    @property
    def offset(self) -> int:
        """Where the chunk begins in the region."""
        return self.tensors[0].offset

    @property
    def length(self) -> int:
        """Bytes from its first to its last."""
        return self.tensors[-1].end - self.offset


def place(lengths: Iterable[tuple[int, int]], align_bytes: int = ALIGN_BYTES) -> tuple[Placed, ...]:
    """Lay tensors out one behind the other.

    Args:
        lengths: (index in the layout, bytes) in publication order.
        align_bytes: each tensor begins at a multiple of this.
    """
    placed: list[Placed] = []
    at = 0
    for index, length in lengths:
        placed.append(Placed(index, at, length))
        at = -(-(at + length) // align_bytes) * align_bytes
    return tuple(placed)


def region_bytes(placed: Sequence[Placed]) -> int:
    """Bytes that a region needs to hold them."""
    return placed[-1].end if placed else 0


def plan_chunks(
    placed: Sequence[Placed],
    target_bytes: int = CHUNK_BYTES,
    max_tensors: int = MAX_CHUNK_TENSORS,
) -> tuple[ChunkPlan, ...]:
    """Cut placed tensors into chunks of neighbours.

    A chunk is closed when the next tensor would make it larger than `target_bytes`; a tensor that
    is larger by itself is a chunk of its own.

    Args:
        placed: in order of their offsets.
        target_bytes: size to aim at.
        max_tensors: an event must stay small, so no chunk has more tensors than this.

    Raises:
        ConfigError: a target or maximum below 1, or more tensors than an event may name.
    """
    if target_bytes < 1 or not 1 <= max_tensors <= MAX_CHUNK_TENSORS:
        raise ConfigError(
            f"chunks of {target_bytes} bytes and {max_tensors} tensors cannot be made",
            next_step=f"use at least 1 byte and 1..{MAX_CHUNK_TENSORS} tensors",
        )
    chunks: list[ChunkPlan] = []
    current: list[Placed] = []
    for tensor in placed:
        full = len(current) == max_tensors
        if current and (full or tensor.end - current[0].offset > target_bytes):
            chunks.append(ChunkPlan(len(chunks), tuple(current)))
            current = []
        current.append(tensor)
    if current:
        chunks.append(ChunkPlan(len(chunks), tuple(current)))
    return tuple(chunks)
