"""The bus, as the roles see it. `NatsBus` is the real one, `MemoryBus` the one for tests.

Two streams (bus.streams): the event stream, where a subject holds one message for ever, and the
report stream. One bucket of blobs. Nothing here knows what an event is: bytes in, bytes out.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ..schemas.errors import AlreadyPublishedError


class ConnectionState(enum.Enum):
    """The state of the connection to the server."""

    CONNECTED = "connected"  # requests get answers
    RECONNECTING = "reconnecting"  # the connection is lost; it is tried again without end
    CLOSED = "closed"  # close() was called


@dataclass(frozen=True, slots=True)
class Message:
    """One stored message. `sequence` is its place in the stream, from 1, growing."""

    subject: str
    data: bytes
    sequence: int
    timestamp: datetime


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server has stored the message durably. `duplicate`: it was there already, unchanged."""

    sequence: int
    duplicate: bool


class SubjectTakenError(AlreadyPublishedError):
    """The subject holds another message; `existing` is that message."""

    existing: Message

    def __init__(self, existing: Message) -> None:
        self.existing = existing
        super().__init__(
            "the subject already holds a different message",
            where={"subject": existing.subject, "sequence": existing.sequence},
            next_step="another process spoke first, or two trainers share a run and attempt",
        )


class Reader(Protocol):
    """Messages in stream order, each once, without gaps, also across reconnects and restarts."""

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None when none came within the time-out (None: wait without end).

        Raises:
            SequenceGapError: messages between the last one and this one are gone from the stream,
                or the stream ends before `start_sequence` (it is another one).
            ReaderReplacedError: a newer reader of the same name has taken over.
            BusClosedError: the bus was closed.
        """
        ...

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages without end; raises as `next` does."""
        ...


class Bus(Protocol):
    """What the roles need from JetStream. All time-outs are in seconds on the monotonic clock."""

    @property
    def state(self) -> ConnectionState:
        """The state of the connection now."""
        ...

    def on_state_change(self, callback: Callable[[ConnectionState], None]) -> None:
        """Call `callback` (on the event loop's thread) after each change of state."""
        ...

    async def publish_once(self, subject: str, data: bytes, *, timeout_s: float = 30.0) -> Receipt:
        """Store `data` as the only message of `subject`; safe to repeat after any failure.

        Retries through reconnects until the time-out.

        Raises:
            SubjectTakenError: the subject holds different bytes.
            StreamFullError: the stream's limits refuse it.
            EventTooLargeError: over the stream's or the server's message size; nothing was sent.
            BusUnavailableError: not acknowledged in time (it may or may not be stored: repeat).
            BusClosedError: after close().
        """
        ...

    async def report(self, subject: str, data: bytes, *, timeout_s: float = 5.0) -> Receipt:
        """Append a message to the report stream; raises the last four of `publish_once`."""
        ...

    async def last(self, subject_filter: str) -> Message | None:
        """The newest stored message on a subject or filter of either stream."""
        ...

    async def last_sequence(self) -> int:
        """The sequence of the newest message of the event stream; 0 when it is empty."""
        ...

    def read(
        self, filters: Sequence[str], *, start_sequence: int = 1, name: str | None = None
    ) -> AbstractAsyncContextManager[Reader]:
        """Read the stream that the filters belong to, in order, from a sequence on.

        `name` makes the consumer durable on the server, where its progress shows as lag; a second
        reader of the same name takes over. Progress kept by the server is never trusted: reading
        starts at `start_sequence`, whatever the consumer delivered before.
        A `start_sequence` below the stream's first message is a SequenceGapError at the first
        `next`, except 1, which means "from the first message that exists".
        """
        ...

    async def put_blob(self, name: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Store a blob; putting the same name again with the same bytes does nothing.

        Raises:
            AlreadyPublishedError: the name holds other bytes.
            StreamFullError, BusUnavailableError, BusClosedError.
        """
        ...

    async def get_blob(self, name: str, *, timeout_s: float = 60.0) -> bytes:
        """Fetch a blob. Raises BlobMissingError, BusUnavailableError."""
        ...

    async def close(self) -> None:
        """Flush and disconnect; idempotent. Readers end with BusClosedError."""
        ...
