"""In-order reading through a pull consumer.

One background task per reader keeps this loop (ADR 0003):

    1. renew   when there is no consumer of ours on this connection: look at the stream (is what we
               need still there?), delete the old consumer, create one that starts behind our last
               message, under a fresh inbox, so that nothing of the old one can arrive
    2. pull    ask for more while less than half of `prefetch` is on the way or waiting
    3. audit   ask the server whether a hole hides a gap, and, after asking for messages while
               nothing was under way, whether the consumer still is ours; messages wait meanwhile
    4. wait    for messages, a change of the connection, or a missed heartbeat (then: renew)

What makes a message fit to be handed out is in bus.deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ..schemas.errors import (
    BusError,
    BusUnavailableError,
    SequenceGapError,
    WeightbusError,
)
from .connection import Connection
from .consumers import HEARTBEAT_S, Consumer
from .deliveries import Deliveries
from .errors import may_pass
from .interface import ConnectionState, Message
from .streams import check_read, stream_of

log = logging.getLogger(__name__)

_SILENCE_S: Final = 2.5 * HEARTBEAT_S
_RETRY_PAUSE_S: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class _Flow:
    """Messages on their way to us, through one inbox of one connection."""

    epoch: int
    inbox: str
    subscription: Subscription
    deliveries: Deliveries


class _Extent(NamedTuple):
    """What the stream holds."""

    first: int
    last: int


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
        self._consumer = Consumer(connection, stream_of(filters[0]), filters, name)
        self._claimed = False
        self._from_first = start_sequence == 1
        self._position = start_sequence - 1
        """Everything for us up to this sequence is in `_ready` or handed out."""
        self._prefetch = connection.config.prefetch
        self._flow: _Flow | None = None
        self._ready: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._wake = asyncio.Event()
        self._failure: WeightbusError | None = None
        self._task: asyncio.Task[None] | None = None
        self._unlisten: Callable[[], None] = lambda: None

    # ---- for the reader's user

    async def next(self, timeout_s: float | None = None) -> Message | None:
        """See `Reader`. Also raises ReaderReplacedError."""
        if not self._ready:
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
        while not self._ready:
            self._connection.ensure_open()
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
        self._task = asyncio.create_task(self._run(), name=f"reader {self._consumer.name}")
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
        await self._end_flow()
        if not self._consumer.named and self._connection.state is ConnectionState.CONNECTED:
            try:
                await self._consumer.delete()
            except WeightbusError as failure:  # it ends by itself after a minute
                log.debug("removing reader %s: %s", self._consumer.name, failure)

    # ---- the loop

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._step()
                except BusError as error:
                    if not may_pass(error):
                        raise
                    log.info("reader %s waits for the server: %s", self._consumer.name, error.what)
                    await self._pause(_RETRY_PAUSE_S)
        except WeightbusError as error:
            self._failure = error
        except Exception as error:
            log.exception("reader %s failed", self._consumer.name)
            self._failure = BusError(f"the reader failed: {error!r}", next_step="report this")
        finally:
            self._arrived.set()

    async def _step(self) -> None:
        self._wake.clear()
        flow = self._flow
        if flow is None or flow.deliveries.broken or flow.epoch != self._connection.epoch:
            await self._connection.connected(_SILENCE_S)
            flow = await self._renew()
        deliveries = flow.deliveries
        if self._is_low():
            await self._pull(flow)
        if deliveries.audit or deliveries.hole_from is not None:
            await self._audit(deliveries)
        await self._pause(HEARTBEAT_S)
        silence_s = time.monotonic() - deliveries.heard
        if deliveries.requested > 0 and silence_s > _SILENCE_S and not deliveries.broken:
            deliveries.broken = f"no heartbeat for {silence_s:.1f} s"

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

    async def _renew(self) -> _Flow:
        if self._flow is not None and self._flow.deliveries.broken:
            log.info("reader %s begins anew: %s", self._consumer.name, self._flow.deliveries.broken)
        await self._end_flow()
        epoch = self._connection.epoch
        extent = await self._extent()
        if self._from_first:
            self._position = max(extent.first - 1, 0)
        self._check_still_there(extent)
        await self._free_name()
        info = await self._consumer.create(self._position + 1)
        self._claimed, self._from_first = True, False
        deliveries = Deliveries(last=self._position)
        if info["num_pending"] == 0:
            deliveries.arrive_at_tail(extent.last)
            self._position = deliveries.last

        async def receive(message: Msg) -> None:
            self._receive(deliveries, message)

        inbox, subscription = await self._connection.subscribe(receive)
        flow = self._flow = _Flow(epoch, inbox, subscription, deliveries)
        return flow

    def _check_still_there(self, extent: _Extent) -> None:
        wanted = self._position + 1
        if extent.first > wanted:
            raise self._gap(wanted, extent, "messages that were asked for are gone from the stream")
        if self._position > extent.last:
            raise self._gap(
                wanted, extent, "the stream ends before the place to read: it is another one"
            )

    def _gap(self, wanted: int, extent: _Extent, what: str) -> SequenceGapError:
        return SequenceGapError(
            what,
            where={
                "stream": self._consumer.stream,
                "wanted_sequence": wanted,
                "first_sequence": extent.first,
                "last_sequence": extent.last,
            },
            next_step="rebuild the state from the version directories and read from sequence 1",
        )

    async def _free_name(self) -> None:
        """Delete the consumer of our name; the first time whoever's it is, later only our own."""
        if self._claimed and await self._consumer.info() is None:
            if not self._consumer.named:
                return
            # Removed: by hand, or by a reader that is about to take the name. It goes first.
            await asyncio.sleep(_RETRY_PAUSE_S)
            if await self._consumer.info() is None:
                return
        await self._consumer.delete()

    async def _extent(self) -> _Extent:
        info = await self._connection.call(f"STREAM.INFO.{self._consumer.stream}")
        return _Extent(int(info["state"]["first_seq"]), int(info["state"]["last_seq"]))

    async def _end_flow(self) -> None:
        flow, self._flow = self._flow, None
        if flow is not None:
            await self._connection.unsubscribe(flow.subscription)

    # ---- 2. pull

    def _is_low(self) -> bool:
        return self._waiting() <= self._prefetch // 2

    def _waiting(self) -> int:
        """Messages that are on the way or here."""
        if self._flow is None:
            return len(self._ready)
        deliveries = self._flow.deliveries
        return max(deliveries.requested, 0) + len(deliveries.held) + len(self._ready)

    async def _pull(self, flow: _Flow) -> None:
        batch = self._prefetch - self._waiting()
        if batch > 0:
            flow.deliveries.request(batch)
            await self._consumer.pull(batch, flow.inbox)

    def _receive(self, deliveries: Deliveries, raw: Msg) -> None:
        if self._flow is None or deliveries is not self._flow.deliveries:
            return
        if raw.reply.startswith("$JS.ACK."):
            message = deliveries.accept(raw.subject, raw.data, raw.reply)
            if message is not None:
                self._release(message)
                return
        elif raw.headers is not None:
            deliveries.on_status(raw.headers)
        self._wake.set()

    def _release(self, message: Message) -> None:
        self._position = message.sequence
        self._ready.append(message)
        self._arrived.set()

    # ---- 3. audit

    async def _audit(self, deliveries: Deliveries) -> None:
        covered, hole_from = deliveries.begin_audit()
        try:
            extent = await self._extent()
            info = await self._consumer.info()
        except BusError:
            deliveries.broken = deliveries.broken or "an audit got no answer"
            raise
        if hole_from is not None and extent.first > hole_from:
            raise self._gap(hole_from, extent, "messages were removed before they were read")
        if info is None:
            deliveries.broken = deliveries.broken or "the consumer is gone"
            return
        if deliveries.broken:
            return
        for message in deliveries.end_audit(covered):
            self._release(message)
        sent = int(info["delivered"]["consumer_seq"])
        if info["num_pending"] == 0 and sent == deliveries.delivered and not deliveries.held:
            deliveries.arrive_at_tail(extent.last)
            self._position = deliveries.last
