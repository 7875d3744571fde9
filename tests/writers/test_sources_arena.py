"""Staging arenas are looked at where they lie; files are read, and closed after each version."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weightbus.schemas.errors import (
    SourceTruncatedError,
)
from weightbus.schemas.events import Location
from weightbus.writers.sources import SHM, SourceReader

WHERE = {"tensor": "w", "rank": 3}
DATA = bytes(range(256)) * 40


def location(path: Path, offset: int = 0, length: int = len(DATA)) -> Location:
    return Location(uri=path.as_uri(), offset=offset, length=length)


def read(reader: SourceReader, place: Location, offset: int, nbytes: int) -> bytes:
    block = memoryview(bytearray(nbytes))
    reader.read_into(place, offset, block, WHERE)
    return bytes(block)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "with space %41 and ü"
    path.write_bytes(DATA)
    return path


@contextmanager
def arena(data: bytes) -> Generator[str]:
    """A file in shared memory."""
    name = f"weightbus-test-{secrets.token_hex(8)}"
    (SHM / name).write_bytes(data)
    try:
        yield name
    finally:
        (SHM / name).unlink(missing_ok=True)


def open_files() -> set[str]:
    found: set[str] = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except FileNotFoundError:
            continue
    return found


def test_ranges_of_a_file(file: Path) -> None:
    reader = SourceReader()
    assert read(reader, location(file), 0, len(DATA)) == DATA
    assert read(reader, location(file, 100, 500), 10, 20) == DATA[110:130]
    assert read(reader, location(file), len(DATA), 0) == b""
    assert reader.view(location(file), 0, 10, WHERE) is None  # a file is never looked at
    assert str(file) in open_files()
    reader.close()
    assert str(file) not in open_files()
    assert read(reader, location(file), 0, 4) == DATA[:4]  # it opens again
    reader.let_go()
    assert str(file) not in open_files()


def test_ranges_of_shared_memory() -> None:
    with arena(DATA) as name:
        reader = SourceReader()
        place = Location(uri=f"shm://{name}", offset=100, length=500)
        assert read(reader, place, 10, 20) == DATA[110:130]
        view = reader.view(place, 10, 20, WHERE)
        assert view is not None
        assert bytes(view) == DATA[110:130]
        assert view.readonly
        reader.let_go()
        assert str(SHM / name) in open_files()  # it is there for the next version
        del view
        (SHM / name).unlink()
        reader.let_go()
        assert not any(name in path for path in open_files())
        reader.close()


def test_shared_memory_that_is_too_short_or_empty() -> None:
    with arena(DATA[:50]) as name, arena(b"") as empty:
        reader = SourceReader()
        for uri, end in ((f"shm://{name}", 50), (f"shm://{empty}", 0)):
            place = Location(uri=uri, offset=0, length=100)
            assert reader.view(place, 0, 60, WHERE) is None
            with pytest.raises(SourceTruncatedError, match=f"the file ends at byte {end}"):
                read(reader, place, 0, 60)
        reader.close()


def test_an_arena_that_was_cut_after_it_was_opened() -> None:
    """No SIGBUS: its length is looked at before each view."""
    with arena(DATA) as name:
        reader = SourceReader()
        place = Location(uri=f"shm://{name}", offset=0, length=len(DATA))
        assert reader.view(place, 0, 100, WHERE) is not None
        os.truncate(SHM / name, 10)
        assert reader.view(place, 0, 100, WHERE) is None
        with pytest.raises(SourceTruncatedError, match="the file ends at byte 10"):
            read(reader, place, 0, 100)
        reader.close()
