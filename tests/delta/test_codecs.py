"""Every codec brings every bit pattern back, and refuses what is not its blob."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weightbus.delta.codecs import CODECS, Codec, apply, codec_of, encode_tensor
from weightbus.delta.gap_ulp import GapUlp
from weightbus.delta.no_blob import NoBlob
from weightbus.schemas.dtypes import ITEM_BYTES, DType
from weightbus.schemas.errors import ConfigError, DeltaFormatError, DeltaTensorError

FLOATS: list[DType] = ["BF16", "F16", "F32"]
ALL: list[Codec] = [*CODECS.values(), GapUlp("numpy")]
SIZES = [0, 1, 2, 3, 4, 5, 254, 255, 256, 257, 509, 510, 511, 512, 1000]
SPECIAL = {
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7FFF, 0x7C00, 0xFC00],
    4: [0, 1 << 31, 1, (1 << 31) + 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF],
}


def round_trip(codec: Codec, old: bytes, new: bytes, dtype: DType) -> bytes | NoBlob:
    blob = codec.encode(old, new, dtype)
    if isinstance(blob, bytes):
        assert apply(old, blob, dtype, codec).tobytes() == new
        data = bytearray(old)
        codec.apply_in_place(data, blob, dtype)
        assert bytes(data) == new
    elif blob is NoBlob.UNCHANGED:
        assert old == new
    return blob


@st.composite
def changes(draw: st.DrawFn) -> tuple[DType, bytes, bytes]:
    """Random bits, then random changes: small steps, special values, anything."""
    dtype = draw(st.sampled_from(FLOATS))
    width = ITEM_BYTES[dtype]
    size = draw(st.sampled_from(SIZES))
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.0, 0.004, 0.05, 0.4, 0.6, 1.0]))
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << (8 * width), size, dtype=np.uint64).astype(f"<u{width}")
    old[rng.random(size) < 0.2] = rng.choice(SPECIAL[width])
    new = old.copy()
    hit = rng.random(size) < share
    kind = draw(st.sampled_from(["near", "special", "any"]))
    if kind == "near":
        new[hit] += rng.integers(-200, 200, int(hit.sum())).astype(f"<u{width}")
    elif kind == "special":
        new[hit] = rng.choice(SPECIAL[width], int(hit.sum()))
    else:
        new[hit] ^= rng.integers(0, 1 << (8 * width), int(hit.sum()), dtype=np.uint64).astype(
            f"<u{width}"
        )
    return dtype, old.tobytes(), new.tobytes()


@settings(deadline=None, max_examples=150)
@given(change=changes())
def test_any_bits_come_back(change: tuple[DType, bytes, bytes]) -> None:
    dtype, old, new = change
    blobs = [round_trip(codec, old, new, dtype) for codec in ALL]
    assert blobs[-1] == blobs[-2], "numpy and numba disagree"


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 765, 1020])
def test_gaps_around_the_limits(dtype: DType, gap: int) -> None:
    width = ITEM_BYTES[dtype]
    old = np.zeros(gap + 2 + gap + 3, f"<u{width}")
    new = old.copy()
    new[[gap, 2 * gap + 1]] = [1, 1 << (8 * width - 1)]
    blobs = [round_trip(codec, old.tobytes(), new.tobytes(), dtype) for codec in ALL]
    assert blobs[-1] == blobs[-2]
    assert isinstance(blobs[-1], bytes)


@pytest.mark.parametrize("place", [0, 4, 8, -1, -2])
def test_first_and_last_element(place: int) -> None:
    old = np.arange(11, dtype="<u2")
    new = old.copy()
    new[place] += 3
    for codec in ALL:
        assert isinstance(round_trip(codec, old.tobytes(), new.tobytes(), "BF16"), bytes)


def test_every_step_of_bf16_near_zero_and_infinity() -> None:
    for old in (0x0000, 0x8000, 0x7F80, 0xFF80, 0xFFFF):
        new = np.arange(1 << 16, dtype=np.uint32).astype("<u2")
        before = np.full(2 * new.size, old, "<u2")
        after = before.copy()
        after[1::2] = new
        for codec in (GapUlp(), GapUlp("numpy")):
            assert round_trip(codec, before.tobytes(), after.tobytes(), "BF16")


def test_unaligned_buffers() -> None:
    old, new = np.zeros(64, "<u2"), np.zeros(64, "<u2")
    new[5] = 7
    shifted = bytearray(b"x" + old.tobytes())
    for codec in ALL:
        blob = codec.encode(memoryview(shifted)[1:], b"" + new.tobytes(), "BF16")
        assert isinstance(blob, bytes)
        data = bytearray(shifted)
        codec.apply_in_place(memoryview(data)[1:], blob, "BF16")
        assert data == b"x" + new.tobytes()


@pytest.mark.parametrize("codec", ALL)
def test_nothing_changed_gives_no_blob(codec: Codec) -> None:
    assert codec.encode(b"\x01\x02\x03\x04", b"\x01\x02\x03\x04", "F32") is NoBlob.UNCHANGED
    assert codec.encode(b"", b"", "BF16") is NoBlob.UNCHANGED


@pytest.mark.parametrize("codec", ALL)
def test_another_size_is_refused(codec: Codec) -> None:
    with pytest.raises(DeltaTensorError, match=r"had 4 bytes and has 8.*full version"):
        codec.encode(bytes(4), bytes(8), "BF16")


@pytest.mark.parametrize("codec", ALL)
def test_every_truncation_is_refused(codec: Codec) -> None:
    old = np.arange(600, dtype="<u2")
    new = old.copy()
    new[::7] += 1
    new[3] = 60_000
    blob = codec.encode(old.tobytes(), new.tobytes(), "BF16")
    assert isinstance(blob, bytes)
    for end in range(len(blob)):
        # A frame may be whole without its last, empty, block; then the result is right.
        data = bytearray(old.tobytes())
        refusal = ""
        try:
            codec.apply_in_place(data, blob[:end], "BF16")
        except DeltaFormatError as error:
            refusal = str(error)
        assert "fetch it again" in refusal or data == new.tobytes()


@pytest.mark.parametrize("codec", ALL)
def test_a_blob_of_a_longer_tensor_is_refused(codec: Codec) -> None:
    old, new = bytes(2000), bytes(1990) + b"0123456789"
    blob = codec.encode(old, new, "BF16")
    assert isinstance(blob, bytes)
    with pytest.raises(DeltaFormatError):
        codec.apply_in_place(bytearray(1000), blob, "BF16")


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
def test_flipped_bits_never_write_outside(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, 700, dtype=np.uint32).astype("<u2")
    new = old.copy()
    new[rng.random(700) < 0.1] += 1
    for codec in ALL:
        blob = codec.encode(old.tobytes(), new.tobytes(), "BF16")
        if not isinstance(blob, bytes):
            continue
        broken = bytearray(blob)
        broken[rng.integers(len(broken))] ^= 1 << int(rng.integers(8))
        data = bytearray(b"\xaa" * 64 + old.tobytes() + b"\xaa" * 64)
        with contextlib.suppress(DeltaFormatError):
            codec.apply_in_place(memoryview(data)[64:-64], broken, "BF16")
        assert data[:64] == data[-64:] == b"\xaa" * 64


def test_fallback_by_tensor() -> None:
    rng = np.random.default_rng(7)
    old, new = rng.bytes(4000), rng.bytes(4000)
    assert encode_tensor(old, new, "BF16", "gap-ulp") == ("whole", new)
    assert encode_tensor(old, old, "BF16", "gap-ulp") is None
    near = (np.frombuffer(old, "<u2") ^ 1).tobytes()
    found = encode_tensor(old, near, "BF16", "gap-ulp")
    assert found is not None
    assert found[0] == "xor"
    integers = encode_tensor(old, old[:-1] + b"!", "I32", "gap-ulp")
    assert integers is not None
    assert integers[0] == "xor"
    assert encode_tensor(b"\x01\x02", b"\x01\x03", "BF16", "gap-ulp") == ("whole", b"\x01\x03")


def test_unknown_encoding_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'lz4'.*xor, overwrite, gap-ulp"):
        codec_of("lz4")
