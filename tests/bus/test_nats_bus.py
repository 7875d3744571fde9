"""What only the real bus has: crashes of a process, broken lines, administration."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace

import pytest
from support.bus_proxy import line_to
from support.bus_servers import PATIENCE_S, fast_config, take
from support.bus_servers import nats_bus as nats_bus_on
from weightbus.bus.config import BusConfig
from weightbus.bus.interface import ConnectionState, Receipt, SubjectTakenError
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer, ServerConfig
from weightbus.bus.streams import EVENT_STREAM
from weightbus.schemas.errors import (
    BlobMissingError,
    BusUnavailableError,
    ConfigError,
    EventTooLargeError,
    SequenceGapError,
    ServerBinaryError,
)


async def publish(bus: NatsBus, count: int, *, run: str = "run", first: int = 0) -> None:
    for number in range(first, first + count):
        await bus.publish_once(f"wb.{run}.1.0.chunk.0.{number}", str(number).encode())


async def test_kill_minus_nine_loses_nothing_that_was_acknowledged(
    nats_server: EmbeddedServer,
) -> None:
    """The server is killed four times while four publish and one reads."""
    count, kills = 200, 4
    chance = random.Random(7)
    acknowledged: dict[str, int] = {}
    moments = sorted(chance.sample(range(10, 4 * count - 10), kills))

    async def publisher(index: int) -> None:
        async with nats_bus_on(nats_server) as bus:
            for number in range(count):
                subject = f"wb.run.1.0.chunk.{index}.{number}"
                receipt = await bus.publish_once(subject, subject.encode())
                acknowledged[subject] = receipt.sequence
                if moments and len(acknowledged) >= moments[0]:
                    moments.pop(0)
                    nats_server.kill()
                    nats_server.restart()

    async with (
        nats_bus_on(nats_server) as bus,
        bus.read(["wb.run.>"], name="writer-0") as reader,
    ):
        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(publisher(index))
            reading = group.create_task(take(reader, 4 * count))
        live = reading.result()
        assert not moments
        assert [message.sequence for message in live] == list(range(1, 4 * count + 1))
        assert {message.subject: message.sequence for message in live} == acknowledged
        assert all(message.data == message.subject.encode() for message in live)
        async with bus.read(["wb.run.>"]) as again:
            assert await take(again, 4 * count) == live


async def test_a_lost_acknowledgement_is_found_again(nats_server: EmbeddedServer) -> None:
    """The line breaks between the server's storing and its answer."""
    async with line_to(nats_server.url) as line:
        config = fast_config(line.url)
        async with await NatsBus.connect(config) as bus:
            line.cut_before_answer(b'"seq":1')
            receipt = await bus.publish_once("wb.run.1.0.outcome", b"complete")
            assert line.cuts == 1
            assert receipt == Receipt(1, duplicate=True)
            line.cut_before_answer(b'"seq":1')
            await bus.report("wbr.run.engine.1.0", b"serving")
            assert line.cuts == 2
            status = await bus.stream_status()
            assert [s.messages for s in status[:2]] == [1, 1]
            line.cut_before_answer(b'"seq":2')
            await bus.put_blob("layout", bytes(1000))
            assert line.cuts == 3
            assert await bus.get_blob("layout") == bytes(1000)


async def test_a_replicated_servers_duplicate_is_compared_too(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_bus_on(nats_server) as bus:
        await bus.publish_once("wb.run.1.0.outcome", b"complete")

        async def duplicate(*_: object, **__: object) -> Receipt:
            return Receipt(1, duplicate=True)

        monkeypatch.setattr("weightbus.bus.nats_bus.publish", duplicate)
        assert (await bus.publish_once("wb.run.1.0.outcome", b"complete")).duplicate
        with pytest.raises(SubjectTakenError):
            await bus.publish_once("wb.run.1.0.outcome", b"aborted")
        with pytest.raises(BusUnavailableError, match="does not show it yet"):
            await bus.publish_once("wb.run.1.1.outcome", b"complete", timeout_s=0.2)


async def test_reading_survives_a_broken_line(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as source, line_to(nats_server.url) as line:
        await publish(source, 300)
        config = replace(fast_config(line.url), prefetch=50)
        async with (
            await NatsBus.connect(config) as bus,
            bus.read(["wb.run.>"], name="writer-0") as reader,
        ):
            seen: list[int] = []
            for _ in range(6):
                seen += [message.sequence for message in await take(reader, 50)]
                line.cut()
            await publish(source, 10, first=300)
            seen += [message.sequence for message in await take(reader, 10)]
            assert seen == list(range(1, 311))
            assert line.cuts == 6


async def test_a_line_that_swallows_everything_is_noticed(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as source, line_to(nats_server.url) as line:
        config = replace(fast_config(line.url), attempt_timeout_s=0.3, ping_interval_s=0.1)
        async with await NatsBus.connect(config) as bus, bus.read(["wb.run.>"]) as reader:
            await publish(source, 3)
            await take(reader, 3)
            lost = asyncio.Event()
            bus.on_state_change(lambda _: lost.set())
            line.mute(on=True)
            await publish(source, 3, first=3)
            with pytest.raises(BusUnavailableError) as caught:
                await bus.last("wb.run.>", timeout_s=0.2)
            assert "looking for the last message of wb.run.>" in str(caught.value)
            await asyncio.wait_for(lost.wait(), PATIENCE_S)
            line.mute(on=False)
            assert [m.sequence for m in await take(reader, 3)] == [4, 5, 6]


async def test_a_consumer_deleted_under_the_reader(nats_server: EmbeddedServer) -> None:
    async with (
        nats_bus_on(nats_server) as bus,
        bus.read(["wb.run.>"], name="writer-0") as reader,
    ):
        await publish(bus, 10)
        await take(reader, 5)
        await bus.connection.call(f"CONSUMER.DELETE.{EVENT_STREAM}.writer-0")
        await publish(bus, 10, first=10)
        assert [m.sequence for m in await take(reader, 15)] == list(range(6, 21))


async def test_a_store_that_was_lost_is_not_taken_for_the_old_one(
    nats_server: EmbeddedServer,
) -> None:
    async with nats_bus_on(nats_server) as bus, bus.read(["wb.run.>"]) as reader:
        await publish(bus, 10)
        await take(reader, 10)
        nats_server.kill()
        shutil.rmtree(nats_server.store)
        nats_server.restart()
        async with nats_bus_on(nats_server) as other:
            await publish(other, 3)
        with pytest.raises(SequenceGapError, match="it is another one") as caught:
            await reader.next(PATIENCE_S)
        assert caught.value.where["last_sequence"] == 3


async def test_a_purge_before_a_slow_reader_is_a_gap(nats_server: EmbeddedServer) -> None:
    config = replace(fast_config(""), prefetch=4)
    async with nats_bus_on(nats_server, config) as bus, bus.read(["wb.run.>"]) as reader:
        await publish(bus, 4)
        assert [m.sequence for m in await take(reader, 1)] == [1]
        await publish(bus, 30, first=4)
        await bus.connection.call(f"STREAM.PURGE.{EVENT_STREAM}", {"seq": 20})
        with pytest.raises(SequenceGapError, match="removed before they were read") as caught:
            await take(reader, 34)
        assert caught.value.where["first_sequence"] == 20


async def test_filtered_holes_are_no_gaps_however_messages_arrive(
    nats_server: EmbeddedServer,
) -> None:
    config = replace(fast_config(""), prefetch=3)
    async with nats_bus_on(nats_server, config) as bus:
        for number in range(60):
            await publish(bus, 1, run="ab"[number % 7 == 0], first=number)
        async with bus.read(["wb.b.>"]) as reader:
            assert [m.sequence for m in await take(reader, 9)] == list(range(1, 61, 7))


async def test_the_lag_of_readers_is_shown(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as bus:
        await publish(bus, 5)
        async with bus.read(["wb.run.>"], name="writer-0") as reader:
            await take(reader, 5)
            status = {s.name: s for s in await bus.consumer_status()}["writer-0"]
            assert (status.delivered_sequence, status.lag, status.connected) == (5, 0, True)
        await publish(bus, 3, first=5)
        async with bus.read(["wb.run.>"]) as reader:
            await take(reader, 8)
        (status,) = await bus.consumer_status()
        assert status.name == "writer-0"
        assert status.lag >= 0


async def test_purging_a_run_makes_room(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as bus:
        await publish(bus, 5, run="old")
        await publish(bus, 5, run="new")
        assert await bus.purge("wb.old.>") == 5
        async with bus.read(["wb.>"]) as reader:
            assert [m.sequence for m in await take(reader, 5)] == list(range(6, 11))


async def test_a_put_that_died_half_way_is_invisible(nats_server: EmbeddedServer) -> None:
    async with nats_bus_on(nats_server) as bus:
        await bus.connection.request("$O.weightbus-blobs.C.half", bytes(1000))
        with pytest.raises(BlobMissingError):
            await bus.get_blob("layout")
        await bus.put_blob("layout", b"whole")
        await bus.connection.call(
            "STREAM.PURGE.OBJ_weightbus-blobs", {"filter": "$O.weightbus-blobs.C.>"}
        )
        with pytest.raises(BlobMissingError, match=r"\(0 of 5 bytes\)"):
            await bus.get_blob("layout")


async def test_the_size_is_checked_before_sending(nats_server: EmbeddedServer) -> None:
    """An oversize message would make the server close the connection for good."""
    async with nats_bus_on(nats_server) as bus:
        epoch = bus.connection.epoch
        with pytest.raises(EventTooLargeError, match="max_payload") as caught:
            await bus.publish_once("wb.run.1.0.opened", bytes(1024 * 1024))
        assert caught.value.where["max_payload_bytes"] == 1024 * 1024
        assert bus.connection.epoch == epoch
        assert bus.state is ConnectionState.CONNECTED


async def test_an_old_server_is_refused() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version":"2.9.25","max_payload":1048576,"headers":true}\r\n')
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    old = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with old:
        port = old.sockets[0].getsockname()[1]
        with pytest.raises(ServerBinaryError, match=r"2\.9\.25 is older than 2\.14"):
            await NatsBus.connect(fast_config(f"nats://127.0.0.1:{port}"))


async def test_no_server_is_an_error_within_the_time_out(nats_server: EmbeddedServer) -> None:
    nats_server.kill()
    config = replace(fast_config(nats_server.url), connect_timeout_s=0.3)
    with pytest.raises(BusUnavailableError, match=r"cannot connect within 0\.3 s") as caught:
        await NatsBus.connect(config)
    assert nats_server.url in str(caught.value)
    assert caught.value.__cause__ is not None or "nats" in str(caught.value)


async def test_connecting_waits_for_a_server_that_is_coming(nats_server: EmbeddedServer) -> None:
    nats_server.kill()
    connecting = asyncio.create_task(NatsBus.connect(fast_config(nats_server.url)))
    await asyncio.sleep(0)
    nats_server.restart()
    async with await connecting as bus:
        assert await bus.last_sequence() == 0


async def test_logins_and_permissions() -> None:
    users = (
        "authorization { users = [\n"
        ' {user: all, password: "a"}\n'
        ' {user: rank, password: "r", permissions: {publish: ["wb.run.*.*.*.3", '
        '"wb.run.*.*.*.3.>", "wb.run.*.*.opened", "$O.weightbus-blobs.>", '
        '"$JS.API.STREAM.MSG.GET.*"], subscribe: ["_INBOX_rank.>"]}}\n'
        "] }"
    )
    async with EmbeddedServer(ServerConfig(extra=users)) as server:
        everyone = replace(fast_config(server.url), user="all", password="a")
        async with await NatsBus.connect(everyone) as bus:
            await publish(bus, 1)
        rank = replace(
            everyone,
            user="rank",
            password="r",
            inbox_prefix="_INBOX_rank",
            create_streams=False,
            attempt_timeout_s=0.2,
        )
        async with await NatsBus.connect(rank) as bus:
            receipt = await bus.publish_once("wb.run.1.0.chunk.3.0", b"mine")
            assert receipt == Receipt(2, duplicate=False)
            await bus.put_blob("layout", b"of rank 3")
            assert await bus.get_blob("layout") == b"of rank 3"
            for subject in ("wb.run.1.-.layout.3", "wb.run.1.0.opened", "wb.run.1.0.sealed.3"):
                await bus.publish_once(subject, b"mine")
            assert (await bus.publish_once("wb.run.1.0.chunk.3.0", b"mine")).duplicate
            with pytest.raises(BusUnavailableError, match="ermissions") as caught:
                await bus.publish_once("wb.run.1.0.chunk.4.0", b"not mine", timeout_s=0.5)
            assert "this login's permissions" in str(caught.value)
            assert "a" not in repr(rank).split("password")[1:]
        wrong = replace(rank, password="w", connect_timeout_s=0.3)
        with pytest.raises(BusUnavailableError, match="accepts this login"):
            await NatsBus.connect(wrong)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="several ways to log in"):
        BusConfig(token="t", user="u")
    with pytest.raises(ConfigError, match="no server URL"):
        BusConfig(url=())
    with pytest.raises(ConfigError, match="must be positive") as caught:
        BusConfig(prefetch=0)
    assert "prefetch=0" in str(caught.value)
    assert "secret" not in repr(BusConfig(user="u", password="secret"))
    config = BusConfig(url=("nats://u:secret@one:4222", "tls://two:4222"))
    assert config.shown_urls == "nats://one:4222,tls://two:4222"
    assert "secret" not in repr(config)
