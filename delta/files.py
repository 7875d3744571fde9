"""The files of a delta folder, written and read.

Shared layout: a safetensors file with one U8 vector per changed tensor, the blob; `__metadata__`
maps its name to the checksum of the new tensor's bytes. In a `gap-ulp` folder the value is a JSON
object `{method, dtype, shape, base, new}` instead, with the checksums of both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast, get_args

from ..schemas.dtypes import ITEM_BYTES, DType
from ..schemas.errors import DeltaMappingError, DeltaTensorError
from ..schemas.safetensors_format import TensorEntry, build_header, read_header
from .buffers import RawBytes, as_bytes
from .checksums import ChecksumFormat, checksum
from .codecs import Encoding, Method, encode_tensor
from .disk import absent_files, write_whole
from .index import DeltaIndex, broken, read_index


class TensorBytes(NamedTuple):
    """One side of a change."""

    dtype: DType
    shape: tuple[int, ...]
    data: RawBytes


class Change(NamedTuple):
    """A tensor in two versions; `old` is None where the base has no such tensor."""

    name: str
    old: TensorBytes | None
    new: TensorBytes


@dataclass(frozen=True, slots=True)
class DeltaShard:
    """A file that was written (or not, when nothing changed: then `names` is empty)."""

    file: str
    names: tuple[str, ...]
    nbytes: int
    unchanged: int
    full_nbytes: int
    """Bytes of all the tensors that were compared; a delta of more should be a full version."""


@dataclass(frozen=True, slots=True)
class DeltaEntry:
    """One blob: where it lies and what it leads to. dtype, shape and `base` only in gap-ulp."""

    name: str
    path: Path
    offset: int
    nbytes: int
    method: Method
    new: str
    checksum: ChecksumFormat
    base: str | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta folder that was read and checked, without its blobs' content."""

    folder: Path
    index: DeltaIndex
    entries: Mapping[str, DeltaEntry]


def write_shard(
    path: Path, changes: Iterable[Change], encoding: Encoding, form: ChecksumFormat = "xxh3-128"
) -> DeltaShard:
    """Encode some tensors into one file; blobs are kept in memory until all are encoded.

    Args:
        path: the file, named by `shard_name`; it appears whole and durable.
        changes: unchanged tensors may be among them; they are left out.
        encoding: what the folder's index will declare.
        form: the checksum that the index will declare.

    Raises:
        DeltaTensorError: a tensor is new, changed shape or dtype, came twice, or cannot be
            addressed by the encoding: publish a full version.
        StorageError: the disk does not take it; nothing half stays.
    """
    blobs: dict[str, bytes] = {}
    metadata: dict[str, str] = {}
    seen: set[str] = set()
    full_nbytes = 0
    for change in changes:
        _check_pair(change, seen)
        old, new = cast("TensorBytes", change.old), change.new
        full_nbytes += as_bytes(new.data).size
        found = encode_tensor(old.data, new.data, new.dtype, encoding)
        if found is None:
            continue
        method, blobs[change.name] = found
        value = checksum(form, new.data)
        if encoding == "gap-ulp":
            fields = {"method": method, "dtype": new.dtype, "shape": list(new.shape)}
            value = json.dumps({**fields, "base": checksum(form, old.data), "new": value})
        metadata[change.name] = value
    nbytes = 0
    if blobs:
        header = build_header([(name, "U8", [len(blob)]) for name, blob in blobs.items()], metadata)
        nbytes = write_whole(path, header, *blobs.values())
    return DeltaShard(path.name, tuple(blobs), nbytes, len(seen) - len(blobs), full_nbytes)


def _check_pair(change: Change, seen: set[str]) -> None:
    name, old, new = change
    if name in seen:
        why = "came twice"
    elif old is None:
        why = "is not in the base version"
    elif (old.dtype, tuple(old.shape)) != (new.dtype, tuple(new.shape)):
        why = f"was {old.dtype} {list(old.shape)} and is {new.dtype} {list(new.shape)}"
    else:
        seen.add(name)
        return
    raise DeltaTensorError(
        f"no delta can express tensor {name}: it {why}",
        where={"tensor": name},
        next_step="publish a full version, or mend what names the tensors",
    )


def weight_map_of(shards: Iterable[DeltaShard]) -> dict[str, str]:
    """The weight map of an index over these files.

    Raises:
        DeltaMappingError: a tensor stands in two of them.
    """
    found: dict[str, str] = {}
    for shard in shards:
        for name in shard.names:
            if name in found:
                raise _doubled(name, found[name], shard.file)
            found[name] = shard.file
    return found


def read_delta(folder: Path) -> Delta:
    """Read index and headers of a delta folder, ours or a peer's, and check that they agree.

    Raises:
        DeltaFormatError: index or entries are not what the format says.
        DeltaMappingError: an absent or unnamed file, a missing or doubled tensor; all are listed.
        ShardCorruptError: a file that is not whole.
    """
    index = read_index(folder)
    files = sorted(set(index.weight_map.values()))
    absent = absent_files(folder, files)
    unnamed = sorted({path.name for path in folder.glob("[!.]*.safetensors")} - set(files))
    if absent or unnamed:
        raise _disagree(folder, f"absent files {absent}, files that it does not name {unnamed}")
    entries: dict[str, DeltaEntry] = {}
    for file in files:
        tensors, _, metadata = read_header(folder / file)
        for tensor in tensors:
            if tensor.name in entries:
                raise _doubled(tensor.name, entries[tensor.name].path.name, file)
            entries[tensor.name] = _entry(folder / file, tensor, metadata, index)
    wrong = sorted(
        name
        for name in {*entries, *index.weight_map}
        if name not in entries or entries[name].path.name != index.weight_map.get(name)
    )
    if wrong:
        raise _disagree(folder, f"{len(wrong)} tensors are not where it says: {wrong[:10]}")
    return Delta(folder, index, entries)


def _entry(
    path: Path, tensor: TensorEntry, metadata: Mapping[str, str], index: DeltaIndex
) -> DeltaEntry:
    value: object = metadata.get(tensor.name)
    if tensor.dtype != "U8" or len(tensor.shape) != 1 or not isinstance(value, str):
        raise broken(path.parent, f"{tensor.name} in {path.name} is no blob with a checksum")
    where = DeltaEntry(
        tensor.name, path, tensor.offset, tensor.nbytes, index.encoding, value, index.checksum
    )
    if index.encoding != "gap-ulp":
        return where
    try:
        fields = cast("dict[str, object]", json.loads(value))
        method, dtype, shape = fields["method"], fields["dtype"], fields["shape"]
        base, new = fields["base"], fields["new"]
        if method not in get_args(Method) or dtype not in ITEM_BYTES or not isinstance(shape, list):
            raise ValueError(f"method {method!r}, dtype {dtype!r}, shape {shape!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise broken(path.parent, f"{tensor.name} in {path.name}: {error!r}") from error
    return replace(
        where, method=cast("Method", method), dtype=dtype, base=str(base), new=str(new),
        shape=tuple(cast("list[int]", shape)),
    )  # fmt: skip


def _disagree(folder: Path, why: str) -> DeltaMappingError:
    return DeltaMappingError(
        f"index and files disagree: {why}",
        where={"folder": folder},
        next_step="the delta is not whole, or a dead writer left files: fetch or write it again",
    )


def _doubled(name: str, first: str, second: str) -> DeltaMappingError:
    return DeltaMappingError(
        f"tensor {name} stands in {first} and {second}",
        where={"tensor": name},
        next_step="let one rank publish it; applied twice it would be wrong",
    )
