"""Commit: one folder, once, by anybody, after anything; and never over something else."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.writer_parts import KEY, CommitScene, commit_scene
from weightbus.engine_agents.verify import verify_version
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import CommitError, OriginError, StorageError
from weightbus.schemas.events import VersionComplete, VersionKey
from weightbus.schemas.manifest import INDEX_FILE, MANIFEST_FILE, ShardTable
from weightbus.writers.commit import discard, index_of, visible_manifest, withdraw
from weightbus.writers.steps import Step

COMMIT_STEPS = [Step.COPY_ASSETS, Step.WRITE_INDEX, Step.WRITE_MANIFEST, Step.RENAME]
NONCE = "trainer"


class CrashError(Exception):
    """The committer's process dies here."""


class At:
    """Does something just before one step, once."""

    def __init__(self, step: Step, action: Callable[[], None]) -> None:
        self._step, self._action, self._done = step, action, False

    def reached(self, step: Step, key: VersionKey) -> None:
        if step is self._step and not self._done:
            self._done = True
            self._action()


class Together:
    """Several committers take each step at the same moment."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)

    def reached(self, step: Step, key: VersionKey) -> None:
        self._barrier.wait(timeout=20)


@pytest.fixture
def scene(tmp_path: Path) -> CommitScene:
    return commit_scene(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def check_visible(scene: CommitScene, complete: VersionComplete) -> None:
    """The folder is whole, and what the event says."""
    assert complete.directory == str(scene.paths.final)
    manifest = verify_version(
        scene.paths.final, complete.manifest_digest, expected_version=complete.version
    )
    assert complete.version == KEY
    assert (complete.shards, complete.nbytes) == (len(manifest.shards), manifest.total_size)
    assert manifest.nonce == NONCE
    assert manifest.plan_digest == scene.plan.digest
    assert not scene.paths.partial.exists()
    index = json.loads((scene.paths.final / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == scene.plan.total_size
    assert index["weight_map"] == {
        tensor.name: shard.file for shard in manifest.shards for tensor in shard.tensors
    }
    assert {path.name for path in scene.paths.final.iterdir()} == {
        "config.json", "extra", INDEX_FILE, MANIFEST_FILE, *(e.file for e in scene.events),
    }  # fmt: skip


def nothing_visible(scene: CommitScene) -> bool:
    return not scene.paths.final.exists()


# ---- becoming visible


def test_a_commit_makes_a_whole_folder_visible(scene: CommitScene) -> None:
    complete = scene.committer().make_visible(scene.events)
    check_visible(scene, complete)


def test_a_second_commit_finds_the_first(scene: CommitScene) -> None:
    first = scene.committer().make_visible(scene.events)
    before = content(scene.paths.final)
    assert scene.committer().make_visible(scene.events) == first
    assert content(scene.paths.final) == before


def test_two_committers_at_the_same_moments(scene: CommitScene) -> None:
    """They meet before each step; whoever renames last finds the version visible."""
    steps = Together(2)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(scene.committer(steps).make_visible, scene.events) for _ in range(2)]
        first, second = (future.result(timeout=20) for future in futures)
    assert first == second
    check_visible(scene, first)


@pytest.mark.parametrize("step", COMMIT_STEPS, ids=lambda step: step.value)
def test_another_committer_is_done_while_one_waits_before_a_step(
    step: Step, scene: CommitScene
) -> None:
    done: list[VersionComplete] = []
    other = At(step, lambda: done.append(scene.committer().make_visible(scene.events)))
    mine = scene.committer(other).make_visible(scene.events)
    assert done == [mine]
    check_visible(scene, mine)


@pytest.mark.parametrize("step", COMMIT_STEPS, ids=lambda step: step.value)
def test_a_commit_after_a_crash_before_any_step(
    step: Step, scene: CommitScene, tmp_path: Path
) -> None:
    def crash() -> None:
        raise CrashError

    with pytest.raises(CrashError):
        scene.committer(At(step, crash)).make_visible(scene.events)
    assert nothing_visible(scene)
    complete = scene.committer().make_visible(scene.events)
    check_visible(scene, complete)
    other = commit_scene(tmp_path / "without a crash")
    untouched = other.committer().make_visible(other.events)
    assert untouched.manifest_digest == complete.manifest_digest
    assert content(other.paths.final) == content(scene.paths.final)


def test_files_of_another_life_do_not_become_visible(scene: CommitScene) -> None:
    partial = scene.paths.partial
    for name in ("old.safetensors", ".model.part", "extra/old.txt"):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text("of a stream that was lost")
    check_visible(scene, scene.committer().make_visible(scene.events))


# ---- what is missing or wrong


def test_a_table_that_is_missing(scene: CommitScene) -> None:
    file = scene.events[1].file
    (scene.paths.tables / f"{file}.json").unlink()
    with pytest.raises(CommitError, match="its table is not in the version's folder") as caught:
        scene.committer().make_visible(scene.events)
    assert file in str(caught.value)
    assert "writer=1" in str(caught.value)
    assert "same shared folder (--root)" in str(caught.value)
    assert nothing_visible(scene)


def test_a_table_that_was_changed(scene: CommitScene) -> None:
    table = scene.paths.tables / f"{scene.events[0].file}.json"
    table.write_bytes(table.read_bytes() + b" ")
    with pytest.raises(CommitError, match="not the one that was announced") as caught:
        scene.committer().make_visible(scene.events)
    assert str(table) in str(caught.value)
    assert "same number" in str(caught.value)
    assert nothing_visible(scene)


def test_a_table_that_is_none(scene: CommitScene) -> None:
    event = scene.events[0]
    (scene.paths.tables / f"{event.file}.json").write_bytes(b"{}")
    bent = event.model_copy(update={"table_digest": digest_of(b"{}")})
    with pytest.raises(CommitError, match="a shard's table cannot be read"):
        scene.committer().make_visible([bent, *scene.events[1:]])
    assert nothing_visible(scene)


def test_a_table_that_cannot_be_read_now(scene: CommitScene) -> None:
    table = scene.paths.tables / f"{scene.events[0].file}.json"
    table.unlink()
    table.mkdir()
    with pytest.raises(CommitError, match="cannot read a shard's table: Is a directory"):
        scene.committer().make_visible(scene.events)


def test_a_shard_of_another_size(scene: CommitScene) -> None:
    event = scene.events[0]
    (scene.paths.partial / event.file).write_bytes(b"short")
    with pytest.raises(
        CommitError, match=f"a shard has 5 bytes, its writer announced {event.nbytes}"
    ) as caught:
        scene.committer().make_visible(scene.events)
    assert event.file in str(caught.value)
    assert nothing_visible(scene)


def test_a_shard_that_is_gone(scene: CommitScene) -> None:
    (scene.paths.partial / scene.events[0].file).unlink()
    with pytest.raises(CommitError, match="a file of the version is gone") as caught:
        scene.committer().make_visible(scene.events)
    assert scene.events[0].file in str(caught.value)
    assert nothing_visible(scene)


def test_a_hidden_folder_that_goes_before_the_rename(scene: CommitScene) -> None:
    with pytest.raises(CommitError, match="its hidden folder is not whole"):
        scene.committer(At(Step.RENAME, lambda: discard(scene.paths))).make_visible(scene.events)
    assert nothing_visible(scene)


def test_an_origin_that_is_gone(scene: CommitScene) -> None:
    scene.origin.rename(scene.origin.with_name("moved"))
    with pytest.raises(OriginError):
        scene.committer().make_visible(scene.events)
    assert nothing_visible(scene)


# ---- the visible name is taken


def _a_file(scene: CommitScene) -> None:
    scene.paths.final.write_text("mine")


def _a_folder(scene: CommitScene) -> None:
    scene.paths.final.mkdir()
    (scene.paths.final / "mine.txt").write_text("mine")


def _another_lineage(scene: CommitScene) -> None:
    scene.committer(nonce="another trainer").make_visible(scene.events)
    scene.lay_out()


def _a_strange_manifest(scene: CommitScene) -> None:
    scene.paths.final.mkdir()
    (scene.paths.final / MANIFEST_FILE).write_text("{}")


@pytest.mark.parametrize(
    "taken", [_a_file, _a_folder, _another_lineage, _a_strange_manifest], ids=lambda f: f.__name__
)
def test_a_name_that_is_taken_is_not_overwritten(
    taken: Callable[[CommitScene], None], scene: CommitScene
) -> None:
    taken(scene)
    final = scene.paths.final
    before = content(final) if final.is_dir() else final.read_bytes()
    with pytest.raises(CommitError, match="visible name is taken by something else") as caught:
        scene.committer().make_visible(scene.events)
    assert str(final) in str(caught.value)
    assert "nothing was overwritten" in str(caught.value)
    assert (content(final) if final.is_dir() else final.read_bytes()) == before


def test_the_same_version_with_other_shards_is_something_else(scene: CommitScene) -> None:
    """Of the same trainer: the stream is the same, the bytes are not."""
    first = scene.committer().make_visible(scene.events)
    scene.lay_out()
    with pytest.raises(CommitError, match="taken by something else"):
        scene.committer().make_visible(scene.events[:-1])
    verify_version(scene.paths.final, first.manifest_digest)


def test_a_rename_that_fails_can_be_tried_again(
    scene: CommitScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path == scene.paths.partial:
            raise OSError(28, "No space left on device")
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        with pytest.raises(StorageError, match="cannot make a version visible"):
            scene.committer().make_visible(scene.events)
    check_visible(scene, scene.committer().make_visible(scene.events))


# ---- an aborted version


def test_withdraw_removes_what_is_hidden_and_what_is_visible(scene: CommitScene) -> None:
    scene.committer().make_visible(scene.events)
    scene.lay_out()
    for _ in range(2):
        withdraw(scene.paths, KEY, NONCE)
        assert list(scene.paths.final.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "nonce"),
    [
        (KEY, "another trainer"),
        (KEY.model_copy(update={"weight_version": 8}), NONCE),
        (KEY.model_copy(update={"run_id": "other"}), NONCE),
    ],
)
def test_withdraw_leaves_what_is_not_its_own(
    key: VersionKey, nonce: str, scene: CommitScene
) -> None:
    complete = scene.committer().make_visible(scene.events)
    withdraw(scene.paths, key, nonce)
    check_visible(scene, complete)


def test_withdraw_leaves_a_folder_without_a_manifest(scene: CommitScene) -> None:
    _a_folder(scene)
    withdraw(scene.paths, KEY, NONCE)
    assert content(scene.paths.final) == {"mine.txt": b"mine"}
    assert not scene.paths.partial.exists()


def test_withdraw_comes_before_the_rename(scene: CommitScene) -> None:
    """Whoever hides the version first wins: it does not become visible later."""
    steps = At(Step.RENAME, lambda: withdraw(scene.paths, KEY, NONCE))
    with pytest.raises(CommitError, match="a file of the version is gone"):
        scene.committer(steps).make_visible(scene.events)
    assert list(scene.paths.final.parent.iterdir()) == []


def test_withdraw_when_an_earlier_removal_was_killed(scene: CommitScene) -> None:
    scene.paths.removing.mkdir()
    (scene.paths.removing / "rest").write_text("half removed")
    withdraw(scene.paths, KEY, NONCE)
    assert list(scene.paths.final.parent.iterdir()) == []


def test_writers_that_withdraw_at_the_same_time(scene: CommitScene) -> None:
    scene.committer().make_visible(scene.events)
    scene.lay_out()
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(withdraw, scene.paths, KEY, NONCE) for _ in range(8)]
        for future in futures:
            future.result(timeout=20)
    assert list(scene.paths.final.parent.iterdir()) == []


def test_a_version_that_cannot_be_hidden(
    scene: CommitScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.committer().make_visible(scene.events)

    def refuse(_path: Path, _target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(StorageError, match="cannot hide an aborted version"):
            withdraw(scene.paths, KEY, NONCE)
    assert visible_manifest(scene.paths, KEY, NONCE) is not None


def test_discard_is_quiet_about_what_is_gone(scene: CommitScene) -> None:
    for _ in range(2):
        discard(scene.paths)
        assert list(scene.paths.final.parent.iterdir()) == []


def test_the_index_is_as_transformers_writes_it(scene: CommitScene) -> None:
    tables = [ShardTable.model_validate_json(shard.table) for shard in reversed(scene.shards)]
    text = index_of(tables).decode()
    assert text.startswith('{\n  "metadata": {\n    "total_size": ')
    assert text.endswith("}\n")
    names = list(json.loads(text)["weight_map"])
    assert names == sorted(names)
