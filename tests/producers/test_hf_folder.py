"""An HF checkpoint folder as a version, without torch and without a copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.staging_publishers import of, published, read_chunk
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.producers.chunks import ChunkPlan
from weightbus.producers.hf_folder import hash_chunk, plan_folder, publish_hf_folder
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import OriginError, SourceTruncatedError
from weightbus.schemas.events import (
    AttemptOpened,
    ChunkReady,
    ProducerSealed,
    VersionAborted,
    VersionOpened,
)
from weightbus.schemas.layout import Layout

TENSORS = {
    "model.embed_tokens.weight": np.arange(60, dtype=np.float32).reshape(12, 5),
    "model.norm.weight": np.ones(5, dtype=np.float16),
    "model.layers.0.mlp.gate.weight": np.arange(7, dtype=np.int32),
    "lm_head.weight": np.arange(60, dtype=np.float32).reshape(12, 5) * 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index, one of them a link as in a download cache."""
    path = tmp_path / "origin"
    blobs = tmp_path / "blobs"
    path.mkdir()
    blobs.mkdir()
    names = list(TENSORS)
    files = {
        "model-00001-of-00002.safetensors": names[:2],
        "model-00002-of-00002.safetensors": names[2:],
    }
    for file, held in files.items():
        save_file({name: TENSORS[name] for name in held}, path / file)
    second = path / "model-00002-of-00002.safetensors"
    second.rename(blobs / "abc")
    second.symlink_to(blobs / "abc")
    (path / "config.json").write_text("{}")
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


async def test_every_tensor_is_announced_where_it_lies(folder: Path) -> None:
    server = MemoryServer()
    done: list[int] = []
    async with await MemoryBus.connect(server) as bus:
        key = await publish_hf_folder(folder, "run", bus, 0, chunk_bytes=100, on_chunk=done.append)
    assert str(key) == "run/1/v000000"
    events = published(server)
    [opened] = of(events, AttemptOpened)
    assert (opened.naming, opened.origin, opened.producers) == ("hf", str(folder), 1)
    layout = Layout.from_bytes(next(iter(server.blobs.values())))
    found: dict[str, bytes] = {}
    for chunk in of(events, ChunkReady):
        data = read_chunk(chunk)
        for tensor in chunk.tensors:
            assert tensor.digest == digest_of(data[tensor.index])
            found[layout.tensors[tensor.index].name] = data[tensor.index]
    assert found == {name: value.tobytes() for name, value in TENSORS.items()}
    assert {tensor.name: tensor.shape for tensor in layout.tensors} == {
        name: value.shape for name, value in TENSORS.items()
    }
    [sealed] = of(events, ProducerSealed)
    assert (sealed.tensors, sealed.nbytes) == (4, sum(done))
    assert isinstance(events[-1], ProducerSealed)
    assert of(events, VersionOpened)[0].producers == 1
    assert {chunk.location.uri.rsplit("/", 1)[1] for chunk in of(events, ChunkReady)} == {
        "abc",
        "model-00001-of-00002.safetensors",
    }


async def test_publishing_twice_is_two_attempts(folder: Path) -> None:
    async with await MemoryBus.connect(MemoryServer()) as bus:
        assert (await publish_hf_folder(folder, "run", bus, 0)).attempt == 1
        assert (await publish_hf_folder(folder, "run", bus, 0)).attempt == 2


def test_a_file_that_became_shorter_is_named(folder: Path) -> None:
    path, chunk = plan_folder(folder).chunks[-1]
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(SourceTruncatedError, match=r"the file ends at byte \d+") as caught:
        hash_chunk(path, chunk)
    assert caught.value.where == {"file": path}


async def test_a_version_that_cannot_be_read_to_its_end_is_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: Path, chunk: ChunkPlan) -> list[str]:
        raise SourceTruncatedError("the file ends", where={"file": path, "chunk": chunk.number})

    monkeypatch.setattr("weightbus.producers.hf_folder.hash_chunk", cut)
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:
        with pytest.raises(SourceTruncatedError):
            await publish_hf_folder(folder, "run", bus, 0)
    [aborted] = of(published(server), VersionAborted)
    assert (aborted.error, aborted.by) == ("SourceTruncatedError", "producer 0")
    assert of(published(server), ProducerSealed) == []


async def test_a_folder_without_weights_opens_no_attempt(tmp_path: Path) -> None:
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:
        with pytest.raises(OriginError, match="neither"):
            await publish_hf_folder(tmp_path, "run", bus, 0)
    assert published(server) == []


def test_the_module_loads_no_torch() -> None:
    code = "import sys, weightbus.producers.hf_folder; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
