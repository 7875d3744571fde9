"""A version directory against its manifest: every file, every tensor, every byte.

Used by the agent before it pauses an engine, and by `weightbus verify`. An engine checks nothing of
this itself: a truncated shard ends it, a missing tensor keeps its old value and is called success.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from pydantic import ValidationError

from ..schemas.digest import digest_of
from ..schemas.errors import ManifestError, ShardCorruptError, VersionError
from ..schemas.events import VersionKey
from ..schemas.manifest import INDEX_FILE, MANIFEST_FILE, Asset, Manifest, ShardTable
from ..schemas.safetensors_format import read_header
from .verify_bytes import Problem, check_asset_bytes, check_shard_bytes

Progress = Callable[[int, int], None]
"""Told (bytes read so far, bytes to read), from the reading threads, one call at a time."""

MAX_LISTED = 200
"""Problems that an error's text lists; `Inspection.problems` has all of them."""

_LOADABLE = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"})
_NEXT_STEP = (
    "do not load this folder; publish the version again, or copy it again from where it was written"
)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found. `manifest` is None when there is none that can be read."""

    manifest: Manifest | None
    problems: tuple[Problem, ...]


def verify_version(
    directory: Path,
    expected_manifest_digest: str | None = None,
    progress: Progress | None = None,
    *,
    expected_version: VersionKey | None = None,
    threads: int = 1,
    read_bytes: bool = True,
) -> Manifest:
    """Check a version directory whole.

    Args:
        directory: the folder with the manifest.
        expected_manifest_digest: the digest that version-complete gave.
        progress: told about the bytes read; an exception that it raises ends the check.
        expected_version: the version that the folder must hold.
        threads: shards that are read at the same time.
        read_bytes: False compares names, sizes and headers only.

    Raises:
        ShardCorruptError: a shard's bytes are not those of the manifest (all problems are listed).
        ManifestError: no manifest, or the folder differs from it in another way.
    """
    found = inspect_version(
        directory,
        expected_manifest_digest,
        progress,
        expected_version=expected_version,
        threads=threads,
        read_bytes=read_bytes,
    )
    if found.problems or found.manifest is None:
        raise error_of(directory, found.problems)
    return found.manifest


def error_of(directory: Path, problems: tuple[Problem, ...]) -> VersionError:
    """One error for all problems of a directory."""
    corrupt = any(problem.kind is ShardCorruptError for problem in problems)
    kind = ShardCorruptError if corrupt else ManifestError
    listed = [str(problem) for problem in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        listed.append(f"and {len(problems) - MAX_LISTED} more")
    first = next(problem for problem in problems if not corrupt or problem.kind is kind)
    return kind(
        f"the version directory differs from its manifest in {len(problems)} "
        f"place{'s' if len(problems) > 1 else ''}: " + "; ".join(listed),
        where={"directory": directory, **first.where()},
        next_step=_NEXT_STEP,
    )


def inspect_version(
    directory: Path,
    expected_manifest_digest: str | None = None,
    progress: Progress | None = None,
    *,
    expected_version: VersionKey | None = None,
    threads: int = 1,
    read_bytes: bool = True,
) -> Inspection:
    """As `verify_version`, but every difference is returned instead of raised."""
    manifest, problems = _read_manifest(directory, expected_manifest_digest)
    if manifest is None:
        return Inspection(None, tuple(problems))
    if expected_version is not None and manifest.version != expected_version:
        text = f"the manifest is of version {manifest.version}, expected {expected_version}"
        problems.append(Problem(ManifestError, text, MANIFEST_FILE))
    problems += _check_index(directory, manifest)
    problems += _check_extra_files(directory, manifest)
    sound: list[ShardTable] = []
    for table in manifest.shards:
        found = _check_shard_shape(directory, table)
        problems += found
        if not found:
            sound.append(table)
    assets: list[Asset] = []
    for asset in manifest.assets:
        found = _check_path(directory, asset.path)
        problems += found
        if not found:
            assets.append(asset)
    if read_bytes:
        problems += _check_bytes(directory, sound, assets, progress, threads)
    return Inspection(manifest, tuple(problems))


def _read_manifest(
    directory: Path, expected_digest: str | None
) -> tuple[Manifest | None, list[Problem]]:
    try:
        data = (directory / MANIFEST_FILE).read_bytes()
    except OSError as error:
        text = f"the manifest cannot be read: {error.strerror}"
        return None, [Problem(ManifestError, text, MANIFEST_FILE)]
    problems: list[Problem] = []
    digest = digest_of(data)
    if expected_digest is not None and digest != expected_digest:
        text = f"the manifest has digest {digest}, version-complete says {expected_digest}"
        problems.append(Problem(ManifestError, text, MANIFEST_FILE))
    try:
        return Manifest.model_validate_json(data), problems
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'manifest'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)[:MAX_LISTED]
        )
        problems.append(Problem(ManifestError, f"not a manifest: {reasons}", MANIFEST_FILE))
        return None, problems


def _check_index(directory: Path, manifest: Manifest) -> list[Problem]:
    """The index must place every tensor where the manifest does, and nothing else."""
    try:
        raw: object = json.loads((directory / INDEX_FILE).read_bytes())
    except (OSError, ValueError) as error:
        return [Problem(ManifestError, f"the index cannot be read: {error}", INDEX_FILE)]
    fields = cast("dict[str, object]", raw) if isinstance(raw, dict) else {}
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict):
        return [Problem(ManifestError, "the index has no weight_map", INDEX_FILE)]
    indexed = cast("dict[str, object]", weight_map)
    expected = {tensor.name: table.file for table in manifest.shards for tensor in table.tensors}
    problems: list[Problem] = []
    for name in sorted(expected.keys() | indexed.keys()):
        if indexed.get(name) != expected.get(name):
            text = (
                f"the index places it in {indexed.get(name)}, the manifest in {expected.get(name)}"
            )
            problems.append(Problem(ManifestError, text, INDEX_FILE, name))
    metadata = fields.get("metadata")
    if isinstance(metadata, dict):
        total = cast("dict[str, object]", metadata).get("total_size")
        if total != manifest.total_size:
            text = f"metadata.total_size is {total}, the tensors have {manifest.total_size} bytes"
            problems.append(Problem(ManifestError, text, INDEX_FILE))
    return problems


def _check_extra_files(directory: Path, manifest: Manifest) -> list[Problem]:
    """Files that a loader would pick up although the manifest does not have them."""
    known = {table.file for table in manifest.shards}
    known |= {str(PurePosixPath(asset.path)) for asset in manifest.assets}
    known |= {MANIFEST_FILE, INDEX_FILE}
    text = "the manifest does not have this file, and a loader would read it"
    try:
        names = {
            path.relative_to(directory).as_posix()
            for path in directory.rglob("*")
            if path.suffix in _LOADABLE or path.name.endswith(".index.json")
        }
    except OSError as error:
        return [Problem(ManifestError, f"the directory cannot be listed: {error}")]
    return [Problem(ManifestError, text, name) for name in sorted(names - known)]


def _check_path(directory: Path, name: str) -> list[Problem]:
    """A path of the manifest must stay inside the directory, and be there."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or relative == PurePosixPath():
        return [Problem(ManifestError, "the path leads out of the version directory", name)]
    path = directory / relative
    try:
        if not path.is_file():
            return [Problem(ManifestError, "the file is missing", name)]
        if not path.resolve().is_relative_to(directory.resolve()):
            return [Problem(ManifestError, "the file is a link out of the version directory", name)]
    except (OSError, ValueError) as error:
        return [Problem(ManifestError, f"the path cannot be used: {error}", name)]
    return []


def _check_shard_shape(directory: Path, table: ShardTable) -> list[Problem]:
    """Size and header of a shard; no tensor is read."""
    problems = _check_path(directory, table.file)
    if problems:
        return problems

    def corrupt(text: str, tensor: str = "", offset: int | None = None) -> None:
        problems.append(Problem(ShardCorruptError, text, table.file, tensor, offset))

    path = directory / table.file
    try:
        size = path.stat().st_size
        if size != table.nbytes:
            cut = (t.name for t in table.tensors if t.offset + t.nbytes > size)
            text = f"the file has {size} bytes, the manifest says {table.nbytes}"
            corrupt(text, next(cut, ""), min(size, table.nbytes))
            return problems
        entries, header_bytes, _ = read_header(path)
    except (OSError, ShardCorruptError) as error:
        corrupt(error.what if isinstance(error, ShardCorruptError) else f"cannot be read: {error}")
        return problems
    if header_bytes != table.header_bytes:
        corrupt(f"the header has {header_bytes} bytes, the manifest says {table.header_bytes}")
    found = {entry.name: entry for entry in entries}
    expected = {tensor.name: tensor for tensor in table.tensors}
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name), expected.get(name)
        if here is None or there is None:
            side = "header" if here is None else "manifest"
            corrupt(f"the {side} does not have the tensor", name)
        elif (here.dtype, here.shape, here.offset) != (there.dtype, there.shape, there.offset):
            corrupt(
                f"the header says {here.dtype} {list(here.shape)} at {here.offset}, "
                f"the manifest {there.dtype} {list(there.shape)} at {there.offset}",
                name,
                there.offset,
            )
    return problems


def _check_bytes(
    directory: Path,
    shards: list[ShardTable],
    assets: list[Asset],
    progress: Progress | None,
    threads: int,
) -> list[Problem]:
    total = sum(table.nbytes for table in shards) + sum(asset.nbytes for asset in assets)
    lock = threading.Lock()
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += nbytes
                progress(done, total)

    def shard(table: ShardTable) -> list[Problem]:
        try:
            return check_shard_bytes(directory, table, advance)
        except OSError as error:
            return [Problem(ShardCorruptError, f"cannot be read: {error}", table.file)]

    def asset(item: Asset) -> list[Problem]:
        try:
            return check_asset_bytes(directory, item, advance)
        except OSError as error:
            return [Problem(ManifestError, f"cannot be read: {error}", item.path)]

    problems: list[Problem] = []
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="weightbus-verify") as pool:
        for found in [*pool.map(shard, shards), *pool.map(asset, assets)]:
            problems += found
    return problems
