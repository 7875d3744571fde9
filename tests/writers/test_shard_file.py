"""A shard file: allocated whole, written in any order, and what a bad disk says."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from weightbus.schemas.errors import CommitError, StorageError
from weightbus.writers.shard_file import WRITE_BEHIND_BYTES, ShardFile, storage_error

HEADER = b"header"


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    def fail(*_: object) -> Any:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_written_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    file = ShardFile(path, 20, HEADER, write_behind=True)
    assert path.stat().st_size == 20
    assert path.stat().st_blocks > 0
    file.write(13, b"3333333")
    file.write(6, memoryview(b"1111111"))
    file.write(20, b"")
    file.sync()
    file.close()
    file.close()
    assert path.read_bytes() == b"header11111113333333"


def test_a_file_of_another_size_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"x" * 100)
    ShardFile(path, 8, HEADER, write_behind=False).close()
    assert path.read_bytes() == b"headerxx"


def test_writing_behind(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "shard", 2 * WRITE_BEHIND_BYTES, HEADER, write_behind=True)
    block = bytes(4 * 1024 * 1024)
    for at in range(0, 2 * WRITE_BEHIND_BYTES - len(block), len(block)):
        file.write(at, block)
    file.sync()
    file.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_that_cannot_allocate(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "posix_fallocate", code)
    file = ShardFile(tmp_path / "shard", 10, HEADER, write_behind=False)
    file.write(6, b"1234")
    file.close()
    assert (tmp_path / "shard").read_bytes() == b"header1234"


def test_a_full_disk_shows_before_the_work_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "posix_fallocate", errno.ENOSPC)
    before = open_descriptors()
    with pytest.raises(StorageError, match="cannot allocate 1000 bytes for a shard: No space"):
        ShardFile(tmp_path / "shard", 1000, HEADER, write_behind=False)
    assert list(tmp_path.iterdir()) == []
    assert open_descriptors() == before


def test_a_header_that_cannot_be_written_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "pwrite", errno.EDQUOT)
    before = open_descriptors()
    with pytest.raises(StorageError, match="cannot write a shard") as error:
        ShardFile(tmp_path / "shard", 1000, HEADER, write_behind=False)
    assert "the writer goes on by itself" in str(error.value)
    assert open_descriptors() == before


def test_a_sync_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile(tmp_path / "shard", 10, HEADER, write_behind=False)
    refuse(monkeypatch, "fdatasync", errno.EIO)
    with pytest.raises(StorageError, match="cannot make a shard durable") as error:
        file.sync()
    assert error.value.retryable
    file.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="cannot create a shard file: No such file") as error:
        ShardFile(tmp_path / "nowhere" / "shard", 10, HEADER, write_behind=False)
    assert "give the writer a folder that it may write to" in str(error.value)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, StorageError), (errno.EROFS, StorageError), (errno.EIO, StorageError),
     (errno.ESTALE, StorageError), (errno.EACCES, CommitError), (errno.ENOTDIR, CommitError),
     (errno.ENOENT, CommitError), (errno.EFBIG, CommitError)],
)  # fmt: skip
def test_which_errors_pass(code: int, kind: type[Exception], tmp_path: Path) -> None:
    error = storage_error(OSError(code, os.strerror(code)), tmp_path, "try")
    assert type(error) is kind
    assert f"errno={errno.errorcode[code]}" in str(error)
    assert str(tmp_path) in str(error)
