"""How fast events go in and out: `python benchmarks/bus.py` (about ten seconds).

Publishing waits for durable storage (`sync_interval: always`), so it is bound by the disk's fsync;
the ratios compare with plain fsyncs of the same disk, in the same run.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from pathlib import Path

from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer, ServerConfig

EVENT_BYTES = 300
"""A small event; a chunk of 50 tensors has 8 kB."""
CHUNK_EVENT_BYTES = 8300
SINGLE = 500
PIPELINED = 4000
IN_FLIGHT = 256


def fsync_rate(folder: Path, *, seconds: float = 1.0) -> float:
    """Appends of one event, each with its own fsync, per second."""
    count = 0
    with (folder / "plain").open("ab", buffering=0) as file:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            file.write(bytes(EVENT_BYTES))
            os.fsync(file.fileno())
            count += 1
    return count / seconds


async def publish(bus: NatsBus, run: str, count: int, in_flight: int, size: int) -> float:
    """Events per second with so many publications under way at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await bus.publish_once(f"wb.{run}.1.0.chunk.0.{number}", bytes(size))

    started = time.perf_counter()
    await asyncio.gather(*[worker() for _ in range(in_flight)])
    return count / (time.perf_counter() - started)


async def read(bus: NatsBus, run: str, count: int, name: str | None) -> float:
    """Events per second from the first to the last."""
    async with bus.read([f"wb.{run}.>"], name=name) as reader:
        started = time.perf_counter()
        for _ in range(count):
            if await reader.next(10.0) is None:
                raise RuntimeError("the stream ended early")
        return count / (time.perf_counter() - started)


async def latencies(bus: NatsBus, count: int) -> list[float]:
    """Seconds from before publishing to having read, one event at a time, sorted."""
    seconds: list[float] = []
    async with bus.read(["wb.live.>"]) as reader:
        for number in range(count):
            started = time.perf_counter()
            await bus.publish_once(f"wb.live.1.0.chunk.0.{number}", bytes(EVENT_BYTES))
            await reader.next(10.0)
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)


async def blobs(bus: NatsBus, megabytes: int) -> tuple[float, float]:
    """MB/s of putting and getting one blob."""
    data = os.urandom(megabytes * 10**6)
    started = time.perf_counter()
    await bus.put_blob("blob", data)
    stored = time.perf_counter()
    await bus.get_blob("blob")
    return megabytes / (stored - started), megabytes / (time.perf_counter() - stored)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="weightbus-bench-") as name:
        folder = Path(name)
        plain = fsync_rate(folder)
        async with (
            EmbeddedServer(ServerConfig(store=folder / "store")) as server,
            await NatsBus.connect(server.url) as bus,
        ):
            single = await publish(bus, "single", SINGLE, 1, EVENT_BYTES)
            many = await publish(bus, "many", PIPELINED, IN_FLIGHT, EVENT_BYTES)
            large = await publish(bus, "large", PIPELINED // 4, IN_FLIGHT, CHUNK_EVENT_BYTES)
            named = await read(bus, "many", PIPELINED, "bench")
            unnamed = await read(bus, "many", PIPELINED, None)
            large_read = await read(bus, "large", PIPELINED // 4, None)
            live = await latencies(bus, 300)
            put, get = await blobs(bus, 8)
    print(f"bus on {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(f"  plain append + fsync            {plain:9.0f} /s")
    print(f"  publish_once, one at a time     {single:9.0f} /s   {single / plain:5.2f} of plain")
    print(f"  publish_once, {IN_FLIGHT} under way     {many:9.0f} /s   {many / single:5.2f} x one")
    print(f"  publish_once, 8.3 kB events     {large:9.0f} /s   {large / many:5.2f} of small")
    print(f"  read, named reader              {named:9.0f} /s   {named / many:5.2f} x publish")
    print(f"  read, unnamed reader            {unnamed:9.0f} /s   {unnamed / named:5.2f} x named")
    print(f"  read, 8.3 kB events             {large_read:9.0f} /s")
    print(f"  publish to read, median / 99 %  {live[150] * 1e3:9.2f} / {live[296] * 1e3:.2f} ms")
    print(f"  blob put / get                  {put:9.0f} / {get:.0f} MB/s")


if __name__ == "__main__":
    asyncio.run(main())
