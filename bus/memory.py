"""A bus in memory for tests: the same promises as `NatsBus`, no server, and faults on request.

    server = MemoryServer()
    bus = await MemoryBus.connect(server)        # as many as there are processes in the story

Buses of one server may live on different event loops and threads.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

from ..schemas.errors import (
    AlreadyPublishedError,
    BlobMissingError,
    BusClosedError,
    BusUnavailableError,
    EventTooLargeError,
    ReaderReplacedError,
    SequenceGapError,
)
from .interface import ConnectionState, Message, Receipt
from .memory_server import MemoryServer, subject_matches
from .streams import (
    EVENT_STREAM,
    REPORT_STREAM,
    check_read,
    check_subject,
    stream_of,
)

__all__ = ["MemoryBus", "MemoryReader", "MemoryServer", "subject_matches"]

Answer = TypeVar("Answer")


class MemoryBus:
    """`Bus` in memory. Make one with `MemoryBus.connect`; it is an `async with` too."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self._state = ConnectionState.CONNECTED
        self._callbacks: list[Callable[[ConnectionState], None]] = []
        self._changed = asyncio.Event()

    @classmethod
    async def connect(cls, server: MemoryServer | None = None) -> Self:
        """Connect to a server, a new one by default."""
        bus = cls(MemoryServer() if server is None else server)
        bus._state = (
            ConnectionState.CONNECTED if bus.server.online else ConnectionState.RECONNECTING
        )
        bus.server.watch(bus, bus._on_change)
        return bus

    @property
    def state(self) -> ConnectionState:
        """See `Bus`."""
        return self._state

    def on_state_change(self, callback: Callable[[ConnectionState], None]) -> None:
        """See `Bus`."""
        self._callbacks.append(callback)

    def _on_change(self, state: ConnectionState | None) -> None:
        if state is not None and self._state not in (state, ConnectionState.CLOSED):
            self._state = state
            for callback in tuple(self._callbacks):
                callback(state)
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """See `Bus`."""
        self.server.unwatch(self)
        self._on_change(ConnectionState.CLOSED)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- publishing and looking

    async def publish_once(self, subject: str, data: bytes, *, timeout_s: float = 30.0) -> Receipt:
        """See `Bus`. Also raises EventTooLargeError."""
        check_subject(subject, EVENT_STREAM)
        return await self._publish(subject, data, once=True, timeout_s=timeout_s)

    async def report(self, subject: str, data: bytes, *, timeout_s: float = 5.0) -> Receipt:
        """See `Bus`. Also raises EventTooLargeError."""
        check_subject(subject, REPORT_STREAM)
        return await self._publish(subject, data, once=False, timeout_s=timeout_s)

    async def last(self, subject_filter: str, *, timeout_s: float = 10.0) -> Message | None:
        """See `Bus`."""
        log = self.server.logs[stream_of(subject_filter)]

        def look() -> Message | None:
            matching = (
                m for m in reversed(log.messages) if subject_matches(subject_filter, m.subject)
            )
            return next(matching, None)

        return await self._ask(look, timeout_s)

    async def last_sequence(self, *, timeout_s: float = 10.0) -> int:
        """See `Bus`."""
        return await self._ask(lambda: self.server.logs[EVENT_STREAM].last, timeout_s)

    async def _publish(self, subject: str, data: bytes, *, once: bool, timeout_s: float) -> Receipt:
        if len(data) > self.server.max_payload_bytes:
            raise EventTooLargeError(
                f"a message of {len(data)} bytes is over the server's max_payload",
                where={"subject": subject, "max_payload_bytes": self.server.max_payload_bytes},
                next_step="send less in one message, or raise max_payload in the server",
            )

        stored: list[Receipt] = []

        def store() -> Receipt | None:
            # A report's repetition is known by its id, as on the real server.
            receipt = (
                stored[0] if stored and not once else self.server.store(subject, data, once=once)
            )
            stored.append(receipt)
            if self.server.acks_to_lose > 0:
                self.server.acks_to_lose -= 1
                return None
            return receipt

        deadline = time.monotonic() + timeout_s
        while True:
            receipt = await self._ask(store, deadline - time.monotonic())
            self.server.changed()
            if receipt is not None:
                return receipt

    async def _ask(self, act: Callable[[], Answer], timeout_s: float) -> Answer:
        """Do something under the server's lock, as soon as it answers."""
        await asyncio.sleep(0)  # a real request would give other tasks a turn
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._ensure_open()
                    changed = self._changed
                    with self.server.lock:
                        if self.server.answers:
                            return act()
                    await changed.wait()
        except TimeoutError:
            raise BusUnavailableError(
                f"no answer within {timeout_s:g} s", next_step="let the MemoryServer answer again"
            ) from None

    def _ensure_open(self) -> None:
        if self._state is ConnectionState.CLOSED:
            raise BusClosedError("the bus is closed", next_step="connect again")

    # ---- blobs

    async def put_blob(self, name: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """See `Bus`. Raises AlreadyPublishedError when the name has other bytes."""
        if await self._ask(lambda: self.server.blobs.setdefault(name, data), timeout_s) != data:
            raise AlreadyPublishedError(
                "the bucket has another blob under this name",
                where={"name": name},
                next_step="name blobs by the digest of their bytes",
            )

    async def get_blob(self, name: str, *, timeout_s: float = 60.0) -> bytes:
        """See `Bus`."""
        data = await self._ask(lambda: self.server.blobs.get(name), timeout_s)
        if data is None:
            raise BlobMissingError(
                "the bucket has no blob of that name",
                where={"name": name},
                next_step="put it first; an event may name a blob only after it is stored",
            )
        return data

    # ---- reading

    @asynccontextmanager
    async def read(
        self, filters: Sequence[str], *, start_sequence: int = 1, name: str | None = None
    ) -> AsyncGenerator[MemoryReader]:
        """See `Bus`. A reader whose name another one takes raises ReaderReplacedError."""
        check_read(filters, start_sequence, name)
        reader = MemoryReader(self, filters, start_sequence, name)
        self.server.changed()  # the reader whose name it took may wait
        yield reader

    @property
    def change(self) -> asyncio.Event:
        """Set at the next change; for readers."""
        return self._changed


class MemoryReader:
    """`Reader` on a MemoryServer; made by `MemoryBus.read`."""

    def __init__(
        self, bus: MemoryBus, filters: Sequence[str], start_sequence: int, name: str | None
    ) -> None:
        self._bus = bus
        self._server = bus.server
        self._filters = tuple(filters)
        self._stream = stream_of(filters[0])
        self._log = bus.server.logs[self._stream]
        self._start = start_sequence
        self._position = start_sequence - 1
        self._key = None if name is None else (self._stream, name)
        self._begun = False
        if self._key is not None:
            with self._server.lock:
                self._server.readers[self._key] = self

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """See `Reader`. Also raises ReaderReplacedError."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    changed = self._bus.change
                    if (message := self._look()) is not None:
                        return message
                    await changed.wait()
        except TimeoutError:
            return None

    async def __aiter__(self) -> AsyncIterator[Message]:
        """See `Reader`."""
        while True:
            message = await self.next()
            if message is not None:
                yield message

    def _look(self) -> Message | None:
        if self._bus.state is ConnectionState.CLOSED:
            raise BusClosedError("the bus is closed", next_step="connect again")
        with self._server.lock:
            if not self._server.answers:
                return None
            if self._key is not None and self._server.readers[self._key] is not self:
                raise ReaderReplacedError(
                    "another reader of this name has taken over",
                    where={"stream": self._stream, "name": self._key[1]},
                    next_step="two processes run with one name (the same writer index?): stop one",
                )
            self._check_still_there()
            return self._advance()

    def _check_still_there(self) -> None:
        if not self._begun and self._start == 1:
            self._position = self._log.first - 1
        self._begun = True
        if self._log.first > self._position + 1 or self._position > self._log.last:
            raise SequenceGapError(
                "messages that were asked for are gone from the stream",
                where={
                    "stream": self._stream,
                    "wanted_sequence": self._position + 1,
                    "first_sequence": self._log.first,
                    "last_sequence": self._log.last,
                },
                next_step="rebuild the state from the version directories and read from sequence 1",
            )

    def _advance(self) -> Message | None:
        index = bisect_right(self._log.messages, self._position, key=lambda m: m.sequence)
        for at in range(index, len(self._log.messages)):
            message = self._log.messages[at]
            self._position = message.sequence
            if any(subject_matches(wanted, message.subject) for wanted in self._filters):
                return message
        self._position = self._log.last
        return None
