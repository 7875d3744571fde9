"""Writers on a bus in memory: versions of folders and of Megatron ranks, in any order of events."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from support.bus_servers import eventually
from support.conversion_megatron import Grid, Model
from support.writer_megatron import DENSE, LATENT, save_origin, stage
from support.writer_versions import check_no_left_over, check_version, make_origin, outcomes
from support.writer_world import WriterWorld
from weightbus.bus.events import publish_event
from weightbus.producers.hf_folder import publish_hf_folder
from weightbus.schemas.events import AnyEvent, ChunkReady, VersionComplete


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
async def test_versions_of_a_folder_with_one_to_five_writers(count: int, tmp_path: Path) -> None:
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", count)
    complete: list[VersionComplete] = []
    async with world.running() as bus:
        for number in (0, 4):
            await publish_hf_folder(tmp_path / "origin", "run", bus, number)
            complete.append(await world.complete(bus, len(complete)))
        numbers = [writer.numbers() for writer in world.writers.values()]
    for one in complete:
        manifest = check_version(one, tensors)
        assert {shard.writer for shard in manifest.shards} == set(range(count))
        assert [asset.path for asset in manifest.assets] == [
            "config.json", "extra/template.jinja", "model.safetensors.index.json",
            "tokenizer.json",
        ]  # fmt: skip
    check_no_left_over(tmp_path / "versions", [one.version for one in complete])
    assert {one["versions_complete_total"] for one in numbers} == {2.0}
    assert {one["last_complete_version"] for one in numbers} == {4.0}
    assert sum(one["shards_persisted_total"] for one in numbers) == sum(
        one.shards for one in complete
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("model", "grid"),
    [
        (DENSE, Grid(tp=2, pp=2)),
        (DENSE, Grid(tp=1, pp=2, dp=2)),
        (dataclasses.replace(DENSE, bias=True, te=False), Grid(tp=2)),
        (LATENT, Grid(tp=2, pp=2)),
        (dataclasses.replace(LATENT, grouped=True), Grid(dp=2, ep=2)),
    ],
    ids=["dense-tp2pp2", "dense-pp2dp2", "bias-tp2", "latent-tp2pp2", "grouped-ep2"],
)
async def test_megatron_ranks_become_a_checkpoint(
    model: Model, grid: Grid, count: int, tmp_path: Path
) -> None:
    save_origin(model, tmp_path / "origin")
    version = stage(model, grid, tmp_path / "staging", tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", count, max_shard_bytes=12_000)
    async with world.running() as bus:
        await version.publish(bus)
        complete = await world.complete(bus)
    check_version(complete, version.wanted)
    check_no_left_over(tmp_path / "versions", [complete.version])


@pytest.mark.parametrize("seed", range(8))
async def test_any_order_between_producers_gives_the_same_bytes(seed: int, tmp_path: Path) -> None:
    """Versions before their layouts, two versions in flight, every event told twice."""
    chance = random.Random(seed)
    save_origin(LATENT, tmp_path / "origin")
    versions = [
        stage(
            LATENT, Grid(tp=2, pp=2), tmp_path / "staging", tmp_path / "origin",
            weight_version=number, chunk_tensors=chance.randrange(1, 5),
        )
        for number in range(2)
    ]  # fmt: skip
    queues = [versions[0].events(chance), [
        event for event in versions[1].events(chance) if event not in versions[1].attempt_events
    ]]  # fmt: skip
    mixed: list[AnyEvent] = []
    while any(queues):
        mixed.append(chance.choice([queue for queue in queues if queue]).pop(0))
    world = WriterWorld(tmp_path / "versions", chance.randrange(1, 4), max_shard_bytes=12_000)
    async with world.running() as bus:
        await versions[0].publish(bus, [event for event in mixed for _ in range(2)])
        complete = [await world.complete(bus, known) for known in range(2)]
        assert await outcomes(bus) == complete
    for one in complete:
        check_version(one, versions[0].wanted)
    check_no_left_over(tmp_path / "versions", [one.version for one in complete])


async def test_a_writer_that_starts_after_everything_was_published(tmp_path: Path) -> None:
    save_origin(DENSE, tmp_path / "origin")
    version = stage(DENSE, Grid(tp=2), tmp_path / "staging", tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2, max_shard_bytes=12_000)
    for _ in range(3):  # the second and third life find everything done
        async with world.running() as bus:
            await version.publish(bus)
            complete = await world.complete(bus)
            check_version(complete, version.wanted)
    check_no_left_over(tmp_path / "versions", [version.key])


async def test_chunks_of_an_ended_version_that_come_after_a_restart(tmp_path: Path) -> None:
    """The checkpoint lies behind the version's end, the late chunk behind the checkpoint."""
    save_origin(DENSE, tmp_path / "origin")
    first = stage(DENSE, Grid(tp=2), tmp_path / "staging", tmp_path / "origin")
    late = next(event for event in first.by_rank[1] if isinstance(event, ChunkReady))
    bent = late.model_copy(update={"tensors": late.tensors[:1] * 2})
    rest = [event for event in first.events() if event != late and event.kind != "producer-sealed"]
    world = WriterWorld(tmp_path / "versions", 2, max_shard_bytes=12_000)
    async with world.running() as bus:
        # Two tensors in one chunk that are the same one: aborted before the producers have ended.
        wrong = late.model_copy(update={"chunk": 77, "tensors": bent.tensors})
        await first.publish(bus, [*rest, wrong])
        await world.outcome(bus)
        second = stage(
            DENSE, Grid(tp=2), tmp_path / "staging", tmp_path / "origin", weight_version=1
        )
        await second.publish(bus)
        await world.complete(bus, 1)
    checkpoints = list((tmp_path / "versions" / "run").glob(".writer-*.json"))
    assert len(checkpoints) == 2
    async with world.running() as bus:
        await publish_event(bus, late)
        await world.tidy()
        third = stage(
            DENSE, Grid(tp=2), tmp_path / "staging", tmp_path / "origin", weight_version=2
        )
        await third.publish(bus)
        complete = await world.complete(bus, 2)
        assert len(await outcomes(bus)) == 3
    check_version(complete, third.wanted)


@pytest.mark.parametrize("damage", ["no checkpoint", "not json", "too far", "of another stream"])
async def test_a_checkpoint_that_is_of_no_use_is_only_slower(damage: str, tmp_path: Path) -> None:
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 1)
    async with world.running() as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        await world.complete(bus)
    [path] = (tmp_path / "versions" / "run").glob(".writer-*.json")
    saved = json.loads(path.read_text())
    if damage == "no checkpoint":
        path.unlink()
    elif damage == "not json":
        path.write_text("{")
    elif damage == "too far":
        path.write_text(json.dumps({**saved, "sequence": 10_000}))
    else:
        path.write_text(json.dumps({**saved, "nonce": "another"}))
    async with world.running() as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 1)
        complete = await world.complete(bus, 1)
        assert len(await outcomes(bus)) == 2
    check_version(complete, tensors)


async def test_a_stream_that_was_lost_and_began_again(tmp_path: Path) -> None:
    """Old folders are not touched; the new stream's versions go where nothing lies."""
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2)
    async with world.running() as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        old = await world.complete(bus)
    other = WriterWorld(tmp_path / "versions", 2)
    async with other.running() as bus:
        await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
        refused = await other.outcome(bus)
        assert not isinstance(refused, VersionComplete)
        assert refused.error == "CommitError"
        assert "visible name is taken by something else" in refused.message
        await publish_hf_folder(tmp_path / "origin", "run", bus, 1)
        new = await other.complete(bus, 1)
    check_version(old, tensors)
    check_version(new, tensors)
    check_no_left_over(tmp_path / "versions", [old.version, new.version])


async def test_tensors_that_nobody_trains_are_copied_from_the_origin(tmp_path: Path) -> None:
    save_origin(DENSE, tmp_path / "origin")
    file = tmp_path / "origin" / "model.safetensors"
    held = load_file(file)
    extra = {"vision.patch.weight": held["model.embed_tokens.weight"][:7][::-1].copy()}
    save_file({**held, **extra}, file)
    version = stage(DENSE, Grid(tp=2), tmp_path / "staging", tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 2, max_shard_bytes=12_000, missing="copy")
    async with world.running() as bus:
        await version.publish(bus)
        complete = await world.complete(bus)
    check_version(complete, {**version.wanted, **extra})


async def test_a_second_writer_with_the_same_number_replaces_the_first(tmp_path: Path) -> None:
    tensors = make_origin(tmp_path / "origin")
    world = WriterWorld(tmp_path / "versions", 1)
    twin = WriterWorld(tmp_path / "versions", 1)
    twin.server = world.server
    async with world.running() as bus:
        await eventually(lambda: 0 in world.writers)
        async with twin.running():
            await publish_hf_folder(tmp_path / "origin", "run", bus, 0)
            complete = await twin.complete(bus)
            await eventually(lambda: world.failure is not None)
    assert type(world.failure).__name__ == "ReaderReplacedError"
    check_version(complete, tensors)
