"""Agent processes that are killed with SIGKILL between any two calls, and started again."""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support import engine_agent_main
from support.bus_servers import connected_bus, new_server
from support.engine_fake import (
    CONTINUE,
    FLUSH,
    HEALTH,
    INFO,
    LOAD,
    PAUSE,
    SERVER,
    FakeSglang,
    Step,
)
from support.engine_versions import key, make_version, small_checkpoint
from weightbus.bus.events import publish_event

PROGRAM = engine_agent_main.__file__


@asynccontextmanager
async def agent_process(*arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, PROGRAM, *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize(
    ("path", "time"),
    [(SERVER, 1), (PAUSE, 1), (FLUSH, 1), (LOAD, 1), (INFO, 3), (CONTINUE, 2), (HEALTH, 1)],
)
async def test_killed_at_a_call_and_started_again(tmp_path: Path, path: str, time: int):
    event = make_version(small_checkpoint(tmp_path / "origin"), tmp_path / "out", key(1))
    gate = asyncio.Event()
    with new_server(tmp_path / "nats") as server:
        async with FakeSglang() as fake, connected_bus(server) as bus:
            fake.script[path].extend([*[Step()] * (time - 1), Step(gate=gate)])
            await publish_event(bus, event)
            async with agent_process(server.url, fake.url) as first:
                await fake.arrived(path, time)
                first.kill()
                await first.wait()
            gate.set()  # the engine acts on the call of the dead
            calls = len(fake.calls)
            async with agent_process(server.url, fake.url):
                await fake.until(
                    lambda: (
                        fake.label == str(key(1))
                        and fake.paused is None
                        and HEALTH in fake.paths()[calls:]
                    )
                )
            assert fake.paths()[calls] == CONTINUE
            assert fake.weights == fake.label
            assert fake.sins == []
