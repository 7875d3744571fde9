"""What a writer knows of a run, event by event, and what it does about each.

While it catches up, events only change the state. `go_live` then cleans up what a killed writer
left and does everything that the state asks for; from there on each event is acted on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from ..bus.events import Received, read_event
from ..bus.interface import Bus, Message
from ..bus.subjects import outcome_subject, parse_subject, subject_of
from ..schemas.errors import (
    BlobMissingError,
    BusError,
    MalformedEventError,
    SchemaError,
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
from .attempts import AttemptState, VersionState, make_plan
from .checkpoint import Checkpoint, save_checkpoint
from .commit import discard, withdraw
from .config import WriterConfig
from .finish import Finisher
from .paths import VersionPaths
from .steps import Step, Steps

_log = logging.getLogger(__name__)


class Progress:
    """The attempts and versions of a run, as one writer sees them.

    Args:
        bus: the writer's bus.
        config: the writer's options.
        root: its root folder, resolved.
        steps: told of each step.
        finisher: does the work.
        numbers: counters to keep.
    """

    def __init__(
        self,
        bus: Bus,
        config: WriterConfig,
        root: Path,
        steps: Steps,
        finisher: Finisher,
        numbers: dict[str, float],
    ) -> None:
        self._bus, self._config, self._root = bus, config, root
        self._steps, self._finisher, self._numbers = steps, finisher, numbers
        self._attempts: dict[int, AttemptState] = {}
        self._aborted: set[VersionKey] = set()
        self._newest = -1
        self._start = 1
        self._live = False
        self._saved: Checkpoint | None = None
        self.next_sequence = 1
        """That of the first event that has not been taken."""

    # ---- questions

    @property
    def live(self) -> bool:
        """Whether events are acted on."""
        return self._live

    def states(self) -> Iterator[VersionState]:
        """Every version that has not ended."""
        for attempt in self._attempts.values():
            yield from attempt.versions.values()

    def nonce_of(self, attempt: int) -> str | None:
        """The nonce of an attempt, if it has been opened."""
        known = self._attempts.get(attempt)
        return None if known is None or known.opened is None else known.opened.nonce

    def checkpoint(self) -> Checkpoint | None:
        """From where a next life must read; None before the first attempt."""
        nonce = self.nonce_of(self._newest)
        if nonce is None:
            return None
        firsts = (state.first_sequence for state in self.states())
        sequence = min([*firsts, self.next_sequence])
        return Checkpoint(sequence=sequence, attempt=self._newest, nonce=nonce)

    async def save(self, path: Path) -> None:
        """Keep the checkpoint, when a version has ended since it was kept."""
        now = self.checkpoint()
        if now is None or (self._saved is not None and now.sequence <= self._saved.sequence):
            return
        with contextlib.suppress(OSError):  # only an optimisation
            await self._finisher.tidy(lambda: save_checkpoint(path, now))
        self._saved = now

    # ---- events

    def begin(self, start: int) -> None:
        """Events come from sequence `start` on."""
        self._start = self.next_sequence = start

    async def take(self, message: Message) -> None:
        """The next message of the run.

        Raises:
            BusError: the bus was closed.
        """
        self.next_sequence = message.sequence + 1
        received = await self._read(message)
        if received is None:
            return
        event = received.event
        match event:
            case AttemptOpened() | LayoutPublished():
                self.note_attempt(event)
                if isinstance(event, AttemptOpened) and self._live:
                    self._supersede()
                await self._settle(self._attempts[event.attempt])
            case VersionComplete() | VersionAborted():
                await self._end(event)
            case VersionOpened() | ChunkReady() | ProducerSealed() | ShardPersisted():
                await self._version_event(event.version, received)
            case _:
                pass  # retired: the version has ended long ago; reports are in the other stream

    def note_attempt(self, event: AttemptOpened | LayoutPublished) -> None:
        """What belongs to an attempt; the same again is nothing new."""
        attempt = self._attempt(event.attempt)
        if isinstance(event, AttemptOpened):
            attempt.opened = event
            self._newest = max(self._newest, event.attempt)
        else:
            attempt.layouts[event.rank] = event

    async def _read(self, message: Message) -> Received | None:
        """The event. What is none ends the attempt or version on whose subject it stands."""
        try:
            received = read_event(message)
            own = subject_of(received.event)
            if own != message.subject:
                raise MalformedEventError(
                    f"a {received.event.kind} event stands on a subject that is not its own",
                    where={
                        "subject": message.subject, "own": own, "sequence": message.sequence
                    },
                    next_step="find out who publishes without weightbus on this subject",
                )  # fmt: skip
        except SchemaError as error:
            self._numbers["malformed_events_total"] += 1
            _log.error("run %s: %s", self._config.run_id, error)
            await self._refuse(message, error)
            return None
        return received

    async def _refuse(self, message: Message, error: SchemaError) -> None:
        try:
            parsed = parse_subject(message.subject)
            number = 0 if parsed.weight_version is None else parsed.weight_version
            key = VersionKey(
                run_id=parsed.run_id, attempt=parsed.attempt, weight_version=number
            )  # fmt: skip
        except (MalformedEventError, ValidationError):
            return  # it belongs to nothing
        if parsed.weight_version is None:
            attempt = self._attempt(parsed.attempt)
            if not attempt.settled:
                attempt.failure = error
                await self._feed_all(attempt)
        elif parsed.kind == "outcome":
            # No other outcome can stand there any more; agents see none either.
            await self._end(
                VersionAborted(
                    version=key, error=type(error).__name__, message=error.what[:8000], by=""
                )
            )
        elif parsed.kind != "retired":
            state = await self._state_of(key, message.sequence)
            if state is not None:
                self._fail(state, error)

    # ---- attempts

    def _attempt(self, number: int) -> AttemptState:
        return self._attempts.setdefault(number, AttemptState(number))

    async def _settle(self, attempt: AttemptState) -> None:
        """Make the attempt's plan, once everything about it is known."""
        if attempt.settled or not attempt.known or attempt.number < self._newest:
            return
        try:
            key = VersionKey(run_id=self._config.run_id, attempt=attempt.number, weight_version=0)
            self._steps.reached(Step.PLAN, key)
            began = time.monotonic()
            attempt.plan = await self._finisher.persistent(
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
        await self._feed_all(attempt)

    async def _feed_all(self, attempt: AttemptState) -> None:
        for state in list(attempt.versions.values()):
            self._feed(state, attempt)

    def _supersede(self) -> None:
        """The trainer restarted: what older attempts have not finished will never be finished."""
        for state in list(self.states()):
            if state.key.attempt < self._newest:
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
            self._finisher.fail(state, error)
        else:
            state.fail(error)

    # ---- versions

    async def _state_of(self, key: VersionKey, sequence: int) -> VersionState | None:
        """The version's state; None when it has ended."""
        attempt = self._attempt(key.attempt)
        number = key.weight_version
        if number in attempt.finished:
            return None
        state = attempt.versions.get(number)
        if state is None:
            if self._start > 1 and await self._ended_before(key):
                attempt.finished.add(number)
                return None
            state = attempt.versions[number] = VersionState(key, sequence)
            if self._live and key.attempt < self._newest:
                self._fail(state, self._superseded(key))
        return state

    async def _ended_before(self, key: VersionKey) -> bool:
        """Whether the version's outcome lies before our first event: this event came too late."""
        subject = outcome_subject(key)
        outcome = await self._finisher.persistent(lambda: self._bus.last(subject))
        return outcome is not None and outcome.sequence < self._start

    async def _version_event(self, key: VersionKey, received: Received) -> None:
        state = await self._state_of(key, received.message.sequence)
        if state is None or state.failure is not None:
            return
        state.backlog.append(received)
        attempt = self._attempt(key.attempt)
        await self._settle(attempt)
        if attempt.settled:
            self._feed(state, attempt)

    def _feed(self, state: VersionState, attempt: AttemptState) -> None:
        """Give the version's events to its assembly, and do what they ask for."""
        if state.failure is not None:
            return
        if attempt.failure is not None:
            self._fail(state, attempt.failure)
            return
        backlog, state.backlog = state.backlog, []
        try:
            for event, message in backlog:
                self._finisher.take(state, attempt, event, message.sequence, live=self._live)
        except WeightbusError as error:
            self._fail(state, error)

    # ---- the start

    async def go_live(self, left_over: list[tuple[VersionKey, Path]]) -> None:
        """The state is that of the stream: clean up, then do everything that it asks for.

        Args:
            left_over: the hidden folders of before the stream's end was looked at.

        Raises:
            StorageError, CommitError: an aborted version cannot be removed.
            BusError: the bus was closed.
        """
        self._live = True
        await self._finisher.tidy(lambda: self._clean_up_at_start(left_over))
        for state in list(self.states()):
            if state.failure is not None:
                self._finisher.publish_failure(state)
        for attempt in list(self._attempts.values()):
            await self._settle(attempt)
        self._supersede()
        for state in list(self.states()):
            self._finisher.resume(state, self._attempt(state.key.attempt))

    def _clean_up_at_start(self, left_over: list[tuple[VersionKey, Path]]) -> None:
        """Folders that a killed writer left: of versions that have ended, or that nobody knows."""
        for key, folder in left_over:
            attempt = self._attempts.get(key.attempt)
            known = attempt is not None and key.weight_version in attempt.versions
            if not known or key.attempt < self._newest:
                _log.info("removing what is left of version %s: %s", key, folder)
                discard(VersionPaths.of(self._root, key))
        for key in self._aborted:
            self._withdraw(key)
        self._aborted.clear()

    def _withdraw(self, key: VersionKey) -> None:
        nonce = self.nonce_of(key.attempt)
        withdraw(VersionPaths.of(self._root, key), key, "" if nonce is None else nonce)

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
        if state is not None:
            state.outcome = outcome
            await self._finisher.end(state)
            if self._live:
                await self._clean_up(state, aborted=aborted)
        if attempt.number < self._newest and not attempt.versions:
            attempt.forget_plan()

    async def _clean_up(self, state: VersionState, *, aborted: bool) -> None:
        self._steps.reached(Step.CLEAN_UP, state.key)
        if aborted:
            await self._finisher.persistent(
                lambda: self._finisher.tidy(lambda: self._withdraw(state.key))
            )
        else:
            paths = VersionPaths.of(self._root, state.key)
            await self._finisher.tidy(lambda: discard(paths))
        ended = "aborted" if aborted else "complete"
        _log.info("version %s %s %s", state.key, ended, state.times.stages())

    def _count(self, outcome: Outcome) -> None:
        if isinstance(outcome, VersionComplete):
            self._numbers["versions_complete_total"] += 1
            self._numbers["last_complete_version"] = float(outcome.version.weight_version)
        else:
            self._numbers["versions_aborted_total"] += 1
