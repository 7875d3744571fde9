"""Finishing a version: its copies as tasks, its shards announced, its commit, or its failure.

One place turns what happens to a piece of work into the version's fate: a named error ends the
version, what passes by itself is tried again, a lost bus ends the writer (a restart goes on).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..bus.events import end_version, publish_event, read_event
from ..bus.interface import Bus, SubjectTakenError
from ..schemas.errors import (
    BusClosedError,
    BusError,
    SchemaError,
    StorageError,
    StreamFullError,
    VersionConflictError,
    WeightbusError,
)
from ..schemas.events import (
    AnyEvent,
    ChunkReady,
    Outcome,
    ProducerSealed,
    ShardPersisted,
    VersionAborted,
    VersionOpened,
)
from ..schemas.layout import Layout
from .assembly import Assembly
from .attempts import AttemptState, VersionState, origin_of
from .commit import Committer
from .config import WriterConfig
from .copy import CopyStoppedError
from .paths import VersionPaths
from .plan_types import Plan
from .replicas import compare_replicas, mismatch
from .shard_work import Lane, VersionWork
from .steps import Step, Steps

_log = logging.getLogger(__name__)
T = TypeVar("T")
_MAX_MESSAGE_CHARS = 8000
_MAX_WAIT_S = 10.0


class Finisher:
    """Does a writer's work on versions, in tasks of one group.

    Args:
        bus: the writer's bus.
        config: the writer's options.
        root: its root folder, resolved.
        steps: told of each step.
        numbers: counters to keep.
    """

    def __init__(
        self,
        bus: Bus,
        config: WriterConfig,
        root: Path,
        steps: Steps,
        lanes: Sequence[Lane],
        numbers: dict[str, float],
    ) -> None:
        self._bus, self._config, self._root, self._steps = bus, config, root, steps
        self._lanes, self._numbers = lanes, numbers
        # A commit cannot be interrupted; its thread is ours, so that we can wait for it.
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="weightbus-commit")
        # Events wait for what is tidied up; that must not wait for another version's commit.
        self._tidying = ThreadPoolExecutor(1, thread_name_prefix="weightbus-tidy")
        self.group: asyncio.TaskGroup | None = None
        """Owns every task; set before the first event."""

    # ---- what the events ask for

    def take(
        self,
        state: VersionState,
        attempt: AttemptState,
        event: AnyEvent,
        sequence: int,
        *,
        live: bool,
    ) -> None:
        """Give one of the version's events to its assembly; when live, do what it asks for.

        Raises:
            VersionConflictError, LayoutError, PairingError: it contradicts what is known.
            ReplicaMismatchError: ranks that hold the same part of a tensor differ.
        """
        plan = attempt.plan
        if plan is None:
            raise VersionConflictError("a version without a plan", where={"version": state.key})
        assembly, work = self._parts(state, attempt, plan)
        if live:
            work.begin()
        match event:
            case VersionOpened():
                assembly.opened(event, sequence)
            case ChunkReady():
                arrivals = assembly.chunk(event, sequence)
                for arrival in arrivals if live else ():
                    work.arrived(plan.sources[arrival.key], assembly)
            case ProducerSealed():
                assembly.seal(event, sequence)
                if assembly.sealed:
                    check_replicas(attempt.held, assembly)
                    state.times.sealed = time.monotonic()
                    if live:
                        work.sealed()
            case ShardPersisted():
                assembly.shard(event, sequence)
                state.last_shard_by = event.writer
                if event.writer == self._config.index:
                    work.skip(event.shard)
            case _:
                pass  # the service keeps other kinds to itself
        if assembly.persisted:
            self._persisted(state, attempt, live=live)

    def resume(self, state: VersionState, attempt: AttemptState) -> None:
        """The stream's end is reached: do everything that the version's state asks for."""
        plan = attempt.plan
        if state.failure is not None or plan is None or state.assembly is None:
            return
        assembly, work = self._parts(state, attempt, plan)
        work.begin()
        for source in plan.sources.values():
            work.arrived(source, assembly)
        if assembly.sealed:
            work.sealed()
        if assembly.persisted:
            self._persisted(state, attempt, live=True)

    def _parts(
        self, state: VersionState, attempt: AttemptState, plan: Plan
    ) -> tuple[Assembly, VersionWork]:
        if state.assembly is None or state.work is None:
            origin = Path() if attempt.opened is None else origin_of(self._config, attempt.opened)
            state.assembly = Assembly(state.key, plan, attempt.layouts)
            state.work = VersionWork(
                state.key, plan, self._root, origin, self._config, self._lanes, self._steps,
                lambda work: self.spawn(state, work), self.announce,
            )  # fmt: skip
        return state.assembly, state.work

    def _persisted(self, state: VersionState, attempt: AttemptState, *, live: bool) -> None:
        if state.times.persisted is None:
            state.times.persisted = time.monotonic()
        if live and not state.committing:
            state.committing = True
            self.spawn(state, self._commit(state, attempt))

    # ---- tasks

    def spawn(self, state: VersionState, work: Coroutine[None, None, None]) -> None:
        """Do something for a version in a task; a named error ends the version."""

        async def guarded() -> None:
            try:
                await work
            except CopyStoppedError:
                pass  # the version has ended meanwhile
            except BusError:
                raise
            except WeightbusError as error:
                self.fail(state, error)

        task = self._create_task(guarded())
        state.tasks.add(task)
        task.add_done_callback(state.tasks.discard)
        # A task that is cancelled before its first step never reaches what it was to await.
        task.add_done_callback(lambda _: work.close())

    async def persistent(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await what the bus may refuse for a while, without end, or the disk, until a deadline.

        Raises:
            StorageError: the disk has refused for `storage_deadline_s`.
            WeightbusError: what no repetition mends.
        """
        deadline, wait_s = time.monotonic() + self._config.storage_deadline_s, 0.1
        while True:
            try:
                return await call()
            except (BusError, StorageError) as error:
                late = time.monotonic() > deadline and isinstance(error, StorageError)
                # A full stream has room again when somebody makes some.
                passes = error.retryable or isinstance(error, StreamFullError)
                if not passes or late:
                    raise
                _log.warning("%s Trying again in %.1f s.", error, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)

    async def announce(self, event: ShardPersisted) -> None:
        """Publish shard-persisted until the server has it.

        Raises:
            VersionConflictError: the shard was announced by another writer or with other bytes.
        """
        self._steps.reached(Step.ANNOUNCE_SHARD, event.version)
        try:
            await self.persistent(
                lambda: publish_event(self._bus, event, timeout_s=self._config.bus_timeout_s)
            )
        except SubjectTakenError as taken:
            standing = read_event(taken.existing).event
            ours = (event.writer, event.writers)
            if (
                not isinstance(standing, ShardPersisted)
                or (standing.writer, standing.writers) != ours
            ):
                raise VersionConflictError(
                    "another writer has announced this shard",
                    where={"version": event.version, "shard": event.shard, **taken.where},
                    next_step="start each writer of a run with its own --index and one --count",
                ) from taken
            # The same announcement would not be taken for another one (bus.publish_once).
            raise VersionConflictError(
                "an earlier life of this writer has announced this shard otherwise",
                where={"version": event.version, "shard": event.shard, **taken.where},
                next_step="the source or the writer's options changed between two lives: publish "
                "the version again",
            ) from taken
        self._numbers["shards_persisted_total"] += 1
        self._numbers["persisted_bytes_total"] += event.nbytes

    async def _commit(self, state: VersionState, attempt: AttemptState) -> None:
        """The writer of the last shard commits; the others only if it does not in time."""
        plan, opened, assembly = attempt.plan, attempt.opened, state.assembly
        if plan is None or opened is None or assembly is None:
            return
        if state.last_shard_by != self._config.index:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.commit_grace_s):
                    await state.ended.wait()
                    return
        self._steps.reached(Step.COMMIT, state.key)
        committer = Committer(
            state.key, opened.nonce, plan, VersionPaths.of(self._root, state.key),
            origin_of(self._config, opened), self._config.durable, self._steps,
        )  # fmt: skip
        shards = list(assembly.shards)
        loop = asyncio.get_running_loop()
        complete = await self.persistent(
            lambda: loop.run_in_executor(self._commits, committer.make_visible, shards)
        )
        self._steps.reached(Step.ANNOUNCE_COMPLETE, state.key)
        await self._publish_outcome(complete)

    def fail(self, state: VersionState, error: WeightbusError) -> None:
        """A version cannot be finished: stop its work now and say so."""
        if state.fail(error):
            self.publish_failure(state)

    def publish_failure(self, state: VersionState) -> None:
        """Abort a version that has failed."""
        error = state.failure
        if error is None:
            return
        message = str(error)
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + " ... (cut; the writer's log has all of it)"
        aborted = VersionAborted(
            version=state.key, error=type(error).__name__, message=message, by=self._config.name
        )
        _log.error("version %s cannot be finished: %s: %s", state.key, aborted.error, error)
        self._create_task(self._publish_outcome(aborted))

    async def _publish_outcome(self, outcome: Outcome) -> None:
        """The outcome that stands comes back through the stream, ours or another."""
        try:
            await self.persistent(
                lambda: end_version(self._bus, outcome, timeout_s=self._config.bus_timeout_s)
            )
        except SchemaError as error:
            # What stands there is no event: it comes through the stream as well, and ends it.
            _log.error("version %s: %s", outcome.version, error)

    # ---- the end

    async def tidy(self, call: Callable[[], T]) -> T:
        """Remove folders or keep a checkpoint; `close` waits for what is under way."""
        return await asyncio.get_running_loop().run_in_executor(self._tidying, call)

    async def end(self, state: VersionState) -> None:
        """The version's outcome stands: return when nothing works for it any more."""
        state.ended.set()
        state.times.ended = time.monotonic()
        if state.work is not None:
            state.work.stop.set()
        for task in list(state.tasks):
            task.cancel()
        if state.tasks:
            await asyncio.wait(list(state.tasks))
        if state.committing:
            await asyncio.get_running_loop().run_in_executor(self._commits, _nothing)
        if state.work is not None:
            await state.work.end()
        if state.assembly is not None:
            state.assembly.clear()

    async def close(self, states: Iterable[VersionState]) -> None:
        """Stop copying between two blocks, close every file, end the threads."""
        works = [state.work for state in states if state.work is not None]
        for work in works:
            work.stop.set()
        for work in works:
            await work.end()
        for lane in self._lanes:
            await asyncio.to_thread(lane.close)
        for thread in (self._commits, self._tidying):
            await asyncio.to_thread(thread.shutdown, wait=True, cancel_futures=True)

    def _create_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        if self.group is None:
            raise BusClosedError("the writer does not run")
        return self.group.create_task(work)


def _nothing() -> None:
    """Runs when what was asked for before it has ended."""


def check_replicas(layouts: Sequence[Layout], assembly: Assembly) -> None:
    """Compare what several ranks hold of the same tensor, as far as they sent digests.

    Raises:
        ReplicaMismatchError: naming tensor, part and ranks.
    """
    differences = compare_replicas(layouts, assembly.digests())
    if differences:
        raise mismatch(assembly.key, differences)
