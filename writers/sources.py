"""Reading the bytes at a location.

Files are read with pread into a reused block: a mapping of a file that became shorter would kill
the process with SIGBUS, a short read is an error with a name. Staging arenas in shared memory are
mapped once and kept: they are allocated whole and never cut (a producer only unlinks them), and
looking at the producers' pages saves a copy that costs half as much as writing (docs/adr/0034).

A scheme is one function from URI to `OpenPlace`; `SCHEMES` lists them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Generator, Mapping
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

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """The bytes where they lie, if they lie in memory; None: use `read_into`."""
        ...

    def lasts(self) -> bool:
        """Whether it is worth keeping for the next version."""
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

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """A file can be cut at any time: it is never looked at, only read."""
        del offset, nbytes

    def lasts(self) -> bool:
        """See OpenPlace."""
        return False

    def close(self) -> None:
        """See OpenPlace."""
        os.close(self._file)


class SharedMemory:
    """A mapped staging arena: as many bytes as it has when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._file).st_size
            mapped = mmap.mmap(self._file, size, prot=mmap.PROT_READ) if size else b""
        except BaseException:
            os.close(self._file)
            raise
        self._bytes = memoryview(mapped)

    def read_into(self, offset: int, block: memoryview) -> int:
        """See OpenPlace."""
        return os.preadv(self._file, [block], offset)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """See OpenPlace; None when the arena is too short, so that reading it says so."""
        if offset + nbytes > min(len(self._bytes), os.fstat(self._file).st_size):
            return None
        return self._bytes[offset : offset + nbytes]

    def lasts(self) -> bool:
        """As long as the producer has not taken it away: its memory is freed with our mapping."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except OSError:  # taken away, or out of reach: the next use opens it again, or says so
            return False

    def close(self) -> None:
        """The mapping goes with the last view of it."""
        self._bytes = memoryview(b"")
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


def _open_shared(uri: str) -> OpenPlace:
    return SharedMemory(path_of(uri))


SCHEMES: Mapping[str, Callable[[str], OpenPlace]] = {"file": _open_local, "shm": _open_shared}


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
        with self._named(location, offset, len(block), where) as details:
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

    def view(
        self, location: Location, offset: int, nbytes: int, where: Mapping[str, object]
    ) -> memoryview | None:
        """The same bytes where they lie, without a copy; None where only reading is safe.

        Raises:
            SourceError, StorageError: as `read_into`.
        """
        with self._named(location, offset, nbytes, where):
            return self._open(location.uri).view(location.offset + offset, nbytes)

    @contextlib.contextmanager
    def _named(
        self, location: Location, offset: int, nbytes: int, where: Mapping[str, object]
    ) -> Generator[dict[str, object]]:
        """Check the range, and give what the system refuses the name of the source's trouble."""
        details: dict[str, object] = {**where, "uri": location.uri}
        if offset + nbytes > location.length:
            raise SourceTruncatedError(
                f"bytes {offset} to {offset + nbytes} of a location of {location.length}",
                where=details,
                next_step="the producer announced a tensor that its chunk does not hold",
            )
        try:
            yield details
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

    def let_go(self) -> None:
        """A version has ended: close what does not last.

        An open staging file would keep its memory after its producer is gone.
        """
        for uri, place in list(self._places.items()):
            if not place.lasts():
                del self._places[uri]
                place.close()

    def close(self) -> None:
        """Close every place."""
        while self._places:
            self._places.popitem()[1].close()
