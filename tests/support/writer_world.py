"""Writers on a server in memory, restarted when they crash, and what they leave."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.bus_servers import PATIENCE_S, eventually
from support.writer_versions import RUN, next_outcome
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.bus.streams import EVENT_STREAM
from weightbus.schemas.errors import WeightbusError
from weightbus.schemas.events import Outcome, VersionComplete, VersionKey
from weightbus.writers.config import WriterConfig
from weightbus.writers.paths import hidden_folders
from weightbus.writers.service import Writer
from weightbus.writers.steps import NoSteps, Step, Steps


class CrashError(Exception):
    """The writer's process dies here."""


class CrashOnce:
    """Whichever writer takes the step first crashes there, once."""

    def __init__(self, step: Step, skip: int = 0) -> None:
        self.crashes = 0
        self._step, self._skip = step, skip
        self._lock = threading.Lock()

    def reached(self, step: Step, key: VersionKey) -> None:
        with self._lock:
            if step is not self._step or self.crashes:
                return
            if self._skip:
                self._skip -= 1
                return
            self.crashes += 1
        raise CrashError(step.value)


class WriterWorld:
    """A run with `count` writers; each restarts on a new bus when a step crashes it."""

    def __init__(self, root: Path, count: int = 2, **options: Any) -> None:
        self.server = MemoryServer()
        self.root, self.count, self.options = root, count, options
        self.steps: Steps = NoSteps()
        self.writers: dict[int, Writer] = {}
        self.lives = 0
        self.failure: WeightbusError | None = None

    def reached(self, step: Step, key: VersionKey) -> None:
        """Told by every writer; `steps` may be set at any time."""
        self.steps.reached(step, key)

    def config(self, index: int) -> WriterConfig:
        options: dict[str, Any] = {
            "max_shard_bytes": 60_000, "block_bytes": 4096, "commit_grace_s": 0.2,
            "storage_deadline_s": 5.0, **self.options,
        }  # fmt: skip
        return WriterConfig(run_id=RUN, index=index, count=self.count, root=self.root, **options)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[MemoryBus]:
        """Yields a bus of the test's own."""
        async with await MemoryBus.connect(self.server) as bus:
            tasks = [asyncio.create_task(self._lives(index)) for index in range(self.count)]
            try:
                yield bus
            finally:
                for writer in list(self.writers.values()):
                    await writer.stop()
                await asyncio.gather(*tasks)

    async def _lives(self, index: int) -> None:
        while True:
            self.lives += 1
            async with await MemoryBus.connect(self.server) as bus:
                writer = self.writers[index] = Writer(bus, self.config(index), self)
                try:
                    await writer.run()
                    return
                except ExceptionGroup as errors:
                    if errors.split(CrashError)[1] is not None:
                        raise
                except WeightbusError as error:
                    self.failure = error
                    return

    async def outcome(self, bus: MemoryBus, known: int = 0) -> Outcome:
        """The run's next outcome, when nothing of the version is left to be removed."""
        outcome = await next_outcome(bus, known, PATIENCE_S)
        await self.tidy()
        return outcome

    async def complete(self, bus: MemoryBus, known: int = 0) -> VersionComplete:
        """As `outcome`, which must be a completion."""
        outcome = await self.outcome(bus, known)
        assert isinstance(outcome, VersionComplete), outcome
        return outcome

    async def tidy(self) -> None:
        """Wait until every writer has read everything and no hidden folder is left."""
        last = self.server.logs[EVENT_STREAM].last

        def done() -> bool:
            numbers = [writer.numbers() for writer in self.writers.values()]
            return (
                all(one["last_sequence"] >= last for one in numbers)
                and all(one["versions_in_progress"] == 0 for one in numbers)
                and hidden_folders(self.root.resolve(), RUN) == []
            )

        await eventually(done)
