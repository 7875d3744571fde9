"""The three checksums that the shared layout knows, as bare hex digits."""

from __future__ import annotations

import zlib
from typing import Literal, TypeAlias

import xxhash

from ..schemas.errors import MissingDependencyError
from .buffers import RawBytes, view_of

ChecksumFormat: TypeAlias = Literal["xxh3-128", "blake3", "adler32"]


def checksum(form: ChecksumFormat, data: RawBytes) -> str:
    """The checksum of one tensor's bytes: 32, 64 or 8 hex digits.

    Raises:
        MissingDependencyError: blake3 is not installed.
    """
    if form == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(view_of(data))
    if form == "adler32":
        return f"{zlib.adler32(view_of(data)):08x}"
    try:
        import blake3  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise MissingDependencyError(
            "blake3 is not installed", next_step="pip install 'weightbus[delta]'"
        ) from error
    return blake3.blake3(view_of(data)).hexdigest()
