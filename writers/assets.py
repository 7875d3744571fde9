"""Everything of a checkpoint folder that is not weights: config, tokenizer, generation settings."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

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
        OriginError: a sub-folder is a link, a link leads nowhere, or the folder cannot be read.
    """
    base = origin.resolve()
    found: list[AssetSource] = []
    try:
        for folder, names, files in os.walk(base, onerror=_raise):
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
                if not _is_asset(relative):
                    continue
                if path.is_symlink() and not path.exists():
                    raise OriginError(
                        "a file of the origin checkpoint is a link that leads nowhere",
                        where={"file": path, "link": path.readlink()},
                        next_step="download the checkpoint again, or remove the link",
                    )
                if path.is_file():
                    found.append(AssetSource(path, relative.as_posix()))
    except OSError as error:
        raise OriginError(
            f"the origin checkpoint cannot be listed: {error.strerror}",
            where={"origin": origin},
            next_step="let the writers read the whole origin checkpoint",
        ) from error
    return sorted(found, key=lambda asset: asset.path)


def _raise(error: OSError) -> None:
    raise error


def _is_asset(path: Path) -> bool:
    return not (
        path.name.startswith(".") or path.suffix in _WEIGHTS or path.as_posix() in _NEVER
    )  # fmt: skip


def copy_asset(asset: AssetSource, folder: Path, scratch: Path, *, durable: bool) -> Asset:
    """Copy one file into a version's folder: written elsewhere, then renamed, so never half.

    A checkpoint in a cache is often made of links to content-named files: their content is copied.

    Args:
        asset: what.
        folder: the version's hidden folder.
        scratch: a folder of the same file system, for the file while it is written.
        durable: whether it is fsynced.

    Raises:
        OriginError: the file cannot be read.
        StorageError, CommitError: the copy cannot be written.
        FileNotFoundError: the version's folder is gone (another writer has committed it).
    """
    target = folder / asset.path
    hasher, nbytes = Hasher(), 0

    def content(source: IO[bytes]) -> Iterator[bytes]:
        nonlocal nbytes
        while block := _read(source, asset.file):
            hasher.update(block)
            nbytes += len(block)
            yield block

    try:
        source = asset.file.open("rb")
    except OSError as error:
        raise _unreadable(asset.file, error) from error
    with source:
        try:
            make_folders(folder, target.parent)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise storage_error(error, target.parent, "create a folder of a version") from error
        write_file(target, content(source), scratch=scratch, durable=durable)
    return Asset(path=asset.path, nbytes=nbytes, digest=hasher.digest())


def _read(source: IO[bytes], file: Path) -> bytes:
    try:
        return source.read(_BLOCK_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: OSError) -> OriginError:
    return OriginError(
        f"a file of the origin checkpoint cannot be read: {error.strerror}",
        where={"file": file},
        next_step="let the writers read the whole origin checkpoint",
    )


def make_folders(base: Path, folder: Path) -> None:
    """Make sub-folders of `base`, but never `base` itself.

    Raises:
        FileNotFoundError: `base` is gone.
        OSError: another reason.
    """
    if folder != base:
        make_folders(base, folder.parent)
        folder.mkdir(exist_ok=True)


def write_file(path: Path, data: Iterable[bytes], *, scratch: Path, durable: bool) -> None:
    """Write a small file whole: in `scratch` under a name of its own, then renamed.

    Safe beside other writers of the same file. What a kill leaves lies in `scratch` and not where
    the file is looked for.

    Raises:
        FileNotFoundError: one of the folders is gone.
        StorageError, CommitError: it cannot be written.
    """
    partial = scratch / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        with partial.open("xb") as file:
            for block in data:
                file.write(block)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, FileNotFoundError):
            raise
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
