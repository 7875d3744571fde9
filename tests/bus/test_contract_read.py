"""The contract of `Bus`, on both buses: reading."""

from __future__ import annotations

import asyncio

import pytest
from support.bus_servers import PATIENCE_S, take
from support.bus_worlds import World
from weightbus.bus.interface import Bus
from weightbus.schemas.errors import (
    BusClosedError,
    ConfigError,
    ReaderReplacedError,
    SequenceGapError,
)


async def publish(bus: Bus, count: int, *, run: str = "run", first: int = 0) -> None:
    for number in range(first, first + count):
        await bus.publish_once(f"wb.{run}.1.0.chunk.0.{number}", f"{run} {number}".encode())


async def test_reads_what_is_stored_and_then_what_comes(bus: Bus) -> None:
    await publish(bus, 20)
    async with bus.read(["wb.run.>"], name="writer-0") as reader:
        stored = await take(reader, 20)
        assert [message.sequence for message in stored] == list(range(1, 21))
        assert [message.data for message in stored] == [f"run {n}".encode() for n in range(20)]
        assert await reader.next(0.05) is None
        await publish(bus, 5, first=20)
        assert [message.sequence for message in await take(reader, 5)] == list(range(21, 26))


async def test_waits_without_end_for_the_first_message(bus: Bus) -> None:
    async with bus.read(["wb.run.>"]) as reader:
        waiting = asyncio.create_task(reader.next())
        await publish(bus, 1)
        message = await asyncio.wait_for(waiting, PATIENCE_S)
        assert message is not None
        assert message.sequence == 1


async def test_iterates(bus: Bus) -> None:
    await publish(bus, 4)
    seen: list[int] = []
    async with bus.read(["wb.run.>"]) as reader:
        async for message in reader:
            seen.append(message.sequence)
            if len(seen) == 4:
                break
    assert seen == [1, 2, 3, 4]


async def test_several_filters_keep_one_order(bus: Bus) -> None:
    for number in range(6):
        await publish(bus, 2, run=("a", "b", "c")[number % 3], first=2 * number)
    async with bus.read(["wb.a.>", "wb.c.1.*.chunk.0.*"]) as reader:
        messages = await take(reader, 8)
        assert [message.sequence for message in messages] == [1, 2, 5, 6, 7, 8, 11, 12]
        assert {message.subject.split(".")[1] for message in messages} == {"a", "c"}
        assert await reader.next(0.05) is None


async def test_messages_that_others_wanted_are_no_gap(bus: Bus) -> None:
    async with bus.read(["wb.a.>"]) as reader:
        for number in range(10):
            await publish(bus, 3, run="b", first=3 * number)
            await publish(bus, 1, run="a", first=number)
            assert (await take(reader, 1))[0].data == f"a {number}".encode()


@pytest.mark.parametrize("start", [1, 7, 30, 31])
async def test_starts_where_it_is_told(bus: Bus, start: int) -> None:
    await publish(bus, 30)
    async with bus.read(["wb.run.>"], start_sequence=start, name="writer") as reader:
        messages = await take(reader, 31 - start)
        assert [message.sequence for message in messages] == list(range(start, 31))
        assert await reader.next(0.05) is None


async def test_the_place_on_the_server_is_never_trusted(bus: Bus) -> None:
    """The messages that an abandoned reader was sent but did not use come again, in order."""
    await publish(bus, 40)
    async with bus.read(["wb.run.>"], name="writer") as reader:
        await take(reader, 10)
    async with bus.read(["wb.run.>"], start_sequence=11, name="writer") as reader:
        assert [m.sequence for m in await take(reader, 30)] == list(range(11, 41))
    async with bus.read(["wb.run.>"], start_sequence=3, name="writer") as reader:
        assert [m.sequence for m in await take(reader, 38)] == list(range(3, 41))


async def test_other_filters_under_an_old_name(bus: Bus) -> None:
    await publish(bus, 3, run="a")
    await publish(bus, 3, run="b")
    async with bus.read(["wb.a.>"], name="agent") as reader:
        await take(reader, 3)
    async with bus.read(["wb.b.>", "wb.c.>"], name="agent") as reader:
        assert [m.sequence for m in await take(reader, 3)] == [4, 5, 6]


async def test_purged_messages_are_a_gap(world: World) -> None:
    bus = await world.connect()
    await publish(bus, 20)
    await world.purge(below=11)
    async with bus.read(["wb.run.>"], start_sequence=5) as reader:
        with pytest.raises(SequenceGapError):
            await reader.next(PATIENCE_S)
        with pytest.raises(SequenceGapError, match="are gone from the stream") as caught:
            await reader.next(PATIENCE_S)
        assert caught.value.where["wanted_sequence"] == 5
        assert caught.value.where["first_sequence"] == 11
        assert "read from sequence 1" in str(caught.value)
    async with bus.read(["wb.run.>"], start_sequence=11) as reader:
        assert [m.sequence for m in await take(reader, 10)] == list(range(11, 21))
    async with bus.read(["wb.run.>"], start_sequence=1) as reader:
        assert [m.sequence for m in await take(reader, 10)] == list(range(11, 21))


async def test_a_purge_of_everything(world: World) -> None:
    bus = await world.connect()
    await publish(bus, 5)
    await world.purge(below=6)
    assert await bus.last_sequence() == 5
    async with bus.read(["wb.run.>"]) as reader:
        assert await reader.next(0.1) is None
        await publish(bus, 2, first=5)
        assert [m.sequence for m in await take(reader, 2)] == [6, 7]


async def test_a_place_behind_the_end_belongs_to_another_stream(bus: Bus) -> None:
    await publish(bus, 3)
    async with bus.read(["wb.run.>"], start_sequence=5) as reader:
        with pytest.raises(SequenceGapError) as caught:
            await reader.next(PATIENCE_S)
        assert caught.value.where["last_sequence"] == 3


async def test_a_purge_behind_a_reader_does_not_disturb_it(world: World) -> None:
    bus = await world.connect()
    await publish(bus, 10)
    async with bus.read(["wb.run.>"], name="writer") as reader:
        await take(reader, 10)
        assert await reader.next(0.05) is None
        await world.purge(below=8)
        await publish(bus, 5, first=10)
        assert [m.sequence for m in await take(reader, 5)] == list(range(11, 16))


async def test_the_second_reader_of_a_name_takes_over(world: World) -> None:
    one, two = await world.connect(), await world.connect()
    await publish(one, 10)
    async with one.read(["wb.run.>"], name="writer-0") as first:
        await take(first, 4)
        async with two.read(["wb.run.>"], start_sequence=5, name="writer-0") as second:
            assert [m.sequence for m in await take(second, 6)] == list(range(5, 11))
            with pytest.raises(ReaderReplacedError, match="has taken over") as caught:
                await take(first, 20)
            assert caught.value.where["name"] == "writer-0"
            with pytest.raises(ReaderReplacedError):
                await first.next(PATIENCE_S)
            await publish(two, 3, first=10)
            assert [m.sequence for m in await take(second, 3)] == [11, 12, 13]


async def test_readers_of_different_names_do_not_meet(world: World) -> None:
    buses = [await world.connect() for _ in range(3)]
    await publish(buses[0], 25)
    names = ["writer-0", "writer-1", None]
    for bus, name in zip(buses, names, strict=True):
        async with bus.read(["wb.run.>"], name=name) as reader:
            assert [m.sequence for m in await take(reader, 25)] == list(range(1, 26))


async def test_reading_outlives_the_server(world: World) -> None:
    bus = await world.connect()
    await publish(bus, 60)
    async with bus.read(["wb.run.>"], name="writer") as reader:
        seen = [m.sequence for m in await take(reader, 7)]
        world.go_away()
        world.come_back()
        seen += [m.sequence for m in await take(reader, 40)]
        world.go_away()
        world.come_back()
        await publish(bus, 20, first=60)
        seen += [m.sequence for m in await take(reader, 33)]
        assert seen == list(range(1, 81))
        assert await reader.next(0.05) is None


async def test_a_reader_may_begin_while_the_server_is_away(world: World) -> None:
    bus = await world.connect()
    await publish(bus, 3)
    world.go_away()
    async with bus.read(["wb.run.>"]) as reader:
        assert await reader.next(0.1) is None
        world.come_back()
        assert [m.sequence for m in await take(reader, 3)] == [1, 2, 3]


async def test_closing_the_bus_ends_its_readers(world: World) -> None:
    bus, other = await world.connect(), await world.connect()
    await publish(other, 3)
    async with bus.read(["wb.run.>"]) as reader:
        await take(reader, 3)
        waiting = asyncio.create_task(reader.next())
        await asyncio.sleep(0)
        await bus.close()
        with pytest.raises(BusClosedError, match="the bus is closed"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        with pytest.raises(BusClosedError):
            await reader.next(1)


@pytest.mark.parametrize(
    ("filters", "start", "name", "message"),
    [
        ([], 1, None, "a reader reads one stream"),
        (["wb.>", "wbr.>"], 1, None, "a reader reads one stream"),
        (["other.>"], 1, None, "belongs to no stream"),
        (["wb.>"], 0, None, "sequences begin at 1"),
        (["wb.>"], 1, "a.b", "letters, digits"),
    ],
)
async def test_impossible_readings_are_refused(
    bus: Bus, filters: list[str], start: int, name: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with bus.read(filters, start_sequence=start, name=name):
            raise AssertionError("opened")
