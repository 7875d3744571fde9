"""Delta codecs on bf16 weights after one Adam-like step: `python benchmarks/delta.py` (< 1 minute).

Masters are fp32; a step moves each by lr times a value of Adam's size. The entropy bound is that of
independent elements: n times the entropy of the step in representable values, zero included.
Speeds are GB of tensor per CPU-second of one thread, the best of a few rounds; memcpy stands beside
them in the same run. Everything is touched and compiled first.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import zstandard
from weightbus.delta.codecs import Codec, encode_tensor
from weightbus.delta.gap_ulp import GapUlp
from weightbus.delta.kernels import kernels
from weightbus.delta.shared import Xor

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
ROUNDS = 4
SPREAD = 0.02
"""Standard deviation of the weights."""
BETA1 = 0.9
MOVE = ((1 - BETA1) / (1 + BETA1)) ** 0.5
"""Standard deviation of Adam's m / sqrt(v) where gradients are noise: 0.23."""
AIM_SIZE, AIM_ENCODE, AIM_APPLY = 1.1, 2.0, 5.0
AIM_RATE = 1e-6

Words = npt.NDArray[np.uint16]


def bf16(values: npt.NDArray[np.float32]) -> Words:
    """Rounded to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def entropy_bytes(old: Words, new: Words) -> float:
    """The bound: the entropy of all steps, zeros included."""
    pair = [words.view(np.int16).astype(np.int32) for words in (old, new)]
    before, after = (words ^ ((words >> 31) & 0x7FFF) for words in pair)
    _, counts = np.unique(after - before, return_counts=True)
    share = counts / old.size
    return float(-(share * np.log2(share)).sum()) * old.size / 8


def speed(nbytes: int, work: Callable[[], object]) -> float:
    """GB per CPU-second, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return nbytes / best / 1e9


def plain_apply(old: Words, new: Words) -> float:
    """xor+zstd-1 without our blocks: the whole frame unpacked, then XORed into new memory."""
    change = zstandard.ZstdCompressor(level=1).compress((old ^ new).view(np.uint8).data)
    unpacker = zstandard.ZstdDecompressor()
    return speed(
        old.nbytes, lambda: old.view(np.uint8) ^ np.frombuffer(unpacker.decompress(change), "u1")
    )


def measure(codec: Codec, old: Words, new: Words) -> tuple[int, float, float] | None:
    """Blob bytes, encode and apply speed; apply is in place on bytes that are restored outside."""
    before, after = old.view(np.uint8), new.view(np.uint8)
    blob = codec.encode(before, after, "BF16")
    if not isinstance(blob, bytes):
        return None
    data = before.copy()
    encode = speed(old.nbytes, lambda: codec.encode(before, after, "BF16"))
    best = float("inf")
    for _ in range(ROUNDS):
        data[:] = before
        began = time.thread_time()
        codec.apply_in_place(data, blob, "BF16")
        best = min(best, time.thread_time() - began)
    if not np.array_equal(data, after):
        raise SystemExit("the codec did not give the new bytes back")
    return len(blob), encode, old.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the bf16 tensor")
    mib: int = parser.parse_args().mib
    rng = np.random.default_rng(0)
    count = mib * 2**19
    masters = rng.standard_normal(count, dtype=np.float32) * np.float32(SPREAD)
    moves = rng.standard_normal(count, dtype=np.float32) * np.float32(MOVE)
    old = bf16(masters)
    target = np.ones(old.nbytes, np.uint8)
    copy = speed(old.nbytes, lambda: np.copyto(target, old.view(np.uint8)))
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, {mib} MiB bf16; memcpy {copy:.1f} GB/s")
    codecs: dict[str, Codec] = {
        "xor": Xor(), kernels().name: GapUlp(), "numpy": GapUlp("numpy"),
    }  # fmt: skip
    for codec in codecs.values():  # compile
        codec.apply_in_place(bytearray(64), bytes(as_blob(codec)), "BF16")
    print("apply x: against xor in cache-sized blocks (ours) / against xor of whole tensors")
    print("lr      changed %  bound %  method     size %  x bound  encode     x   apply  x")
    verdicts = ("no", "no")
    for rate in RATES:
        new = bf16(np.asarray(masters + np.float32(rate) * moves, np.float32))
        changed = float((old != new).mean())
        bound = entropy_bytes(old, new)
        whole_apply = plain_apply(old, new)
        plain = measure(codecs["xor"], old, new)
        chosen = encode_tensor(old.view(np.uint8), new.view(np.uint8), "BF16", "gap-ulp")
        if plain is None or chosen is None or len(chosen[1]) > old.nbytes:
            raise SystemExit("no change, or an entry larger than its tensor")
        for name, codec in codecs.items():
            found = measure(codec, old, new)
            label = name if name == "xor" else f"gap/{name}"
            if found is None:
                print(f"{rate:.0e}  {label}: too different; sent as {chosen[0]}")
                continue
            size, encode, apply = found
            print(
                f"{rate:.0e}  {100 * changed:8.2f}  {100 * bound / old.nbytes:7.3f}  {label:9}"
                f"  {100 * size / old.nbytes:6.3f}  {size / bound:7.3f}  {encode:6.2f}"
                f"  {encode / plain[1]:4.2f}  {apply:6.2f}"
                f"  {apply / plain[2]:.2f} / {apply / whole_apply:.2f}"
            )
            if rate == AIM_RATE and name == kernels().name:
                small = size <= AIM_SIZE * bound and encode >= AIM_ENCODE * plain[1]
                verdicts = tuple(
                    "met" if small and apply >= AIM_APPLY * speed_of_xor else "MISSED"
                    for speed_of_xor in (plain[2], whole_apply)
                )
    print(
        f"aims at lr {AIM_RATE:.0e} (size <= {AIM_SIZE} x bound, encode >= {AIM_ENCODE} x and "
        f"apply >= {AIM_APPLY} x xor): {verdicts[0]} (in blocks), {verdicts[1]} (whole tensors)"
    )


def as_blob(codec: Codec) -> bytes:
    """A small blob that every loop has to run for."""
    blob = codec.encode(bytes(64), bytes(60) + b"\x01\x00\x00\x80", "BF16")
    if not isinstance(blob, bytes):
        raise SystemExit("a small change gave no blob")
    return blob


if __name__ == "__main__":
    main()
