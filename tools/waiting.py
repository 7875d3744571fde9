"""Waiting for a version's outcome."""

from __future__ import annotations

from ..bus.events import read_event
from ..bus.interface import Bus
from ..bus.subjects import outcome_subject
from ..schemas.errors import BusUnavailableError, MalformedEventError, VersionAbortedError
from ..schemas.events import VersionAborted, VersionComplete, VersionKey


async def wait_for_outcome(bus: Bus, key: VersionKey, *, timeout_s: float) -> VersionComplete:
    """The version's completion.

    Raises:
        VersionAbortedError: it was aborted; with the reason.
        BusUnavailableError: no outcome in time.
    """
    async with bus.read([outcome_subject(key)]) as reader:
        message = await reader.next(timeout_s)
    if message is None:
        raise BusUnavailableError(
            f"version {key} has no outcome after {timeout_s:g} s",
            next_step="see what it waits for with `weightbus status`",
        )
    event = read_event(message).event
    if isinstance(event, VersionAborted):
        raise VersionAbortedError(
            f"version {key} was aborted: {event.message}",
            where={"error": event.error, "by": event.by},
            next_step="mend what the message names and publish the next version",
        )
    if not isinstance(event, VersionComplete):
        raise MalformedEventError(
            f"a {event.kind} event on an outcome subject", where={"sequence": message.sequence}
        )
    return event
