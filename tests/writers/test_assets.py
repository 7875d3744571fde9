"""What is copied from the origin beside the weights; small files are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import CommitError, OriginError
from weightbus.writers.assets import copy_asset, list_assets, make_folders, sync_folder, write_file


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for name in (
        "config.json", "tokenizer.model", "model.safetensors", "pytorch_model.bin",
        "model.safetensors.index.json", "manifest.json", "pytorch_model.bin.index.json",
        ".gitattributes", ".cache/huggingface/x.lock", "sub/deep/template.jinja",
        "sub/extra.safetensors", "sub/manifest.json", "original/consolidated.00.pth", "empty.txt",
    ):  # fmt: skip
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    return folder


def test_everything_but_weights_and_hidden_files(origin: Path) -> None:
    assert [asset.path for asset in list_assets(origin)] == [
        "config.json", "empty.txt", "sub/deep/template.jinja", "sub/manifest.json",
        "tokenizer.model",
    ]  # fmt: skip


def test_a_download_cache_of_links_gives_contents(origin: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    cache = tmp_path / "snapshot"
    cache.mkdir()
    (blobs / "1234").write_text("contents")
    (cache / "config.json").symlink_to("../blobs/1234")
    (tmp_path / "alias").symlink_to(cache)
    [asset] = list_assets(tmp_path / "alias")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    copied = copy_asset(asset, out, scratch, durable=True)
    assert (copied.path, copied.nbytes, copied.digest) == (
        "config.json", 8, digest_of(b"contents"),
    )  # fmt: skip
    assert not (out / "config.json").is_symlink()
    assert (out / "config.json").read_text() == "contents"
    assert list(scratch.iterdir()) == []


def test_links_that_are_refused(origin: Path, tmp_path: Path) -> None:
    (origin / "broken.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OriginError, match="a link that leads nowhere") as error:
        list_assets(origin)
    assert "broken.json" in str(error.value)
    (origin / "broken.json").unlink()
    (origin / "more").symlink_to(tmp_path)
    with pytest.raises(OriginError, match="sub-folder of the origin checkpoint is a link"):
        list_assets(origin)


def test_an_origin_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match="cannot be listed: No such file"):
        list_assets(tmp_path / "nowhere")


def test_copies_with_their_folders_over_what_was_there(origin: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    out.mkdir()
    (out / "config.json").write_text("half of an older o")
    for durable in (True, False):
        for asset in list_assets(origin):
            copied = copy_asset(asset, out, scratch, durable=durable)
            data = (origin / asset.path).read_bytes()
            assert (out / asset.path).read_bytes() == data
            assert (copied.nbytes, copied.digest) == (len(data), digest_of(data))
    assert list(scratch.iterdir()) == []


def test_a_file_that_is_gone_meanwhile(origin: Path, tmp_path: Path) -> None:
    [asset, *_] = list_assets(origin)
    (tmp_path / "out").mkdir()
    (origin / asset.path).unlink()
    with pytest.raises(OriginError, match="cannot be read: No such file"):
        copy_asset(asset, tmp_path / "out", tmp_path / "out", durable=False)


def test_a_version_folder_that_is_gone_is_told_apart(origin: Path, tmp_path: Path) -> None:
    """Another writer has made it visible: the commit looks there, nothing is made again."""
    assets = {asset.path: asset for asset in list_assets(origin)}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("config.json", "sub/deep/template.jinja"):
        with pytest.raises(FileNotFoundError):
            copy_asset(assets[name], tmp_path / "gone", scratch, durable=False)
    assert not (tmp_path / "gone").exists()
    assert list(scratch.iterdir()) == []


def test_a_file_in_the_place_of_a_folder(origin: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").write_text("in the way")
    asset = next(one for one in list_assets(origin) if one.path.startswith("sub/deep"))
    with pytest.raises(CommitError, match="cannot create a folder of a version"):
        copy_asset(asset, out, out, durable=False)


def test_a_small_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, [b"a", b"b"], scratch=tmp_path, durable=True)

    def broken() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, os.strerror(28))

    with pytest.raises(Exception, match="No space left on device"):
        write_file(path, broken(), scratch=tmp_path, durable=True)
    assert path.read_bytes() == b"ab"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    with pytest.raises(FileNotFoundError):
        write_file(path, [b"a"], scratch=tmp_path / "gone", durable=True)


def test_folders_of_what_exists_only(tmp_path: Path) -> None:
    make_folders(tmp_path, tmp_path / "a" / "b")
    make_folders(tmp_path, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(FileNotFoundError):
        make_folders(tmp_path / "gone", tmp_path / "gone" / "a")
    assert not (tmp_path / "gone").exists()
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "gone")
    (tmp_path / "file").touch()
    with pytest.raises(CommitError, match="cannot open a folder"):
        sync_folder(tmp_path / "file")
