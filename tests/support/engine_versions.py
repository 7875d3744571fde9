"""Version directories made from ordinary checkpoint folders, without a writer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import VersionComplete, VersionKey
from weightbus.schemas.hf_folder import read_folder
from weightbus.schemas.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    Asset,
    Extent,
    Manifest,
    ManifestTensor,
    ShardTable,
)
from weightbus.schemas.safetensors_format import build_header, read_header

PLAN_DIGEST = "xxh3-128:" + "5" * 32


def key(weight_version: int, attempt: int = 1, run_id: str = "run-1") -> VersionKey:
    return VersionKey(run_id=run_id, attempt=attempt, weight_version=weight_version)


def small_checkpoint(folder: Path, seed: int = 0, tensors: int = 4) -> Path:
    """A checkpoint folder of some kB that looks like a Hugging Face one; no model reads it."""
    folder.mkdir(parents=True)
    values = np.random.default_rng(seed)
    save_file(
        {
            f"model.layers.{layer}.weight": values.standard_normal((8, 16 + layer), np.float32)
            for layer in range(tensors)
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "seed": seed}))
    (folder / "extra").mkdir()
    (folder / "extra" / "template.txt").write_text("{{ message }}")
    return folder


def make_version(
    checkpoint: Path, root: Path, version: VersionKey, *, shards: int = 2, extent_bytes: int = 200
) -> VersionComplete:
    """Write `checkpoint` as a version directory below `root`.

    Args:
        checkpoint: a folder with safetensors files.
        root: where versions are.
        version: which version it is.
        shards: shard files to spread the tensors over.
        extent_bytes: longest extent; several make up a tensor.

    Returns:
        the event that says that it is complete.
    """
    directory = root / version.run_id / f"attempt_{version.attempt:04d}"
    directory /= f"weight_v{version.weight_version:06d}"
    directory.mkdir(parents=True)
    found = sorted(read_folder(checkpoint).items())
    tables: list[ShardTable] = []
    for number in range(shards):
        part = found[number::shards]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header = build_header([(n, t.entry.dtype, t.entry.shape) for n, t in part])
        data = [_bytes_of(t.file, t.entry.offset, t.entry.nbytes) for _, t in part]
        (directory / name).write_bytes(header + b"".join(data))
        entries, _, _ = read_header(directory / name)
        tensors = tuple(
            ManifestTensor(
                name=entry.name, dtype=entry.dtype, shape=entry.shape, offset=entry.offset,
                extents=tuple(_extents(content, extent_bytes)),
            )
            for entry, content in zip(entries, data, strict=True)
        )  # fmt: skip
        tables.append(
            ShardTable(
                file=name, writer=number, nbytes=len(header) + sum(map(len, data)),
                header_bytes=len(header), header_digest=digest_of(header), tensors=tensors,
            )
        )  # fmt: skip
    return _finish(checkpoint, directory, version, tables)


def _finish(
    checkpoint: Path, directory: Path, version: VersionKey, tables: list[ShardTable]
) -> VersionComplete:
    for path in checkpoint.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_FILE:
            target = directory / path.relative_to(checkpoint)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    total = sum(tensor.nbytes for table in tables for tensor in table.tensors)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {t.name: table.file for table in tables for t in table.tensors},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index))
    manifest = Manifest(
        version=version, family="qwen3", plan_digest=PLAN_DIGEST, writers=len(tables),
        total_size=total, shards=tuple(tables), assets=tuple(_assets(directory)),
    )  # fmt: skip
    digest = write_manifest(directory, manifest)
    return VersionComplete(
        version=version, directory=f"file://{directory}", manifest_digest=digest,
        shards=len(tables), nbytes=total,
    )  # fmt: skip


def write_manifest(directory: Path, manifest: Manifest) -> str:
    """Write manifest.json; returns its digest."""
    data = manifest.model_dump_json(indent=1).encode()
    (directory / MANIFEST_FILE).write_bytes(data)
    return digest_of(data)


def directory_of(event: VersionComplete) -> Path:
    return Path(event.directory.removeprefix("file://"))


def flip_byte(path: Path, offset: int) -> None:
    """Invert one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def truncate(path: Path, missing_bytes: int = 1) -> None:
    """Cut the end of a file off."""
    path.write_bytes(path.read_bytes()[:-missing_bytes])


def _assets(directory: Path) -> Iterable[Asset]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.suffix != ".safetensors":
            data = path.read_bytes()
            name = path.relative_to(directory).as_posix()
            yield Asset(path=name, nbytes=len(data), digest=digest_of(data))


def _bytes_of(file: Path, offset: int, nbytes: int) -> bytes:
    return file.read_bytes()[offset : offset + nbytes]


def _extents(data: bytes, extent_bytes: int) -> Iterable[Extent]:
    for start in range(0, len(data), extent_bytes):
        part = data[start : start + extent_bytes]
        yield Extent(length=len(part), digest=digest_of(part))
