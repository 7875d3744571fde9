"""Sources in files and shards to copy them into, for tests of the copy loops."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.conversion_executor import ITEMS, copy_piece
from weightbus.schemas.digest import digest_of
from weightbus.schemas.dtypes import ITEM_BYTES, DType
from weightbus.schemas.events import Location
from weightbus.writers.assembly import Arrival
from weightbus.writers.copy import Input
from weightbus.writers.plan_types import Piece, Source, Target
from weightbus.writers.shard_file import ShardFile

HEADER = b"header__"
NEVER = threading.Event()
"""A stop that nobody asks for."""


def run(target: int, src: int, dst: int, elements: int) -> Piece:
    """A piece that is one run."""
    return Piece(target, 1, elements, src, elements, 1, dst, elements, 1)


def source(
    shape: tuple[int, ...], pieces: Sequence[Piece], *, rank: int = 0, index: int = 0,
    dtype: DType = "BF16",
) -> Source:  # fmt: skip
    """A local tensor of shard 0."""
    return Source(rank, index, f"tensor{index}", dtype, shape, tuple(pieces), 0)


def target(
    number: int, shape: tuple[int, ...], offset: int, sources: Sequence[Source], *,
    streamed: bool, dtype: DType = "BF16",
) -> Target:  # fmt: skip
    """An HF tensor of shard 0 at a byte of the file."""
    keys = tuple(one.key for one in sources)
    return Target(f"target{number}", dtype, shape, 0, offset, number, keys, streamed)


class Staged:
    """Local tensors behind each other in one file, as a producer's chunk of sequence 7."""

    def __init__(self, path: Path, sources: Sequence[Source], *, seed: int = 0) -> None:
        self.path = path
        self.data: dict[tuple[int, int], bytes] = {}
        chance = np.random.default_rng(seed)
        gap = b"\xee" * 5  # neither locations nor tensors begin at round places
        body = bytearray(gap)
        offsets: dict[tuple[int, int], int] = {}
        for one in sources:
            self.data[one.key] = chance.bytes(one.nbytes)
            offsets[one.key] = len(body) - len(gap)
            body += self.data[one.key] + gap
        path.write_bytes(bytes(body))
        location = Location(uri=path.as_uri(), offset=len(gap), length=len(body) - len(gap))
        self.inputs = [
            Input(one, Arrival(one.key, location, offsets[one.key], one.nbytes,
                               digest_of(self.data[one.key]), 3, 7))
            for one in sources
        ]  # fmt: skip

    def flip(self, item: Input, at: int = 0) -> None:
        """Change a byte of a source behind the producer's back."""
        place = item.arrival.location.offset + item.arrival.offset + at
        with self.path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    def expected(self, number: int, shape: tuple[int, ...], dtype: DType = "BF16") -> bytes:
        """A target's bytes, by an executor that is not the writers'."""
        item = ITEMS[ITEM_BYTES[dtype]]
        made: Any = np.zeros(int(np.prod(shape)), item)
        for one in self.inputs:
            local: Any = np.frombuffer(self.data[one.source.key], item)
            for piece in one.source.pieces:
                if piece.target == number:
                    copy_piece(piece, local, made)
        return made.tobytes()


def shard(path: Path, nbytes: int) -> ShardFile:
    """A shard with a header of 8 bytes; `nbytes` behind it."""
    return ShardFile(path, len(HEADER) + nbytes, HEADER, write_behind=False)
