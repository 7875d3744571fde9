"""The work of one writer on one version: its shards, filled as sources arrive, then announced.

Decisions are made on the event loop; bytes move on *lanes*: a lane is a thread with reused memory,
and a shard always uses the same one, so a file is written by one thread (two threads in a file gain
nothing: they share the inode's lock).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

from ..schemas.digest import digest_of
from ..schemas.errors import CommitError, StorageError
from ..schemas.events import ShardPersisted, VersionKey
from ..schemas.manifest import ManifestTensor, ShardTable
from .assembly import Arrival, Assembly, sources_of_shard
from .assets import sync_folder, write_file
from .config import WriterConfig
from .copy import Copier, CopyStoppedError, Input, PlacedExtent, merge_extents
from .paths import VersionPaths
from .plan_types import Plan, Shard, Source
from .shard_file import ShardFile, storage_error
from .steps import Step, Steps

_log = logging.getLogger(__name__)
T = TypeVar("T")
Unit: TypeAlias = tuple[str, object]
"""Something to be done for a shard: ("stream", source key) or ("assemble", target number)."""


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


class ShardBuilder:
    """One shard being filled; every method runs on the shard's lane."""

    def __init__(
        self,
        key: VersionKey,
        plan: Plan,
        shard: Shard,
        paths: VersionPaths,
        config: WriterConfig,
        steps: Steps,
        stop: threading.Event,
    ) -> None:
        self._key, self._plan, self._shard = key, plan, shard
        self._paths, self._config, self._steps = paths, config, steps
        self._stop = stop
        self._file: ShardFile | None = None
        self._placed: dict[int, list[PlacedExtent]] = {}

    def stream(self, copier: Copier, item: Input) -> None:
        """Write a source's runs."""
        file = self._open()
        self._steps.reached(Step.COPY, self._key)
        for number, extents in copier.stream(item, self._plan.targets, file, self._stop).items():
            self._placed.setdefault(number, []).extend(extents)

    def assemble(self, copier: Copier, number: int, inputs: list[Input]) -> None:
        """Put a target together from all of its sources."""
        file = self._open()
        self._steps.reached(Step.COPY, self._key)
        target = self._plan.targets[number]
        self._placed[number] = copier.assemble(target, number, inputs, file, self._stop)

    def finish(self) -> ShardPersisted:
        """Make the shard durable and write its table; returns the event that announces it."""
        file = self._open()
        self._steps.reached(Step.SYNC_SHARD, self._key)
        if self._config.durable:
            file.sync()
        self._steps.reached(Step.WRITE_TABLE, self._key)
        table = self._table()
        data = table.model_dump_json().encode()
        name = f"{self._shard.file}.json"
        try:
            self._paths.tables.mkdir(parents=True, exist_ok=True)
            write_file(self._paths.tables / name, data, durable=self._config.durable)
            if self._config.durable:
                sync_folder(self._paths.tables)
                sync_folder(self._paths.partial)
        except FileNotFoundError as error:
            raise self._folder_lost(error) from error
        except OSError as error:
            raise storage_error(error, self._paths.tables, "write a shard's table") from error
        self.close()
        return ShardPersisted(
            version=self._key,
            plan_digest=self._plan.digest,
            writer=self._config.index,
            writers=self._config.count,
            shard=self._shard.index,
            shards=len(self._plan.shards),
            file=self._shard.file,
            nbytes=self._shard.nbytes,
            digest=table.digest,
            table_digest=digest_of(data),
        )

    def close(self) -> None:
        """Close the file; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> ShardFile:
        if self._stop.is_set():
            raise CopyStoppedError
        if self._file is None:
            self._steps.reached(Step.OPEN_SHARD, self._key)
            partial = self._paths.partial
            try:
                partial.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise storage_error(error, partial, "create a version's hidden folder") from error
            self._file = ShardFile(
                partial / self._shard.file,
                self._shard.nbytes,
                self._shard.header,
                write_behind=self._config.durable,
            )
        return self._file

    def _table(self) -> ShardTable:
        return ShardTable(
            file=self._shard.file,
            writer=self._config.index,
            nbytes=self._shard.nbytes,
            header_bytes=len(self._shard.header),
            header_digest=digest_of(self._shard.header),
            tensors=tuple(
                ManifestTensor(
                    name=target.name,
                    dtype=target.dtype,
                    shape=target.shape,
                    offset=target.offset,
                    extents=merge_extents(self._placed, number),
                )
                for number, target in (
                    (number, self._plan.targets[number]) for number in self._shard.targets
                )
            ),
        )

    def _folder_lost(self, error: FileNotFoundError) -> CommitError:
        return CommitError(
            "the version's hidden folder was removed while it was written",
            where={"version": self._key, "folder": error.filename},
            next_step="something else removes files from the versions' folder",
        )


class VersionWork:
    """This writer's shards of one version.

    Args:
        key: the version.
        plan: its plan.
        root: the writers' root folder.
        config: the writer's options.
        lanes: the IO threads.
        steps: told of each step.
        announce: publishes shard-persisted; returns when the server has it.
    """

    def __init__(
        self,
        key: VersionKey,
        plan: Plan,
        root: Path,
        config: WriterConfig,
        lanes: list[Lane],
        steps: Steps,
        announce: Callable[[ShardPersisted], Awaitable[None]],
    ) -> None:
        self._key, self._plan, self._config = key, plan, config
        self._lanes, self._announce = lanes, announce
        self.stop = threading.Event()
        paths = VersionPaths.of(root, key)
        self._builders: dict[int, ShardBuilder] = {}
        self._left: dict[int, set[Unit]] = {}
        self._lane: dict[int, Lane] = {}
        for position, shard in enumerate(plan.shards_of(config.index)):
            self._builders[shard.index] = ShardBuilder(
                key, plan, shard, paths, config, steps, self.stop
            )
            self._left[shard.index] = self._units(shard)
            self._lane[shard.index] = lanes[position % len(lanes)]

    def _units(self, shard: Shard) -> set[Unit]:
        targets = self._plan.targets
        units: set[Unit] = {
            ("assemble", number) for number in shard.targets if not targets[number].streamed
        }
        for source in sources_of_shard(self._plan, shard.index):
            if any(targets[piece.target].streamed for piece in source.pieces):
                units.add(("stream", source.key))
        return units

    def skip(self, shard: int) -> None:
        """This shard is durable already: an earlier life of this writer has announced it."""
        self._left.pop(shard, None)

    def begin(self, source: Source, assembly: Assembly) -> list[Awaitable[None]]:
        """What can be done now that a source has arrived; each to be awaited in a task."""
        shard = source.shard
        arrival = assembly.arrival(source.key)
        if shard is None or arrival is None or shard not in self._left:
            return []
        work: list[Awaitable[None]] = []
        builder = self._builders[shard]
        if ("stream", source.key) in self._left[shard]:
            item = Input(source, arrival)
            work.append(
                self._unit(
                    shard, ("stream", source.key), lambda copier: builder.stream(copier, item)
                )
            )
        for number in dict.fromkeys(piece.target for piece in source.pieces):
            target = self._plan.targets[number]
            if not target.streamed and assembly.has_all(target.sources):
                work.append(self._assembly(shard, number, assembly))
        return work

    def _assembly(self, shard: int, number: int, assembly: Assembly) -> Awaitable[None]:
        arrivals = [
            (key, assembly.arrival(key)) for key in self._plan.targets[number].sources
        ]  # fmt: skip
        inputs = [
            Input(self._plan.sources[key], arrival)
            for key, arrival in arrivals
            if isinstance(arrival, Arrival)
        ]
        builder = self._builders[shard]
        return self._unit(
            shard, ("assemble", number), lambda copier: builder.assemble(copier, number, inputs)
        )

    async def _unit(self, shard: int, unit: Unit, work: Callable[[Copier], None]) -> None:
        await self._retried(shard, work)
        left = self._left.get(shard)
        if left is None or unit not in left:
            return
        left.remove(unit)
        if not left:
            await self.finish(shard)

    async def finish_empty(self) -> None:
        """Shards with nothing to copy (tensors without elements only)."""
        for shard in [shard for shard, left in self._left.items() if not left]:
            await self.finish(shard)

    async def finish(self, shard: int) -> None:
        """Every byte of a shard is there: make it durable and say so."""
        del self._left[shard]
        builder = self._builders[shard]
        event = await self._retried(shard, lambda _copier: builder.finish())
        await self._announce(event)

    async def _retried(self, shard: int, work: Callable[[Copier], T]) -> T:
        """Run on the shard's lane; a full or failing disk is tried again until the deadline."""
        deadline = time.monotonic() + self._config.storage_deadline_s
        wait_s = 0.1
        while True:
            try:
                return await self._lane[shard].run(work)
            except StorageError as error:
                if time.monotonic() + wait_s > deadline:
                    raise
                _log.warning("version %s: %s Trying again in %.1f s.", self._key, error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 10.0)

    async def end(self) -> None:
        """The version has ended: close every file, on the lane that uses it."""
        self.stop.set()
        for shard, builder in self._builders.items():
            await self._lane[shard].run(lambda _copier, builder=builder: builder.close())
