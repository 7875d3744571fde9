"""What is copied beside the weights, and how a small file is written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import CommitError, OriginError, StorageError
from weightbus.schemas.manifest import Asset
from weightbus.writers.assets import (
    AssetSource,
    copy_asset,
    list_assets,
    make_folders,
    sync_folder,
    write_file,
)

KEPT = {
    "config.json": "{}",
    "generation_config.json": "{}",
    "tokenizer.json": "{}",
    "tokenizer.model": "spm",
    "chat_template.jinja": "{{ x }}",
    "modeling_own.py": "pass",
    "1_Pooling/config.json": "{}",
    "processor/deep/preprocessor_config.json": "{}",
    "LICENSE": "text",
}
LEFT = {
    "model-00001-of-00001.safetensors": "w",
    "model.safetensors.index.json": "{}",
    "pytorch_model.bin": "w",
    "pytorch_model.bin.index.json": "{}",
    "consolidated.pth": "w",
    "old.pt": "w",
    "model.gguf": "w",
    "processor/weights.safetensors": "w",
    "manifest.json": "{}",
    ".gitattributes": "x",
    ".git/config": "x",
    ".cache/huggingface/a.json": "x",
}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for name, text in {**KEPT, **LEFT}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return folder


def test_everything_but_weights_indices_and_hidden_files_is_listed(origin: Path) -> None:
    found = list_assets(origin)
    assert [asset.path for asset in found] == sorted(KEPT)
    assert all(asset.file == origin / asset.path for asset in found)


def test_a_link_to_a_file_stands_for_its_content(
    origin: Path, tmp_path: Path, scratch: Path
) -> None:
    """A download cache holds links to files that are named by their content."""
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_text("vocabulary")
    (origin / "vocab.txt").symlink_to(blob)
    (origin / "weights.safetensors").symlink_to(blob)
    linked = [asset for asset in list_assets(origin) if asset.path == "vocab.txt"]
    assert len(linked) == 1
    assert all(asset.path != "weights.safetensors" for asset in list_assets(origin))
    out = tmp_path / "out"
    out.mkdir()
    copy_asset(linked[0], out, scratch, durable=False)
    assert not (out / "vocab.txt").is_symlink()
    assert (out / "vocab.txt").read_text() == "vocabulary"


def test_a_folder_that_is_a_link_itself_is_followed(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(origin)
    assert [asset.path for asset in list_assets(tmp_path / "alias")] == sorted(KEPT)


def test_a_sub_folder_that_is_a_link_is_refused(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (origin / "extra").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OriginError, match="a sub-folder of the origin checkpoint is a link") as it:
        list_assets(origin)
    assert it.value.where["folder"] == origin.resolve() / "extra"


def test_a_link_that_leads_nowhere_is_refused(origin: Path) -> None:
    (origin / "tokenizer_config.json").symlink_to("../blobs/gone")
    with pytest.raises(OriginError, match="a link that leads nowhere") as info:
        list_assets(origin)
    assert "tokenizer_config.json" in str(info.value)
    assert "download the checkpoint again" in str(info.value)


def test_an_origin_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match="cannot be listed: No such file"):
        list_assets(tmp_path / "gone")


def test_a_copy_says_its_path_size_and_digest(origin: Path, tmp_path: Path, scratch: Path) -> None:
    big = os.urandom(3 * 1024 * 1024 + 7)
    (origin / "processor/deep/preprocessor_config.json").write_bytes(big)
    out = tmp_path / "out"
    out.mkdir()
    path = "processor/deep/preprocessor_config.json"
    for _ in range(2):  # a second committer does the same
        made = copy_asset(AssetSource(origin / path, path), out, scratch, durable=True)
        assert made == Asset(path=path, nbytes=len(big), digest=digest_of(big))
        assert (out / path).read_bytes() == big
    assert list(scratch.iterdir()) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(OriginError, match="cannot be read: No such file") as info:
        copy_asset(AssetSource(tmp_path / "gone", "gone"), tmp_path, scratch, durable=False)
    assert info.value.where["file"] == tmp_path / "gone"


def test_a_folder_that_another_has_renamed_is_not_made_again(
    origin: Path, tmp_path: Path, scratch: Path
) -> None:
    path = "1_Pooling/config.json"
    with pytest.raises(FileNotFoundError):
        copy_asset(AssetSource(origin / path, path), tmp_path / "out", scratch, durable=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(FileNotFoundError):
        make_folders(tmp_path / "out", tmp_path / "out" / "a" / "b")


def test_a_file_is_whole_or_not_there(tmp_path: Path, scratch: Path) -> None:
    class PullThePlugError(Exception):
        pass

    def data() -> Iterator[bytes]:
        yield b"half"
        assert not (tmp_path / "file").exists()
        raise PullThePlugError

    with pytest.raises(PullThePlugError):
        write_file(tmp_path / "file", data(), scratch=scratch, durable=False)
    assert not (tmp_path / "file").exists()
    write_file(tmp_path / "file", [b"one ", b"two"], scratch=scratch, durable=True)
    assert (tmp_path / "file").read_bytes() == b"one two"
    write_file(tmp_path / "file", [b"three"], scratch=scratch, durable=False)
    assert (tmp_path / "file").read_bytes() == b"three"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageError), (errno.EACCES, CommitError)]
)
def test_a_write_that_fails_leaves_nothing(
    number: int, kind: type[Exception], tmp_path: Path, scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(kind, match="cannot write a file of a version") as info:
        write_file(tmp_path / "file", [b"data"], scratch=scratch, durable=True)
    assert type(info.value) is kind
    assert not (tmp_path / "file").exists()
    assert list(scratch.iterdir()) == []


def test_writers_of_one_file_do_not_meet(tmp_path: Path, scratch: Path) -> None:
    def other() -> Iterator[bytes]:
        yield b"A"
        write_file(tmp_path / "file", [b"BB"], scratch=scratch, durable=False)
        yield b"A"

    write_file(tmp_path / "file", other(), scratch=scratch, durable=False)
    assert (tmp_path / "file").read_bytes() == b"AA"
    assert list(scratch.iterdir()) == []


def test_syncing_a_folder_names_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")

    def fail(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="cannot make a folder durable"):
        sync_folder(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
