"""One shard file while it is written: allocated whole, filled in any order, made durable."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

from ..schemas.errors import CommitError, StorageError, VersionError

WRITE_BEHIND_BYTES = 32 * 1024 * 1024
_SYNC_FILE_RANGE_WRITE = 2
_PASSES = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE,
    errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.ETIMEDOUT,
}  # fmt: skip
_NO_ALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def storage_error(error: OSError, path: Path, doing: str) -> VersionError:
    """The named error for a failed file operation.

    A full, read-only or failing disk can be mended while the writer waits (StorageError); a folder
    that is not there or not ours cannot (CommitError).
    """
    what = f"cannot {doing}: {error.strerror}"
    if error.errno in _PASSES:
        return StorageError(
            what,
            where={"file": path, "errno": errno.errorcode.get(error.errno or 0, error.errno)},
            next_step="free space or remount the disk; the writer goes on by itself",
        )
    return CommitError(
        what,
        where={"file": path, "errno": errno.errorcode.get(error.errno or 0, error.errno)},
        next_step="give the writer a folder that it may write to",
    )


@cache
def _libc() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


class ShardFile:
    """A file of known size; `write` may be called in any order, by one thread.

    Args:
        path: where, in a hidden folder that exists.
        nbytes: its final size; allocated now, so that a full disk shows before the work.
        header: its first bytes.
        write_behind: start writing to the disk every 32 MiB, so that the final sync is short.
    """

    def __init__(self, path: Path, nbytes: int, header: bytes, *, write_behind: bool) -> None:
        self.path = path
        self._write_behind = write_behind
        self._dirty_bytes = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, path, "create a shard file") from error
        try:
            self._allocate(nbytes)
        except OSError as error:
            self.close()
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # what it got of a full disk is of use to others
            raise storage_error(error, path, f"allocate {nbytes} bytes for a shard") from error
        try:
            self.write(0, header)
        except VersionError:
            self.close()
            raise

    def _allocate(self, nbytes: int) -> None:
        if os.fstat(self._file).st_size != nbytes:
            os.ftruncate(self._file, nbytes)
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            # Some network file systems cannot: a full disk then shows at a write.
            if error.errno not in _NO_ALLOCATION:
                raise

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at byte `offset`. Raises StorageError, CommitError."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
                self._dirty_bytes += count
        except OSError as error:
            raise storage_error(error, self.path, "write a shard") from error
        if self._write_behind and self._dirty_bytes >= WRITE_BEHIND_BYTES:
            self._dirty_bytes = 0
            # Only a hint; where the system does not know it, the final sync does all the work.
            _libc().sync_file_range(
                self._file, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE
            )

    def sync(self) -> None:
        """Make every byte durable.

        Raises:
            StorageError: some bytes may be lost, and asking again may falsely succeed (Linux drops
                the dirty mark of a page that it failed to write): write the whole file again.
        """
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise storage_error(error, self.path, "make a shard durable") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(OSError):
            if self._file >= 0:
                os.close(self._file)
        self._file = -1
