"""The encoding `gap-ulp`: where values changed and by how many representable values. docs/delta.md.

A blob is `"gu01" <u4 bytes of gap frame> <u8 count>`, the gap frame and the step frame.
Gap stream (u8): unchanged elements before each change, 255 = 255 of them and the gap goes on.
Step stream (u8): zigzag(step) - 1 of each change, 255 = the value itself; those values stand, in
order, behind the last step.
"""

from __future__ import annotations

import struct

import numpy as np

from ..schemas.dtypes import DType
from .buffers import U8, RawBytes, Words, as_bytes, as_words
from .frames import malformed, pack, unpack
from .kernels import GO_ON, RAW, Backend, kernels
from .no_blob import NoBlob
from .shared import pair_of

MAGIC = b"gu01"
_HEAD = struct.Struct("<4sIQ")
FLOAT_BYTES: dict[DType, int] = {"BF16": 2, "F16": 2, "F32": 4}
"""The element types that have ulp steps."""
SMALL_CHANGE = 0.8
"""Above this share of changed elements the steps save nothing against xor or the whole tensor."""


class GapUlp:
    """Gaps and signed ulp steps.

    Args:
        backend: numba where it is installed, else numpy; the blobs are the same.
    """

    name = "gap-ulp"

    def __init__(self, backend: Backend = "auto") -> None:
        self.backend: Backend = backend

    def encode(self, old: RawBytes, new: RawBytes, dtype: DType) -> bytes | NoBlob:
        """See `Codec`; too different are other dtypes and changes of over 4/5 of the elements."""
        before, after = pair_of(old, new)
        item_bytes = FLOAT_BYTES.get(dtype)
        if item_bytes is None:
            return NoBlob.TOO_DIFFERENT
        limit = int(SMALL_CHANGE * (before.size // item_bytes)) + 1
        loops = kernels(self.backend)
        found = loops.scan(as_words(before, item_bytes), as_words(after, item_bytes), limit)
        if found is None:
            return NoBlob.TOO_DIFFERENT
        count, gaps, steps, raws = found
        if not count:
            return NoBlob.UNCHANGED
        gap_frame = pack(gaps)
        step_frame = pack(np.concatenate((steps, raws.view(np.uint8))), symbols=True)
        return _HEAD.pack(MAGIC, len(gap_frame), count) + gap_frame + step_frame

    def apply_in_place(self, data: RawBytes, blob: RawBytes, dtype: DType) -> None:
        """See `Codec`; checks everything before the first byte."""
        item_bytes = FLOAT_BYTES.get(dtype)
        if item_bytes is None:
            raise malformed("a gap-ulp blob", f"elements of {dtype} have no ulp steps")
        target = as_bytes(data)
        words = as_words(target, item_bytes)
        gaps, steps, raws = _streams(as_bytes(blob), words)
        kernels(self.backend).patch(words, gaps, steps, raws)
        if not np.shares_memory(words, target):  # the buffer was not aligned
            target[:] = words.view(np.uint8)


def _streams(blob: U8, words: Words) -> tuple[U8, U8, Words]:
    """Gaps, steps and raw values, checked: patching with them stays inside the tensor."""
    what = "a gap-ulp blob"
    if blob.size < _HEAD.size:
        raise malformed(what, f"{blob.size} bytes are no header")
    magic, gap_bytes, count = _HEAD.unpack_from(blob.data)
    end = _HEAD.size + gap_bytes
    if magic != MAGIC or end > blob.size or not 0 < count <= words.size:
        raise malformed(what, f"magic {magic!r}, {gap_bytes} bytes of gaps, {count} changes")
    gaps = unpack(blob[_HEAD.size : end], what, count + words.size // GO_ON)
    content = unpack(blob[end:], what, count * (1 + words.itemsize))
    ended = int(np.count_nonzero(gaps != GO_ON))
    if ended != count or gaps[-1] == GO_ON or int(gaps.sum(dtype=np.int64)) + count > words.size:
        raise malformed(what, f"the gaps do not lead to {count} of {words.size} elements")
    steps = content[:count]
    raw_bytes = content[count:]
    if steps.size != count or raw_bytes.size != words.itemsize * int(
        np.count_nonzero(steps == RAW)
    ):
        raise malformed(what, f"{content.size} bytes of steps for {count} changes")
    return gaps, steps, as_words(raw_bytes, words.itemsize)
