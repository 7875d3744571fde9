"""The index of a delta folder: its base, its encoding, which file has which tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from ..schemas.errors import DeltaFormatError
from ..schemas.manifest import INDEX_FILE
from .checksums import ChecksumFormat
from .codecs import Encoding
from .disk import write_whole

LINEAGE_KEY = "weightbus_lineage"
COMPRESSION = "zstd"
_DIGITS = re.compile(r"\d{1,18}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\.safetensors")


@dataclass(frozen=True, slots=True)
class DeltaIndex:
    """Metadata and weight map of a delta folder.

    `lineage` is `run_id/attempt/nonce`, or empty in the deltas of others: two versions of one
    number and different lineage have nothing to do with each other.
    """

    version: int
    base_version: int
    encoding: Encoding
    checksum: ChecksumFormat = "xxh3-128"
    lineage: str = ""
    weight_map: Mapping[str, str] = field(default_factory=dict[str, str])


def shard_name(shard: int, shards: int) -> str:
    """The name of a delta's file; they are numbered from 0."""
    return f"model-{shard:05d}-of-{shards:05d}.safetensors"


def write_index(folder: Path, index: DeltaIndex, *, total_size: int | None = None) -> None:
    """Write the index, after all of its files: readers take a folder with an index as whole.

    Raises:
        StorageError: the disk does not take it; nothing half stays.
    """
    metadata: dict[str, object] = {
        "version": f"{index.version:06d}",
        "base_version": f"{index.base_version:06d}",
        "delta_encoding": index.encoding,
        "compression_format": COMPRESSION,
        "checksum_format": index.checksum,
    }
    if index.lineage:
        metadata[LINEAGE_KEY] = index.lineage
    if total_size is not None:
        metadata["total_size"] = total_size
    content = {"metadata": metadata, "weight_map": dict(sorted(index.weight_map.items()))}
    write_whole(folder / INDEX_FILE, json.dumps(content, indent=1).encode())


def is_delta(folder: Path) -> bool:
    """Whether the folder's index declares an encoding; a full version's does not.

    Raises:
        DeltaFormatError: there is an index that cannot be read.
    """
    try:
        fields, _ = _load(folder)
    except FileNotFoundError:
        return False
    return "delta_encoding" in fields


def read_index(folder: Path) -> DeltaIndex:
    """Read and check an index.

    Raises:
        DeltaFormatError: none, or not that of a delta that this release can read.
    """
    try:
        fields, weight_map = _load(folder)
    except FileNotFoundError as error:
        raise broken(folder, f"there is no {INDEX_FILE}") from error
    unsafe = [str(file) for file in weight_map.values() if not _FILE.fullmatch(str(file))]
    if unsafe:
        raise broken(folder, f"it names files that are no plain safetensors names: {unsafe[:5]}")
    if fields.get("compression_format") != COMPRESSION:
        raise broken(folder, f"compression_format is {fields.get('compression_format')!r}")
    return DeltaIndex(
        version=_number(folder, fields, "version"),
        base_version=_number(folder, fields, "base_version"),
        encoding=cast("Encoding", _one_of(folder, fields, "delta_encoding", Encoding)),
        checksum=cast("ChecksumFormat", _one_of(folder, fields, "checksum_format", ChecksumFormat)),
        lineage=str(fields.get(LINEAGE_KEY, "")),
        weight_map=cast("dict[str, str]", weight_map),
    )


def _load(folder: Path) -> tuple[dict[str, object], dict[str, object]]:
    try:
        raw: object = json.loads((folder / INDEX_FILE).read_bytes())
    except ValueError as error:
        raise broken(folder, f"it is not JSON: {error}") from error
    fields = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    metadata, weight_map = fields.get("metadata", {}), fields.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(weight_map, dict):
        raise broken(folder, "metadata or weight_map is no JSON object")
    return cast("dict[str, object]", metadata), cast("dict[str, object]", weight_map)


def _number(folder: Path, fields: Mapping[str, object], key: str) -> int:
    text = str(fields.get(key))
    if not _DIGITS.fullmatch(text):
        raise broken(folder, f"{key} is {text!r}, not a number")
    return int(text)


def _one_of(folder: Path, fields: Mapping[str, object], key: str, known: object) -> str:
    value = fields.get(key)
    if value not in get_args(known):
        raise broken(folder, f"{key} is {value!r}; known are {', '.join(get_args(known))}")
    return str(value)


def broken(folder: Path, why: str) -> DeltaFormatError:
    """The error of an index that cannot be used."""
    return DeltaFormatError(
        f"the delta's index cannot be used: {why}",
        where={"folder": folder},
        next_step="fetch the delta again, or take a full version",
    )
