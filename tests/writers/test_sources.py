"""Reading at locations: what is there, what is not, and what cannot be read."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weightbus.schemas.errors import (
    SourceError,
    SourceMissingError,
    SourceTruncatedError,
    StorageError,
)
from weightbus.schemas.events import Location
from weightbus.writers.sources import SHM, LocalFile, SourceReader, path_of

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


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceMissingError, match="the file of a chunk is not there") as error:
        read(SourceReader(), location(tmp_path / "gone"), 0, 1)
    for text in ("tensor=w", "rank=3", "gone", "taken its staging along"):
        assert text in str(error.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read") as error:
        read(SourceReader(), location(tmp_path), 0, 1)
    assert not isinstance(error.value, SourceMissingError)


def test_a_file_that_ends_too_early(file: Path) -> None:
    os.truncate(file, 1000)
    with pytest.raises(SourceTruncatedError, match="ends at byte 1000, 24 bytes too early"):
        read(SourceReader(), location(file), 0, 1024)


def test_more_than_the_location_has(file: Path) -> None:
    with pytest.raises(SourceTruncatedError, match="bytes 90 to 110 of a location of 100") as error:
        read(SourceReader(), location(file, 0, 100), 90, 20)
    assert "a tensor that its chunk does not hold" in str(error.value)
    with pytest.raises(SourceTruncatedError):
        SourceReader().view(location(file, 0, 100), 90, 20, WHERE)


class Failing:
    """A place that fails once, then gives its bytes one by one."""

    def __init__(self, code: int) -> None:
        self.code = code

    def read_into(self, offset: int, block: memoryview) -> int:
        code, self.code = self.code, 0
        if code:
            raise OSError(code, os.strerror(code))
        block[:1] = DATA[offset : offset + 1]
        return 1

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        return None

    def lasts(self) -> bool:
        return False

    def close(self) -> None:
        return


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_place_that_fails(code: int) -> None:
    reader = SourceReader({"odd": lambda _: Failing(code)})
    place = Location(uri="odd://place", offset=5, length=100)
    kind = SourceError if code == errno.EACCES else StorageError
    with pytest.raises(kind, match="a chunk cannot be read: "):
        read(reader, place, 0, 9)
    assert read(reader, place, 0, 9) == DATA[5:14]  # short reads are read on


@pytest.mark.parametrize(
    ("uri", "path"),
    [("file:///a/b", "/a/b"), ("file://localhost/a%20b", "/a b"), ("shm://name", "/dev/shm/name"),
     ("shm://Weightbus-RUN_1", "/dev/shm/Weightbus-RUN_1")],
)  # fmt: skip
def test_uris(uri: str, path: str) -> None:
    assert path_of(uri) == Path(path)


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket/key", "file://host/a", "file:a", "shm://", "shm://..", "shm://.", "shm://a/b",
     "shm:///a", "shm://a%2Fb", "shm://%2e%2e", "", "/a/b"],
)  # fmt: skip
def test_uris_that_mean_no_file_here(uri: str) -> None:
    with pytest.raises(SourceError, match="known are file:///path and shm://name"):
        path_of(uri)


def test_an_open_file_is_closed_once(file: Path) -> None:
    place = LocalFile(file)
    place.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        place.read_into(0, memoryview(bytearray(1)))
