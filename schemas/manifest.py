"""The manifest: the complete description of a version directory. It is written last.

Digests (all xxh3-128, schemas.digest): an *extent* is a run of bytes that was written and hashed in
one go. A tensor's digest is its extent's, or `combine` of its extents' when there are several. A
shard's digest is `combine` of its header's and its tensors', in file order. So every byte is hashed
once, while it is copied, and a reader can verify with one pass over each file.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import Count, Digest, Frozen, Seq, ShortText
from .digest import combine
from .dtypes import ITEM_BYTES, DType
from .events import VersionKey

MANIFEST_FILE = "manifest.json"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 99_999


class Extent(Frozen):
    """A run of `length` bytes with its digest; extents of a tensor follow each other."""

    length: Count
    digest: Digest


class ManifestTensor(Frozen):
    """One HF tensor: `offset` in bytes from the start of the shard file."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: DType
    shape: Seq[Count]
    offset: Count
    extents: Seq[Extent]

    @model_validator(mode="after")
    def _check(self) -> ManifestTensor:
        if sum(extent.length for extent in self.extents) != self.nbytes:
            raise ValueError(f"{self.name}: extents do not add up to {self.nbytes} bytes")
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def digest(self) -> str:
        """The tensor's digest."""
        if len(self.extents) == 1:
            return self.extents[0].digest
        return combine(extent.digest for extent in self.extents)


class ShardTable(Frozen):
    """One shard file, as its writer describes it. Tensors stand in file order, without gaps."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    writer: Count
    nbytes: Count
    header_bytes: Count
    header_digest: Digest
    tensors: Seq[ManifestTensor]

    @property
    def digest(self) -> str:
        """The shard's digest."""
        return combine([self.header_digest, *(tensor.digest for tensor in self.tensors)])

    @model_validator(mode="after")
    def _check(self) -> ShardTable:
        at = self.header_bytes
        for tensor in self.tensors:
            if tensor.offset != at:
                raise ValueError(f"{tensor.name} starts at {tensor.offset}, not at {at}")
            at += tensor.nbytes
        if at != self.nbytes:
            raise ValueError(f"{self.file}: tensors end at {at}, the file at {self.nbytes}")
        return self


class Asset(Frozen):
    """A file that is not a shard (config, tokenizer, index): path relative to the directory."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    nbytes: Count
    digest: Digest


class Manifest(Frozen):
    """A version directory.

    `nonce` is that of the attempt's opening: it tells apart two versions of one name when the
    stream, and with it the numbers of attempts, was lost and began again.
    """

    format: Literal["weightbus-manifest"] = "weightbus-manifest"
    schema_version: Literal[1] = 1
    version: VersionKey
    nonce: ShortText = ""
    family: ShortText
    plan_digest: Digest
    writers: Annotated[int, Field(ge=1)]
    total_size: Count
    shards: Annotated[Seq[ShardTable], Field(min_length=1, max_length=MAX_SHARDS)]
    assets: Seq[Asset] = ()

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        names = [tensor.name for shard in self.shards for tensor in shard.tensors]
        if len(names) != len(set(names)):
            raise ValueError("a tensor stands in the manifest twice")
        if (
            sum(tensor.nbytes for shard in self.shards for tensor in shard.tensors)
            != self.total_size
        ):
            raise ValueError(f"the tensors do not add up to {self.total_size} bytes")
        files = [shard.file for shard in self.shards]
        if len(files) != len(set(files)):
            raise ValueError("a shard file stands in the manifest twice")
        return self
