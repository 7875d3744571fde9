"""Small checkpoints and deltas, and a reader written only from the shared layout's description."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard
from weightbus.delta.checksums import ChecksumFormat
from weightbus.delta.codecs import Encoding
from weightbus.delta.files import Change, TensorBytes, weight_map_of, write_shard
from weightbus.delta.index import DeltaIndex, shard_name, write_index
from weightbus.schemas.dtypes import DType
from weightbus.schemas.safetensors_format import build_header

Model = dict[str, tuple[DType, tuple[int, ...], bytes]]


def model(seed: int = 0) -> Model:
    """Seven tensors in bf16, fp16, fp32 and an integer type; one is empty."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[DType, tuple[int, ...], int]] = {
        "embed": ("BF16", (64, 48), 2), "norm": ("BF16", (48,), 2), "q": ("BF16", (48, 50), 2),
        "half": ("F16", (33,), 2), "bias": ("F32", (17, 3), 4), "table": ("I32", (9,), 4),
        "none": ("BF16", (0, 4), 2),
    }  # fmt: skip
    return {
        name: (dtype, shape, rng.bytes(int(np.prod(shape)) * width))
        for name, (dtype, shape, width) in shapes.items()
    }


def stepped(old: Model, seed: int, *, share: float = 0.03, all_of: str = "norm") -> Model:
    """The next version: few small steps, one tensor all new, `table` by one byte, `half` kept."""
    rng = np.random.default_rng(seed)
    new = dict(old)
    for name in ("embed", "q", "bias"):
        dtype, shape, data = old[name]
        words = np.frombuffer(data, "<u4" if dtype == "F32" else "<u2").copy()
        words[rng.random(words.size) < share] += 1
        new[name] = (dtype, shape, words.tobytes())
    dtype, shape, data = old[all_of]
    new[all_of] = (dtype, shape, rng.bytes(len(data)))
    dtype, shape, data = old["table"]
    new["table"] = (dtype, shape, bytes([data[0] ^ 1]) + data[1:])
    return new


def save(folder: Path, tensors: Model, *, files: int = 2) -> Path:
    """An ordinary checkpoint with an index, a config and a sub-folder."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for k in range(files):
        own = names[k::files]
        file = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
        header = build_header([(n, tensors[n][0], tensors[n][1]) for n in own], {"format": "pt"})
        (folder / file).write_bytes(header + b"".join(tensors[n][2] for n in own))
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "tokenizer.txt").write_text("words")
    return folder


def load(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes, read without our code."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        for name, info in header.items():
            if name != "__metadata__":
                begin, end = info["data_offsets"]
                found[name] = raw[8 + length + begin : 8 + length + end]
    return found


def bytes_of(tensors: Model) -> dict[str, bytes]:
    """A model's bytes, as `load` gives them."""
    return {name: data for name, (_, _, data) in tensors.items()}


def changes_of(old: Model, new: Model) -> list[Change]:
    """Both sides of every tensor."""
    return [Change(n, TensorBytes(*old[n]), TensorBytes(*new[n])) for n in new]


def save_delta(
    folder: Path, old: Model, new: Model, version: int, encoding: Encoding,
    form: ChecksumFormat = "xxh3-128", *, lineage: str = "", base_version: int | None = None,
) -> Path:  # fmt: skip
    """A delta in two files."""
    folder.mkdir(parents=True)
    changes = changes_of(old, new)
    shards = [
        write_shard(folder / shard_name(k, 2), changes[k::2], encoding, form) for k in range(2)
    ]
    base = version - 1 if base_version is None else base_version
    weight_map = weight_map_of(shards)
    write_index(folder, DeltaIndex(version, base, encoding, form, lineage, weight_map))
    return folder


def independent_apply(base: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """What the description of the shared layout says, in the plainest way."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    meta, result = index["metadata"], dict(base)
    assert meta["compression_format"] == "zstd"
    assert len(meta["version"]) == len(meta["base_version"]) == 6
    for name, file in index["weight_map"].items():
        raw = (folder / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert header[name]["dtype"] == "U8"
        begin, end = header[name]["data_offsets"]
        assert header[name]["shape"] == [end - begin]
        blob = zstandard.ZstdDecompressor().decompress(raw[8 + length + begin : 8 + length + end])
        if meta["delta_encoding"] == "xor":
            new = bytes(a ^ b for a, b in zip(base[name], blob, strict=True))
        else:
            count = int.from_bytes(blob[:4], "little")
            places = struct.unpack(f"<{count}I", blob[4 : 4 + 4 * count])
            data = bytearray(base[name])
            for place, value in zip(places, blob[4 + 4 * count :], strict=True):
                data[place] = value
            new = bytes(data)
        sums = {
            "xxh3-128": xxhash.xxh3_128(new).hexdigest(),
            "blake3": blake3.blake3(new).hexdigest(),
            "adler32": f"{zlib.adler32(new):08x}",
        }
        assert header["__metadata__"][name] == sums[meta["checksum_format"]]
        result[name] = new
    return result
