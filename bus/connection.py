"""One connection to the server: requests with answers, the state, reconnecting without end.

nats-py's own reconnecting is switched off. A lost connection is replaced by a new client, so no
buffer, subscription or half-sent request of the old one lives on: requests that were under way fail
at once (and are sent again by `persist`), readers begin anew behind their last message (ADR 0002).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ..schemas.errors import BusClosedError, BusError, BusUnavailableError, EventTooLargeError
from .config import BusConfig
from .errors import may_pass, refusal
from .interface import ConnectionState
from .server_binary import check_version

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Handler = Callable[[Msg], Awaitable[None]]

_NO_RESPONDERS: Final = "503"
_RETRY_PAUSE_S: Final = 0.02
_RETRY_PAUSE_MAX_S: Final = 1.0
_MESSAGES: Final = -1
_BYTES: Final = 0
"""The client's own limits drop messages in silence; ours are the sizes of our requests."""


class Connection:
    """See the module. `epoch` grows with each new connection to the server."""

    def __init__(self, config: BusConfig) -> None:
        self.config = config
        self.epoch = 0
        self.last_error: Exception | None = None
        self._client: Client | None = None
        self._inbox = ""
        self._token = 0
        self._answers: dict[str, asyncio.Future[Msg]] = {}
        self._state = ConnectionState.RECONNECTING
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[ConnectionState], None]] = []
        self._reopening: asyncio.Task[None] | None = None

    # ---- state

    @property
    def state(self) -> ConnectionState:
        """The state now."""
        return self._state

    def listen(self, callback: Callable[[ConnectionState], None]) -> Callable[[], None]:
        """Call back after each change of state; returns what ends that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def _enter(self, state: ConnectionState) -> None:
        if state is self._state:
            return
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()
        for callback in tuple(self._listeners):
            try:
                callback(state)
            except Exception:
                log.exception("a state callback failed")

    def ensure_open(self) -> None:
        """Raise BusClosedError after `close`."""
        if self._state is ConnectionState.CLOSED:
            raise BusClosedError("the bus is closed", next_step="connect again")

    # ---- opening, losing, reopening

    async def open(self) -> None:
        """Connect for the first time.

        Raises:
            ServerBinaryError: the server is older than 2.14.
            BusUnavailableError: no connection within `connect_timeout_s`.
        """
        deadline = time.monotonic() + self.config.connect_timeout_s
        pause = self.config.reconnect_pause_s
        while True:
            try:
                async with asyncio.timeout(max(deadline - time.monotonic(), 0)):
                    await self._attach()
                return
            except (OSError, TimeoutError, nats.errors.Error) as error:
                self._note(error)
            if time.monotonic() + pause > deadline:
                raise BusUnavailableError(
                    f"cannot connect within {self.config.connect_timeout_s:g} s: "
                    f"{self.last_error or 'no answer'}",
                    where={"url": self.config.shown_urls},
                    next_step="check that nats-server runs there and accepts this login",
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, self.config.reconnect_pause_max_s)

    async def _attach(self) -> None:
        client = Client()

        async def closed() -> None:
            if client is self._client:
                self._lose()

        try:
            await client.connect(
                **self.config.client_options(),
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=self.config.attempt_timeout_s,  # pyright: ignore[reportArgumentType] - floats do
                closed_cb=closed,
                error_cb=self._on_error,
            )
            check_version(
                str(client.connected_server_version), where={"url": self.config.shown_urls}
            )
            inbox = client.new_inbox()
            await client.subscribe(
                f"{inbox}.*",
                cb=self._on_answer,
                pending_msgs_limit=_MESSAGES,
                pending_bytes_limit=_BYTES,
            )
            if client.is_closed:
                raise nats.errors.ConnectionClosedError
        except BaseException:
            await client.close()
            raise
        self._client, self._inbox = client, inbox
        self.epoch += 1
        self.last_error = None
        self._enter(ConnectionState.CONNECTED)

    def _lose(self) -> None:
        self._client = None
        for future in self._answers.values():
            if not future.done():
                future.set_exception(BusUnavailableError("the connection to the server is lost"))
        self._answers.clear()
        if self._state is ConnectionState.CLOSED:
            return
        log.warning("connection to the server lost: %s", self.last_error)
        self._enter(ConnectionState.RECONNECTING)
        self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        pause = self.config.reconnect_pause_s
        while self._state is ConnectionState.RECONNECTING:
            try:
                await self._attach()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next try may work
                self._note(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.config.reconnect_pause_max_s)
        log.info("connected to the server again")

    async def close(self) -> None:
        """Disconnect for good; idempotent."""
        client, self._client = self._client, None
        self._enter(ConnectionState.CLOSED)
        self._lose()
        if self._reopening is not None:
            self._reopening.cancel()
            await asyncio.wait([self._reopening])
        if client is not None:
            await client.close()

    async def _on_error(self, error: Exception) -> None:
        self._note(error)

    def _note(self, error: Exception) -> None:
        if str(error) != str(self.last_error):
            log.info("nats: %s", error)
        self.last_error = error

    # ---- requests

    async def connected(self, timeout_s: float) -> None:
        """Wait until there is a connection.

        Raises:
            BusUnavailableError: none within the time-out.
            BusClosedError: after `close`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._state is ConnectionState.RECONNECTING:
                    await self._changed.wait()
        except TimeoutError:
            raise BusUnavailableError(
                f"no connection to the server: {self.last_error}",
                where={"url": self.config.shown_urls},
                next_step="check that nats-server runs; reconnecting goes on",
            ) from None
        self.ensure_open()

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Msg:
        """Send a message and wait for its answer.

        Raises:
            BusUnavailableError: not connected, connection lost, no answer in time, or nobody there.
            BusClosedError: after `close`.
            EventTooLargeError: payload and headers are over the server's max_payload.
        """
        client = self._live_client()
        size = len(payload) + sum(len(k) + len(v) + 4 for k, v in (headers or {}).items()) + 16
        if size > client.max_payload:
            # The server would answer such a message by closing the connection.
            raise EventTooLargeError(
                f"a message of {size} bytes is over the server's max_payload",
                where={"subject": subject, "max_payload_bytes": client.max_payload},
                next_step="send less in one message, or raise max_payload in the server",
            )
        self._token += 1
        token = str(self._token)
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._answers[token] = future
        try:
            async with asyncio.timeout(
                self.config.attempt_timeout_s if timeout_s is None else timeout_s
            ):
                await client.publish(
                    subject,
                    payload,
                    reply=f"{self._inbox}.{token}",
                    headers=None if headers is None else dict(headers),
                )
                answer = await future
        except TimeoutError:
            last = "" if self.last_error is None else f"; the last error was: {self.last_error}"
            raise BusUnavailableError(
                f"no answer in time{last}",
                where={"subject": subject},
                next_step="look at the server's health, and at this login's permissions",
            ) from None
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailableError(
                f"the request could not be sent: {error}", where={"subject": subject}
            ) from error
        finally:
            self._answers.pop(token, None)
        if answer.headers is not None and answer.headers.get("Status") == _NO_RESPONDERS:
            raise BusUnavailableError(
                "nobody answers on this subject",
                where={"subject": subject},
                next_step="check that JetStream runs and that its streams exist",
            )
        return answer

    async def call(
        self,
        operation: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request of JetStream's API, such as `STREAM.INFO.<name>`; raises as `request`.

        Raises:
            RefusedError: the server answered with an error.
        """
        payload = b"" if body is None else json.dumps(body).encode()
        answer = await self.request(
            f"{self.config.api_prefix}.{operation}", payload, timeout_s=timeout_s
        )
        result: dict[str, Any] = json.loads(answer.data)
        if "error" in result:
            raise refusal(operation, result["error"])
        return result

    async def persist(
        self, attempt: Callable[[float], Awaitable[Answer]], *, timeout_s: float, what: str
    ) -> Answer:
        """Repeat an idempotent attempt through lost connections until it is answered.

        Args:
            attempt: gets the seconds that it may take.
            timeout_s: for everything together.
            what: for the message, e.g. `publishing on wb.…`.

        Raises:
            BusUnavailableError: no answer within the time-out.
            BusClosedError: after `close`.
        """
        deadline = time.monotonic() + timeout_s
        pause = _RETRY_PAUSE_S
        while True:
            try:
                remaining = deadline - time.monotonic()
                await self.connected(remaining)
                return await attempt(
                    min(self.config.attempt_timeout_s, deadline - time.monotonic())
                )
            except BusError as error:
                if not may_pass(error):
                    raise
                if time.monotonic() + pause >= deadline:
                    raise BusUnavailableError(
                        f"{what}: no success within {timeout_s:g} s: {error.what}",
                        where=error.where,
                        next_step=error.next_step,
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_PAUSE_MAX_S)

    # ---- for readers

    async def subscribe(self, handler: Handler) -> tuple[str, Subscription]:
        """A new inbox on the present connection; it is not carried over to the next one."""
        client = self._live_client()
        inbox = client.new_inbox()
        try:
            return inbox, await client.subscribe(
                inbox, cb=handler, pending_msgs_limit=_MESSAGES, pending_bytes_limit=_BYTES
            )
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailableError(f"cannot subscribe: {error}") from error

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription, whatever became of its connection."""
        try:
            await subscription.unsubscribe()
        except (nats.errors.Error, OSError) as error:
            log.debug("unsubscribing: %s", error)

    async def send(self, subject: str, payload: bytes, *, reply: str) -> None:
        """Send without waiting for an answer."""
        client = self._live_client()
        try:
            await client.publish(subject, payload, reply=reply)
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailableError(f"cannot send: {error}") from error

    async def _on_answer(self, message: Msg) -> None:
        future = self._answers.pop(message.subject.rpartition(".")[2], None)
        if future is not None and not future.done():
            future.set_result(message)

    def _live_client(self) -> Client:
        self.ensure_open()
        if self._client is None:
            raise BusUnavailableError("not connected to the server")
        return self._client
