"""Folding deltas into folders: bytes, refusals, and a kill before every step."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.delta_folders import (
    Model,
    bytes_of,
    load,
    model,
    save,
    save_delta,
    stepped,
)  # fmt: skip
from weightbus.delta.apply import ApplyOptions, apply_delta, recover
from weightbus.delta.codecs import Encoding
from weightbus.delta.index import shard_name
from weightbus.delta.state import locked, read_state
from weightbus.schemas.errors import (
    DeltaBaseError,
    DeltaChecksumError,
    DeltaError,
    DeltaLockedError,
    DeltaTensorError,
    OutputFolderError,
)  # fmt: skip

ORIGIN = ApplyOptions(base_version=0)
ENCODINGS: list[Encoding] = ["xor", "overwrite", "gap-ulp"]


class World:
    """An origin checkpoint, and versions 1 to 3 as deltas of it."""

    def __init__(self, root: Path, encoding: Encoding, lineage: str = "run/1/n") -> None:
        self.root = root
        self.models: list[Model] = [model()]
        self.base = save(root / "origin", self.models[0])
        self.deltas: list[Path] = []
        for version in (1, 2, 3):
            self.models.append(stepped(self.models[-1], version))
            folder = root / f"weight_v{version:06d}"
            old, new = self.models[-2:]
            self.deltas.append(save_delta(folder, old, new, version, encoding, lineage=lineage))


@pytest.fixture(params=ENCODINGS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.param)


def test_a_new_folder_from_three_deltas(world: World) -> None:
    target = world.root / "served" / "new"
    before = {path: path.read_bytes() for path in world.base.rglob("*") if path.is_file()}
    state = apply_delta(world.base, world.deltas, target, ORIGIN)
    assert state.version == 3
    assert load(target) == bytes_of(world.models[3])
    assert (target / "sub" / "tokenizer.txt").read_text() == "words"
    assert json.loads((target / ".weight_sync/state.json").read_text()) == {"version": "000003"}
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in target.parent.iterdir()) == ["new"]
    assert apply_delta(world.base, world.deltas, target, ORIGIN) == read_state(target)


def test_in_place_one_by_one_and_again(world: World) -> None:
    for version in (1, 2, 3):
        apply_delta(world.base, world.deltas[:version], world.base, ORIGIN)
        assert load(world.base) == bytes_of(world.models[version])
    assert apply_delta(world.base, world.deltas, world.base).version == 3
    assert sorted(p.name for p in (world.base / ".weight_sync").iterdir()) == [
        "lock", "state.json", "weightbus.json",
    ]  # fmt: skip


def test_nothing_changed_advances_the_version(tmp_path: Path) -> None:
    base = save(tmp_path / "origin", model())
    delta = save_delta(tmp_path / "d", model(), model(), 1, "xor")
    assert apply_delta(base, [delta], base, ORIGIN).version == 1
    assert load(base) == bytes_of(model())


def test_wrong_order_version_and_lineage(world: World) -> None:
    with pytest.raises(DeltaBaseError, match="version 2 is based on 1, here is 0"):
        apply_delta(world.base, world.deltas[1:], world.base, ORIGIN)
    with pytest.raises(DeltaBaseError, match="here is an unknown version"):
        apply_delta(world.base, world.deltas, world.base)
    apply_delta(world.base, world.deltas[:1], world.base, ORIGIN)
    other = save_delta(
        world.root / "o", world.models[1], world.models[2], 2, "xor", lineage="run/2/m"
    )
    with pytest.raises(DeltaBaseError, match="different lineages: run/1/n, run/2/m"):
        apply_delta(world.base, [other], world.base)
    again = save_delta(
        world.root / "p", world.models[0], world.models[1], 1, "xor", lineage="run/2/m"
    )
    with pytest.raises(DeltaBaseError, match="different lineages"):
        apply_delta(world.base, [again], world.base)
    assert load(world.base) == bytes_of(world.models[1])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, -4000])
def test_a_flipped_byte_in_the_base(world: World, at: int) -> None:
    apply_delta(world.base, world.deltas[:1], world.base, ORIGIN)
    flip(sorted(world.base.glob("*.safetensors"))[0], at)
    before = load(world.base)
    with pytest.raises(DeltaBaseError, match=r"of the base has .* should have"):
        apply_delta(world.base, world.deltas, world.base)
    assert load(world.base) == before
    assert read_state(world.base).version == 1
    with pytest.raises(DeltaBaseError):
        apply_delta(world.base, world.deltas, world.root / "new")
    assert not (world.root / "new").exists()


def test_a_flipped_byte_in_a_base_that_nobody_recorded(world: World) -> None:
    flip(sorted(world.base.glob("*.safetensors"))[0], -4000)
    with pytest.raises((DeltaBaseError, DeltaChecksumError)):
        apply_delta(world.base, world.deltas, world.root / "new", ORIGIN)
    assert not list(world.root.glob(".new*"))


def test_every_flipped_byte_of_a_blob_is_refused(world: World) -> None:
    path = world.deltas[0] / shard_name(0, 2)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    good = 0
    for at in range(start, len(whole), 37):
        flip(path, at)
        try:
            apply_delta(world.base, world.deltas[:1], world.root / f"t{at}", ORIGIN)
        except DeltaError:
            assert not (world.root / f"t{at}").exists()
        else:  # zstd does not use every bit of a header
            assert load(world.root / f"t{at}") == bytes_of(world.models[1])
            good += 1
        path.write_bytes(whole)
    assert good <= 2


def test_a_base_of_another_shape(world: World) -> None:
    narrow = dict(world.models[0])
    del narrow["q"]
    base = save(world.root / "narrow", narrow)
    with pytest.raises(DeltaTensorError, match=r"q is not in the base.*full version"):
        apply_delta(base, world.deltas, world.root / "new", ORIGIN)


def test_a_target_that_exists(world: World) -> None:
    (world.root / "new").mkdir()
    with pytest.raises(OutputFolderError, match="holds version None"):
        apply_delta(world.base, world.deltas, world.root / "new", ORIGIN)


def test_the_lock_has_a_deadline(world: World) -> None:
    with (
        locked(world.base, 0),
        pytest.raises(DeltaLockedError, match=r"lock for 0.1 s.*each agent its own"),
    ):
        apply_delta(
            world.base, world.deltas, world.base, ApplyOptions(base_version=0, lock_timeout_s=0.1)
        )


def steps_of(world: World, target: Path) -> list[str]:
    """Runs in a child that ends by itself: the world stays as it is."""
    seen: list[str] = []
    copy = World(world.root / "copy", "xor")
    goal = copy.base if target == world.base else copy.root / "new"
    apply_delta(copy.base, copy.deltas[:2], goal, ApplyOptions(0, on_step=seen.append))
    return seen


def killed_before(step: int, world: World, target: Path) -> None:
    child = os.fork()
    if child == 0:
        count = 0

        def on_step(_: str) -> None:
            nonlocal count
            if count == step:
                os._exit(9)
            count += 1

        try:
            apply_delta(world.base, world.deltas[:2], target, ApplyOptions(0, on_step=on_step))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9


@pytest.mark.parametrize("in_place", [True, False])
def test_a_kill_before_every_step_recovers(tmp_path: Path, in_place: bool) -> None:
    probe = World(tmp_path / "probe", "xor")
    goal = probe.base if in_place else probe.root / "new"
    steps = steps_of(probe, goal)
    assert len(steps) >= 5
    for number in range(len(steps)):
        world = World(tmp_path / str(number), ENCODINGS[number % 3])
        target = world.base if in_place else world.root / "new"
        killed_before(number, world, target)
        if in_place and number % 2:
            state = recover(world.base)
            version = state.version if state.version is not None else 0
            assert load(world.base) == bytes_of(world.models[version])
        apply_delta(world.base, world.deltas, target, ORIGIN) if in_place or number < len(
            steps
        ) - 1 else None
        wanted = world.models[3 if in_place or number < len(steps) - 1 else 2]
        assert load(target) == bytes_of(wanted), steps[number]
        assert not list(world.root.glob(".new*"))
        assert not (world.base / ".weight_sync/next").exists()
        assert not (world.base / ".weight_sync/journal.json").exists()
