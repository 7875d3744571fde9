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
import contextlib
import logging
import time
from pathlib import Path

from ..bus.events import Received, read_event
from ..bus.interface import Bus, Message, Reader
from ..bus.subjects import parse_subject, run_filter
from ..schemas.errors import (
    BlobMissingError,
    BusClosedError,
    BusError,
    MalformedEventError,
    SequenceGapError,
    VersionAbortedError,
    WeightbusError,
)
from ..schemas.events import (
    AttemptOpened,
    ChunkReady,
    LayoutPublished,
    Outcome,
    ProducerSealed,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionKey,
    VersionOpened,
)
from .attempts import AttemptState, VersionState, make_plan, read_attempts
from .checkpoint import Checkpoint, checkpoint_path, load_checkpoint, save_checkpoint
from .commit import discard, withdraw
from .config import WriterConfig
from .finish import Finisher
from .paths import VersionPaths, check_apart, hidden_folders
from .shard_file import storage_error
from .shard_work import Lane
from .steps import NoSteps, Step, Steps

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
        self._attempts: dict[int, AttemptState] = {}
        self._aborted: set[VersionKey] = set()
        self._left_over: list[tuple[VersionKey, Path]] = []
        self._newest = -1
        self._live = False
        self._next_sequence = 1
        self._lanes: list[Lane] = []
        self._finish: Finisher | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopping = False
        self._numbers: dict[str, float] = dict.fromkeys(
            ("versions_complete_total", "versions_aborted_total", "shards_persisted_total",
             "persisted_bytes_total", "last_complete_version", "last_sequence"), 0.0,
        )  # fmt: skip

    # ---- life

    async def run(self) -> None:
        """Work until `stop()` or until cancelled.

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
            await self._cancel_main()
        if not self._main.cancelled():
            self._main.result()

    async def stop(self) -> None:
        """End `run`; returns when its files are closed. May be called early, and twice."""
        self._stopping = True
        await self._cancel_main()

    async def _cancel_main(self) -> None:
        if self._main is not None and not self._main.done():
            self._main.cancel()
            await asyncio.wait({self._main})

    def numbers(self) -> dict[str, float]:
        """Counters and gauges for a metrics endpoint."""
        waiting = sum(len(attempt.versions) for attempt in self._attempts.values())
        return {**self._numbers, "versions_in_progress": float(waiting)}

    async def _work(self) -> None:
        self._prepare_root()
        self._lanes = [
            Lane(number, self._config.block_bytes) for number in range(self._config.io_threads)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                self._finish = Finisher(
                    self._bus, self._config, self._root, self._steps, group, self._lanes,
                    self._numbers,
                )  # fmt: skip
                await self._follow()
        except ExceptionGroup as errors:
            # One named error is what a user can act on; more than one is shown as it is.
            if len(errors.exceptions) == 1 and isinstance(errors.exceptions[0], WeightbusError):
                raise errors.exceptions[0] from errors
            raise
        finally:
            await self._close()

    def _prepare_root(self) -> None:
        if self._config.origin is not None:
            check_apart(self._root, self._config.origin)
        folder = self._root / self._config.run_id
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, folder, "create the run's folder") from error

    def _finisher(self) -> Finisher:
        if self._finish is None:
            raise BusClosedError("the writer does not run")
        return self._finish

    async def _close(self) -> None:
        states = [
            state for attempt in self._attempts.values() for state in attempt.versions.values()
        ]
        for state in states:
            if state.work is not None:
                state.work.stop.set()
        for state in states:
            if state.work is not None:
                await state.work.end()
        for lane in self._lanes:
            await asyncio.to_thread(lane.close)

    # ---- reading

    async def _follow(self) -> None:
        for event in await read_attempts(self._bus, self._config.run_id):
            self._note_attempt(event)
        start = self._checkpointed_sequence()
        try:
            await self._read(start)
        except SequenceGapError as gap:
            if self._live or start == 1:
                raise
            _log.warning("the checkpoint points to events that are gone: %s Reading all.", gap)
            await self._read(1)

    def _checkpointed_sequence(self) -> int:
        found = load_checkpoint(self._checkpoint_path())
        if found is None:
            return 1
        attempt = self._attempts.get(found.attempt)
        opened = None if attempt is None else attempt.opened
        return found.sequence if opened is not None and opened.nonce == found.nonce else 1

    def _checkpoint_path(self) -> Path:
        return checkpoint_path(self._root, self._config.run_id, self._config.name)

    async def _read(self, start: int) -> None:
        # Looked at before the stream's end is: what lies here now belongs to events before that.
        self._left_over = await asyncio.to_thread(hidden_folders, self._root, self._config.run_id)
        subjects = run_filter(self._config.run_id)
        last = await self._bus.last(subjects)
        end = 0 if last is None else last.sequence
        name = f"{self._config.run_id}-{self._config.name}"
        async with self._bus.read([subjects], start_sequence=start, name=name) as reader:
            self._next_sequence = start
            await self._catch_up(reader, end)
            await self._go_live()
            async for message in reader:
                await self._apply(message)

    async def _catch_up(self, reader: Reader, end: int) -> None:
        while self._next_sequence <= end:
            message = await reader.next()
            if message is not None:
                await self._apply(message)

    async def _apply(self, message: Message) -> None:
        self._next_sequence = message.sequence + 1
        self._numbers["last_sequence"] = float(message.sequence)
        try:
            received = read_event(message)
        except MalformedEventError as error:
            self._refuse(message, error)
            return
        event = received.event
        match event:
            case AttemptOpened() | LayoutPublished():
                self._note_attempt(event)
                if isinstance(event, AttemptOpened) and self._live:
                    self._supersede()
                await self._settle(self._attempts[event.attempt])
            case VersionComplete() | VersionAborted():
                await self._end(event)
            case VersionOpened() | ChunkReady() | ProducerSealed() | ShardPersisted():
                await self._version_event(event.version, received)
            case _:
                pass  # retired: the version has ended long ago; reports are in the other stream

    def _refuse(self, message: Message, error: MalformedEventError) -> None:
        """What is not an event ends the version on whose subject it stands, not the writer."""
        version = parse_subject(message.subject)
        if version.weight_version is None:
            raise error
        key = VersionKey(
            run_id=version.run_id,
            attempt=version.attempt,
            weight_version=version.weight_version,
        )
        state = self._state_of(key, message.sequence)
        if state is not None:
            self._fail(state, error)

    # ---- attempts

    def _attempt(self, number: int) -> AttemptState:
        return self._attempts.setdefault(number, AttemptState(number))

    def _note_attempt(self, event: AttemptOpened | LayoutPublished) -> None:
        attempt = self._attempt(event.attempt)
        if isinstance(event, AttemptOpened):
            attempt.opened = event
            self._newest = max(self._newest, event.attempt)
        else:
            attempt.layouts[event.rank] = event

    async def _settle(self, attempt: AttemptState) -> None:
        """Make the attempt's plan, once everything about it is known and somebody needs it."""
        if attempt.settled or not attempt.known or attempt.number < self._newest:
            return
        try:
            key = VersionKey(run_id=self._config.run_id, attempt=attempt.number, weight_version=0)
            self._steps.reached(Step.PLAN, key)
            began = time.monotonic()
            attempt.plan = await self._finisher().persistent(
                lambda: make_plan(self._bus, self._config, attempt)
            )
            _log.info(
                "run %s attempt %d: planned %d tensors in %d shards, %d bytes, in %.2f s",
                self._config.run_id, attempt.number, len(attempt.plan.targets),
                len(attempt.plan.shards), attempt.plan.total_size, time.monotonic() - began,
            )  # fmt: skip
        except WeightbusError as error:
            if isinstance(error, BusError) and not isinstance(error, BlobMissingError):
                raise
            attempt.failure = error
            _log.error("run %s attempt %d: %s", self._config.run_id, attempt.number, error)
        for state in list(attempt.versions.values()):
            await self._feed(state, attempt)

    def _supersede(self) -> None:
        """The trainer restarted: what older attempts have not finished will never be finished."""
        for attempt in self._attempts.values():
            if attempt.number < self._newest:
                for state in attempt.versions.values():
                    self._fail(state, self._superseded(state.key))

    def _superseded(self, key: VersionKey) -> VersionAbortedError:
        return VersionAbortedError(
            f"the trainer restarted as attempt {self._newest}",
            where={"version": key},
            next_step="nothing: the new attempt publishes its own versions",
        )

    def _fail(self, state: VersionState, error: WeightbusError) -> None:
        """While catching up only noted: the stream may know the version's outcome already."""
        if self._live:
            self._finisher().fail(state, error)
        else:
            state.fail(error)

    # ---- versions

    def _state_of(self, key: VersionKey, sequence: int) -> VersionState | None:
        """The version's state; None when it has ended."""
        attempt = self._attempt(key.attempt)
        number = key.weight_version
        if number in attempt.finished:
            return None
        state = attempt.versions.get(number)
        if state is None:
            state = attempt.versions[number] = VersionState(key, sequence)
            if self._live and key.attempt < self._newest:
                self._fail(state, self._superseded(key))
        return state

    async def _version_event(self, key: VersionKey, received: Received) -> None:
        state = self._state_of(key, received.message.sequence)
        if state is None or state.failure is not None:
            return
        state.backlog.append(received)
        attempt = self._attempt(key.attempt)
        await self._settle(attempt)
        if attempt.settled:
            await self._feed(state, attempt)

    async def _feed(self, state: VersionState, attempt: AttemptState) -> None:
        """Give the version's events to its assembly, and do what they ask for."""
        if state.failure is not None:
            return
        if attempt.failure is not None:
            self._fail(state, attempt.failure)
            return
        backlog, state.backlog = state.backlog, []
        try:
            for event, message in backlog:
                self._finisher().take(state, attempt, event, message.sequence, live=self._live)
        except WeightbusError as error:
            self._fail(state, error)

    async def _go_live(self) -> None:
        """The state is that of the stream: clean up, then do everything that it asks for."""
        self._live = True
        await asyncio.to_thread(self._clean_up_at_start)
        failed = [state for state in self._states() if state.failure is not None]
        for state in failed:
            self._finisher().publish_failure(state)
        for attempt in list(self._attempts.values()):
            await self._settle(attempt)
        self._supersede()
        for state in self._states():
            self._finisher().resume(state, self._attempt(state.key.attempt))
        _log.info(
            "%s of run %s is live at sequence %d, %d versions in progress",
            self._config.name, self._config.run_id, self._next_sequence, len(self._states()),
        )  # fmt: skip

    def _states(self) -> list[VersionState]:
        return [state for attempt in self._attempts.values() for state in attempt.versions.values()]

    def _clean_up_at_start(self) -> None:
        """Folders that a killed writer left: of versions that have ended, or that nobody knows."""
        for key, folder in self._left_over:
            attempt = self._attempts.get(key.attempt)
            known = attempt is not None and key.weight_version in attempt.versions
            if not known or key.attempt < self._newest:
                _log.info("removing what is left of version %s: %s", key, folder)
                discard(VersionPaths.of(self._root, key))
        for key in self._aborted:
            self._withdraw(key)
        self._aborted.clear()

    def _withdraw(self, key: VersionKey) -> None:
        opened = self._attempt(key.attempt).opened
        nonce = "" if opened is None else opened.nonce
        withdraw(VersionPaths.of(self._root, key), key, nonce)

    # ---- the end of a version

    async def _end(self, outcome: Outcome) -> None:
        """The version's outcome stands: stop what is still done for it, and forget it."""
        key = outcome.version
        attempt = self._attempt(key.attempt)
        attempt.finished.add(key.weight_version)
        state = attempt.versions.pop(key.weight_version, None)
        aborted = isinstance(outcome, VersionAborted)
        if aborted and not self._live:
            self._aborted.add(key)
        self._count(outcome)
        if state is None:
            return
        state.outcome = outcome
        state.ended.set()
        state.times.ended = time.monotonic()
        if state.work is not None:
            state.work.stop.set()
        for task in list(state.tasks):
            task.cancel()
        if state.tasks:
            await asyncio.wait(list(state.tasks))
        if state.work is not None:
            await state.work.end()
        if state.assembly is not None:
            state.assembly.clear()
        if self._live:
            self._steps.reached(Step.CLEAN_UP, key)
            if aborted:
                await asyncio.to_thread(self._withdraw, key)
            else:
                await asyncio.to_thread(discard, VersionPaths.of(self._root, key))
            self._save_checkpoint()
            _log.info(
                "version %s %s %s", key, "aborted" if aborted else "complete", state.times.stages()
            )

    def _count(self, outcome: Outcome) -> None:
        if isinstance(outcome, VersionComplete):
            self._numbers["versions_complete_total"] += 1
            self._numbers["last_complete_version"] = float(outcome.version.weight_version)
        else:
            self._numbers["versions_aborted_total"] += 1

    def _save_checkpoint(self) -> None:
        attempt = self._attempts.get(self._newest)
        if attempt is None or attempt.opened is None:
            return
        firsts = [
            state.first_sequence
            for known in self._attempts.values()
            for state in known.versions.values()
        ]
        checkpoint = Checkpoint(
            sequence=min([*firsts, self._next_sequence]),
            attempt=attempt.number,
            nonce=attempt.opened.nonce,
        )
        with contextlib.suppress(OSError):  # only an optimisation
            save_checkpoint(self._checkpoint_path(), checkpoint)
