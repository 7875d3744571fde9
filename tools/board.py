"""The board: what the stream says about every run, version and engine, folded from its events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias

from ..bus.events import Received, read_event
from ..bus.interface import Bus, Message
from ..bus.subjects import EVENTS_FILTER, REPORTS_FILTER, reports_filter, run_filter
from ..schemas.errors import BusUnavailableError
from ..schemas.events import (
    AttemptOpened,
    ChunkReady,
    EngineReport,
    LayoutPublished,
    ProducerSealed,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionKey,
    VersionOpened,
    VersionRetired,
)

Stage: TypeAlias = Literal["publishing", "converting", "complete", "aborted", "retired"]


@dataclass
class VersionState:
    """One version. Times are JetStream's, of the message that says so."""

    key: VersionKey
    producers: int = 0
    opened_at: datetime | None = None
    sealed: set[int] = field(default_factory=set[int])
    sealed_at: datetime | None = None
    chunks: int = 0
    nbytes: int = 0
    shards_done: set[int] = field(default_factory=set[int])
    shards: int = 0
    outcome: VersionComplete | VersionAborted | None = None
    outcome_at: datetime | None = None
    retired: bool = False

    @property
    def stage(self) -> Stage:
        """Where the version is on its way."""
        if self.retired:
            return "retired"
        if isinstance(self.outcome, VersionComplete):
            return "complete"
        if isinstance(self.outcome, VersionAborted):
            return "aborted"
        return (
            "converting" if self.producers and len(self.sealed) >= self.producers else "publishing"
        )

    @property
    def waits_for(self) -> str:
        """What the version waits for, or why it ended: the answer to "why does it hang?"."""
        if isinstance(self.outcome, VersionAborted):
            return f"{self.outcome.error}: {self.outcome.message} (by {self.outcome.by})"
        match self.stage:
            case "publishing":
                silent = sorted(set(range(self.producers)) - self.sealed)
                return f"seals of ranks {_numbers(silent)}" if silent else "its opening"
            case "converting" if not self.shards:
                return "the first shard: is a writer running?"
            case "converting":
                return f"shards {_numbers(sorted(set(range(self.shards)) - self.shards_done))}"
            case _:
                return ""


@dataclass
class EngineState:
    """One engine, from its agent's reports."""

    engine: str
    url: str
    serving: VersionKey | None
    last: EngineReport
    last_at: datetime


@dataclass
class RunState:
    """One run: its newest attempt, and every version and engine that the stream still knows."""

    run_id: str
    attempt: AttemptOpened | None = None
    layouts: set[int] = field(default_factory=set[int])
    versions: dict[tuple[int, int], VersionState] = field(
        default_factory=dict[tuple[int, int], VersionState]
    )
    engines: dict[str, EngineState] = field(default_factory=dict[str, EngineState])

    def newest_complete(self) -> VersionKey | None:
        """The version that engines ought to serve."""
        ready = [number for number, state in self.versions.items() if state.stage == "complete"]
        return self.versions[max(ready)].key if ready else None

    def lag(self, engine: EngineState) -> int:
        """Complete versions newer than the one that an engine serves."""
        served = engine.serving
        at = (-1, -1) if served is None else (served.attempt, served.weight_version)
        return sum(
            number > at and state.stage in ("complete", "retired")
            for number, state in self.versions.items()
        )


@dataclass
class Board:
    """Every run that the stream knows."""

    runs: dict[str, RunState] = field(default_factory=dict[str, RunState])

    def apply(self, received: Received) -> None:
        """Fold one event in. Doubled and late events do no harm."""
        event, message = received
        if isinstance(event, AttemptOpened | LayoutPublished):
            run = self.runs.setdefault(event.run_id, RunState(event.run_id))
            _apply_attempt(run, event)
            return
        run = self.runs.setdefault(event.version.run_id, RunState(event.version.run_id))
        if isinstance(event, EngineReport):
            _apply_report(run, event, message)
            return
        number = (event.version.attempt, event.version.weight_version)
        _apply_version(run.versions.setdefault(number, VersionState(event.version)), event, message)


def _apply_attempt(run: RunState, event: AttemptOpened | LayoutPublished) -> None:
    newest = -1 if run.attempt is None else run.attempt.attempt
    if isinstance(event, AttemptOpened):
        if event.attempt > newest:
            run.attempt = event
    elif event.attempt >= newest:
        run.layouts.add(event.rank)


def _apply_report(run: RunState, event: EngineReport, message: Message) -> None:
    known = run.engines.get(event.engine)
    serving = known.serving if known is not None else None
    if event.outcome == "serving":
        serving = event.version
    run.engines[event.engine] = EngineState(
        event.engine, event.engine_url, serving, event, message.timestamp
    )


def _apply_version(
    state: VersionState,
    event: VersionOpened
    | ChunkReady
    | ProducerSealed
    | ShardPersisted
    | VersionComplete
    | VersionAborted
    | VersionRetired,
    message: Message,
) -> None:
    match event:
        case VersionOpened():
            state.producers = event.producers
            state.opened_at = message.timestamp
        case ChunkReady():
            state.chunks += 1
            state.nbytes += event.location.length
        case ProducerSealed():
            state.sealed.add(event.rank)
            state.sealed_at = message.timestamp
        case ShardPersisted():
            state.shards_done.add(event.shard)
            state.shards = event.shards
        case VersionComplete() | VersionAborted():
            state.outcome = event
            state.outcome_at = message.timestamp
        case VersionRetired():
            state.retired = True


def _numbers(numbers: Iterable[int], most: int = 8) -> str:
    listed = list(numbers)
    text = ", ".join(map(str, listed[:most]))
    return text if len(listed) <= most else f"{text} and {len(listed) - most} more"


async def read_board(bus: Bus, run_id: str | None = None, *, timeout_s: float = 30.0) -> Board:
    """Read both streams up to their present ends.

    Raises:
        BusUnavailableError: the end was not reached in time.
    """
    board = Board()
    filters = (
        (EVENTS_FILTER, REPORTS_FILTER)
        if run_id is None
        else (run_filter(run_id), reports_filter(run_id))
    )
    try:
        async with asyncio.timeout(timeout_s):
            for subjects in filters:
                await _fold(bus, subjects, board)
    except TimeoutError as error:
        raise BusUnavailableError(
            f"the streams were not read to their ends within {timeout_s:g} s",
            next_step="look at the server (`weightbus bus status`) or give a longer time-out",
        ) from error
    return board


async def _fold(bus: Bus, subjects: str, board: Board) -> None:
    last = await bus.last(subjects)
    if last is None:
        return
    async with bus.read([subjects]) as reader:
        async for message in reader:
            board.apply(read_event(message))
            if message.sequence >= last.sequence:
                return
