"""What a producer holds: its local tensors and which part of the whole each of them is."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from .base import Count, Frozen, Seq, ShortText
from .digest import digest_of
from .dtypes import ITEM_BYTES, DType

Naming: TypeAlias = Literal["megatron", "hf"]
"""`megatron`: global Megatron names, to be converted. `hf`: Hugging Face names, whole tensors."""


class ParallelRank(Frozen):
    """The coordinates of one producer. `rank` is its number in the run's world, unique there."""

    rank: Count
    tp_rank: Count = 0
    pp_rank: Count = 0
    ep_rank: Count = 0
    etp_rank: Count = 0
    dp_rank: Count = 0


class Part(Frozen):
    """Which part of a whole tensor a local tensor is.

    The whole is cut along `dim` into `count` equal parts; this is number `index`. With `blocks`,
    the whole consists of blocks of these sizes along `dim` (gate rows then up rows: two blocks of
    I), each block is cut by itself, and the local tensor is its part of every block, in order.
    `count` 1 is the whole tensor (replicated tensors too); then `blocks` says nothing about bytes.
    """

    dim: Count = 0
    index: Count = 0
    count: Annotated[int, Field(ge=1)] = 1
    blocks: Seq[Count] = ()

    @model_validator(mode="after")
    def _check(self) -> Part:
        if self.index >= self.count:
            raise ValueError(f"part {self.index} of {self.count}")
        if any(size % self.count for size in self.blocks):
            raise ValueError(f"blocks {self.blocks} cannot be cut into {self.count}")
        return self


class LocalTensor(Frozen):
    """One tensor of one producer, under its global name (layer, expert numbers are global).

    `owned` is true on exactly one of the producers that hold the same part: that one publishes it.
    `local_name` is what the trainer itself calls it, for messages.
    """

    name: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: DType
    shape: Seq[Count]
    part: Part = Part()
    owned: bool = True
    local_name: ShortText = ""

    @model_validator(mode="after")
    def _check(self) -> LocalTensor:
        part = self.part
        if part.count > 1 and part.dim >= len(self.shape):
            raise ValueError(f"{self.name}: cut along dim {part.dim} of shape {self.shape}")
        if part.count > 1 and part.blocks:
            local = sum(part.blocks) // part.count
            if local != self.shape[part.dim]:
                raise ValueError(
                    f"{self.name}: blocks {part.blocks} cut into {part.count} give {local} rows, "
                    f"the shape {self.shape} says {self.shape[part.dim]}"
                )
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor of which this is a part."""
        shape = list(self.shape)
        if self.part.count > 1:
            shape[self.part.dim] *= self.part.count
        return tuple(shape)


class Layout(Frozen):
    """Everything that one producer holds, in publication order; chunk events name it by index."""

    schema_version: Literal[1] = 1
    naming: Naming
    producer: ParallelRank
    tensors: Seq[LocalTensor]

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same layout always gives the same bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Parse `to_bytes`; raises pydantic's ValidationError."""
        return cls.model_validate_json(data)

    def digest(self) -> str:
        """The name under which the layout lies in the bucket."""
        return digest_of(self.to_bytes())

    @property
    def owned_bytes(self) -> int:
        """Bytes that this producer publishes per version."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.owned)
