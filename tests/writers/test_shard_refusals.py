"""Every call by which a shard reaches the disk, refused: the file, the reason, what to do now."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from weightbus.schemas.errors import CommitError, StorageError, VersionError
from weightbus.writers.shard_file import ShardFile

MENDED = "free space or remount the disk; the writer goes on by itself"
OTHER_FOLDER = "give the writer a folder that it may write to"
REASONS: list[tuple[int, type[VersionError], str]] = [
    (errno.ENOSPC, StorageError, MENDED),
    (errno.EDQUOT, StorageError, MENDED),
    (errno.EIO, StorageError, MENDED),
    (errno.EROFS, StorageError, MENDED),
    (errno.EACCES, CommitError, OTHER_FOLDER),
]
CALLS = [
    ("open", "create a shard file"),
    ("ftruncate", "allocate 12 bytes for a shard"),
    ("posix_fallocate", "allocate 12 bytes for a shard"),
    ("pwrite", "write a shard"),
    ("fdatasync", "make a shard durable"),
]


def write_one(path: Path) -> None:
    """A whole shard."""
    file = ShardFile(path, 12, b"head", write_behind=True)
    try:
        file.write(8, b"last")
        file.write(4, b"mid.")
        file.sync()
    finally:
        file.close()


@pytest.mark.parametrize(("number", "kind", "next_step"), REASONS)
@pytest.mark.parametrize(("function", "doing"), CALLS)
def test_it_is_named_and_the_next_try_finds_nothing_in_its_way(
    function: str, doing: str, number: int, kind: type[VersionError], next_step: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "shard"
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        with pytest.raises(VersionError) as info:
            write_one(path)
    error = info.value
    assert type(error) is kind
    assert error.what == f"cannot {doing}: {os.strerror(number)}"
    assert error.where == {"file": path, "errno": errno.errorcode[number]}
    assert error.next_step == next_step
    assert error.retryable == (kind is StorageError)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
    write_one(path)
    assert path.read_bytes() == b"headmid.last"


@pytest.mark.parametrize("function", ["ftruncate", "posix_fallocate"])
def test_what_a_full_disk_gave_is_given_back(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "shard").write_bytes(b"left by a killed writer")
    monkeypatch.setattr(os, function, refuse)
    with pytest.raises(StorageError, match="cannot allocate 12 bytes"):
        write_one(tmp_path / "shard")
    assert list(tmp_path.iterdir()) == []
