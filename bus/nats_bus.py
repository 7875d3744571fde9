"""The real bus: NATS JetStream through one connection."""

from __future__ import annotations

import base64
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from ..schemas.errors import BusUnavailableError
from .blobs import BlobStore
from .config import BusConfig
from .connection import Connection
from .errors import NO_MESSAGE, WRONG_LAST_SEQUENCE, RefusedError
from .interface import ConnectionState, Message, Receipt, SubjectTakenError
from .publishing import publish
from .reader import NatsReader
from .streams import (
    EVENT_STREAM,
    REPORT_STREAM,
    Difference,
    StreamStatus,
    check_subject,
    declared,
    ensure,
    status,
    stream_of,
    verify,
)

__all__ = ["BusConfig", "NatsBus"]


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A reader's place on the server. `lag`: stored messages that it was not sent yet."""

    name: str
    stream: str
    delivered_sequence: int
    lag: int
    connected: bool


class NatsBus:
    """`Bus` over NATS JetStream. Make one with `NatsBus.connect`; it is an `async with` too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._blobs = BlobStore(connection)

    @classmethod
    async def connect(cls, config: BusConfig | str | None = None) -> Self:
        """Connect, and create or check the streams (`BusConfig.create_streams`).

        Args:
            config: a configuration, or only a URL.

        Raises:
            BusUnavailableError: no connection within `connect_timeout_s`.
            ServerBinaryError: the server is older than 2.14.
            StreamMismatchError: a stream is not as declared (limits and replicas may differ).
        """
        if config is None or isinstance(config, str):
            config = BusConfig() if config is None else BusConfig(url=config)
        connection = Connection(config)
        await connection.open()
        bus = cls(connection)
        try:
            if config.create_streams:
                await connection.persist(
                    lambda _: ensure(connection, declared(config.streams), update=False),
                    timeout_s=config.connect_timeout_s,
                    what="creating the streams",
                )
        except BaseException:
            await bus.close()
            raise
        return bus

    @property
    def connection(self) -> Connection:
        """The connection, for tools that speak JetStream's API themselves."""
        return self._connection

    # ---- state

    @property
    def state(self) -> ConnectionState:
        """See `Bus`."""
        return self._connection.state

    def on_state_change(self, callback: Callable[[ConnectionState], None]) -> None:
        """See `Bus`."""
        self._connection.listen(callback)

    async def close(self) -> None:
        """See `Bus`."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- publishing

    async def publish_once(self, subject: str, data: bytes, *, timeout_s: float = 30.0) -> Receipt:
        """See `Bus`. Also raises EventTooLargeError."""
        check_subject(subject, EVENT_STREAM)
        headers = {"Nats-Msg-Id": subject, "Nats-Expected-Last-Subject-Sequence": "0"}

        async def attempt(attempt_s: float) -> Receipt:
            try:
                receipt = await publish(
                    self._connection, EVENT_STREAM, subject, data, headers, timeout_s=attempt_s
                )
            except RefusedError as error:
                # A single server says "wrong last sequence" to our own repetition, a replicated
                # one says "duplicate". Either way the subject itself knows what it holds.
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
            else:
                if not receipt.duplicate:
                    return receipt
            return await self._standing(subject, data, attempt_s)

        return await self._connection.persist(
            attempt, timeout_s=timeout_s, what=f"publishing on {subject}"
        )

    async def _standing(self, subject: str, data: bytes, timeout_s: float) -> Receipt:
        existing = await self._last(subject, timeout_s)
        if existing is None:
            raise BusUnavailableError(
                "the server knows this message but does not show it yet", where={"subject": subject}
            )
        if existing.data != data:
            raise SubjectTakenError(existing)
        return Receipt(existing.sequence, duplicate=True)

    async def report(self, subject: str, data: bytes, *, timeout_s: float = 5.0) -> Receipt:
        """See `Bus`. Also raises EventTooLargeError."""
        check_subject(subject, REPORT_STREAM)
        # The id keeps a repetition after a lost acknowledgement from being stored twice.
        headers = {"Nats-Msg-Id": secrets.token_hex(16)}
        return await self._connection.persist(
            lambda attempt_s: publish(
                self._connection, REPORT_STREAM, subject, data, headers, timeout_s=attempt_s
            ),
            timeout_s=timeout_s,
            what=f"reporting on {subject}",
        )

    # ---- looking

    async def last(self, subject_filter: str, *, timeout_s: float = 10.0) -> Message | None:
        """See `Bus`. Answered by the stream's leader, so it never misses an acknowledged message.

        Raises:
            BusUnavailableError, BusClosedError.
        """
        return await self._connection.persist(
            lambda attempt_s: self._last(subject_filter, attempt_s),
            timeout_s=timeout_s,
            what=f"looking for the last message of {subject_filter}",
        )

    async def _last(self, subject_filter: str, timeout_s: float) -> Message | None:
        operation = f"STREAM.MSG.GET.{stream_of(subject_filter)}"
        try:
            answer = await self._connection.call(
                operation, {"last_by_subj": subject_filter}, timeout_s=timeout_s
            )
        except RefusedError as error:
            if error.err_code != NO_MESSAGE:
                raise
            return None
        return _stored(answer["message"])

    async def last_sequence(self, *, timeout_s: float = 10.0) -> int:
        """See `Bus`. Raises BusUnavailableError, BusClosedError."""
        info = await self._connection.persist(
            lambda attempt_s: self._connection.call(
                f"STREAM.INFO.{EVENT_STREAM}", timeout_s=attempt_s
            ),
            timeout_s=timeout_s,
            what="asking for the last sequence",
        )
        return int(info["state"]["last_seq"])

    # ---- reading

    @asynccontextmanager
    async def read(
        self, filters: Sequence[str], *, start_sequence: int = 1, name: str | None = None
    ) -> AsyncGenerator[NatsReader]:
        """See `Bus`. A reader whose name another one takes raises ReaderReplacedError."""
        reader = NatsReader(self._connection, filters, start_sequence=start_sequence, name=name)
        async with reader:
            yield reader

    # ---- blobs

    async def put_blob(self, name: str, data: bytes, *, timeout_s: float = 60.0) -> None:
        """See `Bus`. Raises AlreadyPublishedError when the name has other bytes."""
        await self._blobs.put(name, data, timeout_s=timeout_s)

    async def get_blob(self, name: str, *, timeout_s: float = 60.0) -> bytes:
        """See `Bus`."""
        return await self._blobs.get(name, timeout_s=timeout_s)

    # ---- administration (not part of `Bus`)

    async def ensure_streams(self) -> None:
        """Create and update the streams to what the configuration declares.

        Raises:
            StreamMismatchError: with every difference that remains.
        """
        await ensure(self._connection, declared(self._connection.config.streams))

    async def verify_streams(self) -> tuple[Difference, ...]:
        """Every difference between the declared and the server's streams; changes nothing."""
        return await verify(self._connection, declared(self._connection.config.streams))

    async def stream_status(self) -> tuple[StreamStatus, ...]:
        """Sizes, sequences and differences of each stream; changes nothing."""
        return await status(self._connection, declared(self._connection.config.streams))

    async def consumer_status(self) -> tuple[ConsumerStatus, ...]:
        """The readers that the server knows, on both streams."""
        found: list[ConsumerStatus] = []
        for stream in (EVENT_STREAM, REPORT_STREAM):
            answer: dict[str, Any] = {"total": 1}
            listed = 0
            while listed < answer["total"]:
                answer = await self._connection.call(f"CONSUMER.LIST.{stream}", {"offset": listed})
                consumers: list[dict[str, Any]] = answer.get("consumers") or []
                if not consumers:
                    break
                listed += len(consumers)
                found += [_consumer(stream, info) for info in consumers]
        return tuple(found)

    async def purge(self, subject_filter: str) -> int:
        """Remove every message on a filter for ever, to make room; returns how many.

        Only for runs that are over: a reader that still wants these messages is not told.
        """
        answer = await self._connection.call(
            f"STREAM.PURGE.{stream_of(subject_filter)}", {"filter": subject_filter}
        )
        return int(answer["purged"])


def _stored(message: dict[str, Any]) -> Message:
    return Message(
        subject=message["subject"],
        data=base64.b64decode(message.get("data", "")),
        sequence=message["seq"],
        timestamp=datetime.fromisoformat(message["time"]),
    )


def _consumer(stream: str, info: dict[str, Any]) -> ConsumerStatus:
    return ConsumerStatus(
        name=info["name"],
        stream=stream,
        delivered_sequence=info["delivered"]["stream_seq"],
        lag=info["num_pending"],
        connected=info.get("num_waiting", 0) > 0,
    )
