"""In-order reading through a pull consumer.

One background task per reader keeps this loop (ADR 0003):

    1. renew   when there is no consumer of ours on this connection: look at the stream (is what we
               need still there?), delete the old consumer, create one that starts behind our last
               message, under a fresh inbox, so that nothing of the old one can arrive
    2. pull    ask for more while less than half of `prefetch` is on the way or waiting
    3. audit   ask the server whether a hole hides a gap, and, after asking for messages while
               nothing was under way, whether the consumer still is ours; messages wait meanwhile
    4. wait    for messages, a change of the connection, or a missed heartbeat (then: renew)

Messages need no acknowledgement: the place in the stream is ours, not the server's. A consumer's
own numbering of its deliveries is contiguous, so a hole in it is a lost delivery (renew). A hole in
the stream's numbering is normal (filtered out) unless the stream's beginning has moved into it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ..schemas.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    ReaderReplacedError,
    SequenceGapError,
    WeightbusError,
)
from .connection import Connection
from .errors import CONSUMER_EXISTS, CONSUMER_NOT_FOUND, RefusedError, may_pass
from .interface import ConnectionState, Message
from .streams import stream_of

log = logging.getLogger(__name__)

_NS: Final = 10**9
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_HEARTBEAT_S: Final = 2.0
_SILENCE_S: Final = 5.0
"""Two heartbeats and a half."""
_PULL_EXPIRES_S: Final = 30.0
_RETRY_PAUSE_S: Final = 0.1
_UNNAMED_LIFE_S: Final = 60
_OWNER: Final = "weightbus-reader"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(slots=True, eq=False)
class _Consumer:
    """Our consumer as it stands on one connection."""

    epoch: int
    last: int
    """Stream sequence of the last message it sent us, or where it began."""
    inbox: str = ""
    subscription: Subscription | None = None
    delivered: int = 0
    """How many it sent us, by its own numbering."""
    requested: int = 0
    """Messages that pull requests still ask for."""
    at_tail: bool = False
    """All that is stored was sent, and pull requests have waited for more ever since."""
    audit: bool = False
    """Pulled without a request under way: it may have become somebody else's meanwhile."""
    gap_from: int | None = None
    """First sequence of the first hole that nobody has looked at."""
    broken: str = ""
    heard: float = field(default_factory=time.monotonic)
    held: deque[Message] = field(default_factory=deque[Message])
    """Received, and waiting for an audit."""


class NatsReader:
    """`Reader` on JetStream; made by `NatsBus.read`, which also starts and ends it."""

    def __init__(
        self,
        connection: Connection,
        filters: Sequence[str],
        *,
        start_sequence: int,
        name: str | None,
    ) -> None:
        check_read(filters, start_sequence, name)
        self._connection = connection
        self._stream = stream_of(filters[0])
        self._filters = tuple(filters)
        self._named = name is not None
        self._name = name if name is not None else f"weightbus-{secrets.token_hex(8)}"
        self._owner = secrets.token_hex(12)
        self._from_first = start_sequence <= 1
        self._position = max(start_sequence, 1) - 1  # everything up to here was handed out or waits
        self._prefetch = connection.config.prefetch
        self._ready: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._wake = asyncio.Event()
        self._consumer: _Consumer | None = None
        self._claimed = False
        self._failure: WeightbusError | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- for the reader's user

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """See `Reader`. Also raises ReaderReplacedError."""
        if not self._ready or self._failure is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wait_for_message()
            except TimeoutError:
                return None
        self._connection.ensure_open()
        message = self._ready.popleft()
        if self._is_low() and not self._wake.is_set():
            self._wake.set()
            await asyncio.sleep(0)  # the task that asks for more needs the loop
        return message

    async def _wait_for_message(self) -> None:
        while True:
            self._connection.ensure_open()
            if self._ready:
                return
            if self._failure is not None:
                raise self._failure
            if self._task is None or self._task.done():
                raise BusUnavailableError(
                    "the reader does not run", next_step="use it inside its `async with` block"
                )
            self._arrived.clear()
            await self._arrived.wait()

    async def __aiter__(self) -> AsyncIterator[Message]:
        """See `Reader`."""
        while True:
            message = await self.next()
            if message is not None:
                yield message

    async def __aenter__(self) -> Self:
        self._unlisten = self._connection.listen(self._on_state)
        self._task = asyncio.create_task(self._run(), name=f"reader {self._name}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlisten()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._drop_consumer()
        if not self._named and self._connection.state is ConnectionState.CONNECTED:
            try:
                await self._connection.call(f"CONSUMER.DELETE.{self._stream}.{self._name}")
            except WeightbusError as failure:  # it ends by itself after a minute
                log.debug("removing reader %s: %s", self._name, failure)

    # ---- the loop

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._step()
                except BusError as error:
                    if not may_pass(error):
                        raise
                    log.info("reader %s waits for the server: %s", self._name, error.what)
                    await self._pause(_RETRY_PAUSE_S)
        except WeightbusError as error:
            self._failure = error
        except Exception as error:
            log.exception("reader %s failed", self._name)
            self._failure = BusUnavailableError(f"the reader failed: {error!r}")
        finally:
            self._arrived.set()

    async def _step(self) -> None:
        self._wake.clear()
        consumer = self._consumer
        if consumer is None or consumer.broken or consumer.epoch != self._connection.epoch:
            await self._connection.connected(_SILENCE_S)
            consumer = await self._renew()
        if self._is_low():
            await self._pull(consumer)
        if consumer.audit or consumer.gap_from is not None:
            await self._audit(consumer)
        await self._pause(_HEARTBEAT_S)
        silence_s = time.monotonic() - consumer.heard
        if consumer.requested > 0 and silence_s > _SILENCE_S and not consumer.broken:
            consumer.broken = "no heartbeat"

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _on_state(self, state: ConnectionState) -> None:
        self._wake.set()
        if state is ConnectionState.CLOSED:
            self._arrived.set()

    # ---- 1. renew

    async def _renew(self) -> _Consumer:
        await self._drop_consumer()
        state = await self._state_of_stream()
        first, last = int(state["first_seq"]), int(state["last_seq"])
        if self._from_first:
            self._position = max(first - 1, 0)
        self._check_still_there(first, last)
        consumer = _Consumer(self._connection.epoch, last=self._position)
        await self._release_name()
        info = await self._create()
        self._claimed, self._from_first = True, False

        async def receive(message: Msg) -> None:
            self._receive(consumer, message)

        consumer.inbox, consumer.subscription = await self._connection.subscribe(receive)
        self._consumer = consumer
        if info["num_pending"] == 0:
            consumer.at_tail = True
            self._position = consumer.last = max(self._position, last)
        await self._pull(consumer)
        return consumer

    def _check_still_there(self, first: int, last: int) -> None:
        wanted = self._position + 1
        if first > wanted:
            raise self._gap(
                wanted, first, "messages that were asked for are gone from the stream", last
            )
        if self._position > last:
            raise self._gap(
                wanted,
                first,
                "the stream ends before the place to read from: it is another one",
                last,
            )

    def _gap(self, wanted: int, first: int, what: str, last: int | None = None) -> SequenceGapError:
        where: dict[str, object] = {
            "stream": self._stream,
            "wanted_sequence": wanted,
            "first_sequence": first,
        }
        if last is not None:
            where["last_sequence"] = last
        return SequenceGapError(
            what,
            where=where,
            next_step="rebuild the state from the version directories and read from sequence 1",
        )

    async def _release_name(self) -> None:
        """Delete the consumer of our name; the first time whoever's it is, later only our own."""
        if self._claimed and not await self._is_ours():
            if not self._named:
                return
            # Removed: by hand, or by a reader that is about to take the name. It goes first.
            await asyncio.sleep(_RETRY_PAUSE_S)
            if not await self._is_ours():
                return
        try:
            await self._connection.call(f"CONSUMER.DELETE.{self._stream}.{self._name}")
        except RefusedError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise

    async def _create(self) -> dict[str, Any]:
        config: dict[str, object] = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._position + 1,
            "ack_policy": "none",
            "filter_subjects": list(self._filters),
            "replay_policy": "instant",
            "metadata": {_OWNER: self._owner},
        }
        if self._named:
            config["durable_name"] = self._name
        else:
            config |= {"inactive_threshold": _UNNAMED_LIFE_S * _NS, "mem_storage": True}
        body = {"stream_name": self._stream, "action": "create", "config": config}
        try:
            info = await self._connection.call(f"CONSUMER.CREATE.{self._stream}.{self._name}", body)
        except RefusedError as error:
            if error.err_code in CONSUMER_EXISTS:  # somebody was faster: once more
                raise BusUnavailableError("another reader of this name starts too") from error
            raise
        found = info["config"]
        wrong = [key for key in ("opt_start_seq", "ack_policy") if found.get(key) != config[key]]
        if wrong or sorted(found.get("filter_subjects") or []) != sorted(self._filters):
            raise ConfigError(
                "the server made another consumer than the one asked for",
                where={"asked": config, "made": found},
                next_step="use nats-server 2.14 or newer",
            )
        return info

    async def _drop_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None and consumer.subscription is not None:
            await self._connection.unsubscribe(consumer.subscription)

    # ---- 2. pull

    def _is_low(self) -> bool:
        return self._waiting() <= self._prefetch // 2

    def _waiting(self) -> int:
        """Messages that are on the way or here."""
        consumer = self._consumer
        coming = 0 if consumer is None else consumer.requested + len(consumer.held)
        return coming + len(self._ready)

    async def _pull(self, consumer: _Consumer) -> None:
        batch = self._prefetch - self._waiting()
        if batch <= 0:
            return
        if consumer.requested <= 0:
            consumer.requested = 0
            # Nobody would have told us of a takeover while nothing was asked for.
            consumer.audit = consumer.delivered > 0 or consumer.audit
        consumer.requested += batch
        body = {
            "batch": batch,
            "expires": int(_PULL_EXPIRES_S * _NS),
            "idle_heartbeat": int(_HEARTBEAT_S * _NS),
        }
        await self._connection.send(
            f"{self._connection.config.api_prefix}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}",
            json.dumps(body).encode(),
            reply=consumer.inbox,
        )

    def _receive(self, consumer: _Consumer, message: Msg) -> None:
        if consumer is not self._consumer:
            return
        consumer.heard = time.monotonic()
        if message.reply.startswith("$JS.ACK."):
            self._accept(consumer, message)
        elif message.headers is not None:
            self._on_status(consumer, message.headers)

    def _on_status(self, consumer: _Consumer, headers: dict[str, str]) -> None:
        status = headers.get("Status", "")
        if status == "100":
            sent = int(headers.get("Nats-Last-Consumer", consumer.delivered))
            if sent > consumer.delivered:
                consumer.broken = "deliveries were lost"
                self._wake.set()
        elif status == "408":  # the request expired: it is over, with so many unsent
            consumer.requested -= int(headers.get("Nats-Pending-Messages", consumer.requested))
            self._wake.set()
        else:  # deleted, moved to another leader, server going down, ...: look what is true now
            consumer.broken = f"{status} {headers.get('Description', '')}"
            self._wake.set()

    def _accept(self, consumer: _Consumer, raw: Msg) -> None:
        tokens = raw.reply.split(".")
        base = 5 if len(tokens) == 9 else 7  # with domain and account hash before the stream
        sequence, delivered = int(tokens[base]), int(tokens[base + 1])
        consumer.requested -= 1
        if consumer.broken:
            return
        if delivered != consumer.delivered + 1 or sequence <= consumer.last:
            consumer.broken = f"delivery {delivered} after {consumer.delivered}"
            self._wake.set()
            return
        if sequence > consumer.last + 1 and not consumer.at_tail and consumer.gap_from is None:
            consumer.gap_from = consumer.last + 1
        consumer.delivered, consumer.last = delivered, sequence
        consumer.at_tail = tokens[base + 3] == "0" and consumer.requested > 0
        timestamp = _EPOCH + timedelta(microseconds=int(tokens[base + 2]) // 1000)
        message = Message(raw.subject, raw.data, sequence, timestamp)
        if consumer.held or consumer.audit or consumer.gap_from is not None:
            consumer.held.append(message)
            self._wake.set()
        else:
            self._release(message)

    def _release(self, message: Message) -> None:
        self._position = message.sequence
        self._ready.append(message)
        self._arrived.set()

    # ---- 3. audit

    async def _audit(self, consumer: _Consumer) -> None:
        """Clear what waits: the consumer was ours, and holes are not at the stream's beginning."""
        gap_from, consumer.gap_from = consumer.gap_from, None
        covered = len(consumer.held)
        try:
            ours = await self._is_ours()
            first = 0 if gap_from is None else int((await self._state_of_stream())["first_seq"])
        except BusError:
            consumer.broken = consumer.broken or "audit without answer"
            raise
        if gap_from is not None and first > gap_from:
            raise self._gap(gap_from, first, "messages were removed before they were read")
        if not ours:
            consumer.broken = consumer.broken or "the consumer is gone"
        if consumer.broken:
            return
        consumer.audit = False
        if consumer.gap_from is None:
            covered = len(consumer.held)  # those that came meanwhile follow without a hole
        for _ in range(covered):
            self._release(consumer.held.popleft())

    async def _is_ours(self) -> bool:
        """Whether the consumer is there and ours; ReaderReplacedError when it is another's."""
        try:
            info = await self._connection.call(f"CONSUMER.INFO.{self._stream}.{self._name}")
        except RefusedError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise
            return False
        if (info["config"].get("metadata") or {}).get(_OWNER) != self._owner:
            raise ReaderReplacedError(
                "another reader of this name has taken over",
                where={"stream": self._stream, "name": self._name},
                next_step="two processes run with one name (the same writer index?): stop one",
            )
        return True

    async def _state_of_stream(self) -> dict[str, Any]:
        info = await self._connection.call(f"STREAM.INFO.{self._stream}")
        return info["state"]


def check_read(filters: Sequence[str], start_sequence: int, name: str | None) -> None:
    """Refuse arguments that `Bus.read` cannot mean.

    Raises:
        ConfigError: no filter, filters of two streams, a negative sequence, an impossible name.
    """
    if not filters or len({stream_of(subject) for subject in filters}) != 1:
        raise ConfigError(
            "a reader reads one stream: give filters of wb. or filters of wbr.",
            where={"filters": list(filters)},
        )
    if start_sequence < 1:
        raise ConfigError("sequences begin at 1", where={"start_sequence": start_sequence})
    if name is not None and _NAME.fullmatch(name) is None:
        raise ConfigError(
            "a reader's name is made of letters, digits, _ and -", where={"name": name}
        )
