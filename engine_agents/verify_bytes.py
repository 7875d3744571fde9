"""The bytes of a version directory against the digests of its manifest, in one pass."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..schemas.digest import Hasher
from ..schemas.errors import ManifestError, ShardCorruptError, VersionError
from ..schemas.manifest import Asset, ShardTable

BLOCK_BYTES = 1 << 20
Advance = Callable[[int], None]
"""Told how many bytes more were read; an exception that it raises ends the reading."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One difference between a version directory and its manifest.

    `offset` is in bytes from the start of the file; `kind` is the error that it amounts to.
    """

    kind: type[VersionError]
    text: str
    file: str = ""
    tensor: str = ""
    offset: int | None = None

    def where(self) -> dict[str, object]:
        """The coordinates that are known."""
        pairs = {"file": self.file, "tensor": self.tensor, "offset": self.offset}
        return {key: value for key, value in pairs.items() if value is not None and value != ""}

    def __str__(self) -> str:
        place = ", ".join(f"{key} {value}" for key, value in self.where().items())
        return f"{place}: {self.text}" if place else self.text


class _Stream:
    """A file's bytes in order, in pieces of at most a block, read with pread into one buffer.

    Never mapped: a file that is cut while it is read gives a short read here, and would end the
    process there. Reading fills the page cache, which is what the engine reads from next.
    """

    def __init__(self, fd: int, advance: Advance) -> None:
        self._fd = fd
        self._advance = advance
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._filled = 0
        self._used = 0
        self._at = 0

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """The next `nbytes` bytes; ends early where the file does."""
        left = nbytes
        while left > 0:
            if self._used == self._filled:
                self._filled = os.preadv(self._fd, [self._block], self._at)
                self._used = 0
                self._at += self._filled
                if self._filled == 0:
                    return
                self._advance(self._filled)
            size = min(left, self._filled - self._used)
            yield self._block[self._used : self._used + size]
            self._used += size
            left -= size

    def digest(self, nbytes: int) -> str:
        """The digest of the next `nbytes` bytes (of fewer, where the file ends)."""
        hasher = Hasher()
        for piece in self.take(nbytes):
            hasher.update(piece)
        return hasher.digest()


def check_shard_bytes(directory: Path, table: ShardTable, advance: Advance) -> list[Problem]:
    """Hash a shard's header and every extent of every tensor.

    Args:
        directory: the version directory.
        table: the shard, as the manifest describes it; its size was compared before.
        advance: told how much was read.
    """
    problems: list[Problem] = []

    def differ(text: str, tensor: str = "", offset: int = 0) -> None:
        problems.append(Problem(ShardCorruptError, text, table.file, tensor, offset))

    fd = open_regular(directory / table.file)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        stream = _Stream(fd, advance)
        found = stream.digest(table.header_bytes)
        if found != table.header_digest:
            differ(f"the header has digest {found}, the manifest says {table.header_digest}")
        for tensor in table.tensors:
            at = tensor.offset
            for extent in tensor.extents:
                found = stream.digest(extent.length)
                if found != extent.digest:
                    differ(
                        f"{extent.length} bytes have digest {found}, "
                        f"the manifest says {extent.digest}",
                        tensor.name,
                        at,
                    )
                at += extent.length
    finally:
        os.close(fd)
    return problems


def check_asset_bytes(directory: Path, asset: Asset, advance: Advance) -> list[Problem]:
    """Compare an asset's size and digest."""
    fd = open_regular(directory / asset.path)
    try:
        size = os.fstat(fd).st_size
        if size != asset.nbytes:
            text = f"the file has {size} bytes, the manifest says {asset.nbytes}"
            return [Problem(ManifestError, text, asset.path)]
        found = _Stream(fd, advance).digest(size)
    finally:
        os.close(fd)
    if found != asset.digest:
        text = f"the file has digest {found}, the manifest says {asset.digest}"
        return [Problem(ManifestError, text, asset.path)]
    return []


def open_regular(path: Path) -> int:
    """Open a file for reading; anything but a regular file is an OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return fd
