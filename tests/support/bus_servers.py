"""Servers and buses for tests of every area."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from weightbus.bus.interface import Bus, Message, Reader
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.bus.nats_bus import BusConfig, NatsBus
from weightbus.bus.server import EmbeddedServer, ServerConfig

PATIENCE_S = 20.0
"""How long a test waits for what must come; far above what it takes."""


def new_server(store: Path) -> EmbeddedServer:
    """A nats-server on a port of the system's choice, not started."""
    return EmbeddedServer(ServerConfig(store=store))


def fast_config(url: str, *, name: str = "test") -> BusConfig:
    """Short pauses and pings, so that tests of lost connections are quick."""
    return BusConfig(
        url=url, name=name, attempt_timeout_s=1.0, reconnect_pause_max_s=0.1, ping_interval_s=0.5
    )


@asynccontextmanager
async def connected_bus(server: EmbeddedServer | MemoryServer | str) -> AsyncGenerator[Bus]:
    """A bus on a running server (or its URL), closed at the end."""
    if isinstance(server, MemoryServer):
        async with await MemoryBus.connect(server) as memory_bus:
            yield memory_bus
        return
    url = server if isinstance(server, str) else server.url
    async with await NatsBus.connect(fast_config(url)) as nats_bus:
        yield nats_bus


@asynccontextmanager
async def nats_bus(
    server: EmbeddedServer, config: BusConfig | None = None
) -> AsyncGenerator[NatsBus]:
    """A NatsBus with a configuration of the test's; its URL is filled in."""
    chosen = fast_config(server.url) if config is None else replace(config, url=server.url)
    async with await NatsBus.connect(chosen) as bus:
        yield bus


async def take(reader: Reader, count: int, timeout_s: float = PATIENCE_S) -> list[Message]:
    """The next `count` messages; fails the test when one does not come."""
    messages: list[Message] = []
    for _ in range(count):
        message = await reader.next(timeout_s)
        assert message is not None, f"only {len(messages)} of {count} messages came"
        messages.append(message)
    return messages


async def eventually(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until something outside the event loop is true; fails the test when it stays false."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        await asyncio.sleep(0.01)
