"""Files that are there whole or not at all, and durable once they are there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..schemas.errors import ShardCorruptError, StorageError
from .buffers import RawBytes, view_of


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, *parts: RawBytes) -> int:
    """Write a file beside its place, make it durable, rename it; its bytes.

    Raises:
        StorageError: the disk does not take it; nothing half stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(view_of(part))
            file.flush()
            os.fdatasync(file.fileno())
            size = file.tell()
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return size


def read_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Fill the view from a file.

    Raises:
        ShardCorruptError: the file ends before.
    """
    at = 0
    while at < len(view):
        got = os.preadv(fd, [view[at:]], offset + at)
        if got == 0:
            raise ShardCorruptError(
                f"a file ends at byte {offset + at}, inside a tensor",
                next_step="somebody truncates it: fetch or write it again",
            )
        at += got


def write_exactly(fd: int, view: memoryview, offset: int) -> None:
    """Write all of the view to a file."""
    at = 0
    while at < len(view):
        at += os.pwritev(fd, [view[at:]], offset + at)


def storage_error(path: Path, error: OSError) -> StorageError:
    """What an OSError means for who runs this."""
    return StorageError(
        f"cannot write: {error.strerror}",
        where={"path": path, "errno": error.errno},
        next_step="free space or mend permissions, then try again; nothing half was left",
    )


def absent_files(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of the names that are no files of the folder."""
    return [name for name in names if not (folder / name).is_file()]
