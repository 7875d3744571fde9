"""Versions of made-up Megatron ranks: staged in files, as events to be bent and shuffled."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from support.conversion_megatron import (
    Grid,
    Model,
    layouts_of,
    local_bytes,
    wanted_of,
    whole_value,
)
from support.writer_versions import RUN, Tensors
from weightbus.bus.events import publish_event
from weightbus.bus.interface import Bus
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import (
    AnyEvent,
    AttemptOpened,
    ChunkReady,
    ChunkTensor,
    LayoutPublished,
    Location,
    ProducerSealed,
    VersionKey,
    VersionOpened,
)
from weightbus.schemas.layout import Layout
from weightbus.writers.plan_types import Source

DENSE = Model(norms=True, te=True)
LATENT = Model(latent=True, experts=4, dense_layers=1)
_CHUNK_TENSORS = 3


def save_origin(model: Model, folder: Path) -> None:
    """An origin checkpoint whose headers ask for what the model becomes."""
    folder.mkdir()
    family = "deepseek_v3" if model.latent else "qwen3"
    (folder / "config.json").write_text(json.dumps({**model.config, "model_type": family}))
    save_file(as_tensors(model), folder / "model.safetensors")


def as_tensors(model: Model) -> Tensors:
    """The HF tensors that the formulas give."""
    return {
        name: np.frombuffer(raw.data, np.float32).reshape(raw.shape)
        for name, raw in wanted_of(model).items()
    }


@dataclass
class MegatronVersion:
    """One version of a model on a grid of ranks.

    `attempt_events` belong to the attempt, `by_rank` are each rank's events in its own order.
    """

    key: VersionKey
    layouts: list[Layout]
    attempt_events: list[AnyEvent]
    by_rank: list[list[AnyEvent]]
    wanted: Tensors

    def events(self, chance: random.Random | None = None) -> list[AnyEvent]:
        """Everything, rank by rank, or mixed: only each rank's own order stays."""
        if chance is None:
            return [*self.attempt_events, *(event for rank in self.by_rank for event in rank)]
        queues = [[event] for event in self.attempt_events] + [list(rank) for rank in self.by_rank]
        mixed: list[AnyEvent] = []
        while queues:
            queue = chance.choice(queues)
            mixed.append(queue.pop(0))
            queues = [queue for queue in queues if queue]
        return mixed

    async def publish(self, bus: Bus, events: Iterable[AnyEvent] | None = None) -> None:
        """Put the layouts into the bucket and publish the events, in this order."""
        for layout in self.layouts:
            await bus.put_blob(layout.digest(), layout.to_bytes())
        for event in self.events() if events is None else events:
            await publish_event(bus, event)


def stage(
    model: Model,
    grid: Grid,
    folder: Path,
    origin: Path,
    *,
    attempt: int = 1,
    weight_version: int = 0,
    value_of: Callable[[str, tuple[int, ...]], Any] = whole_value,
    chunk_tensors: int = _CHUNK_TENSORS,
) -> MegatronVersion:
    """Write each rank's tensors into a file of `folder` and make the events that announce them."""
    folder.mkdir(parents=True, exist_ok=True)
    layouts = layouts_of(model, grid)
    key = VersionKey(run_id=RUN, attempt=attempt, weight_version=weight_version)
    attempt_events: list[AnyEvent] = [
        AttemptOpened(
            run_id=RUN, attempt=attempt, nonce=f"trainer {attempt}", producers=len(layouts),
            naming="megatron", origin=str(origin),
        )
    ]  # fmt: skip
    attempt_events += [
        LayoutPublished(
            run_id=RUN, attempt=attempt, rank=layout.producer.rank,
            layout_digest=layout.digest(), tensors=len(layout.tensors), nbytes=layout.owned_bytes,
        )
        for layout in layouts
    ]  # fmt: skip
    by_rank = [_rank(layout, layouts, folder, key, value_of, chunk_tensors) for layout in layouts]
    return MegatronVersion(key, layouts, attempt_events, by_rank, as_tensors(model))


def _rank(
    layout: Layout,
    layouts: list[Layout],
    folder: Path,
    key: VersionKey,
    value_of: Callable[[str, tuple[int, ...]], Any],
    chunk_tensors: int,
) -> list[AnyEvent]:
    rank = layout.producer.rank
    path = folder / f"rank{rank}_v{key.weight_version}"
    staged: list[tuple[ChunkTensor, int]] = []
    data = bytearray()
    for index, tensor in enumerate(layout.tensors):
        if tensor.owned:
            source = Source(rank, index, tensor.name, tensor.dtype, tensor.shape, (), None)
            raw = local_bytes(source, layouts, value_of)
            staged.append(
                (
                    ChunkTensor(index=index, offset=0, length=len(raw), digest=digest_of(raw)),
                    len(data),
                )
            )
            data += raw
    path.write_bytes(data)
    events: list[AnyEvent] = [VersionOpened(version=key, producers=len(layouts))]
    events += list(_chunks(staged, path, key, rank, chunk_tensors))
    events.append(
        ProducerSealed(
            version=key, rank=rank, chunks=len(events) - 1, tensors=len(staged), nbytes=len(data)
        )
    )
    return events


def _chunks(
    staged: Sequence[tuple[ChunkTensor, int]], path: Path, key: VersionKey, rank: int, size: int
) -> Iterable[ChunkReady]:
    for number, at in enumerate(range(0, len(staged), size)):
        part = staged[at : at + size]
        begin = part[0][1]
        end = part[-1][1] + part[-1][0].length
        yield ChunkReady(
            version=key, rank=rank, chunk=number,
            location=Location(uri=path.as_uri(), offset=begin, length=end - begin),
            tensors=tuple(
                tensor.model_copy(update={"offset": offset - begin}) for tensor, offset in part
            ),
        )  # fmt: skip
