"""Locations are read by pread; what is missing, cut or failing has a name."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from weightbus.schemas.errors import (
    SourceError,
    SourceMissingError,
    SourceTruncatedError,
    StorageError,
)
from weightbus.schemas.events import Location
from weightbus.writers.sources import SHM, SourceReader, path_of

WHERE = {"tensor": "decoder.w", "rank": 3, "chunk": 5, "sequence": 8}


@pytest.fixture
def reader() -> Iterator[SourceReader]:
    one = SourceReader()
    yield one
    one.close()


def read(reader: SourceReader, location: Location, offset: int, size: int) -> bytes:
    block = memoryview(bytearray(size))
    reader.read_into(location, offset, block, WHERE)
    return bytes(block)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a/b%20c", "/a/b c"),
        ("file://localhost/a", "/a"),
        ("shm://weightbus-run-a1-r0", "/dev/shm/weightbus-run-a1-r0"),
    ],
)
def test_uris_are_files(uri: str, path: str) -> None:
    assert path_of(uri) == Path(path)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/key", "file://elsewhere/a", "file:relative", "relative", "shm://", "shm:///a",
        "shm://..", "shm://.", "shm://a/b", "shm://a%2Fb", "shm://..%2Fetc%2Fpasswd",
    ],
)  # fmt: skip
def test_other_uris_are_refused(uri: str, reader: SourceReader) -> None:
    with pytest.raises(SourceError, match=r"known are file:///path and shm://name"):
        path_of(uri)
    with pytest.raises(SourceError, match="cannot read from"):
        read(reader, Location(uri=uri, offset=0, length=1), 0, 1)


def test_ranges_of_a_file_are_read(tmp_path: Path, reader: SourceReader) -> None:
    path = tmp_path / "with space"
    path.write_bytes(bytes(range(100)))
    location = Location(uri=path.as_uri(), offset=10, length=50)
    assert read(reader, location, 0, 50) == bytes(range(10, 60))
    assert read(reader, location, 49, 1) == bytes([59])
    assert read(reader, location, 50, 0) == b""


def test_shared_memory_is_read(reader: SourceReader) -> None:
    name = f"weightbus-test-{secrets.token_hex(8)}"
    (SHM / name).write_bytes(b"abcdef")
    try:
        assert read(reader, Location(uri=f"shm://{name}", offset=1, length=5), 1, 3) == b"cde"
    finally:
        (SHM / name).unlink()


def test_a_missing_file_is_named(tmp_path: Path, reader: SourceReader) -> None:
    location = Location(uri=(tmp_path / "gone").as_uri(), offset=0, length=1)
    with pytest.raises(SourceMissingError, match="the file of a chunk is not there") as info:
        read(reader, location, 0, 1)
    text = str(info.value)
    assert "tensor=decoder.w, rank=3, chunk=5, sequence=8, uri=file://" in text
    assert "a producer has ended" in text
    assert not info.value.retryable


def test_a_file_that_was_cut_is_named(tmp_path: Path, reader: SourceReader) -> None:
    path = tmp_path / "staged"
    path.write_bytes(b"x" * 100)
    location = Location(uri=path.as_uri(), offset=50, length=50)
    assert read(reader, location, 0, 50) == b"x" * 50
    with path.open("r+b") as file:
        file.truncate(80)
    with pytest.raises(SourceTruncatedError, match="ends at byte 80, 20 bytes too early") as info:
        read(reader, location, 0, 50)
    assert info.value.where["tensor"] == "decoder.w"


def test_a_tensor_outside_its_location_is_named(tmp_path: Path, reader: SourceReader) -> None:
    path = tmp_path / "staged"
    path.write_bytes(b"x" * 100)
    location = Location(uri=path.as_uri(), offset=0, length=50)
    with pytest.raises(SourceTruncatedError, match="bytes 45 to 55 of a location of 50"):
        read(reader, location, 45, 10)


def test_a_place_without_permission_is_named(tmp_path: Path, reader: SourceReader) -> None:
    location = Location(uri=tmp_path.as_uri(), offset=0, length=1)
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read(reader, location, 0, 1)


class Moody:
    """A place that gives single bytes and fails when told to."""

    def __init__(self) -> None:
        self.fails_with: int | None = None
        self.kept = False
        self.closed = False

    def read_into(self, offset: int, block: memoryview) -> int:
        if self.fails_with is not None:
            raise OSError(self.fails_with, os.strerror(self.fails_with))
        block[:1] = bytes([offset])
        return 1

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        del offset, nbytes

    def lasts(self) -> bool:
        return self.kept

    def close(self) -> None:
        self.closed = True


def test_another_scheme_is_one_function() -> None:
    places: list[Moody] = []

    def opener(uri: str) -> Moody:
        assert uri == "s3://bucket/key"
        places.append(Moody())
        return places[-1]

    reader = SourceReader({"s3": opener})
    location = Location(uri="s3://bucket/key", offset=7, length=3)
    assert read(reader, location, 0, 3) == bytes([7, 8, 9])
    assert read(reader, location, 1, 1) == bytes([8])
    assert len(places) == 1
    assert reader.view(location, 0, 1, WHERE) is None
    places[0].kept = True
    reader.let_go()
    assert not places[0].closed
    places[0].kept = False
    reader.let_go()
    assert places[0].closed
    read(reader, location, 0, 1)
    places[1].kept = True
    reader.close()
    assert places[1].closed
    assert len(places) == 2


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, StorageError), (errno.EACCES, SourceError)]
)
def test_a_failing_disk_is_worth_another_try(number: int, kind: type[Exception]) -> None:
    place = Moody()
    reader = SourceReader({"s3": lambda _uri: place})
    place.fails_with = number
    location = Location(uri="s3://bucket/key", offset=0, length=3)
    with pytest.raises(kind, match="a chunk cannot be read") as info:
        read(reader, location, 0, 3)
    assert type(info.value) is kind
    place.fails_with = None
    assert read(reader, location, 0, 3) == bytes([0, 1, 2])


def test_closing_lets_a_removed_staging_file_go(tmp_path: Path, reader: SourceReader) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"old")
    location = Location(uri=path.as_uri(), offset=0, length=3)
    read(reader, location, 0, 3)
    assert str(path) in open_files()
    path.unlink()
    reader.close()
    assert not any(str(path) in name for name in open_files())
    path.write_bytes(b"new")
    assert read(reader, location, 0, 3) == b"new"


def open_files() -> list[str]:
    """What this process has open."""
    names: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(entry.readlink()))
        except OSError:
            continue  # the listing's own
    return names
