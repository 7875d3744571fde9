"""Peers' deltas as they write them, extents of a manifest, and a disk that does not take it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors.numpy import save
from support.delta_folders import bytes_of, load, model, save_delta, stepped
from support.delta_folders import save as save_model
from weightbus.delta.apply import ApplyOptions, apply_delta
from weightbus.delta.fold import TensorJob, rebuild
from weightbus.delta.state import read_state
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import DeltaBaseError, StorageError
from weightbus.schemas.hf_folder import read_folder
from weightbus.schemas.manifest import Extent

ORIGIN = ApplyOptions(base_version=0)


@pytest.mark.parametrize("sized", [True, False])
def test_a_peers_xor_delta_as_it_is(tmp_path: Path, sized: bool) -> None:
    """Written by safetensors' own writer; frames with and without a declared size."""
    old, new = model(), stepped(model(), 1)
    base, folder = save_model(tmp_path / "origin", old), tmp_path / "weight_v000001"
    folder.mkdir()
    blobs: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}
    sums: dict[str, str] = {}
    for name, (_, _, data) in new.items():
        if data != old[name][2]:
            change = bytes(a ^ b for a, b in zip(data, old[name][2], strict=True))
            packer = zstandard.ZstdCompressor(level=1, write_content_size=sized)
            blobs[name] = np.frombuffer(packer.compress(change), np.uint8)
            sums[name] = xxhash.xxh3_128_hexdigest(data)
    file = "model-00000-of-00001.safetensors"
    (folder / file).write_bytes(save(blobs, metadata=sums))
    metadata = {
        "version": "000001", "base_version": "000000", "delta_encoding": "xor",
        "compression_format": "zstd", "checksum_format": "xxh3-128",
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": dict.fromkeys(blobs, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert apply_delta(base, [folder], base, ORIGIN).lineage == ""
    assert load(base) == bytes_of(new)


def test_a_peer_that_moved_the_folder_on(tmp_path: Path) -> None:
    models = [model(), stepped(model(), 1)]
    models.append(stepped(models[1], 2))
    base = save_model(tmp_path / "origin", models[0])
    apply_delta(
        base, [save_delta(tmp_path / "1", models[0], models[1], 1, "xor")], base, ORIGIN
    )  # fmt: skip
    peers = save_model(tmp_path / "peers", models[2])
    for path in peers.glob("*.safetensors"):
        (base / path.name).write_bytes(path.read_bytes())
    (base / ".weight_sync/state.json").write_text('{"version": "000002"}')
    assert read_state(base).tensors is None
    third = stepped(models[2], 3)
    delta = save_delta(tmp_path / "3", models[2], third, 3, "gap-ulp", lineage="run/1/n")
    assert apply_delta(base, [delta], base).lineage == "run/1/n"
    assert load(base) == bytes_of(third)


@pytest.mark.parametrize("cut", [0, 1, 1000])
def test_extents_of_a_manifest_are_verified(tmp_path: Path, cut: int) -> None:
    tensor = read_folder(save_model(tmp_path / "origin", model()))["embed"]
    data = model()["embed"][2]
    parts = [data[:cut], data[cut:]] if cut else [data]
    good = [Extent(length=len(part), digest=digest_of(part)) for part in parts]
    fd = os.open(tensor.file, os.O_RDONLY)
    try:
        found = rebuild(TensorJob(tensor, (), good, None), fd)
        assert (found.length, found.digest) == (len(data), digest_of(data))
        bad = [*good[:-1], Extent(length=good[-1].length, digest=digest_of(b"other"))]
        with pytest.raises(DeltaBaseError, match=r"embed of the base has"):
            rebuild(TensorJob(tensor, (), bad, None), fd)
    finally:
        os.close(fd)


def test_a_disk_that_does_not_take_it(tmp_path: Path) -> None:
    base = save_model(tmp_path / "origin", model())
    delta = save_delta(tmp_path / "1", model(), stepped(model(), 1), 1, "xor")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write: .*free space or mend permissions"):
        apply_delta(base, [delta], tmp_path / "file" / "new", ORIGIN)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_model(tmp_path / "origin", model())
    delta = save_delta(tmp_path / "1", model(), stepped(model(), 1), 1, "gap-ulp")

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for target in (base, tmp_path / "new"):
        with pytest.raises(StorageError, match="No space left on device"):
            apply_delta(base, [delta], target, ORIGIN)
    monkeypatch.undo()
    assert load(base) == bytes_of(model())
    assert not list(tmp_path.glob(".new*"))
    assert not (base / ".weight_sync/next").exists()
    assert apply_delta(base, [delta], base, ORIGIN).version == 1
