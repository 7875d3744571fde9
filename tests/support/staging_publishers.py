"""A producer without torch, on a bus in memory, and what it has published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from weightbus.bus.events import end_version, read_event
from weightbus.bus.interface import Bus
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.bus.streams import EVENT_STREAM
from weightbus.producers.attempts import Trainer, open_attempt
from weightbus.producers.bus_thread import BusThread
from weightbus.producers.chunks import Placed
from weightbus.producers.publisher import PublisherTimes, VersionPublisher
from weightbus.producers.staging import Slot, StagingConfig
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import (
    AnyEvent,
    ChunkReady,
    Outcome,
    VersionAborted,
    VersionComplete,
    VersionKey,
)
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank

Kind = TypeVar("Kind")
RUN = "run"
QUICK = PublisherTimes(publish_s=0.3, start_s=5.0, close_s=0.0)
PATIENT = PublisherTimes(publish_s=20.0, start_s=20.0, close_s=0.0)


class BytesSource:
    """Tensors that are bytes: `values[name]` may be changed between versions."""

    def __init__(self, values: dict[str, bytes], *, unowned: Sequence[str] = (), rank: int = 0):
        self.values = values
        self.forgotten = False
        self.on_fill: Callable[[], None] = lambda: None
        self._layout = Layout(
            naming="megatron",
            producer=ParallelRank(rank=rank),
            tensors=tuple(
                LocalTensor(name=name, dtype="U8", shape=(len(data),), owned=name not in unowned)
                for name, data in values.items()
            ),
        )

    @property
    def layout(self) -> Layout:
        return self._layout

    def fill(self, slot: Slot, placed: Sequence[Placed]) -> None:
        self.on_fill()
        for part in placed:
            name = self._layout.tensors[part.index].name
            slot.buffer[part.offset : part.end] = self.values[name]

    def forget(self) -> None:
        self.forgotten = True


def memory_thread(server: MemoryServer) -> BusThread:
    """A bus thread of its own, as each producer has one."""

    async def connect() -> Bus:
        return await MemoryBus.connect(server)

    return BusThread(connect)


def make_publisher(
    server: MemoryServer,
    source: BytesSource,
    staging: StagingConfig,
    *,
    times: PublisherTimes = QUICK,
    producers: int = 1,
    attempt: int | None = None,
) -> VersionPublisher:
    """A publisher; `attempt` None opens one, as rank 0 does."""
    thread = memory_thread(server)
    if attempt is None:
        trainer = Trainer(RUN, producers, "megatron", "/origin")
        attempt = thread.run(open_attempt(thread.bus, trainer), 5.0)
    return VersionPublisher(
        source,
        thread,
        run_id=RUN,
        attempt=attempt,
        producers=producers,
        staging=staging,
        times=times,
        owns_bus=True,
    )


def published(server: MemoryServer) -> list[AnyEvent]:
    """Every event so far, in order."""
    with server.lock:
        messages = list(server.logs[EVENT_STREAM].messages)
    return [read_event(message).event for message in messages]


def of(events: Sequence[AnyEvent], kind: type[Kind]) -> list[Kind]:
    """The events of one kind."""
    return [event for event in events if isinstance(event, kind)]


def end(server: MemoryServer, key: VersionKey, error: str = "") -> None:
    """Speak as the writers do: complete, or aborted with a message."""
    if error:
        outcome: Outcome = VersionAborted(
            version=key, error="CoverageError", message=error, by="writer 0"
        )
    else:
        outcome = VersionComplete(
            version=key,
            directory="file:///versions/v",
            manifest_digest=digest_of(b"manifest"),
            shards=1,
            nbytes=1,
        )

    async def speak() -> None:
        async with await MemoryBus.connect(server) as bus:
            await end_version(bus, outcome)

    asyncio.run(speak())


def read_chunk(chunk: ChunkReady) -> dict[int, bytes]:
    """The bytes of a chunk's tensors at its location, by index in the layout."""
    scheme, _, rest = chunk.location.uri.partition("://")
    data = Path(f"/dev/shm/{rest}" if scheme == "shm" else rest).read_bytes()
    start = chunk.location.offset
    return {
        tensor.index: data[start + tensor.offset : start + tensor.offset + tensor.length]
        for tensor in chunk.tensors
    }
