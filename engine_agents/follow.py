"""Following the stream: outcomes and retirements of a run, from the beginning on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..bus.events import read_event
from ..bus.interface import Bus, ConnectionState, Message, Reader
from ..bus.subjects import outcomes_filter, retirements_filter
from ..schemas.errors import BusUnavailableError, SchemaError, SequenceGapError
from ..schemas.events import AnyEvent

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_QUIET_S = 5.0


class Follower:
    """Hands every outcome and retirement of a run to `take`, in stream order.

    `caught_up` is set once everything that was stored when the follower began has been handed
    over: an agent that joins late must not act on the first version that it sees.
    """

    def __init__(self, bus: Bus, run_id: str, name: str, take: Callable[[AnyEvent], None]) -> None:
        self._bus = bus
        self._filters = [outcomes_filter(run_id), retirements_filter(run_id)]
        self._name = name
        self._take = take
        self._next = 1
        self.caught_up = asyncio.Event()

    async def follow(self) -> None:
        """Read without end.

        Raises:
            BusClosedError: the bus was closed.
        """
        while True:
            try:
                await self._read()
            except SequenceGapError as error:
                # Outcomes that the stream has let go are of no use any more; newer ones are.
                _log.warning("the stream has a gap, reading what is left of it: %s", error)
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
            async for message in reader:
                self._hand_over(message)

    async def _catch_up(self, reader: Reader, goal: int) -> None:
        while self._next <= goal:
            message = await reader.next(_QUIET_S)
            if message is not None:
                self._hand_over(message)
            elif self._bus.state is ConnectionState.CONNECTED:
                return  # the last one was removed from the stream meanwhile

    def _hand_over(self, message: Message) -> None:
        self._next = message.sequence + 1
        try:
            event = read_event(message).event
        except SchemaError as error:
            _log.error("an event was left out: %s", error)
            return
        self._take(event)
