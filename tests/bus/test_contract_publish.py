"""The contract of `Bus`, on both buses: publishing, looking, blobs, closing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.bus_servers import take
from support.bus_worlds import KINDS, World
from support.bus_worlds import world as open_world
from weightbus.bus.interface import Bus, ConnectionState, Receipt, SubjectTakenError
from weightbus.bus.streams import StreamLimits
from weightbus.schemas.errors import (
    AlreadyPublishedError,
    BlobMissingError,
    BusClosedError,
    BusUnavailableError,
    ConfigError,
    EventTooLargeError,
    StreamFullError,
)


async def test_publishing_again_finds_the_first_message(bus: Bus) -> None:
    first = await bus.publish_once("wb.run.1.-.attempt", b"one")
    again = await bus.publish_once("wb.run.1.-.attempt", b"one")
    assert first == Receipt(1, duplicate=False)
    assert again == Receipt(1, duplicate=True)
    assert await bus.last_sequence() == 1


async def test_other_bytes_on_a_taken_subject_are_refused(bus: Bus) -> None:
    await bus.publish_once("wb.run.1.0.outcome", b"complete")
    with pytest.raises(SubjectTakenError, match="already holds a different message") as caught:
        await bus.publish_once("wb.run.1.0.outcome", b"aborted")
    assert caught.value.existing.data == b"complete"
    assert caught.value.existing.sequence == 1
    assert "wb.run.1.0.outcome" in str(caught.value)


async def test_many_publishers_of_the_same_bytes_store_one_message(world: World) -> None:
    buses = [await world.connect() for _ in range(4)]
    receipts = await asyncio.gather(
        *[bus.publish_once("wb.run.1.0.opened", b"same") for bus in buses for _ in range(3)]
    )
    assert {receipt.sequence for receipt in receipts} == {1}
    assert [receipt.duplicate for receipt in receipts].count(False) == 1


async def test_of_many_publishers_of_different_bytes_exactly_one_wins(world: World) -> None:
    buses = [await world.connect() for _ in range(5)]
    results = await asyncio.gather(
        *[
            bus.publish_once("wb.run.1.0.outcome", f"by {index}".encode())
            for index, bus in enumerate(buses)
        ],
        return_exceptions=True,
    )
    winners = [index for index, result in enumerate(results) if isinstance(result, Receipt)]
    losers = [result for result in results if isinstance(result, SubjectTakenError)]
    assert len(winners) == 1
    assert len(losers) == 4
    assert {loser.existing.data for loser in losers} == {f"by {winners[0]}".encode()}


async def test_last_of_a_subject_a_filter_and_nothing(bus: Bus) -> None:
    assert await bus.last_sequence() == 0
    assert await bus.last("wb.run.>") is None
    for number in range(3):
        await bus.publish_once(f"wb.run.1.{number}.opened", str(number).encode())
    await bus.publish_once("wb.other.1.0.opened", b"x")
    newest = await bus.last("wb.run.*.*.opened")
    assert newest is not None
    assert (newest.subject, newest.data, newest.sequence) == ("wb.run.1.2.opened", b"2", 3)
    assert newest.timestamp.tzinfo is not None
    literal = await bus.last("wb.run.1.0.opened")
    assert literal is not None
    assert literal.sequence == 1
    assert await bus.last("wb.run.1.9.opened") is None
    assert await bus.last_sequence() == 4


async def test_reports_are_appended_to_a_stream_of_their_own(bus: Bus) -> None:
    first = await bus.report("wbr.run.engine.1.0", b"serving")
    second = await bus.report("wbr.run.engine.1.0", b"serving")
    assert (first.sequence, second.sequence) == (1, 2)
    assert await bus.last_sequence() == 0
    newest = await bus.last("wbr.run.>")
    assert newest is not None
    assert newest.sequence == 2
    async with bus.read(["wbr.run.>"]) as reader:
        assert [m.sequence for m in await take(reader, 2)] == [1, 2]


async def test_an_empty_message_is_a_message(bus: Bus) -> None:
    await bus.publish_once("wb.run.1.0.opened", b"")
    found = await bus.last("wb.run.1.0.opened")
    assert found is not None
    assert found.data == b""
    assert (await bus.publish_once("wb.run.1.0.opened", b"")).duplicate


@pytest.mark.parametrize("subject", ["other.run", "wbr.run", "wb.run.*", "wb.>"])
async def test_only_event_subjects_are_published_once(bus: Bus, subject: str) -> None:
    with pytest.raises(ConfigError, match="stream"):
        await bus.publish_once(subject, b"")


async def test_an_oversize_message_is_refused_and_the_bus_lives_on(bus: Bus) -> None:
    for size in (200_000, 2_000_000):
        with pytest.raises(EventTooLargeError, match="Next: send less in one message"):
            await bus.publish_once("wb.run.1.0.opened", bytes(size))
        with pytest.raises(EventTooLargeError):
            await bus.report("wbr.run.engine.1.0", bytes(size))
    assert bus.state is ConnectionState.CONNECTED
    assert await bus.last_sequence() == 0
    assert not (await bus.publish_once("wb.run.1.0.opened", b"small")).duplicate


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_a_full_stream_refuses_and_keeps_what_it_has(kind: str, tmp_path: Path) -> None:
    async with open_world(kind, tmp_path, StreamLimits(events_max_bytes=20_000)) as world:
        bus = await world.connect()

        async def fill() -> None:
            for number in range(100):
                await bus.publish_once(f"wb.run.1.0.chunk.0.{number}", bytes(1000))

        with pytest.raises(StreamFullError, match="make room") as caught:
            await fill()
        stored = await bus.last_sequence()
        assert "wb.run.1.0.chunk.0." in str(caught.value)
        assert 5 < stored < 21
        async with bus.read(["wb.run.>"]) as reader:
            assert len(await take(reader, stored)) == stored
        again = await bus.publish_once("wb.run.1.0.chunk.0.0", bytes(1000))
        assert again == Receipt(1, duplicate=True)


async def test_blobs_come_back_and_are_written_once(bus: Bus) -> None:
    blobs = {"empty": b"", "xxh3-128:small": b"layout", "large": bytes(range(256)) * 1500}
    for name, data in blobs.items():
        await bus.put_blob(name, data)
        await bus.put_blob(name, data)
        assert await bus.get_blob(name) == data
    with pytest.raises(AlreadyPublishedError, match="another blob under this name"):
        await bus.put_blob("large", b"other")
    with pytest.raises(BlobMissingError, match="no blob of that name") as caught:
        await bus.get_blob("absent")
    assert "absent" in str(caught.value)


async def test_many_put_the_same_blob(world: World) -> None:
    buses = [await world.connect() for _ in range(4)]
    data = bytes(300_000)
    await asyncio.gather(*[bus.put_blob("layout", data) for bus in buses])
    assert await buses[0].get_blob("layout") == data


async def test_nothing_works_after_close(bus: Bus) -> None:
    await bus.close()
    await bus.close()
    assert bus.state is ConnectionState.CLOSED
    for attempt in (
        bus.publish_once("wb.run.1.0.opened", b""),
        bus.report("wbr.run.engine.1.0", b""),
        bus.last("wb.>"),
        bus.last_sequence(),
        bus.put_blob("x", b""),
        bus.get_blob("x"),
    ):
        with pytest.raises(BusClosedError, match="the bus is closed"):
            await attempt


async def test_publishing_without_a_server_ends_at_its_time_out(world: World) -> None:
    bus = await world.connect()
    world.go_away()
    with pytest.raises(BusUnavailableError) as caught:
        await bus.publish_once("wb.run.1.0.opened", b"x", timeout_s=0.2)
    assert caught.value.retryable
    assert caught.value.next_step
    world.come_back()
    assert (await bus.publish_once("wb.run.1.0.opened", b"x")).sequence == 1


async def test_publishing_outlives_the_server(world: World) -> None:
    bus = await world.connect()
    count = 120
    halfway = asyncio.Event()

    async def publish(number: int) -> Receipt:
        receipt = await bus.publish_once(f"wb.run.1.0.chunk.0.{number}", str(number).encode())
        if receipt.sequence == count // 3:
            halfway.set()
        return receipt

    tasks = [asyncio.create_task(publish(number)) for number in range(count)]
    await halfway.wait()
    world.go_away()
    world.come_back()
    receipts = await asyncio.gather(*tasks)
    assert sorted(receipt.sequence for receipt in receipts) == list(range(1, count + 1))
    async with bus.read(["wb.run.>"]) as reader:
        messages = await take(reader, count)
    stored = {message.sequence: message.data for message in messages}
    assert stored == {r.sequence: str(n).encode() for n, r in enumerate(receipts)}


async def test_the_state_is_told(world: World) -> None:
    bus = await world.connect()
    states: list[ConnectionState] = []
    changed = asyncio.Event()

    def note(state: ConnectionState) -> None:
        states.append(state)
        changed.set()

    async def until(state: ConnectionState) -> None:
        while bus.state is not state:
            changed.clear()
            await changed.wait()

    bus.on_state_change(note)
    assert bus.state is ConnectionState.CONNECTED
    world.go_away()
    await until(ConnectionState.RECONNECTING)
    world.come_back()
    await until(ConnectionState.CONNECTED)
    await bus.close()
    assert states == [
        ConnectionState.RECONNECTING,
        ConnectionState.CONNECTED,
        ConnectionState.CLOSED,
    ]
