"""Staging arenas in shared memory: looked at in place, kept while they exist, never trusted."""

import os
import secrets
from collections.abc import Generator
from pathlib import Path

import pytest
from weightbus.schemas.errors import SourceMissingError, SourceTruncatedError
from weightbus.schemas.events import Location
from weightbus.writers.sources import SHM, SourceReader

WHERE = {"tensor": "t", "rank": 1}
DATA = bytes(range(200))


@pytest.fixture
def arena() -> Generator[Path]:
    path = SHM / f"weightbus-test-{secrets.token_hex(6)}"
    path.write_bytes(DATA)
    yield path
    path.unlink(missing_ok=True)


def _location(arena: Path, offset: int = 50, length: int = 100) -> Location:
    return Location(uri=f"shm://{arena.name}", offset=offset, length=length)


def test_it_shows_the_bytes_where_they_lie(arena: Path) -> None:
    reader = SourceReader()
    view = reader.view(_location(arena), 10, 30, WHERE)
    assert view is not None
    assert bytes(view) == DATA[60:90]
    with arena.open("r+b") as file:
        file.seek(60)
        file.write(b"\xff")
    assert view[0] == 0xFF, "a copy, not a view"
    assert view.readonly
    reader.close()


def test_reading_gives_the_same_bytes(arena: Path) -> None:
    reader = SourceReader()
    block = bytearray(30)
    reader.read_into(_location(arena), 10, memoryview(block), WHERE)
    assert block == DATA[60:90]
    reader.close()


def test_a_file_is_only_ever_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    reader = SourceReader()
    assert (
        reader.view(Location(uri=f"file://{tmp_path}/a", offset=0, length=9), 0, 9, WHERE) is None
    )
    reader.close()


def test_an_arena_that_somebody_cut_is_an_error_and_not_a_signal(arena: Path) -> None:
    reader = SourceReader()
    assert reader.view(_location(arena), 0, 100, WHERE) is not None
    os.truncate(arena, 120)
    assert reader.view(_location(arena), 0, 100, WHERE) is None
    with pytest.raises(SourceTruncatedError, match="30 bytes too early"):
        reader.read_into(_location(arena), 0, memoryview(bytearray(100)), WHERE)
    reader.close()


@pytest.mark.parametrize("nbytes", [101, 10**9])
def test_a_tensor_that_leaves_its_chunk_is_named(nbytes: int, arena: Path) -> None:
    reader = SourceReader()
    with pytest.raises(SourceTruncatedError, match="of a location of 100") as caught:
        reader.view(_location(arena), 0, nbytes, WHERE)
    assert caught.value.where["tensor"] == "t"
    reader.close()


def test_it_is_kept_from_version_to_version_until_its_producer_removes_it(arena: Path) -> None:
    reader = SourceReader()
    assert reader.view(_location(arena), 0, 1, WHERE) is not None
    opened = _mappings(arena)
    assert opened == 1
    reader.let_go()
    assert _mappings(arena) == opened
    arena.unlink()
    reader.let_go()
    assert _mappings(arena) == 0
    with pytest.raises(SourceMissingError):
        reader.view(_location(arena), 0, 1, WHERE)


def test_an_arena_of_the_same_name_is_another_one(arena: Path) -> None:
    reader = SourceReader()
    assert reader.view(_location(arena), 0, 1, WHERE) is not None
    arena.unlink()
    arena.write_bytes(bytes(200))
    reader.let_go()
    view = reader.view(_location(arena), 10, 1, WHERE)
    assert view is not None
    assert bytes(view) == b"\0"
    reader.close()


def test_an_empty_arena_has_nothing_to_show(arena: Path) -> None:
    arena.write_bytes(b"")
    reader = SourceReader()
    assert reader.view(_location(arena), 0, 1, WHERE) is None
    reader.close()


def _mappings(arena: Path) -> int:
    return Path("/proc/self/maps").read_text().count(arena.name)
