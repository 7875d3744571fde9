"""The fixtures that other folders' tests may import."""

from __future__ import annotations

from support.bus_fixtures import any_bus, memory_bus, memory_server, nats_bus_on_server
from weightbus.bus.interface import Bus
from weightbus.bus.memory import MemoryBus, MemoryServer

__all__ = ["any_bus", "memory_bus", "memory_server", "nats_bus_on_server"]


async def test_any_bus(any_bus: Bus) -> None:
    assert (await any_bus.publish_once("wb.run.1.0.opened", b"x")).sequence == 1


async def test_the_two_by_name(
    nats_bus_on_server: Bus,
    memory_bus: MemoryBus,
    memory_server: MemoryServer,
) -> None:
    assert await nats_bus_on_server.last("wb.>") is None
    assert memory_bus.server is memory_server
