"""A writer's checkpoint: what cannot be read is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from weightbus.writers.checkpoint import (
    Checkpoint,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
)

CHECKPOINT = Checkpoint(sequence=7, attempt=2, nonce="n")


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, "run", "writer-0-of-2")
    assert path == tmp_path / "run" / ".writer-0-of-2.json"
    assert load_checkpoint(path) is None
    for sequence in (7, 9):
        saved = CHECKPOINT.model_copy(update={"sequence": sequence})
        save_checkpoint(path, saved)
        assert load_checkpoint(path) == saved
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sequence": -1}', '{"schema_version": 2}'])
def test_what_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_text(text)
    assert load_checkpoint(path) is None


def test_a_folder_in_its_place_is_none_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir()
    assert load_checkpoint(path) is None
    with pytest.raises(OSError, match="directory"):
        save_checkpoint(path, CHECKPOINT)
    assert path.is_dir()


def test_what_a_killed_save_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    (tmp_path / "checkpoint.tmp").write_text("half of")
    save_checkpoint(path, CHECKPOINT)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]
