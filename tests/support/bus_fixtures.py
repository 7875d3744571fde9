"""Fixtures on the bus; a test folder's conftest.py imports the names that it needs.

from support.bus_fixtures import *  # in a conftest.py: every fixture of `__all__`
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from support.bus_servers import connected_bus, new_server
from weightbus.bus.interface import Bus
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.bus.server import EmbeddedServer

__all__ = ["any_bus", "memory_bus", "memory_server", "nats_bus_on_server", "nats_server"]


@pytest.fixture
def nats_server(tmp_path: Path) -> Generator[EmbeddedServer]:
    """A running nats-server of this test alone, with an empty store."""
    with new_server(tmp_path / "nats-store") as server:
        yield server


@pytest.fixture
async def nats_bus_on_server(nats_server: EmbeddedServer) -> AsyncGenerator[Bus]:
    """A NatsBus on `nats_server`."""
    async with connected_bus(nats_server) as bus:
        yield bus


@pytest.fixture
def memory_server() -> MemoryServer:
    """The server of `memory_bus`."""
    return MemoryServer()


@pytest.fixture
async def memory_bus(memory_server: MemoryServer) -> AsyncGenerator[MemoryBus]:
    """A MemoryBus on `memory_server`."""
    async with await MemoryBus.connect(memory_server) as bus:
        yield bus


@pytest.fixture(params=["memory", "nats"])
async def any_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Bus]:
    """Each test twice: on a MemoryBus and on a NatsBus."""
    if request.param == "memory":
        async with connected_bus(MemoryServer()) as bus:
            yield bus
        return
    with new_server(tmp_path / "nats-store") as server:
        async with connected_bus(server) as bus:
            yield bus
