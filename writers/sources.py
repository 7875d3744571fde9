"""Reading the bytes at a location: pread into a reused block, never a mapping.

A mapping of a file that became shorter kills the process with SIGBUS, and mapped pages count as the
writer's memory. A short read is an error with a name instead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..schemas.errors import SourceError, SourceMissingError, SourceTruncatedError, StorageError
from ..schemas.events import Location

SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EMFILE, errno.ENFILE}


def path_of(uri: str) -> Path:
    """The file that a URI means on this machine.

    Raises:
        SourceError: a scheme that this release cannot read, or a name that is none.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    name = unquote(parts.netloc)
    if parts.scheme == "shm" and not parts.path and name and Path(name).name == name:
        return SHM / name
    raise SourceError(
        f"cannot read from {uri!r}: known are file:///path and shm://name",
        where={"uri": uri},
        next_step="let the producers stage in shared memory or in a folder that writers mount",
    )


class SourceReader:
    """Reads ranges of locations; keeps files open until `close`. One thread uses one reader."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}

    def read_into(
        self, location: Location, offset: int, block: memoryview, where: Mapping[str, object]
    ) -> None:
        """Fill `block` with the bytes at `location.offset + offset`.

        Args:
            location: the chunk's location.
            offset: in bytes, relative to it.
            block: writable bytes.
            where: tensor, rank, chunk and sequence, for errors.

        Raises:
            SourceMissingError: no such file.
            SourceTruncatedError: the file or the location ends before the block is full.
            StorageError: the disk fails (retry helps).
        """
        details = {"uri": location.uri, **where}
        if offset + len(block) > location.length:
            raise SourceTruncatedError(
                f"bytes {offset} to {offset + len(block)} of a location of {location.length}",
                where=details,
                next_step="the producer announced a tensor that its chunk does not hold",
            )
        try:
            file = self._open(location.uri)
            done = 0
            while done < len(block):
                count = os.preadv(file, [block[done:]], location.offset + offset + done)
                if count == 0:
                    raise SourceTruncatedError(
                        f"the file ends at byte {location.offset + offset + done}, "
                        f"{len(block) - done} bytes too early",
                        where=details,
                        next_step="the file was cut or replaced; publish the version again",
                    )
                done += count
        except FileNotFoundError as error:
            raise SourceMissingError(
                "the file of a chunk is not there",
                where=details,
                next_step="a producer has ended and taken its staging along, or this writer does "
                "not see the producers' shared memory or folder",
            ) from error
        except OSError as error:
            kind = StorageError if error.errno in _TRANSIENT else SourceError
            raise kind(f"a chunk cannot be read: {error.strerror}", where=details) from error

    def _open(self, uri: str) -> int:
        file = self._files.get(uri)
        if file is None:
            file = os.open(path_of(uri), os.O_RDONLY | os.O_CLOEXEC)
            self._files[uri] = file
        return file

    def close(self) -> None:
        """Close every file."""
        while self._files:
            os.close(self._files.popitem()[1])
