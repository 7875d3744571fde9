"""Three servers, three replicas, and the death of leaders."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.bus_servers import take
from weightbus.bus.interface import SubjectTakenError
from weightbus.bus.nats_bus import BusConfig, NatsBus
from weightbus.bus.server import EmbeddedServer, ServerConfig
from weightbus.bus.streams import EVENT_STREAM, StreamLimits

PATIENCE_S = 60.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def cluster(tmp_path: Path) -> Generator[dict[str, EmbeddedServer]]:
    ports = free_ports(3)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    with ExitStack() as stack:
        servers = {
            f"n{index}": stack.enter_context(
                EmbeddedServer(
                    ServerConfig(
                        store=tmp_path / f"n{index}",
                        server_name=f"n{index}",
                        extra=f'cluster {{ name: c, listen: "127.0.0.1:{port}", '
                        f"routes: [{routes}] }}",
                    )
                )
            )
            for index, port in enumerate(ports)
        }
        yield servers


@pytest.mark.slow
async def test_the_death_of_leaders_loses_and_doubles_nothing(
    cluster: dict[str, EmbeddedServer],
) -> None:
    config = BusConfig(
        url=tuple(server.url for server in cluster.values()),
        streams=StreamLimits(replicas=3),
        connect_timeout_s=PATIENCE_S,
        attempt_timeout_s=1.0,
    )
    count, publishers, kills = 200, 4, 2
    acknowledged: dict[int, bytes] = {}

    async with await NatsBus.connect(config) as bus, await NatsBus.connect(config) as other:
        assert await bus.verify_streams() == ()
        await bus.publish_once("wb.run.1.0.outcome", b"complete")
        assert (await other.publish_once("wb.run.1.0.outcome", b"complete")).duplicate
        with pytest.raises(SubjectTakenError):
            await other.publish_once("wb.run.1.0.outcome", b"aborted")
        progress = asyncio.Condition()

        async def publish(index: int) -> None:
            for number in range(count):
                data = f"{index}.{number}".encode()
                receipt = await bus.publish_once(
                    f"wb.run.1.0.chunk.{index}.{number}", data, timeout_s=PATIENCE_S
                )
                acknowledged[receipt.sequence] = data
                async with progress:
                    progress.notify_all()

        async def kill_leaders() -> None:
            for kill in range(kills):
                aim = (kill + 1) * count * publishers // (kills + 1)
                async with progress:
                    await progress.wait_for(lambda aim=aim: len(acknowledged) >= aim)
                info = await bus.connection.persist(
                    lambda _: bus.connection.call(f"STREAM.INFO.{EVENT_STREAM}"),
                    timeout_s=PATIENCE_S,
                    what="finding the leader",
                )
                leader = cluster[info["cluster"]["leader"]]
                leader.kill()
                seen = len(acknowledged)
                async with progress:
                    await progress.wait_for(lambda seen=seen: len(acknowledged) > seen)
                leader.restart()

        async with (
            other.read(["wb.run.>"], name="writer-0") as reader,
            asyncio.TaskGroup() as group,
        ):
            for index in range(publishers):
                group.create_task(publish(index))
            group.create_task(kill_leaders())
            reading = group.create_task(take(reader, count * publishers + 1, PATIENCE_S))
        messages = reading.result()
    assert [message.sequence for message in messages] == list(range(1, len(messages) + 1))
    assert {message.sequence: message.data for message in messages[1:]} == acknowledged
