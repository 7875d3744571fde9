"""Events over a bus: the codec and the subjects put together."""

from __future__ import annotations

from typing import NamedTuple

from ..schemas.codec import decode, encode
from ..schemas.events import (
    AnyEvent,
    EngineReport,
    Outcome,
    VersionAborted,
    VersionComplete,
    VersionKey,
)
from .interface import Bus, Message, Receipt, SubjectTakenError
from .subjects import outcome_subject, subject_of


class Received(NamedTuple):
    """An event and its place in the stream."""

    event: AnyEvent
    message: Message


async def publish_event(bus: Bus, event: AnyEvent, *, timeout_s: float = 30.0) -> Receipt:
    """Publish an event on its subject, once. Raises as `Bus.publish_once`."""
    if isinstance(event, EngineReport):
        return await bus.report(subject_of(event), encode(event), timeout_s=timeout_s)
    return await bus.publish_once(subject_of(event), encode(event), timeout_s=timeout_s)


def read_event(message: Message) -> Received:
    """Decode a message. Raises SchemaError with the subject and sequence."""
    event = decode(message.data, subject=message.subject, sequence=message.sequence)
    return Received(event, message)


async def end_version(bus: Bus, outcome: Outcome, *, timeout_s: float = 30.0) -> Outcome:
    """Publish a version's outcome; returns the one that stands, ours or the one that came first."""
    try:
        await publish_event(bus, outcome, timeout_s=timeout_s)
    except SubjectTakenError as first:
        standing = read_event(first.existing).event
        if not isinstance(standing, VersionComplete | VersionAborted):
            raise
        return standing
    return outcome


async def outcome_of(bus: Bus, key: VersionKey) -> Outcome | None:
    """The version's outcome, if it has one."""
    message = await bus.last(outcome_subject(key))
    if message is None:
        return None
    event = read_event(message).event
    return event if isinstance(event, VersionComplete | VersionAborted) else None
