"""Commits beside other commits and removals, between any two steps; what lies in the way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.writer_plans import KEY, persist, plan_of
from weightbus.engine_agents.verify import verify_version
from weightbus.schemas.errors import CommitError
from weightbus.schemas.events import ShardPersisted, VersionComplete, VersionKey
from weightbus.schemas.manifest import Manifest
from weightbus.writers.commit import Committer, discard, withdraw
from weightbus.writers.paths import VersionPaths, hidden_folders
from weightbus.writers.plan_types import Plan
from weightbus.writers.steps import NoSteps, Step, Steps

PLAN = plan_of({"a": [(0, 0)], "b": [(0, 1)], "c": [(0, 2)]}, shards=2, writers=2)
COMMIT_STEPS = [Step.COPY_ASSETS, Step.WRITE_INDEX, Step.WRITE_MANIFEST, Step.RENAME]


class At:
    """Does something just before a step, once."""

    def __init__(self, step: Step, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def reached(self, step: Step, key: VersionKey) -> None:
        if step is self._step:
            self._step = Step.PLAN
            self._act()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "sub" / "tokenizer.json").write_text("tokens")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def paths(tmp_path: Path) -> VersionPaths:
    return VersionPaths.of(tmp_path / "root", KEY)


@pytest.fixture
def shards(paths: VersionPaths) -> list[ShardPersisted]:
    return persist(PLAN, paths)


def committer(
    paths: VersionPaths, origin: Path, steps: Steps | None = None, *,
    nonce: str = "nonce", plan: Plan = PLAN, durable: bool = True,
) -> Committer:  # fmt: skip
    return Committer(
        KEY, nonce, plan, paths, origin, durable, NoSteps() if steps is None else steps
    )  # fmt: skip


def check(complete: VersionComplete, paths: VersionPaths) -> Manifest:
    assert complete.directory == str(paths.final)
    assert not paths.partial.exists()
    manifest = verify_version(paths.final, complete.manifest_digest, expected_version=KEY)
    assert (complete.shards, complete.nbytes) == (2, manifest.total_size)
    files = {path.relative_to(paths.final).as_posix() for path in paths.final.rglob("*.*")}
    assert files == {
        "config.json", "sub/tokenizer.json", "model.safetensors.index.json", "manifest.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    return manifest


@pytest.mark.parametrize("step", COMMIT_STEPS, ids=lambda step: step.value)
@pytest.mark.parametrize("clean", [True, False], ids=["cleaned up", "not yet cleaned up"])
def test_another_writer_commits_in_the_middle(
    step: Step, paths: VersionPaths, origin: Path, shards: list[ShardPersisted], *, clean: bool
) -> None:
    """The whole commit of another writer, its clean-up too, fits between any two steps of ours."""
    others: list[VersionComplete] = []

    def other() -> None:
        others.append(committer(paths, origin).make_visible(shards))
        if clean:
            discard(paths)

    complete = committer(paths, origin, At(step, other)).make_visible(shards)
    assert others == [complete]
    check(complete, paths)


def test_many_commits_at_once(
    paths: VersionPaths, origin: Path, shards: list[ShardPersisted]
) -> None:
    count = 6
    gate = threading.Barrier(count)

    def one(_: int) -> VersionComplete:
        gate.wait()
        return committer(paths, origin).make_visible(shards)

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count)))
    assert all(complete == found[0] for complete in found)
    check(found[0], paths)


def test_strangers_in_the_hidden_folder_do_not_become_visible(
    paths: VersionPaths, origin: Path, shards: list[ShardPersisted]
) -> None:
    (paths.partial / "old").mkdir()
    (paths.partial / "old" / "stale.json").write_text("{}")
    (paths.partial / "model-00001-of-00009.safetensors").write_bytes(b"of another life")
    (paths.partial / ".model-00001-of-00002.safetensors.1234.part").write_bytes(b"half")
    (paths.partial / "link").symlink_to(origin / "config.json")
    complete = committer(paths, origin).make_visible(shards)
    check(complete, paths)
    assert (origin / "config.json").exists()


# ---------------------------------------------------------------------------------- withdrawal


@pytest.mark.parametrize("step", COMMIT_STEPS, ids=lambda step: step.value)
def test_a_version_that_is_withdrawn_in_the_middle_of_a_commit(
    step: Step, paths: VersionPaths, origin: Path, shards: list[ShardPersisted]
) -> None:
    steps = At(step, lambda: withdraw(paths, KEY, "nonce"))
    with pytest.raises(CommitError, match="is gone"):
        committer(paths, origin, steps).make_visible(shards)
    assert list(paths.final.parent.iterdir()) == []


def test_withdrawals_and_commits_at_once_leave_all_or_nothing(
    paths: VersionPaths, origin: Path
) -> None:
    """Never a part of a version under its visible name, whoever is faster."""
    for _ in range(15):
        shards = persist(PLAN, paths)
        gate = threading.Barrier(4)

        def commit(gate: threading.Barrier, shards: list[ShardPersisted] = shards) -> None:
            gate.wait()
            try:
                complete = committer(paths, origin, durable=False).make_visible(shards)
                if paths.final.exists():
                    verify_version(paths.final, complete.manifest_digest, read_bytes=False)
            except Exception:  # noqa: BLE001 - the other side may take it away at any moment
                return

        def remove(gate: threading.Barrier) -> None:
            gate.wait()
            withdraw(paths, KEY, "nonce")

        with ThreadPoolExecutor(4) as pool:
            for work in [pool.submit(one, gate) for one in (commit, remove, commit, remove)]:
                work.result()
        if paths.final.exists():  # made visible after both had looked
            verify_version(paths.final)
        withdraw(paths, KEY, "nonce")
        assert list(paths.final.parent.iterdir()) == []


def test_hidden_folders_are_known_by_their_names(tmp_path: Path) -> None:
    root = tmp_path / "root"
    keys = [VersionKey(run_id="run", attempt=a, weight_version=v)
            for a, v in itertools.product((1, 20_000), (0, 1_234_567))]  # fmt: skip
    wanted: set[tuple[VersionKey, Path]] = set()
    for key in keys:
        of = VersionPaths.of(root, key)
        for folder in (of.final, of.partial, of.tables, of.removing):
            folder.mkdir(parents=True)
        wanted |= {(key, of.partial), (key, of.tables), (key, of.removing)}
    (root / "run" / "attempt_0001" / ".weight_vX.partial").mkdir()
    (root / "run" / "attempts_1" / ".weight_v000001.partial").mkdir(parents=True)
    (root / "other" / "attempt_0001" / ".weight_v000001.partial").mkdir(parents=True)
    assert set(hidden_folders(root, "run")) == wanted
    assert hidden_folders(root, "nobody") == []
