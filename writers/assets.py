"""Everything of a checkpoint folder that is not weights: config, tokenizer, generation settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..schemas.digest import Hasher
from ..schemas.errors import OriginError
from ..schemas.manifest import INDEX_FILE, MANIFEST_FILE, Asset
from .shard_file import storage_error

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
_NEVER = {INDEX_FILE, MANIFEST_FILE, "pytorch_model.bin.index.json"}
_BLOCK_BYTES = 1024 * 1024


class AssetSource(NamedTuple):
    """A file of the origin and its path relative to it."""

    file: Path
    path: str


def list_assets(origin: Path) -> list[AssetSource]:
    """The files to copy, sub-folders too, sorted by path. A link to a file stands for its content.

    Raises:
        OriginError: a sub-folder is a link, or the folder cannot be read.
    """
    base = origin.resolve()
    found: list[AssetSource] = []
    try:
        for folder, names, files in os.walk(base):
            names[:] = sorted(name for name in names if not name.startswith("."))
            linked = [name for name in names if (Path(folder) / name).is_symlink()]
            if linked:
                raise OriginError(
                    "a sub-folder of the origin checkpoint is a link",
                    where={"folder": Path(folder) / linked[0]},
                    next_step="replace the link by the folder itself",
                )
            for name in sorted(files):
                path = Path(folder) / name
                relative = path.relative_to(base)
                if _is_asset(relative) and path.is_file():
                    found.append(AssetSource(path, relative.as_posix()))
    except OSError as error:
        raise OriginError(
            f"the origin checkpoint cannot be listed: {error.strerror}", where={"origin": origin}
        ) from error
    return sorted(found, key=lambda asset: asset.path)


def _is_asset(path: Path) -> bool:
    return not (
        path.name.startswith(".") or path.suffix in _WEIGHTS or path.as_posix() in _NEVER
    )  # fmt: skip


def copy_asset(asset: AssetSource, folder: Path, *, durable: bool) -> Asset:
    """Copy one file into a version's folder: a temporary name, then a rename, so never half.

    A checkpoint in a cache is often made of links to content-named files: their content is copied.

    Raises:
        OriginError: the file cannot be read.
        StorageError, CommitError: the copy cannot be written.
        FileNotFoundError: the version's folder is gone (another writer has committed it).
    """
    target = folder / asset.path
    hasher, nbytes = Hasher(), 0
    try:
        source = asset.file.open("rb")
    except OSError as error:
        raise OriginError(
            f"a file of the origin checkpoint cannot be read: {error.strerror}",
            where={"file": asset.file},
        ) from error
    with source:
        data = bytearray()
        while block := source.read(_BLOCK_BYTES):
            hasher.update(block)
            nbytes += len(block)
            data += block
    make_folders(folder, target.parent)
    write_file(target, bytes(data), durable=durable)
    return Asset(path=asset.path, nbytes=nbytes, digest=hasher.digest())


def make_folders(base: Path, folder: Path) -> None:
    """Make sub-folders of `base`, but never `base` itself.

    Raises:
        FileNotFoundError: `base` is gone.
    """
    if folder != base:
        make_folders(base, folder.parent)
        folder.mkdir(exist_ok=True)


def write_file(path: Path, data: bytes, *, durable: bool) -> None:
    """Write a small file whole: under a name of our own, then renamed. Safe beside other writers.

    Raises:
        FileNotFoundError: the folder is gone.
        StorageError, CommitError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise storage_error(error, path, "write a file of a version") from error


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable.

    Raises:
        FileNotFoundError: it is gone.
        StorageError: the disk fails.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, folder, "open a folder") from error
    try:
        os.fsync(handle)
    except OSError as error:
        raise storage_error(error, folder, "make a folder durable") from error
    finally:
        os.close(handle)
