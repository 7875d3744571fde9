"""The work of one writer on one version: its shards, filled as sources arrive, then announced.

Decisions are made on the event loop; bytes move on *lanes*: a lane is a thread with reused memory,
and a shard always uses the same one, so a file is written by one thread (two threads in a file gain
nothing: they share the inode's lock). What is to be done waits in a queue per lane; one task per
lane takes it from there in batches, as long as there is some.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from ..schemas.errors import StorageError
from ..schemas.events import ShardPersisted, VersionKey
from .assembly import Assembly, sources_of_shard
from .config import WriterConfig
from .copy import Copier, CopyStoppedError, Input
from .paths import VersionPaths
from .plan_types import Plan, Shard, Source
from .shard_builder import AssembleUnit, CopyUnit, ShardBuilder, StreamUnit, Unit
from .steps import Steps

_log = logging.getLogger(__name__)
T = TypeVar("T")
Spawn: TypeAlias = Callable[[Coroutine[None, None, None]], None]
Announce: TypeAlias = Callable[[ShardPersisted], Awaitable[None]]
_BATCH_BYTES = 64 * 1024 * 1024
_MAX_WAIT_S = 10.0


class Lane:
    """One IO thread and its reused memory."""

    def __init__(self, number: int, block_bytes: int) -> None:
        self._copier = Copier(block_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"weightbus-io-{number}")

    async def run(self, work: Callable[[Copier], T]) -> T:
        """Run `work` on the lane's thread, after what was asked for before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._copier)

    def close(self) -> None:
        """Wait for the thread's present work and end it; drops what has not begun."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._copier.close()


@dataclass
class _Work:
    """One shard's part: `left` counts units that have not been done yet.

    `done`: every unit is, and it is being made durable or is. `skipped`: it was announced by an
    earlier life, and what is left of its units is not done.
    """

    builder: ShardBuilder
    lane: int
    left: int
    assembled: set[int] = field(default_factory=set[int])
    units: list[Unit] = field(default_factory=list[Unit])
    done: bool = False
    skipped: bool = False


class VersionWork:
    """This writer's shards of one version.

    Args:
        key: the version.
        plan: its plan.
        root: the writers' root folder.
        origin: the origin checkpoint's folder.
        config: the writer's options.
        lanes: the IO threads.
        steps: told of each step.
        spawn: runs something as a task of the version.
        announce: publishes shard-persisted; returns when the server has it.
    """

    def __init__(
        self,
        key: VersionKey,
        plan: Plan,
        root: Path,
        origin: Path,
        config: WriterConfig,
        lanes: Sequence[Lane],
        steps: Steps,
        spawn: Spawn,
        announce: Announce,
    ) -> None:
        self._key, self._plan, self._config = key, plan, config
        self._lanes, self._spawn, self._announce = lanes, spawn, announce
        self.stop = threading.Event()
        self._queues: list[deque[Unit]] = [deque() for _ in lanes]
        self._pumping = [False for _ in lanes]
        self._origin, self._begun = origin, False
        paths = VersionPaths.of(root, key)
        self._shards = {
            shard.index: _Work(
                ShardBuilder(key, plan, shard, paths, config, steps, self.stop),
                position % len(lanes),
                self._count(shard),
            )
            for position, shard in enumerate(plan.shards_of(config.index))
        }

    def _count(self, shard: Shard) -> int:
        targets = self._plan.targets
        assembled = sum(
            1 for number in shard.targets if not targets[number].streamed and targets[number].nbytes
        )
        streams = sum(
            1
            for source in sources_of_shard(self._plan, shard.index)
            if any(targets[piece.target].streamed for piece in source.pieces)
        )
        copies = sum(1 for copy in self._plan.copies if targets[copy.target].shard == shard.index)
        return assembled + streams + copies

    # ---- what the events say

    def skip(self, shard: int) -> None:
        """This shard is durable already: an earlier life of this writer has announced it."""
        work = self._shards.get(shard)
        if work is not None:
            work.done = work.skipped = True
            work.units.clear()

    def begin(self) -> None:
        """Queue what waits for no event: copies from the origin. Again, it does nothing."""
        if self._begun:
            return
        self._begun = True
        for copy in self._plan.copies:
            target = self._plan.targets[copy.target]
            work = self._shards.get(target.shard)
            if work is not None and not work.done:
                file = self._origin / copy.file
                self._queue(work, CopyUnit(target.shard, copy, file, target.nbytes))

    def arrived(self, source: Source, assembly: Assembly) -> None:
        """A source has arrived: queue what can be done now. Call it once per source."""
        arrival = assembly.arrival(source.key)
        work = None if source.shard is None else self._shards.get(source.shard)
        if work is None or work.done or arrival is None or source.shard is None:
            return
        numbers = dict.fromkeys(piece.target for piece in source.pieces)
        if any(self._plan.targets[number].streamed for number in numbers):
            self._queue(work, StreamUnit(source.shard, Input(source, arrival)))
        for number in numbers:
            target = self._plan.targets[number]
            if target.streamed or number in work.assembled or not assembly.has_all(target.sources):
                continue
            work.assembled.add(number)
            arrivals = [(key, assembly.arrival(key)) for key in target.sources]
            inputs = [
                Input(self._plan.sources[key], found)
                for key, found in arrivals
                if found is not None
            ]
            self._queue(work, AssembleUnit(source.shard, number, inputs))

    def sealed(self) -> None:
        """Everything has arrived: shards with nothing to copy can be finished too."""
        for number, work in self._shards.items():
            if not work.done and not work.left:
                self._spawn(self._finish(number))

    def _queue(self, work: _Work, unit: Unit) -> None:
        work.units.append(unit)
        self._queues[work.lane].append(unit)
        if not self._pumping[work.lane]:
            self._pumping[work.lane] = True
            self._spawn(self._pump(work.lane))

    # ---- the work

    async def _pump(self, lane: int) -> None:
        queue = self._queues[lane]
        try:
            while queue:
                batch = self._batch(queue)
                done: list[Unit] = []
                await self._retried(lane, lambda copier, b=batch, d=done: self._do(copier, b, d))
                for unit in done:
                    self._shards[unit.shard].left -= 1
                for number in dict.fromkeys(unit.shard for unit in done):
                    if not self._shards[number].left and not self._shards[number].done:
                        await self._finish(number)
        finally:
            self._pumping[lane] = False

    def _batch(self, queue: deque[Unit]) -> deque[Unit]:
        """The next units, enough to be worth the hop to another thread."""
        batch = deque([queue.popleft()])
        nbytes = batch[0].nbytes
        while queue and nbytes + queue[0].nbytes <= _BATCH_BYTES:
            batch.append(queue.popleft())
            nbytes += batch[-1].nbytes
        return batch

    def _do(self, copier: Copier, batch: deque[Unit], done: list[Unit]) -> None:
        """On the lane: what is done leaves the batch, so that a second try goes on from there."""
        while batch:
            unit = batch[0]
            work = self._shards[unit.shard]
            if not work.skipped:
                work.builder.do(copier, unit)
            done.append(batch.popleft())

    async def _finish(self, number: int) -> None:
        """Every byte of a shard is there: make it durable, describe it and say so."""
        work = self._shards[number]
        work.done = True
        lane, builder = self._lanes[work.lane], work.builder
        deadline, wait_s = self._deadline(), 0.1
        while True:
            try:
                await lane.run(lambda _: builder.sync())
                break
            except StorageError as error:
                wait_s = await self._wait(error, deadline, wait_s)
            await self._retried(work.lane, lambda _: builder.reset())
            again = deque(work.units)
            await self._retried(work.lane, lambda copier, b=again: self._do(copier, b, []))
        event = await self._retried(work.lane, lambda _: builder.describe())
        await lane.run(lambda _: builder.close())
        work.units.clear()
        # Not here: the lane has other shards to fill while the server is away.
        self._spawn(self._say(event))

    async def _say(self, event: ShardPersisted) -> None:
        await self._announce(event)

    # ---- disks that fail

    def _deadline(self) -> float:
        return time.monotonic() + self._config.storage_deadline_s

    async def _retried(self, lane: int, work: Callable[[Copier], T]) -> T:
        """Run on a lane; a full or failing disk is tried again until the deadline."""
        deadline, wait_s = self._deadline(), 0.1
        while True:
            try:
                return await self._lanes[lane].run(work)
            except StorageError as error:
                wait_s = await self._wait(error, deadline, wait_s)

    async def _wait(self, error: StorageError, deadline: float, wait_s: float) -> float:
        """Wait before another try; returns how long to wait the next time."""
        if self.stop.is_set():
            raise CopyStoppedError from error
        if time.monotonic() + wait_s > deadline:
            raise error
        _log.warning("version %s: %s Trying again in %.1f s.", self._key, error, wait_s)
        await asyncio.sleep(wait_s)
        return min(2 * wait_s, _MAX_WAIT_S)

    async def end(self) -> None:
        """The version has ended: close its files, on the lanes that use them."""
        self.stop.set()
        for queue in self._queues:
            queue.clear()
        for work in self._shards.values():
            work.units.clear()
            await self._lanes[work.lane].run(lambda _, builder=work.builder: builder.close())
        for lane in self._lanes:
            await lane.run(lambda copier: copier.let_go())
