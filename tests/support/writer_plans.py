"""Small plans made by hand, and shards of them on the disk."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from support.conversion_executor import copy_piece
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import Location, ShardPersisted, VersionKey
from weightbus.schemas.manifest import Extent, ManifestTensor, ShardTable
from weightbus.writers.assembly import Arrival
from weightbus.writers.copy import Input
from weightbus.writers.paths import VersionPaths
from weightbus.writers.plan_types import Group, Piece, Plan, Shard, Source, Target
from weightbus.writers.shards import ShardTensor, file_name, file_of

KEY = VersionKey(run_id="run", attempt=1, weight_version=7)


def piece(target: int, rows: int, cols: int, src: Sequence[int], dst: Sequence[int]) -> Piece:
    """`src` and `dst`: (offset, row step, col step)."""
    return Piece(target, rows, cols, *src, *dst)


def source(pieces: Sequence[Piece], elements: int, *, rank: int = 0, index: int = 0) -> Source:
    """A one-dimensional local tensor of F32."""
    shard = 0 if pieces else None
    return Source(rank, index, f"source {rank}.{index}", "F32", (elements,), tuple(pieces), shard)


def target(
    shape: tuple[int, ...], sources: Sequence[Source], number: int = 0, *, offset: int = 16
) -> Target:
    """An F32 target fed by the sources that have a piece there."""
    feeding = [one for one in sources if any(p.target == number for p in one.pieces)]
    streamed = all(p.is_run for one in feeding for p in one.pieces if p.target == number)
    keys = tuple(one.key for one in feeding)
    return Target(f"target {number}", "F32", shape, 0, offset, 0, keys, streamed)


def inputs(
    sources: Sequence[Source], folder: Path, *, seed: int = 0
) -> dict[tuple[int, int], Input]:
    """Random bytes of every source, each in a file of its own, at an odd offset."""
    chance = np.random.default_rng(seed)
    found: dict[tuple[int, int], Input] = {}
    for one in sources:
        data = chance.bytes(one.nbytes)
        path = folder / f"source-{secrets.token_hex(4)}"
        path.write_bytes(b"xyz" + data + b"tail")
        location = Location(uri=path.as_uri(), offset=1, length=len(data) + 2)
        arrival = Arrival(one.key, location, 2, len(data), digest_of(data), 3, 99)
        found[one.key] = Input(one, arrival)
    return found


def wanted(
    sources: Sequence[Source], items: Mapping[tuple[int, int], Input], shape: tuple[int, ...],
    number: int = 0,
) -> bytes:  # fmt: skip
    """What the pieces make of the sources, by the executor that tests of plans use."""
    out = np.zeros(int(np.prod(shape)), np.uint32)
    for one in sources:
        path = Path(items[one.key].arrival.location.uri.removeprefix("file://"))
        data = np.frombuffer(path.read_bytes()[3 : 3 + one.nbytes], np.uint32)
        for part in one.pieces:
            if part.target == number:
                copy_piece(part, data, out)
    return out.tobytes()


def plan_of(
    groups: Mapping[str, Sequence[tuple[int, int]]], *, nbytes: int = 8, shards: int = 1,
    writers: int = 1, unused: Sequence[tuple[int, int]] = (),
) -> Plan:  # fmt: skip
    """Groups of U8 targets, each fed by whole sources (rank, index) of `nbytes` bytes.

    Group g lies in shard g % shards, shard s belongs to writer s % writers.
    """
    sources: dict[tuple[int, int], Source] = {
        key: Source(*key, f"unused {key}", "U8", (nbytes,), (), None) for key in unused
    }
    names = {
        key: (f"{group}.{key[0]}.{key[1]}", number)
        for number, (group, keys) in enumerate(groups.items())
        for key in keys
    }
    files = [
        file_of(
            ShardTensor(name, "U8", (nbytes,), nbytes)
            for name, group in names.values()
            if group % shards == shard
        )
        for shard in range(shards)
    ]
    places = [
        (tensor.name, shard, offset)
        for shard, file in enumerate(files)
        for tensor, offset in zip(file.tensors, file.offsets, strict=True)
    ]
    number_of = {name: number for number, (name, _, _) in enumerate(places)}
    for key, (name, group) in names.items():
        run = Piece(number_of[name], 1, nbytes, 0, nbytes, 1, 0, nbytes, 1)
        label = f"{list(groups)[group]} {key}"
        sources[key] = Source(*key, label, "U8", (nbytes,), (run,), group % shards)
    by_name = {name: (key, group) for key, (name, group) in names.items()}
    targets = tuple(
        Target(name, "U8", (nbytes,), shard, offset, by_name[name][1], (by_name[name][0],), True)
        for name, shard, offset in places
    )
    made = tuple(
        Group(
            number, group, tuple(sorted(number_of[names[key][0]] for key in keys)),
            tuple(sorted(keys)),
        )
        for number, (group, keys) in enumerate(groups.items())
    )  # fmt: skip
    shard_list = tuple(
        Shard(
            index, file_name(index, shards), index % writers, file.header, file.nbytes,
            tuple(number for number, one in enumerate(targets) if one.shard == index),
        )
        for index, file in enumerate(files)
    )  # fmt: skip
    return Plan(
        digest=digest_of(repr((groups, nbytes, shards, writers)).encode()), family="hf",
        writers=writers, sources=dict(sorted(sources.items())), targets=targets,
        groups=made, shards=shard_list, total_size=sum(one.nbytes for one in targets),
    )  # fmt: skip


def persist(plan: Plan, paths: VersionPaths, *, key: VersionKey = KEY) -> list[ShardPersisted]:
    """Write every shard of a plan and its table; returns the events that announce them."""
    for folder in (paths.partial, paths.tables):
        folder.mkdir(parents=True, exist_ok=True)
    events: list[ShardPersisted] = []
    for shard in plan.shards:
        body = {number: bytes([number % 256]) * plan.targets[number].nbytes
                for number in shard.targets}  # fmt: skip
        (paths.partial / shard.file).write_bytes(shard.header + b"".join(body.values()))
        table = ShardTable(
            file=shard.file, writer=shard.writer, nbytes=shard.nbytes,
            header_bytes=len(shard.header), header_digest=digest_of(shard.header),
            tensors=tuple(
                ManifestTensor(
                    name=plan.targets[number].name, dtype=plan.targets[number].dtype,
                    shape=plan.targets[number].shape, offset=plan.targets[number].offset,
                    extents=(Extent(length=len(data), digest=digest_of(data)),),
                )
                for number, data in body.items()
            ),
        )  # fmt: skip
        data = table.model_dump_json().encode()
        (paths.tables / f"{shard.file}.json").write_bytes(data)
        events.append(
            ShardPersisted(
                version=key, plan_digest=plan.digest, writer=shard.writer, writers=plan.writers,
                shard=shard.index, shards=len(plan.shards), file=shard.file, nbytes=shard.nbytes,
                digest=table.digest, table_digest=digest_of(data),
            )
        )  # fmt: skip
    return events
