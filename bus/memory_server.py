"""The server behind `MemoryBus`: two logs, blobs, and the faults that a test can cause."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from ..schemas.errors import StreamFullError
from .interface import ConnectionState, Message, Receipt, SubjectTakenError
from .streams import EVENT_STREAM, MAX_MESSAGE_BYTES, REPORT_STREAM, StreamLimits, stream_of

Watcher = Callable[[ConnectionState | None], None]


def subject_matches(subject_filter: str, subject: str) -> bool:
    """Whether a NATS filter (`*` one token, `>` the rest) covers a subject."""
    wanted, tokens = subject_filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and all(
            w in ("*", t) for w, t in zip(wanted[:-1], tokens, strict=False)
        )
    return len(wanted) == len(tokens) and all(
        w in ("*", t) for w, t in zip(wanted, tokens, strict=True)
    )


class MemoryLog:
    """One stream. `messages` in order; `first` is the lowest sequence that may still exist."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.messages: list[Message] = []
        self.newest: dict[str, Message] = {}
        self.first = 1
        self.last = 0
        self.nbytes = 0

    def append(self, subject: str, data: bytes) -> Message:
        """Store a message behind the last one."""
        self.last += 1
        message = Message(subject, data, self.last, datetime.now(UTC))
        self.messages.append(message)
        self.newest[subject] = message
        self.nbytes += len(subject) + len(data)
        return message

    def purge(self, subject_filter: str, below: int) -> int:
        """Remove messages under a sequence; returns how many."""
        gone = [
            m
            for m in self.messages
            if m.sequence < below and subject_matches(subject_filter, m.subject)
        ]
        doomed = {m.sequence for m in gone}
        self.messages = [m for m in self.messages if m.sequence not in doomed]
        self.newest = {m.subject: m for m in self.messages}
        self.first = self.messages[0].sequence if self.messages else self.last + 1
        self.nbytes -= sum(len(m.subject) + len(m.data) for m in gone)
        return len(gone)


class MemoryServer:
    """What the buses share, and the faults that a test can cause."""

    def __init__(
        self, *, limits: StreamLimits | None = None, max_payload_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        chosen = StreamLimits() if limits is None else limits
        self.max_payload_bytes = max_payload_bytes
        self.lock = threading.RLock()
        self.logs: Final = {
            EVENT_STREAM: MemoryLog(chosen.events_max_bytes),
            REPORT_STREAM: MemoryLog(chosen.reports_max_bytes),
        }
        self.blobs: dict[str, bytes] = {}
        self.readers: dict[tuple[str, str], object] = {}
        self.online = True
        self.paused = False
        self.acks_to_lose = 0
        self._watchers: dict[object, tuple[asyncio.AbstractEventLoop, Watcher]] = {}

    # ---- faults

    def disconnect(self) -> None:
        """Every bus loses its connection, until `reconnect`."""
        self._set(online=False)

    def reconnect(self) -> None:
        """Buses find the server again."""
        self._set(online=True)

    def drop_connections(self) -> None:
        """Every bus loses its connection and finds the server again at once."""
        self.disconnect()
        self.reconnect()

    def pause(self) -> None:
        """The server stays connected and answers nothing, until `resume`."""
        with self.lock:
            self.paused = True

    def resume(self) -> None:
        """Answer again."""
        with self.lock:
            self.paused = False
        self.changed()

    def lose_acks(self, count: int) -> None:
        """Store the next `count` publications but lose their acknowledgements."""
        with self.lock:
            self.acks_to_lose += count

    def purge(self, subject_filter: str, *, below: int | None = None) -> int:
        """Remove messages (with a sequence under `below`) for ever; returns how many."""
        with self.lock:
            log = self.logs[stream_of(subject_filter)]
            return log.purge(subject_filter, log.last + 1 if below is None else below)

    def _set(self, *, online: bool) -> None:
        with self.lock:
            self.online = online
        self.changed(ConnectionState.CONNECTED if online else ConnectionState.RECONNECTING)

    # ---- for the buses

    @property
    def answers(self) -> bool:
        """Whether requests are answered now."""
        return self.online and not self.paused

    def watch(self, token: object, watcher: Watcher) -> None:
        """Call `watcher` on the running loop after each change (with a state: a new one)."""
        with self.lock:
            self._watchers[token] = (asyncio.get_running_loop(), watcher)

    def unwatch(self, token: object) -> None:
        """End `watch`."""
        with self.lock:
            self._watchers.pop(token, None)

    def changed(self, state: ConnectionState | None = None) -> None:
        """Tell every bus."""
        with self.lock:
            watchers = list(self._watchers.values())
        for loop, watcher in watchers:
            if not loop.is_closed():
                loop.call_soon_threadsafe(watcher, state)

    def store(self, subject: str, data: bytes, *, once: bool) -> Receipt:
        """Append a message; call it with the lock held. Raises as `Bus.publish_once`."""
        stream = EVENT_STREAM if once else REPORT_STREAM
        log = self.logs[stream]
        existing = log.newest.get(subject) if once else None
        if existing is not None:
            if existing.data != data:
                raise SubjectTakenError(existing)
            return Receipt(existing.sequence, duplicate=True)
        if log.nbytes + len(subject) + len(data) > log.max_bytes:
            raise StreamFullError(
                "maximum bytes exceeded",
                where={"stream": stream, "subject": subject},
                next_step="make room: purge finished runs, or raise the limit (see docs/bus.md)",
            )
        return Receipt(log.append(subject, data).sequence, duplicate=False)
