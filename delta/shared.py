"""The two encodings of the shared layout: what slime, miles, Stitch and SGLang write and read.

xor: zstd-1 of new ^ old over the raw bytes.
overwrite: zstd-1 of `<u4 count><u4 byte positions x count><new bytes x count>`.
"""

from __future__ import annotations

import numpy as np

from ..schemas.dtypes import DType
from ..schemas.errors import DeltaTensorError
from .buffers import U8, RawBytes, as_bytes
from .frames import malformed, pack, unpack, xor_frame_into
from .no_blob import NoBlob

POSITION_BYTES = 4
MOST_BYTES = 1 << 32
"""Positions are u4: a tensor of 4 GiB or more has bytes that they cannot name."""


def pair_of(old: RawBytes, new: RawBytes) -> tuple[U8, U8]:
    """Both sides as bytes.

    Raises:
        DeltaTensorError: another number of bytes on each side.
    """
    before, after = as_bytes(old), as_bytes(new)
    if before.size != after.size:
        raise DeltaTensorError(
            f"the tensor had {before.size} bytes and has {after.size}",
            next_step="publish a full version: a delta cannot change a shape or dtype",
        )
    return before, after


class Xor:
    """new ^ old, byte by byte."""

    name = "xor"

    def encode(self, old: RawBytes, new: RawBytes, dtype: DType) -> bytes | NoBlob:  # noqa: ARG002 - one interface
        """See `Codec`; never too different."""
        before, after = pair_of(old, new)
        change = before ^ after
        return pack(change) if change.any() else NoBlob.UNCHANGED

    def apply_in_place(self, data: RawBytes, blob: RawBytes, dtype: DType) -> None:  # noqa: ARG002
        """See `Codec`."""
        xor_frame_into(as_bytes(data), blob, "an xor blob")


class Overwrite:
    """The changed bytes with their positions; applying it twice does no harm."""

    name = "overwrite"

    def encode(self, old: RawBytes, new: RawBytes, dtype: DType) -> bytes | NoBlob:  # noqa: ARG002
        """See `Codec`; never too different, but the tensor must be smaller than 4 GiB."""
        before, after = pair_of(old, new)
        if before.size >= MOST_BYTES:
            raise DeltaTensorError(
                f"overwrite cannot address a tensor of {before.size} bytes, its positions are u4",
                next_step="use the encoding xor or gap-ulp for this model",
            )
        where = np.flatnonzero(before != after)
        if not where.size:
            return NoBlob.UNCHANGED
        count = np.array([where.size], "<u4")
        parts = (count.view(np.uint8), where.astype("<u4").view(np.uint8), after[where])
        return pack(np.concatenate(parts))

    def apply_in_place(self, data: RawBytes, blob: RawBytes, dtype: DType) -> None:  # noqa: ARG002
        """See `Codec`; checks everything before the first byte."""
        target, what = as_bytes(data), "an overwrite blob"
        most = POSITION_BYTES + (POSITION_BYTES + 1) * target.size
        content = unpack(blob, what, most)
        count = int.from_bytes(content[:POSITION_BYTES].tobytes(), "little")
        if content.size != POSITION_BYTES + (POSITION_BYTES + 1) * count:
            raise malformed(what, f"{count} positions do not fill {content.size} bytes")
        end = POSITION_BYTES * (1 + count)
        where = content[POSITION_BYTES:end].view("<u4")
        if count and int(where.max()) >= target.size:
            raise malformed(what, f"a position is outside the tensor's {target.size} bytes")
        target[where] = content[end:]
