"""The faults of the in-memory bus."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.bus_servers import PATIENCE_S, take
from weightbus.bus.interface import ConnectionState, Receipt
from weightbus.bus.memory import MemoryBus, MemoryServer, subject_matches
from weightbus.schemas.errors import BusUnavailableError


@pytest.mark.parametrize(
    ("subject_filter", "subject", "matches"),
    [
        ("wb.>", "wb.run", True),
        ("wb.>", "wb", False),
        ("wb.run.*.*.outcome", "wb.run.1.0.outcome", True),
        ("wb.run.*.*.outcome", "wb.run.1.0.outcome.x", False),
        ("wb.*", "wb.run.1", False),
        ("wb.run", "wb.run", True),
        ("wb.run", "wb.other", False),
        ("wb.*.1.>", "wb.run.2.x", False),
    ],
)
def test_filters(subject_filter: str, subject: str, matches: bool) -> None:
    assert subject_matches(subject_filter, subject) is matches


async def test_lost_acknowledgements_are_repeated() -> None:
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:
        server.lose_acks(2)
        assert await bus.publish_once("wb.a", b"x") == Receipt(1, duplicate=True)
        server.lose_acks(1)
        assert await bus.report("wbr.a", b"x") == Receipt(1, duplicate=False)
        assert (await bus.report("wbr.a", b"x")).sequence == 2


async def test_a_paused_server_stays_connected_and_silent() -> None:
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus, bus.read(["wb.>"]) as reader:
        server.pause()
        with pytest.raises(BusUnavailableError, match="no answer within"):
            await bus.publish_once("wb.a", b"x", timeout_s=0.05)
        assert bus.state is ConnectionState.CONNECTED
        waiting = asyncio.create_task(bus.publish_once("wb.a", b"x"))
        assert await reader.next(0.05) is None
        server.resume()
        assert await waiting == Receipt(1, duplicate=False)
        assert len(await take(reader, 1)) == 1


async def test_dropped_connections_come_back() -> None:
    server = MemoryServer()
    states: list[ConnectionState] = []
    async with await MemoryBus.connect(server) as bus:
        bus.on_state_change(states.append)
        server.drop_connections()
        await bus.publish_once("wb.a", b"x")
        assert states == [ConnectionState.RECONNECTING, ConnectionState.CONNECTED]


async def test_a_bus_may_connect_while_the_server_is_away() -> None:
    server = MemoryServer()
    server.disconnect()
    async with await MemoryBus.connect(server) as bus:
        assert bus.state is ConnectionState.RECONNECTING


async def test_buses_on_different_threads_share_a_server() -> None:
    server = MemoryServer()

    async def publish() -> None:
        async with await MemoryBus.connect(server) as bus:
            for number in range(200):
                await bus.publish_once(f"wb.a.{number}", b"x")

    async with await MemoryBus.connect(server) as bus, bus.read(["wb.a.>"]) as reader:
        thread = threading.Thread(target=lambda: asyncio.run(publish()))
        thread.start()
        messages = await asyncio.wait_for(take(reader, 200), PATIENCE_S)
        await asyncio.to_thread(thread.join)
    assert [message.sequence for message in messages] == list(range(1, 201))
