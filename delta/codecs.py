"""One interface for every delta encoding, and the order in which they are tried.

A codec turns (old bytes, new bytes) of one tensor into a blob, and the old bytes and the blob into
the new ones. It knows nothing of files; whoever applies a blob verifies the base before and the
result after, because a blob can be applied to any bytes of the right length.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np

from ..schemas.dtypes import DType
from ..schemas.errors import ConfigError, DeltaTensorError
from .buffers import U8, RawBytes, as_bytes
from .gap_ulp import GapUlp
from .no_blob import NoBlob
from .shared import Overwrite, Xor

Encoding: TypeAlias = Literal["xor", "overwrite", "gap-ulp"]
"""What a delta folder declares: the first two are the shared layout, the third is ours."""
Method: TypeAlias = Literal["xor", "overwrite", "gap-ulp", "whole"]
"""What one entry holds. In a gap-ulp folder each tensor has its own."""


class Codec(Protocol):
    """A delta encoding of single tensors. Stateless; any thread may call it."""

    @property
    def name(self) -> str:
        """What an index calls it."""
        ...

    def encode(self, old: RawBytes, new: RawBytes, dtype: DType) -> bytes | NoBlob:
        """The blob that leads from `old` to `new`.

        Args:
            old: the tensor's bytes in the base version, C-contiguous.
            new: as many bytes of the new version.
            dtype: its element type.

        Raises:
            DeltaTensorError: another number of bytes, or a tensor that the encoding cannot address.
        """
        ...

    def apply_in_place(self, data: RawBytes, blob: RawBytes, dtype: DType) -> None:
        """Turn the old bytes in the writable buffer `data` into the new ones.

        Raises:
            DeltaFormatError: a truncated or malformed blob; `data` may be half changed.
        """
        ...


CODECS: dict[Encoding, Codec] = {"xor": Xor(), "overwrite": Overwrite(), "gap-ulp": GapUlp()}


def codec_of(name: str) -> Codec:
    """The codec of that name.

    Raises:
        ConfigError: there is none.
    """
    for known in get_args(Encoding):
        if known == name:
            return CODECS[known]
    raise ConfigError(
        f"unknown delta encoding {name!r}", next_step=f"one of {', '.join(CODECS)}"
    )  # fmt: skip


def apply(old: RawBytes, blob: RawBytes, dtype: DType, codec: Codec) -> U8:
    """The new bytes, in memory of their own; `old` stays as it is.

    Raises:
        DeltaFormatError: a truncated or malformed blob.
    """
    data = np.array(as_bytes(old))
    codec.apply_in_place(data, blob, dtype)
    return data


def encode_tensor(
    old: RawBytes, new: RawBytes, dtype: DType, encoding: Encoding
) -> tuple[Method, bytes] | None:
    """Encode one tensor as a folder of this encoding wants it; None when it is unchanged.

    The shared encodings have one method per folder, so the blob may even be larger than the tensor
    (by zstd's frame). `gap-ulp` takes xor where the change is not small, and the whole tensor where
    that is not smaller: an entry of it is never larger than the tensor.

    Raises:
        DeltaTensorError: see `Codec.encode`.
    """
    blob = CODECS[encoding].encode(old, new, dtype)
    if isinstance(blob, bytes):
        if encoding == "gap-ulp" and len(blob) >= as_bytes(new).size:
            return "whole", bytes(as_bytes(new))
        return encoding, blob
    if blob is NoBlob.UNCHANGED:
        return None
    if encoding != "gap-ulp":
        raise DeltaTensorError(f"a change that {encoding} cannot express", next_step="use xor")
    other = CODECS["xor"].encode(old, new, dtype)
    if other is NoBlob.UNCHANGED:
        return None
    if isinstance(other, bytes) and len(other) < as_bytes(new).size:
        return "xor", other
    return "whole", bytes(as_bytes(new))
