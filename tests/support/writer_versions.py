"""Origins to publish, and what must be true of a writers' folder and of the stream afterwards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import load_file, save_file
from support.bus_servers import take
from weightbus.bus.events import read_event
from weightbus.bus.interface import Bus
from weightbus.bus.subjects import outcomes_filter, run_filter
from weightbus.engine_agents.verify import verify_version
from weightbus.schemas.errors import SchemaError
from weightbus.schemas.events import AnyEvent, Outcome, VersionComplete, VersionKey
from weightbus.schemas.manifest import Manifest

RUN = "run"
Tensors: TypeAlias = dict[str, Any]


def make_origin(folder: Path, nbytes: int = 400_000, *, seed: int = 0, layers: int = 12) -> Tensors:
    """An HF folder: two files, assets in a sub-folder, about `nbytes`; returns its tensors."""
    (folder / "extra").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text(json.dumps({"seed": seed}))
    (folder / "extra" / "template.jinja").write_text("{{ messages }}")
    chance = np.random.default_rng(seed)
    columns = 64
    rows = max(2, nbytes // (layers * columns * 4))
    tensors: Tensors = {}
    for layer in range(layers):
        count = rows - rows // 4 + layer * (rows // 2) // layers
        value = chance.standard_normal((count, columns), np.float32)
        tensors[f"model.layers.{layer}.mlp.weight"] = value
        tensors[f"model.layers.{layer}.norm.weight"] = value[0].astype(np.float16)
    tensors["scale"] = np.full((), seed, np.float32)
    names = sorted(tensors)
    halves = (names[::2], names[1::2])
    weight_map: dict[str, str] = {}
    for number, half in enumerate(halves, 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        weight_map |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return tensors


def tensors_of(directory: Path, manifest: Manifest) -> Tensors:
    """Every tensor of a version directory, read by the safetensors library."""
    found: Tensors = {}
    for shard in manifest.shards:
        found.update(load_file(directory / shard.file))
    return found


def check_version(complete: VersionComplete, expected: Mapping[str, Any]) -> Manifest:
    """The directory is whole, as its manifest says, and holds exactly these bytes."""
    directory = Path(complete.directory)
    manifest = verify_version(
        directory, complete.manifest_digest, expected_version=complete.version
    )
    found = tensors_of(directory, manifest)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name
    return manifest


def check_no_left_over(root: Path, visible: Sequence[VersionKey], run_id: str = RUN) -> None:
    """Under a writers' root are these version directories and checkpoints of writers, no more."""
    wanted = {f"attempt_{key.attempt:04d}/weight_v{key.weight_version:06d}" for key in visible}
    folders = {path.relative_to(root / run_id).as_posix() for path in root.glob(f"{run_id}/*/*")}
    assert folders == wanted
    others = {path.name for path in (root / run_id).iterdir() if path.is_file()}
    assert all(name.startswith(".writer-") and name.endswith(".json") for name in others), others
    for key in visible:
        folder = root / run_id / f"attempt_{key.attempt:04d}" / f"weight_v{key.weight_version:06d}"
        hidden = [path for path in folder.rglob("*") if path.name.startswith(".")]
        assert hidden == []


async def events_of(bus: Bus, run_id: str = RUN) -> list[AnyEvent]:
    """Every event of a run up to now; what is none is left out."""
    subjects = run_filter(run_id)
    last = await bus.last(subjects)
    found: list[AnyEvent] = []
    if last is None:
        return found
    async with bus.read([subjects]) as reader:
        async for message in reader:
            with contextlib.suppress(SchemaError):
                found.append(read_event(message).event)
            if message.sequence >= last.sequence:
                break
    return found


async def outcomes(bus: Bus, run_id: str = RUN) -> list[Outcome]:
    """The outcomes of a run's versions, in the stream's order."""
    return [event for event in await events_of(bus, run_id) if isinstance(event, Outcome)]


async def next_outcome(bus: Bus, known: int, timeout_s: float, run_id: str = RUN) -> Outcome:
    """The outcome that follows the first `known` ones of a run."""
    async with bus.read([outcomes_filter(run_id)]) as reader:
        messages = await take(reader, known + 1, timeout_s)
    event = read_event(messages[-1]).event
    assert isinstance(event, Outcome)
    return event
