"""A writer: reads a run's events in order, persists its shards, commits versions.

    start    read all attempt-level events; then every event from the checkpoint on, as state only
    live     the end that the stream had at the start is reached: do the work that the state asks
             for, then follow events as they come
    stop     cancel -> stop the copies between two blocks -> close the files -> end the IO threads

Nothing is acknowledged to the server: the state is rebuilt from the stream, and work that was
half done is done again, with the same bytes at the same places.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ..bus.interface import Bus, Message
from ..bus.subjects import run_filter
from ..schemas.errors import SequenceGapError, WeightbusError
from .attempts import read_attempts
from .checkpoint import Checkpoint, checkpoint_path, load_checkpoint
from .config import WriterConfig
from .finish import Finisher
from .paths import check_apart, hidden_folders
from .progress import Progress
from .shard_file import storage_error
from .shard_work import Lane
from .steps import NoSteps, Steps

_log = logging.getLogger(__name__)


class Writer:
    """Writer `index` of `count` of a run.

    Args:
        bus: an open bus; whoever opened it closes it.
        config: see WriterConfig.
        steps: told of each step (writers.steps).
    """

    def __init__(self, bus: Bus, config: WriterConfig, steps: Steps | None = None) -> None:
        self._bus, self._config = bus, config
        self._steps: Steps = NoSteps() if steps is None else steps
        self._root = config.root.resolve()
        self._progress: Progress | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self._numbers: dict[str, float] = dict.fromkeys(
            ("versions_complete_total", "versions_aborted_total", "shards_persisted_total",
             "persisted_bytes_total", "malformed_events_total", "last_complete_version",
             "last_sequence"), 0.0,
        )  # fmt: skip

    # ---- life

    async def run(self) -> None:
        """Work until `stop()` or until cancelled. Call it once.

        Raises:
            OutputFolderError: the root is equal to, inside or around the origin.
            StorageError, CommitError: the root cannot be written to.
            BusError: the bus was closed, or another writer with this number has started.
        """
        if self._stopping:
            return
        self._main = asyncio.create_task(self._work(), name=self._config.name)
        try:
            await asyncio.wait({self._main})
        finally:
            await self.stop()
        if not self._main.cancelled():
            self._main.result()

    async def stop(self) -> None:
        """End `run`; returns when its files are closed. May be called early, and twice."""
        if self._main is not None and not self._main.done():
            if not self._stopping:  # a second cancel would interrupt the closing
                self._main.cancel()
            self._stopping = True
            await asyncio.wait({self._main})
        self._stopping = True

    def numbers(self) -> dict[str, float]:
        """Counters and gauges for a metrics endpoint."""
        waiting = 0 if self._progress is None else sum(1 for _ in self._progress.states())
        return {**self._numbers, "versions_in_progress": float(waiting)}

    async def _work(self) -> None:
        await asyncio.to_thread(self._prepare_root)
        config = self._config
        lanes = [Lane(number, config.block_bytes) for number in range(config.io_threads)]
        finisher = Finisher(self._bus, config, self._root, self._steps, lanes, self._numbers)
        progress = self._progress = Progress(
            self._bus, config, self._root, self._steps, finisher, self._numbers
        )
        try:
            async with asyncio.TaskGroup() as group:
                finisher.group = group
                await self._follow(progress, finisher)
        except ExceptionGroup as errors:
            # One named error is what a user can act on; more than one is shown as it is.
            if len(errors.exceptions) == 1 and isinstance(errors.exceptions[0], WeightbusError):
                raise errors.exceptions[0] from errors
            raise
        finally:
            await finisher.close(progress.states())

    def _prepare_root(self) -> None:
        if self._config.origin is not None:
            check_apart(self._root, self._config.origin)
        folder = self._root / self._config.run_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, folder, "create the run's folder") from error

    # ---- reading

    async def _follow(self, progress: Progress, finisher: Finisher) -> None:
        run_id = self._config.run_id
        # The server may be away now; later the reader waits for it by itself.
        for event in await finisher.persistent(lambda: read_attempts(self._bus, run_id)):
            progress.note_attempt(event)
        path = checkpoint_path(self._root, self._config.run_id, self._config.name)
        found = await asyncio.to_thread(load_checkpoint, path)
        last = await finisher.persistent(self._bus.last_sequence)
        start = self._start_sequence(found, progress, last)
        try:
            await self._read(start, progress, finisher, path)
        except SequenceGapError as gap:
            if progress.live or start == 1:
                raise
            _log.warning("the checkpoint points to events that are gone: %s Reading all.", gap)
            await self._read(1, progress, finisher, path)

    def _start_sequence(self, found: Checkpoint | None, progress: Progress, last: int) -> int:
        """The checkpoint's sequence, unless it belongs to another stream than this one."""
        if found is None or progress.nonce_of(found.attempt) != found.nonce:
            return 1
        # A stream that was restored from a copy of before ends too early.
        return found.sequence if found.sequence <= last + 1 else 1

    async def _read(self, start: int, progress: Progress, finisher: Finisher, path: Path) -> None:
        # Looked at before the stream's end is: what lies here now belongs to events before that.
        left_over = await asyncio.to_thread(hidden_folders, self._root, self._config.run_id)
        subjects = run_filter(self._config.run_id)
        last = await finisher.persistent(lambda: self._bus.last(subjects))
        end = 0 if last is None else last.sequence
        name = f"{self._config.run_id}-{self._config.name}"
        async with self._bus.read([subjects], start_sequence=start, name=name) as reader:
            progress.begin(start)
            self._numbers["last_sequence"] = float(start - 1)
            while progress.next_sequence <= end:
                message = await reader.next()
                if message is not None:
                    await self._take(message, progress)
            await progress.go_live(left_over)
            _log.info(
                "%s of run %s is live at sequence %d, %d versions in progress",
                self._config.name, self._config.run_id, progress.next_sequence,
                sum(1 for _ in progress.states()),
            )  # fmt: skip
            async for message in reader:
                await self._take(message, progress)
                await progress.save(path)

    async def _take(self, message: Message, progress: Progress) -> None:
        self._numbers["last_sequence"] = float(message.sequence)
        await progress.take(message)
