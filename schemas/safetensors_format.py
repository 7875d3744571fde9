"""The safetensors file format: headers, read and written without loading a tensor.

Layout (huggingface/safetensors, README "Format"): u64 little-endian header length, JSON header
`{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {str: str}}` padded with spaces,
then the data. Offsets are relative to the data and leave no holes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast, get_args

from .dtypes import ITEM_BYTES, DType
from .errors import ShardCorruptError

MAX_HEADER_BYTES = 100_000_000
ALIGN_BYTES = 8
_DTYPES = frozenset(get_args(DType))


class TensorEntry(NamedTuple):
    """One tensor of a file: `offset` in bytes from the start of the file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def build_header(
    tensors: Sequence[tuple[str, DType, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The header of a file with these tensors in this order: length prefix, JSON, padding."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[list[TensorEntry], int, dict[str, str]]:
    """Read and check a file's header.

    Returns:
        the tensors in file order, the header's bytes (= where data starts), the metadata.

    Raises:
        ShardCorruptError: truncated, malformed, holes, overlaps or trailing bytes. (A truncated
            file kills an SGLang server that loads it, so this is checked before any hand-over.)
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise _corrupt(path, f"{size} bytes cannot hold a header of {length} bytes")
        text = file.read(length)
    try:
        raw: object = json.loads(text)
    except ValueError as error:
        raise _corrupt(path, f"the header is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise _corrupt(path, "the header is not a JSON object")
    fields = cast("dict[str, object]", raw)
    metadata = fields.pop("__metadata__", {})
    start = 8 + length
    entries = sorted((_entry(path, name, value, start) for name, value in fields.items()),
                     key=lambda entry: (entry.offset, entry.nbytes))  # fmt: skip
    at = start
    for entry in entries:
        if entry.offset != at:
            raise _corrupt(path, f"tensor {entry.name} starts at {entry.offset}, expected {at}")
        at += entry.nbytes
    if at != size:
        raise _corrupt(path, f"the tensors end at byte {at}, the file has {size}")
    return entries, start, cast("dict[str, str]", metadata)


def _entry(path: Path, name: str, value: object, start: int) -> TensorEntry:
    try:
        fields = cast("dict[str, object]", value)
        dtype = fields["dtype"]
        shape = tuple(cast("list[int]", fields["shape"]))
        begin, end = cast("list[int]", fields["data_offsets"])
        if dtype not in _DTYPES or any(type(dim) is not int or dim < 0 for dim in shape):
            raise ValueError(f"dtype {dtype!r}, shape {shape!r}")
        entry = TensorEntry(name, cast("DType", dtype), shape, start + begin)
        if entry.nbytes != end - begin:
            raise ValueError(f"{entry.nbytes} bytes, offsets {begin}..{end}")
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(path, f"the entry of tensor {name!r} is malformed: {error}") from error
    return entry


def _corrupt(path: Path, why: str) -> ShardCorruptError:
    return ShardCorruptError(
        f"not a whole safetensors file: {why}",
        where={"file": path},
        next_step="do not load it; fetch or write the file again",
    )
