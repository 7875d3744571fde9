"""One writer's work on one version, without a bus: a plan, its staged sources, two lanes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file
from support.bus_servers import PATIENCE_S
from support.conversion_megatron import Grid, Model
from support.writer_megatron import MegatronVersion, save_origin, stage
from support.writer_versions import RUN
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import ChunkReady, ShardPersisted, VersionKey
from weightbus.schemas.hf_folder import read_config
from weightbus.schemas.manifest import ShardTable
from weightbus.writers.assembly import Assembly
from weightbus.writers.config import WriterConfig
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.expectation import Expectation
from weightbus.writers.paths import VersionPaths
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_types import Plan
from weightbus.writers.shard_work import Lane, VersionWork
from weightbus.writers.steps import Step


class CountedSteps:
    """How often each step was taken."""

    def __init__(self) -> None:
        self.taken: Counter[Step] = Counter()
        self._lock = threading.Lock()

    def reached(self, step: Step, key: VersionKey) -> None:
        with self._lock:
            self.taken[step] += 1


@dataclass
class Bench:
    """A version that is staged and planned, and the work on it."""

    version: MegatronVersion
    plan: Plan
    paths: VersionPaths
    work: VersionWork
    assembly: Assembly
    steps: CountedSteps
    announced: list[ShardPersisted] = field(default_factory=list[ShardPersisted])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def announce(self, event: ShardPersisted) -> None:
        self.announced.append(event)

    @property
    def chunks(self) -> list[ChunkReady]:
        return [event for event in self.version.events() if isinstance(event, ChunkReady)]

    def arrive(self, chunks: Sequence[ChunkReady]) -> None:
        """What the events say, as the writer's service passes it on."""
        for sequence, chunk in enumerate(chunks, 10):
            for arrival in self.assembly.chunk(chunk, sequence):
                self.work.arrived(self.plan.sources[arrival.key], self.assembly)

    async def done(self) -> None:
        """Wait for every task, also for those that tasks begin; raises what they raise."""
        async with asyncio.timeout(PATIENCE_S):
            while self.tasks:
                tasks, self.tasks = self.tasks, []
                await asyncio.gather(*tasks)

    def tensors(self) -> dict[str, Any]:
        """Every tensor of this writer's shards, as safetensors reads them."""
        return {
            name: value
            for event in self.announced
            for name, value in load_file(self.paths.partial / event.file).items()
        }

    def check(self) -> None:
        """All shards are announced once, with the bytes that were wanted and tables to match."""
        assert sorted(event.shard for event in self.announced) == list(range(len(self.plan.shards)))
        found = self.tensors()
        wanted = self.version.wanted
        assert sorted(found) == sorted(wanted)
        for name, value in wanted.items():
            assert found[name].tobytes() == value.tobytes(), name
        for event in self.announced:
            data = (self.paths.tables / f"{event.file}.json").read_bytes()
            assert digest_of(data) == event.table_digest
            assert ShardTable.model_validate_json(data).digest == event.digest
        names = {path.name for path in self.paths.partial.iterdir()}
        assert names == {shard.file for shard in self.plan.shards}


@asynccontextmanager
async def bench(
    model: Model, grid: Grid, folder: Path, *, chunk_tensors: int = 3, **options: Any
) -> AsyncGenerator[Bench]:
    """One writer of one; ends as the service ends it."""
    origin = folder / "origin"
    save_origin(model, origin)
    version = stage(model, grid, folder / "staging", origin, chunk_tensors=chunk_tensors)
    chosen: dict[str, Any] = {
        "max_shard_bytes": 15_000, "block_bytes": 4096, "storage_deadline_s": 5.0, **options,
    }  # fmt: skip
    config = WriterConfig(run_id=RUN, index=0, count=1, root=folder / "versions", **chosen)
    plan = build_plan(
        version.layouts, Expectation.from_folder(origin), family_of(read_config(origin)),
        writers=1, max_shard_bytes=config.max_shard_bytes,
    )  # fmt: skip
    lanes = [Lane(number, config.block_bytes) for number in range(config.io_threads)]
    steps = CountedSteps()
    made: Bench
    work = VersionWork(
        version.key, plan, config.root, origin, config, lanes, steps,
        lambda task: made.spawn(task),  # noqa: PLW0108 - `made` is not there yet
        lambda event: made.announce(event),  # noqa: PLW0108
    )  # fmt: skip
    ranks = [layout.producer.rank for layout in version.layouts]
    made = Bench(
        version, plan, VersionPaths.of(config.root, version.key), work,
        Assembly(version.key, plan, ranks), steps,
    )  # fmt: skip
    try:
        yield made
    finally:
        await work.end()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        for lane in lanes:
            lane.close()
