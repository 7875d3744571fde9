"""Plans and events for tests of a writer's parts: no bus, no IO threads, no trainer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from support.conversion_executor import shard_files
from support.conversion_megatron import (
    Grid,
    Model,
    expectation_of,
    layouts_of,
    local_bytes,
)
from support.writer_versions import RUN
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import (
    ChunkReady,
    ChunkTensor,
    Location,
    ProducerSealed,
    ShardPersisted,
    VersionKey,
)
from weightbus.schemas.layout import Layout
from weightbus.schemas.manifest import Extent, ManifestTensor, ShardTable
from weightbus.writers.commit import Committer
from weightbus.writers.conversion.catalogue import family_of
from weightbus.writers.paths import VersionPaths
from weightbus.writers.plan import build_plan
from weightbus.writers.plan_types import Plan, Shard
from weightbus.writers.steps import NoSteps, Steps

KEY = VersionKey(run_id=RUN, attempt=1, weight_version=7)
Key = tuple[int, int]


def plan_of(
    model: Model, grid: Grid, *, writers: int = 2, layouts: list[Layout] | None = None
) -> tuple[Plan, list[Layout]]:
    """A plan with several shards, and the layouts that it was made of."""
    layouts = layouts_of(model, grid) if layouts is None else layouts
    family = family_of(model.config, "deepseek_v3" if model.latent else "qwen3")
    plan = build_plan(
        layouts, expectation_of(model), family, writers=writers, max_shard_bytes=20_000
    )
    return plan, layouts


def chunk_of(plan: Plan, number: int, *keys: Key, key: VersionKey = KEY) -> ChunkReady:
    """A chunk event with these sources of one rank, one behind the other."""
    tensors: list[ChunkTensor] = []
    at = 0
    for source in (plan.sources[one] for one in keys):
        digest = digest_of(f"{source.key}".encode())
        tensors.append(
            ChunkTensor(index=source.index, offset=at, length=source.nbytes, digest=digest)
        )
        at += source.nbytes
    location = Location(uri="shm://arena", offset=0, length=at)
    return ChunkReady(
        version=key, rank=keys[0][0], chunk=number, location=location, tensors=tuple(tensors)
    )


def seal_of(rank: int, *chunks: ChunkReady, key: VersionKey = KEY) -> ProducerSealed:
    """The seal of a producer that has published these chunks."""
    tensors = [tensor for chunk in chunks for tensor in chunk.tensors]
    return ProducerSealed(
        version=key, rank=rank, chunks=len(chunks), tensors=len(tensors),
        nbytes=sum(tensor.length for tensor in tensors),
    )  # fmt: skip


def persisted_of(plan: Plan, shard: Shard, table: bytes = b"") -> ShardPersisted:
    """The event that announces a shard."""
    return ShardPersisted(
        version=KEY, plan_digest=plan.digest, writer=shard.writer, writers=plan.writers,
        shard=shard.index, shards=len(plan.shards), file=shard.file, nbytes=shard.nbytes,
        digest=digest_of(shard.file.encode()), table_digest=digest_of(table),
    )  # fmt: skip


class WrittenShard(NamedTuple):
    """A shard file's bytes, its table's, and the event that announces both."""

    data: bytes
    table: bytes
    event: ShardPersisted


def written(plan: Plan, files: dict[str, bytes]) -> list[WrittenShard]:
    """Every shard of a plan as its writer would describe it."""
    found: list[WrittenShard] = []
    for shard in plan.shards:
        data = files[shard.file]
        tensors = [
            ManifestTensor(
                name=target.name, dtype=target.dtype, shape=target.shape, offset=target.offset,
                extents=(
                    Extent(
                        length=target.nbytes,
                        digest=digest_of(data[target.offset : target.offset + target.nbytes]),
                    ),
                ),
            )
            for target in (plan.targets[number] for number in shard.targets)
        ]  # fmt: skip
        table = ShardTable(
            file=shard.file, writer=shard.writer, nbytes=shard.nbytes,
            header_bytes=len(shard.header), header_digest=digest_of(shard.header),
            tensors=tuple(tensors),
        )  # fmt: skip
        raw = table.model_dump_json().encode()
        event = persisted_of(plan, shard, raw)
        found.append(WrittenShard(data, raw, event.model_copy(update={"digest": table.digest})))
    return found


@dataclass
class CommitScene:
    """A version of which every shard is persisted, on a disk."""

    plan: Plan
    paths: VersionPaths
    origin: Path
    shards: list[WrittenShard]

    @property
    def events(self) -> list[ShardPersisted]:
        return [shard.event for shard in self.shards]

    def lay_out(self) -> None:
        """Write the hidden folders."""
        self.paths.partial.mkdir(parents=True, exist_ok=True)
        self.paths.tables.mkdir(parents=True, exist_ok=True)
        for shard in self.shards:
            (self.paths.partial / shard.event.file).write_bytes(shard.data)
            (self.paths.tables / f"{shard.event.file}.json").write_bytes(shard.table)

    def committer(self, steps: Steps | None = None, nonce: str = "trainer") -> Committer:
        return Committer(
            KEY, nonce, self.plan, self.paths, self.origin, durable=True,
            steps=NoSteps() if steps is None else steps,
        )  # fmt: skip


def commit_scene(folder: Path) -> CommitScene:
    """A small dense model on two ranks, two writers; with an origin of two assets."""
    model = dataclasses.replace(Model(), norms=True)
    plan, layouts = plan_of(model, Grid(tp=2))
    files = shard_files(plan, lambda source: local_bytes(source, layouts))
    origin = folder / "origin"
    (origin / "extra").mkdir(parents=True)
    (origin / "config.json").write_text("{}")
    (origin / "extra" / "template.jinja").write_text("{{ messages }}")
    scene = CommitScene(plan, VersionPaths.of(folder / "out", KEY), origin, written(plan, files))
    scene.lay_out()
    return scene
