"""One story, two servers: what the contract suite needs of a real and of an in-memory one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from support.bus_servers import fast_config, new_server
from weightbus.bus.interface import Bus
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer
from weightbus.bus.streams import EVENT_STREAM, StreamLimits


class World(Protocol):
    """A server, its buses and its accidents."""

    async def connect(self) -> Bus:
        """One more bus; closed at the end of the test."""
        ...

    def go_away(self) -> None:
        """The server dies."""
        ...

    def come_back(self) -> None:
        """The server is back with everything that it acknowledged."""
        ...

    async def purge(self, *, below: int) -> None:
        """Remove the events under a sequence."""
        ...


class MemoryWorld:
    """On a MemoryServer."""

    def __init__(self, limits: StreamLimits, stack: AsyncExitStack) -> None:
        self.server = MemoryServer(limits=limits)
        self._stack = stack

    async def connect(self) -> Bus:
        return await self._stack.enter_async_context(await MemoryBus.connect(self.server))

    def go_away(self) -> None:
        self.server.disconnect()

    def come_back(self) -> None:
        self.server.reconnect()

    async def purge(self, *, below: int) -> None:
        self.server.purge("wb.>", below=below)


class NatsWorld:
    """On a nats-server of its own, which dies of SIGKILL."""

    def __init__(
        self, server: EmbeddedServer, limits: StreamLimits, stack: AsyncExitStack, prefetch: int
    ) -> None:
        self.server = server
        self.config = replace(fast_config(server.url), streams=limits, prefetch=prefetch)
        self._stack = stack

    async def connect(self) -> NatsBus:
        return await self._stack.enter_async_context(await NatsBus.connect(self.config))

    def go_away(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.restart()

    async def purge(self, *, below: int) -> None:
        bus = await self.connect()
        await bus.connection.call(f"STREAM.PURGE.{EVENT_STREAM}", {"seq": below})
        await bus.close()


@asynccontextmanager
async def world(
    kind: str, folder: Path, limits: StreamLimits | None = None
) -> AsyncGenerator[World]:
    """`kind` is `memory`, `nats`, or `nats-tight`: readers that ask for two messages at a time."""
    chosen = StreamLimits() if limits is None else limits
    async with AsyncExitStack() as stack:
        if kind == "memory":
            yield MemoryWorld(chosen, stack)
            return
        server = stack.enter_context(new_server(folder / "nats-store"))
        yield NatsWorld(server, chosen, stack, prefetch=2 if kind == "nats-tight" else 512)


KINDS = ("memory", "nats", "nats-tight")
