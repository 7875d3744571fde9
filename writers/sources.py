"""Reading the bytes at a location: pread into a reused block, never a mapping.

A mapping of a file that became shorter kills the process with SIGBUS, and mapped pages count as the
writer's memory. A short read is an error with a name instead.

A scheme is one function from URI to `OpenPlace`; `SCHEMES` lists them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ..schemas.errors import SourceError, SourceMissingError, SourceTruncatedError, StorageError
from ..schemas.events import Location

SHM = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lives on Linux
_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.EMFILE, errno.ENFILE}


class OpenPlace(Protocol):
    """An open place with bytes. One thread uses it."""

    def read_into(self, offset: int, block: memoryview) -> int:
        """Fill the start of `block` from byte `offset` on; returns how many bytes, 0 at the end.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class LocalFile:
    """An open file of this machine."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, offset: int, block: memoryview) -> int:
        """See OpenPlace."""
        return os.preadv(self._file, [block], offset)

    def close(self) -> None:
        """See OpenPlace."""
        os.close(self._file)


def path_of(uri: str) -> Path:
    """The file that a URI means on this machine.

    Raises:
        SourceError: a scheme that this release cannot read, or a name that is none.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.startswith("/"):
        return Path(unquote(parts.path))
    name = unquote(parts.netloc)
    flat = name not in ("", ".", "..") and Path(name).name == name
    if parts.scheme == "shm" and not parts.path and flat:
        return SHM / name
    raise SourceError(
        f"cannot read from {uri!r}: known are file:///path and shm://name",
        where={"uri": uri},
        next_step="let the producers stage in shared memory or in a folder that writers mount",
    )


def _open_local(uri: str) -> OpenPlace:
    return LocalFile(path_of(uri))


SCHEMES: Mapping[str, Callable[[str], OpenPlace]] = {"file": _open_local, "shm": _open_local}


class SourceReader:
    """Reads ranges of locations; keeps places open until `close`. One thread uses one reader."""

    def __init__(self, schemes: Mapping[str, Callable[[str], OpenPlace]] = SCHEMES) -> None:
        self._schemes = schemes
        self._places: dict[str, OpenPlace] = {}

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
            SourceError: a place that this release or this user cannot read.
            StorageError: the disk fails (retry helps).
        """
        details = {**where, "uri": location.uri}
        if offset + len(block) > location.length:
            raise SourceTruncatedError(
                f"bytes {offset} to {offset + len(block)} of a location of {location.length}",
                where=details,
                next_step="the producer announced a tensor that its chunk does not hold",
            )
        try:
            place = self._open(location.uri)
            done = 0
            while done < len(block):
                at = location.offset + offset + done
                count = place.read_into(at, block[done:])
                if count == 0:
                    raise SourceTruncatedError(
                        f"the file ends at byte {at}, {len(block) - done} bytes too early",
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
            raise kind(
                f"a chunk cannot be read: {error.strerror}",
                where=details,
                next_step="let this writer read the producers' staging place",
            ) from error

    def _open(self, uri: str) -> OpenPlace:
        place = self._places.get(uri)
        if place is None:
            opener = self._schemes.get(urlsplit(uri).scheme, _open_local)
            place = self._places[uri] = opener(uri)
        return place

    def close(self) -> None:
        """Close every place. An open staging file would keep its memory after its producer."""
        while self._places:
            self._places.popitem()[1].close()
