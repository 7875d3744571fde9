"""Where versions lie, and that no writer may write into, beside or around its origin."""

from __future__ import annotations

from pathlib import Path

import pytest
from weightbus.schemas.errors import OutputFolderError
from weightbus.schemas.events import VersionKey
from weightbus.writers.paths import VersionPaths, check_apart, hidden_folders


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "origin"
    folder.mkdir(parents=True)
    return folder


def refused(root: Path, origin: Path, relation: str) -> None:
    with pytest.raises(OutputFolderError) as info:
        check_apart(root, origin)
    error = info.value
    assert error.what == f"the output folder {relation} the origin checkpoint"
    assert error.where == {"root": root.resolve(), "origin": origin.resolve()}
    assert "--root" in error.next_step
    assert not error.retryable


def test_folders_of_their_own_are_fine(origin: Path, tmp_path: Path) -> None:
    check_apart(tmp_path / "versions", origin)
    check_apart(origin.parent / "versions", origin)
    check_apart(origin.parent / "origin-2", origin)  # begins with the same letters


def test_the_origin_itself_is_refused(origin: Path) -> None:
    refused(origin, origin, "is")
    refused(origin.parent / "." / "x" / ".." / "origin", origin, "is")


def test_a_folder_inside_the_origin_is_refused(origin: Path) -> None:
    refused(origin / "versions" / "deep", origin, "lies inside")


def test_a_folder_around_the_origin_is_refused(origin: Path, tmp_path: Path) -> None:
    refused(origin.parent, origin, "contains")
    refused(tmp_path, origin, "contains")


def test_links_do_not_hide_it(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "same").symlink_to(origin)
    (tmp_path / "around").symlink_to(origin.parent)
    refused(tmp_path / "same", origin, "is")
    refused(origin, tmp_path / "same", "is")
    refused(tmp_path / "same" / "not-yet-there", origin, "lies inside")
    refused(tmp_path / "around", origin, "contains")
    refused(origin.parent, tmp_path / "same", "contains")


def test_a_link_inside_the_origin_that_leads_away_is_fine(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (origin / "out").symlink_to(tmp_path / "versions")
    check_apart(origin / "out", origin)


def test_relative_paths_are_compared_too(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(Path("models/origin/out"), origin, "lies inside")
    refused(Path(), origin, "contains")
    check_apart(Path("versions"), origin)


@pytest.mark.parametrize(
    ("attempt", "version", "folder", "name"),
    [
        (1, 7, "attempt_0001", "weight_v000007"),
        (12345, 1234567, "attempt_12345", "weight_v1234567"),
    ],
)
def test_a_version_has_one_visible_folder_and_three_hidden_ones_beside_it(
    attempt: int, version: int, folder: str, name: str
) -> None:
    key = VersionKey(run_id="run", attempt=attempt, weight_version=version)
    paths = VersionPaths.of(Path("/root"), key)
    parent = Path("/root/run") / folder
    assert paths.final == parent / name
    assert paths.partial == parent / f".{name}.partial"
    assert paths.tables == parent / f".{name}.tables"
    assert paths.removing == parent / f".{name}.removing"


def test_hidden_folders_are_found_with_their_versions(tmp_path: Path) -> None:
    wanted: list[tuple[VersionKey, Path]] = []
    for attempt, version in ((1, 0), (2, 7), (12345, 1234567)):
        key = VersionKey(run_id="run", attempt=attempt, weight_version=version)
        paths = VersionPaths.of(tmp_path, key)
        paths.final.mkdir(parents=True)
        for hidden in (paths.partial, paths.tables, paths.removing):
            hidden.mkdir()
            wanted.append((key, hidden))
    other = VersionPaths.of(tmp_path, VersionKey(run_id="other", attempt=1, weight_version=0))
    other.partial.mkdir(parents=True)
    assert sorted(hidden_folders(tmp_path, "run"), key=lambda found: found[1]) == sorted(
        wanted, key=lambda found: found[1]
    )


@pytest.mark.parametrize(
    "name",
    [
        "attempt_0001/.weight_v07.partial", "attempt_0001/.weight_v000007",
        "attempt_0001/.weight_v000007.backup", "attempt_0001/.weight_v000007.partial.old",
        "attempt_1/.weight_v000007.partial", "attempt_0001x/.weight_v000007.partial",
        ".weight_v000007.partial", "deeper/attempt_0001/.weight_v000007.partial",
    ],
)  # fmt: skip
def test_folders_that_are_not_ours_are_left_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    assert hidden_folders(tmp_path, "run") == []


def test_a_run_that_never_was_has_none(tmp_path: Path) -> None:
    assert hidden_folders(tmp_path, "run") == []
