"""The plan as data: which bytes of which local tensor go to which place of which shard.

Everything is a *piece*: a two-dimensional strided copy. Renames, QKV and GLU splits, expert
numbers, cut padding, swapped halves, transposes and TP cuts are all pieces with different offsets
and steps, so one copy loop executes every rule that only moves bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..schemas.dtypes import ITEM_BYTES, DType


@dataclass(frozen=True, slots=True)
class Piece:
    """Copy `rows` x `cols` elements of one source tensor into one target tensor.

    Element (i, j) of the piece lies at `src_offset + i * src_row_step + j * src_col_step` in the
    source and at `dst_offset + i * dst_row_step + j * dst_col_step` in the target; all in
    elements, from the start of the tensor. Row-major in the source: `src_col_step` is 1 except
    where `cols` is 1.
    """

    target: int
    rows: int
    cols: int
    src_offset: int
    src_row_step: int
    src_col_step: int
    dst_offset: int
    dst_row_step: int
    dst_col_step: int

    @property
    def elements(self) -> int:
        """How many elements it copies."""
        return self.rows * self.cols

    @property
    def is_run(self) -> bool:
        """Whether it is one contiguous run in the source and in the target."""
        return (self.cols == 1 or (self.src_col_step == 1 and self.dst_col_step == 1)) and (
            self.rows == 1 or (self.src_row_step == self.cols and self.dst_row_step == self.cols)
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One local tensor that one producer publishes: number `index` of rank `rank`'s layout.

    All its pieces go to one shard (`shard`), so exactly one writer reads and verifies it.
    A source with no pieces (a tied copy that the rule drops) has `shard` None and is never read.
    """

    rank: int
    index: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    shard: int | None

    @property
    def key(self) -> tuple[int, int]:
        """(rank, index): how chunk events name it."""
        return (self.rank, self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Target:
    """One HF tensor. `offset` is its first byte's place in the shard file (header included).

    `sources` are the keys of all sources with a piece here; a target without any is one of the
    plan's `copies`. `streamed`: every piece is a run, so
    each source's bytes are written as they arrive; otherwise the tensor is put together when its
    last source is there.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shard: int
    offset: int
    group: int
    sources: tuple[tuple[int, int], ...]
    streamed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A target that nobody produces: its bytes are the origin checkpoint's, taken as they are.

    `file` is a safetensors file of the origin's folder, `offset` the place of the tensor's first
    byte in it; the length is the target's. Such a target has no sources.
    """

    target: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its complete header and which targets follow it, in file order."""

    index: int
    file: str
    writer: int
    header: bytes
    nbytes: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """HF tensors that travel together: complete when every one of `sources` has arrived."""

    index: int
    name: str
    targets: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a writer needs to know before the first byte; the same in every writer."""

    digest: str
    family: str
    writers: int
    sources: Mapping[tuple[int, int], Source]
    targets: tuple[Target, ...]
    groups: tuple[Group, ...]
    shards: tuple[Shard, ...]
    total_size: int
    copies: tuple[BaseCopy, ...] = ()

    def shards_of(self, writer: int) -> tuple[Shard, ...]:
        """The shards that a writer persists."""
        return tuple(shard for shard in self.shards if shard.writer == writer)
