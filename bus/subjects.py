"""Subjects: built and parsed here and nowhere else.

    wb.<run>.<attempt>.-.attempt                  a trainer (re)started
    wb.<run>.<attempt>.-.layout.<rank>            a producer's layout is in the bucket
    wb.<run>.<attempt>.<version>.opened
    wb.<run>.<attempt>.<version>.chunk.<rank>.<chunk>
    wb.<run>.<attempt>.<version>.sealed.<rank>
    wb.<run>.<attempt>.<version>.shard.<shard>
    wb.<run>.<attempt>.<version>.outcome          complete or aborted, whichever comes first
    wb.<run>.<attempt>.<version>.retired
    wbr.<run>.<engine>.<attempt>.<version>        engine reports (second stream)

Each `wb` subject holds at most one message for ever: publishing with an expected last subject
sequence of 0 makes that so, and makes a subject the key of its event. Numbers carry no leading
zeros, so a token has one spelling. The rank stands before the chunk: a producer may be allowed
`wb.<run>.*.*.*.<rank>.>` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from ..schemas.errors import MalformedEventError
from ..schemas.events import (
    AnyEvent,
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

EVENTS_ROOT = "wb"
REPORTS_ROOT = "wbr"
EVENTS_FILTER = f"{EVENTS_ROOT}.>"
REPORTS_FILTER = f"{REPORTS_ROOT}.>"


def subject_of(event: AnyEvent) -> str:
    """The one subject of an event."""
    if isinstance(event, AttemptOpened):
        return f"{EVENTS_ROOT}.{event.run_id}.{event.attempt}.-.attempt"
    if isinstance(event, LayoutPublished):
        return f"{EVENTS_ROOT}.{event.run_id}.{event.attempt}.-.layout.{event.rank}"
    key = event.version
    if isinstance(event, EngineReport):
        return f"{REPORTS_ROOT}.{key.run_id}.{event.engine}.{key.attempt}.{key.weight_version}"
    return f"{EVENTS_ROOT}.{key.run_id}.{key.attempt}.{key.weight_version}.{_leaf(event)}"


def _leaf(
    event: VersionOpened
    | ChunkReady
    | ProducerSealed
    | ShardPersisted
    | VersionComplete
    | VersionAborted
    | VersionRetired,
) -> str:
    match event:
        case VersionOpened():
            return "opened"
        case ChunkReady():
            return f"chunk.{event.rank}.{event.chunk}"
        case ProducerSealed():
            return f"sealed.{event.rank}"
        case ShardPersisted():
            return f"shard.{event.shard}"
        case VersionComplete() | VersionAborted():
            return "outcome"
        case VersionRetired():
            return "retired"
        case _:
            assert_never(event)


def outcome_subject(key: VersionKey) -> str:
    """Where a version's one outcome is."""
    return f"{EVENTS_ROOT}.{key.run_id}.{key.attempt}.{key.weight_version}.outcome"


def run_filter(run_id: str) -> str:
    """Every event of a run."""
    return f"{EVENTS_ROOT}.{run_id}.>"


def attempts_filter(run_id: str) -> str:
    """The openings of a run's attempts."""
    return f"{EVENTS_ROOT}.{run_id}.*.-.attempt"


def attempt_level_filter(run_id: str) -> str:
    """Everything that belongs to a run's attempts and not to a version: openings and layouts."""
    return f"{EVENTS_ROOT}.{run_id}.*.-.>"


def outcomes_filter(run_id: str, attempt: int | None = None) -> str:
    """The outcomes of a run's versions, in every attempt or in one."""
    return f"{EVENTS_ROOT}.{run_id}.{'*' if attempt is None else attempt}.*.outcome"


def retirements_filter(run_id: str) -> str:
    """The retirements of a run's versions."""
    return f"{EVENTS_ROOT}.{run_id}.*.*.retired"


def reports_filter(run_id: str) -> str:
    """Every engine report of a run."""
    return f"{REPORTS_ROOT}.{run_id}.>"


@dataclass(frozen=True, slots=True)
class ParsedSubject:
    """What an event subject says. `weight_version` is None for what belongs to the attempt."""

    run_id: str
    attempt: int
    weight_version: int | None
    kind: str
    numbers: tuple[int, ...]


def parse_subject(subject: str) -> ParsedSubject:
    """Take an event subject (root `wb`) apart.

    Raises:
        MalformedEventError: not a subject that `subject_of` builds.
    """
    tokens = subject.split(".")
    try:
        root, run_id, attempt, version, kind, *numbers = tokens
        if root != EVENTS_ROOT:
            raise ValueError(f"root {root!r}")
        return ParsedSubject(
            run_id,
            int(attempt),
            None if version == "-" else int(version),
            kind,
            tuple(int(number) for number in numbers),
        )
    except ValueError as error:
        raise MalformedEventError(
            f"not an event subject: {error}",
            where={"subject": subject},
            next_step="publish only through weightbus on the subjects wb.>",
        ) from error
