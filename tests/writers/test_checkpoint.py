"""A writer's checkpoint is replaced whole, and anything that is none counts as none."""

from __future__ import annotations

from pathlib import Path

import pytest
from weightbus.writers.checkpoint import (
    Checkpoint,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
)

ONE = Checkpoint(sequence=42, attempt=3, nonce="abc")


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, "run", "writer-0-of-2")
    assert load_checkpoint(path) is None
    save_checkpoint(path, ONE)
    assert load_checkpoint(path) == ONE
    later = ONE.model_copy(update={"sequence": 50})
    save_checkpoint(path, later)
    assert load_checkpoint(path) == later
    assert [entry.name for entry in path.parent.iterdir()] == [".writer-0-of-2.json"]


def test_what_a_kill_left_is_taken_over(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, "run", "writer-0-of-2")
    path.parent.mkdir()
    path.with_name(f"{path.name}.tmp").write_text('{"sequ')
    save_checkpoint(path, ONE)
    assert load_checkpoint(path) == ONE
    assert [entry.name for entry in path.parent.iterdir()] == [".writer-0-of-2.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe",
        b'{"sequence": -1, "attempt": 0, "nonce": ""}',
        b'{"sequence": "7", "attempt": 0, "nonce": ""}',
        b'{"schema_version": 2, "sequence": 7, "attempt": 0, "nonce": ""}',
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_counts_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(content)
    assert load_checkpoint(path) is None


def test_a_folder_in_its_place_counts_as_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None


def test_writers_do_not_share_one(tmp_path: Path) -> None:
    paths = {
        checkpoint_path(tmp_path, run, name)
        for run in ("a", "b")
        for name in ("writer-0-of-2", "writer-1-of-2", "writer-0-of-1")
    }
    assert len(paths) == 6
