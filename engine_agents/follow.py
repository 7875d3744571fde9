"""Following the stream: the outcomes and retirements of a run, from the beginning on."""

from __future__ import annotations

import asyncio
import logging

from ..bus.events import read_event
from ..bus.interface import Bus, ConnectionState, Message, Reader
from ..bus.subjects import outcomes_filter, retirements_filter
from ..schemas.digest import digest_of
from ..schemas.errors import BusUnavailableError, SchemaError, SequenceGapError
from .targets import Targets

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_QUIET_S = 5.0
_MAX_NAME_CHARS = 128


class Follower:
    """Keeps `targets` up to date, and sets `changed` when they may have changed.

    `caught_up` is set once everything that was stored when the follower began is in `targets`: an
    agent that joins late must not act on the first version that it sees. After a gap the stream is
    read again from its beginning, and `caught_up` is cleared meanwhile.
    """

    def __init__(
        self, bus: Bus, run_id: str, engine_name: str, targets: Targets, changed: asyncio.Event
    ) -> None:
        self._bus = bus
        self._filters = [outcomes_filter(run_id), retirements_filter(run_id)]
        self._name = reader_name(run_id, engine_name)
        self._targets = targets
        self._changed = changed
        self._next = 1
        self.caught_up = asyncio.Event()

    async def follow(self) -> None:
        """Read without end.

        Raises:
            ReaderReplacedError: another agent of the same run and engine has started.
            BusClosedError: the bus was closed.
        """
        while True:
            try:
                await self._read()
            except SequenceGapError as error:
                # The stream has let old outcomes go, or was lost and begins anew: either way what
                # is in it now is what counts.
                _log.warning("the stream has a gap, reading what is left of it: %s", error)
                self.caught_up.clear()
                self._targets.forget()
                self._next = 1
            except BusUnavailableError as error:
                _log.warning("the bus does not answer: %s", error)
            await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        stored = [await self._bus.last(subjects) for subjects in self._filters]
        goal = max((message.sequence for message in stored if message is not None), default=0)
        reading = self._bus.read(self._filters, start_sequence=self._next, name=self._name)
        async with reading as reader:
            await self._catch_up(reader, goal)
            self.caught_up.set()
            self._changed.set()
            async for message in reader:
                if self._hand_over(message):
                    self._changed.set()

    async def _catch_up(self, reader: Reader, goal: int) -> None:
        while self._next <= goal:
            message = await reader.next(_QUIET_S)
            if message is not None:
                self._hand_over(message)
            elif self._bus.state is ConnectionState.CONNECTED:
                return  # the last one was removed from the stream meanwhile

    def _hand_over(self, message: Message) -> bool:
        self._next = message.sequence + 1
        try:
            event = read_event(message).event
        except SchemaError as error:
            _log.error("an event was left out: %s", error)
            return False
        return self._targets.add(event)


def reader_name(run_id: str, engine_name: str) -> str:
    """The name under which the agent's progress shows at the server."""
    name = f"agent-{run_id}-{engine_name}"
    if len(name) <= _MAX_NAME_CHARS:
        return name
    return f"agent-{digest_of(name.encode()).rpartition(':')[2]}"
