"""Shard files: their size from the start, any order of writes, named failures, no half file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from weightbus.schemas.errors import CommitError, StorageError, VersionError
from weightbus.writers import shard_file
from weightbus.writers.shard_file import WRITE_BEHIND_BYTES, ShardFile, storage_error


def failing(number: int) -> Callable[..., int]:
    def fail(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_it_has_its_size_and_its_blocks_at_once(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "s", 1_000_000, b"head", write_behind=False)
    status = (tmp_path / "s").stat()
    assert status.st_size == 1_000_000
    assert status.st_blocks * 512 >= 1_000_000
    file.close()


def test_writes_come_in_any_order(tmp_path: Path) -> None:
    file = ShardFile(tmp_path / "s", 12, b"head", write_behind=True)
    file.write(8, b"last")
    file.write(4, memoryview(b"mid."))
    file.sync()
    file.close()
    file.close()
    assert (tmp_path / "s").read_bytes() == b"headmid.last"


@pytest.mark.parametrize("size", [5, 12, 50])
def test_what_a_killed_writer_left_is_taken_over(size: int, tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"?" * size)
    file = ShardFile(tmp_path / "s", 12, b"head", write_behind=False)
    file.write(4, b"rest....")
    file.close()
    assert (tmp_path / "s").read_bytes() == b"headrest...."


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def three(file: int, data: memoryview, offset: int) -> int:
        return real(file, data[:3], offset)

    monkeypatch.setattr(os, "pwrite", three)
    file = ShardFile(tmp_path / "s", 14, b"head", write_behind=False)
    file.write(4, b"0123456789")
    file.close()
    assert (tmp_path / "s").read_bytes() == b"head0123456789"


def test_a_full_disk_shows_before_the_work_and_gets_its_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(StorageError) as info:
        ShardFile(tmp_path / "s", 1000, b"head", write_behind=False)
    text = str(info.value)
    assert "cannot allocate 1000 bytes for a shard: No space left on device" in text
    assert f"file={tmp_path / 's'}" in text
    assert "ENOSPC" in text
    assert "free space" in text
    assert info.value.retryable
    assert not (tmp_path / "s").exists()


def test_a_file_system_that_cannot_allocate_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    file = ShardFile(tmp_path / "s", 1000, b"head", write_behind=False)
    file.close()
    assert (tmp_path / "s").stat().st_size == 1000


FAILURES = [
    (errno.ENOSPC, StorageError, "free space or remount the disk"),
    (errno.EIO, StorageError, "free space or remount the disk"),
    (errno.EROFS, StorageError, "free space or remount the disk"),
    (errno.EACCES, CommitError, "give the writer a folder that it may write to"),
]
CALLS = [
    ("open", "cannot create a shard file"),
    ("ftruncate", "cannot allocate 12 bytes for a shard"),
    ("posix_fallocate", "cannot allocate 12 bytes for a shard"),
    ("pwrite", "cannot write a shard"),
]


@pytest.mark.parametrize(("number", "kind", "next_step"), FAILURES)
@pytest.mark.parametrize(("function", "what"), CALLS)
def test_every_refusal_names_the_file_and_what_to_do(
    function: str, what: str, number: int, kind: type[VersionError], next_step: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(number))
        with pytest.raises(kind) as info:
            ShardFile(path, 12, b"head", write_behind=False)
    error = info.value
    assert type(error) is kind
    assert error.what == f"{what}: {os.strerror(number)}"
    assert error.where == {"file": path, "errno": errno.errorcode[number]}
    assert next_step in error.next_step
    # The next try finds nothing that stops it.
    ShardFile(path, 12, b"head", write_behind=False).close()
    assert path.read_bytes() == b"head" + bytes(8)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failing_write_is_worth_another_try(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ShardFile(tmp_path / "s", 12, b"head", write_behind=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(number))
        with pytest.raises(StorageError, match="cannot write a shard"):
            file.write(4, b"rest....")
    file.write(4, b"rest....")
    file.close()
    assert (tmp_path / "s").read_bytes() == b"headrest...."


def test_a_failing_header_closes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "pwrite", failing(errno.EIO))
    with pytest.raises(StorageError, match="cannot write a shard"):
        ShardFile(tmp_path / "s", 12, b"head", write_behind=False)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_failing_sync_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ShardFile(tmp_path / "s", 12, b"head", write_behind=False)
    monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
    with pytest.raises(StorageError, match="cannot make a shard durable"):
        file.sync()
    file.close()


def test_a_folder_that_is_not_there_is_no_matter_of_waiting(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="cannot create a shard file: No such file") as info:
        ShardFile(tmp_path / "gone" / "s", 12, b"head", write_behind=False)
    assert not info.value.retryable
    assert "a folder that it may write to" in str(info.value)


def test_permissions_are_no_matter_of_waiting() -> None:
    error = storage_error(PermissionError(errno.EACCES, "Permission denied"), Path("/x"), "write")
    assert type(error) is CommitError
    assert "EACCES" in str(error)


@pytest.mark.parametrize(("write_behind", "calls"), [(True, 2), (False, 0)])
def test_the_disk_begins_before_the_end(
    write_behind: bool, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, ...]] = []

    class Library:
        def sync_file_range(self, *arguments: object) -> int:
            seen.append(arguments)
            return -1  # not known on this system: only a hint

    monkeypatch.setattr(shard_file, "_libc", Library)
    block = memoryview(bytes(WRITE_BEHIND_BYTES // 4))
    file = ShardFile(tmp_path / "s", 9 * len(block), b"", write_behind=write_behind)
    for number in range(9):
        file.write(number * len(block), block)
    file.close()
    assert len(seen) == calls
