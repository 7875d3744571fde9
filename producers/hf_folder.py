"""An ordinary Hugging Face checkpoint folder as a version: nothing is copied, only announced.

The locations are ranges of the folder's own safetensors files, so the folder must stay as it is
until the version is complete; the digests show it if it does not. Needs no torch.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..bus.events import end_version
from ..bus.interface import Bus
from ..schemas.digest import Hasher
from ..schemas.errors import SourceTruncatedError, WeightbusError
from ..schemas.events import VersionKey
from ..schemas.hf_folder import FolderTensor, read_folder
from ..schemas.layout import Layout, LocalTensor, ParallelRank
from .announce import Announcement, aborted_by, announce
from .attempts import Trainer, open_attempt, publish_layout
from .chunks import CHUNK_BYTES, ChunkPlan, Placed, plan_chunks

BLOCK_BYTES = 1024 * 1024
_RANK = 0


@dataclass(frozen=True, slots=True)
class FolderPlan:
    """What a folder publishes: its absolute path, its layout, and its chunks with the file of each.

    Offsets of placed tensors are from the start of their file.
    """

    folder: Path
    layout: Layout
    chunks: tuple[tuple[Path, ChunkPlan], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.layout.owned_bytes


def plan_folder(folder: Path, chunk_bytes: int = CHUNK_BYTES) -> FolderPlan:
    """Read a folder's headers: tensors by file and place in it.

    Raises:
        OriginError: not a checkpoint folder.
        ShardCorruptError: a file of it is truncated or malformed.
        ConfigError: `chunk_bytes` below 1.
    """
    by_file: defaultdict[Path, list[FolderTensor]] = defaultdict(list)
    for tensor in read_folder(folder).values():
        # A download cache keeps links to files elsewhere; the writers get the file itself.
        by_file[tensor.file.resolve()].append(tensor)
    held: list[LocalTensor] = []
    chunks: list[tuple[Path, ChunkPlan]] = []
    for path, tensors in sorted(by_file.items()):
        tensors.sort(key=lambda tensor: (tensor.entry.offset, tensor.entry.nbytes))
        first = len(held)
        held += [
            LocalTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape)
            for entry in (tensor.entry for tensor in tensors)
        ]
        placed = [
            Placed(first + place, tensor.entry.offset, tensor.entry.nbytes)
            for place, tensor in enumerate(tensors)
        ]
        for chunk in plan_chunks(placed, chunk_bytes):
            chunks.append((path, ChunkPlan(len(chunks), chunk.tensors)))
    layout = Layout(naming="hf", producer=ParallelRank(rank=_RANK), tensors=tuple(held))
    return FolderPlan(folder.resolve(), layout, tuple(chunks))


async def publish_hf_folder(
    folder: Path,
    run_id: str,
    bus: Bus,
    weight_version: int,
    *,
    attempt: int | None = None,
    family: str = "",
    step: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    timeout_s: float = 60.0,
    on_chunk: Callable[[int], None] = lambda _nbytes: None,
) -> VersionKey:
    """Publish a checkpoint folder as a version of a new attempt, with one producer.

    Args:
        folder: config.json and safetensors weights, in one file or with an index.
        run_id: the run.
        bus: where to.
        weight_version: usually 0, to seed a run.
        attempt: None takes the run's next one.
        family: conversion family; names are HF names already, so it is only noted.
        step: the trainer's step, for people.
        chunk_bytes: size that a chunk aims at.
        timeout_s: for each request.
        on_chunk: called with the bytes of each chunk that is durable (progress).

    Returns:
        the version's identity, when every event of it is durable. The outcome is yet to come
        (bus.events.outcome_of).

    Raises:
        OriginError, ShardCorruptError, ConfigError: as `plan_folder`.
        SourceTruncatedError: a file became shorter meanwhile; the version is aborted.
        VersionConflictError: another trainer holds the attempt.
        BusUnavailableError: no answer in time.
    """
    plan = await asyncio.to_thread(plan_folder, folder, chunk_bytes)
    trainer = Trainer(run_id, 1, "hf", str(plan.folder), family)
    number = await open_attempt(bus, trainer, attempt, timeout_s=timeout_s)
    await publish_layout(bus, run_id, number, plan.layout, timeout_s=timeout_s)
    key = VersionKey(run_id=run_id, attempt=number, weight_version=weight_version)
    files = {chunk.number: path for path, chunk in plan.chunks}
    part = Announcement(
        version=key,
        rank=_RANK,
        producers=1,
        step=step,
        chunks=[(path.as_uri(), 0, chunk) for path, chunk in plan.chunks],
        digests=lambda chunk: hash_chunk(files[chunk.number], chunk),
    )
    try:
        await announce(bus, part, timeout_s=timeout_s, on_chunk=on_chunk)
    except WeightbusError as error:
        # Nobody will seal it: do not let writers wait for that.
        aborted = aborted_by(_RANK, key, error)
        with suppress(WeightbusError):
            await end_version(bus, aborted, timeout_s=timeout_s)
        raise
    return key


def hash_chunk(path: Path, chunk: ChunkPlan) -> list[str]:
    """The digest of each tensor of a chunk, read in blocks that are reused.

    Raises:
        SourceTruncatedError: the file ends before the chunk does.
    """
    block = memoryview(bytearray(BLOCK_BYTES))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return [_hash_range(descriptor, path, part, block) for part in chunk.tensors]
    finally:
        os.close(descriptor)


def _hash_range(descriptor: int, path: Path, part: Placed, block: memoryview) -> str:
    hasher = Hasher()
    at = part.offset
    while at < part.end:
        got = os.preadv(descriptor, [block[: min(len(block), part.end - at)]], at)
        if got == 0:
            raise SourceTruncatedError(
                f"the file ends at byte {at}, tensor number {part.index} at {part.end}",
                where={"file": path},
                next_step="do not change a checkpoint folder while it is published",
            )
        hasher.update(block[:got])
        at += got
    return hasher.digest()
