"""zstd frames, written with their content size and read with a bound on what they may grow to."""

from __future__ import annotations

import threading

import zstandard

from ..schemas.errors import DeltaFormatError
from .buffers import U8, RawBytes, as_bytes, view_of

LEVEL = 1
BLOCK_BYTES = 1 << 20
_of_thread = threading.local()
# The step stream has few symbols and no repetitions; a match finder only finds accidents there,
# which cost more than their literals. A tiny table finds fewer of them (docs/adr/0060).
_SYMBOLS = zstandard.ZstdCompressionParameters.from_level(LEVEL, min_match=7, hash_log=6)


def pack(data: RawBytes, *, symbols: bool = False) -> bytes:
    """One zstd-1 frame. `symbols`: few symbols without repetitions, see above."""
    name = "symbols" if symbols else "plain"
    packer: zstandard.ZstdCompressor | None = getattr(_of_thread, name, None)
    if packer is None:  # a context is 1 MB and belongs to one thread
        packer = (
            zstandard.ZstdCompressor(compression_params=_SYMBOLS)
            if symbols
            else zstandard.ZstdCompressor(level=LEVEL)
        )
        setattr(_of_thread, name, packer)
    return packer.compress(view_of(data))


def unpack(frame: RawBytes, what: str, most_bytes: int) -> U8:
    """The content of one frame that declares its size.

    Args:
        frame: the frame, and nothing behind it.
        what: for messages.
        most_bytes: what the content may have at most.

    Raises:
        DeltaFormatError: truncated, corrupt, no declared size, or more than `most_bytes`.
    """
    view = view_of(frame)
    try:
        size = zstandard.frame_content_size(view)
        if not 0 <= size <= most_bytes:
            raise malformed(what, f"it declares {size} bytes, at most {most_bytes} can be")
        data = _unpacker().decompress(view, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise malformed(what, str(error)) from error
    if len(data) != size:
        raise malformed(what, f"it declares {size} bytes and holds {len(data)}")
    return as_bytes(data)


def xor_frame_into(data: U8, frame: RawBytes, what: str) -> None:
    """XOR a frame's content onto the bytes, block by block, so that blocks stay in the cache.

    Frames without a declared size are read too: peers write them by streaming.

    Raises:
        DeltaFormatError: truncated, corrupt, or not as long as `data`, which is then half changed.
    """
    at = 0
    try:
        with _unpacker().stream_reader(view_of(frame), closefd=False) as reader:
            while at < data.size:
                block = reader.read(min(BLOCK_BYTES, data.size - at))
                if not block:
                    raise malformed(what, f"it ends after {at} of {data.size} bytes")
                part = data[at : at + len(block)]
                part ^= as_bytes(block)
                at += len(block)
            if reader.read(1):
                raise malformed(what, f"it holds more than the tensor's {data.size} bytes")
    except zstandard.ZstdError as error:
        raise malformed(what, str(error)) from error


def malformed(what: str, why: str) -> DeltaFormatError:
    """The error of a blob that is not what its encoding says."""
    return DeltaFormatError(
        f"{what} is not what the encoding says: {why}",
        next_step="do not use this delta; fetch it again, or take a full version",
    )


def _unpacker() -> zstandard.ZstdDecompressor:
    unpacker: zstandard.ZstdDecompressor | None = getattr(_of_thread, "unpacker", None)
    if unpacker is None:
        unpacker = _of_thread.unpacker = zstandard.ZstdDecompressor()
    return unpacker
