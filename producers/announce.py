"""The events of one version of one producer, in their order: opened, chunks, sealed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..bus.events import publish_event
from ..bus.interface import Bus, SubjectTakenError
from ..schemas.errors import VersionConflictError, WeightbusError
from ..schemas.events import (
    ChunkReady,
    ChunkTensor,
    Location,
    ProducerSealed,
    ReplicaDigest,
    VersionAborted,
    VersionKey,
    VersionOpened,
)
from .chunks import ChunkPlan

_MAX_MESSAGE = 8000  # below the limit of the event's field, in characters
IN_FLIGHT = 8
"""Chunk events that may wait for the server's disk at once."""

Digests = Callable[[ChunkPlan], Sequence[str]]
"""Digest of each tensor of a chunk; runs on a worker thread."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One producer's part of a version.

    Attributes:
        version: which.
        rank: whose.
        producers: how many producers the version has.
        step: the trainer's step, for people.
        chunks: in order, with the location's uri and the offset of the chunks' region in it.
        digests: how to hash a chunk.
        replicas: digests of tensors that other producers publish.
    """

    version: VersionKey
    rank: int
    producers: int
    step: int | None
    chunks: Sequence[tuple[str, int, ChunkPlan]]
    digests: Digests
    replicas: tuple[ReplicaDigest, ...] = ()


async def announce(
    bus: Bus,
    part: Announcement,
    *,
    timeout_s: float,
    stopped: Callable[[], bool] = lambda: False,
    on_chunk: Callable[[int], None] = lambda _nbytes: None,
) -> bool:
    """Publish every event of the part; hashing goes on while events wait for the server.

    Args:
        bus: where to.
        part: what.
        timeout_s: for each event.
        stopped: asked before each chunk; true ends the work (the version has an outcome).
        on_chunk: called with the bytes of each chunk that is durable.

    Returns:
        whether everything was published.

    Raises:
        VersionConflictError: another producer spoke differently about this version.
        BusUnavailableError: an event was not acknowledged in time.
    """
    if stopped():
        return False
    opened = VersionOpened(version=part.version, producers=part.producers, step=part.step)
    await _once(bus, opened, timeout_s)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def send(event: ChunkReady) -> None:
        try:
            await _once(bus, event, timeout_s)
        finally:
            slots.release()
        on_chunk(event.location.length)

    try:
        async with asyncio.TaskGroup() as group:
            for uri, base, chunk in part.chunks:
                await slots.acquire()
                if stopped():
                    return False
                digests = await asyncio.to_thread(part.digests, chunk)
                group.create_task(send(_chunk_ready(part, uri, base, chunk, digests)))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    if stopped():
        return False
    sealed = ProducerSealed(
        version=part.version,
        rank=part.rank,
        chunks=len(part.chunks),
        tensors=sum(len(chunk.tensors) for _, _, chunk in part.chunks),
        nbytes=sum(tensor.length for _, _, chunk in part.chunks for tensor in chunk.tensors),
        replicas=part.replicas,
    )
    await _once(bus, sealed, timeout_s)
    return True


def aborted_by(rank: int, version: VersionKey, reason: WeightbusError) -> VersionAborted:
    """The outcome of a version that one of its producers gives up."""
    return VersionAborted(
        version=version,
        error=type(reason).__name__,
        message=str(reason)[:_MAX_MESSAGE],
        by=f"producer {rank}",
    )


def _chunk_ready(
    part: Announcement, uri: str, base: int, chunk: ChunkPlan, digests: Sequence[str]
) -> ChunkReady:
    return ChunkReady(
        version=part.version,
        rank=part.rank,
        chunk=chunk.number,
        location=Location(uri=uri, offset=base + chunk.offset, length=chunk.length),
        tensors=tuple(
            ChunkTensor(
                index=tensor.index,
                offset=tensor.offset - chunk.offset,
                length=tensor.length,
                digest=digest,
            )
            for tensor, digest in zip(chunk.tensors, digests, strict=True)
        ),
    )


async def _once(
    bus: Bus, event: VersionOpened | ChunkReady | ProducerSealed, timeout_s: float
) -> None:
    try:
        await publish_event(bus, event, timeout_s=timeout_s)
    except SubjectTakenError as taken:
        raise VersionConflictError(
            f"another {event.kind} event of version {event.version} says something else",
            where=taken.where,
            next_step="publish the same weight_version and step from every rank, and give each "
            "trainer its own run_id or attempt",
        ) from taken
