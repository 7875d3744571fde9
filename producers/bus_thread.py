"""An event loop in a thread of its own, for callers that are not asynchronous.

The bus lives on the loop's thread and is only touched there. A trainer blocks on nothing but the
calls that it asks to wait for, each with a deadline; a lost connection is the bus's own business.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from ..bus.config import BusConfig
from ..bus.interface import Bus
from ..bus.nats_bus import NatsBus
from ..schemas.errors import BusClosedError, BusUnavailableError

Result = TypeVar("Result")
BusFactory: TypeAlias = Callable[[], Awaitable[Bus]]


class BusThread:
    """Owns a bus and the event loop that it lives on.

    Args:
        factory: makes the bus; runs on the loop's thread.
        connect_timeout_s: how long the factory may take.
        name: the thread's name.

    Raises:
        BusUnavailableError: no bus within `connect_timeout_s`.
        Exception: whatever the factory raises.
    """

    def __init__(
        self,
        factory: BusFactory,
        *,
        connect_timeout_s: float = 30.0,
        name: str = "weightbus-bus",
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._bus: Bus | None = None
        self._thread.start()

        async def connect() -> Bus:
            return await factory()

        try:
            self._bus = self.run(connect(), timeout_s=connect_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def bus(self) -> Bus:
        """The bus, to be used in coroutines that run on this thread only."""
        if self._bus is None:
            raise _closed()
        return self._bus

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine on the loop and return at once.

        Raises:
            BusClosedError: after close().
        """
        with self._lock:
            if self._closed:
                coroutine.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            BusUnavailableError: it took longer than `timeout_s`; it is cancelled.
            BusClosedError: after close().
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError as error:
            if future.done():
                raise  # the coroutine's own TimeoutError
            future.cancel()
            raise BusUnavailableError(
                f"the bus did not answer within {timeout_s} s",
                next_step="check the server and the URL (weightbus bus status), then retry",
            ) from error

    def close(self, grace_s: float = 10.0) -> None:
        """Close the bus, cancel what still runs, end the loop and its thread. Idempotent.

        Args:
            grace_s: how long the bus may take to flush, and the tasks to end.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        shutdown = asyncio.run_coroutine_threadsafe(self._shutdown(grace_s), self._loop)
        try:
            with suppress(FutureTimeoutError):
                shutdown.result(2 * grace_s + 1.0)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(grace_s)
            if not self._thread.is_alive():
                self._loop.close()

    async def _shutdown(self, grace_s: float) -> None:
        own = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not own]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        if self._bus is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._bus.close(), grace_s)
        await self._loop.shutdown_default_executor()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


BusSource: TypeAlias = BusThread | BusConfig | BusFactory | str
"""How a publisher may be given its bus: a shared thread, or how to reach the server."""


def bus_thread_of(source: BusSource, *, connect_timeout_s: float = 30.0) -> tuple[BusThread, bool]:
    """The thread to publish on, and whether it is new (then the caller must close it).

    Raises:
        BusUnavailableError, StreamMismatchError, ServerBinaryError: as `NatsBus.connect`.
    """
    if isinstance(source, BusThread):
        return source, False
    if isinstance(source, BusConfig | str):
        config = source

        async def connect() -> Bus:
            return await NatsBus.connect(config)

        return BusThread(connect, connect_timeout_s=connect_timeout_s), True
    return BusThread(source, connect_timeout_s=connect_timeout_s), True


def _closed() -> BusClosedError:
    return BusClosedError(
        "the producer's bus thread is closed", next_step="do not publish after close()"
    )
