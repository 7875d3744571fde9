import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine_versions import (
    directory_of,
    flip_byte,
    key,
    make_version,
    small_checkpoint,
    truncate,
    write_manifest,
)
from weightbus.engine_agents.verify import MAX_LISTED, inspect_version, verify_version
from weightbus.engine_agents.verify_bytes import BLOCK_BYTES
from weightbus.schemas.errors import ManifestError, ShardCorruptError
from weightbus.schemas.events import VersionComplete
from weightbus.schemas.manifest import INDEX_FILE, MANIFEST_FILE, Manifest

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def event(tmp_path: Path) -> VersionComplete:
    return make_version(small_checkpoint(tmp_path / "origin"), tmp_path / "out", key(7))


@pytest.fixture
def version(event: VersionComplete) -> Path:
    return directory_of(event)


def manifest_of(version: Path) -> Manifest:
    return Manifest.model_validate_json((version / MANIFEST_FILE).read_bytes())


def edit_index(version: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((version / INDEX_FILE).read_bytes())
    change(index["weight_map"])
    (version / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_good_version_passes(event: VersionComplete, version: Path, threads: int):
    seen: list[tuple[int, int]] = []
    manifest = verify_version(
        version,
        event.manifest_digest,
        lambda done, total: seen.append((done, total)),
        expected_version=event.version,
        threads=threads,
    )
    assert manifest == manifest_of(version)
    total = sum(table.nbytes for table in manifest.shards)
    total += sum(asset.nbytes for asset in manifest.assets)
    assert seen[-1] == (total, total)


def test_bytes_across_blocks_are_hashed_as_they_were_written(tmp_path: Path):
    origin = small_checkpoint(tmp_path / "origin", tensors=1)
    (origin / "model.safetensors").unlink()
    header = b'{"big":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    size = 2 * BLOCK_BYTES + 12345
    text = header % (size, size)
    data = os.urandom(size)
    (origin / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    event = make_version(origin, tmp_path / "out", key(1), shards=1, extent_bytes=BLOCK_BYTES - 777)
    verify_version(directory_of(event), event.manifest_digest)


def test_a_truncated_shard_is_named_with_the_tensor_that_is_cut(version: Path):
    truncate(version / SHARD, 3)
    size = (version / SHARD).stat().st_size
    with pytest.raises(ShardCorruptError) as caught:
        verify_version(version)
    assert f"the file has {size} bytes, the manifest says {size + 3}" in str(caught.value)
    last = manifest_of(version).shards[1].tensors[-1]
    assert caught.value.where == {
        "directory": version,
        "file": SHARD,
        "tensor": last.name,
        "offset": size,
    }
    assert "do not load this folder" in caught.value.next_step


def test_a_flipped_byte_is_named_with_its_extent(version: Path):
    tensor = manifest_of(version).shards[1].tensors[0]
    flip_byte(version / SHARD, tensor.offset + 250)
    with pytest.raises(ShardCorruptError, match="200 bytes have digest xxh3-128:") as caught:
        verify_version(version)
    assert caught.value.where["tensor"] == tensor.name
    assert caught.value.where["offset"] == tensor.offset + 200


def test_every_flipped_byte_is_found(version: Path):
    whole = (version / SHARD).read_bytes()
    for offset in range(8, len(whole), 37):
        flip_byte(version / SHARD, offset)
        with pytest.raises(ShardCorruptError):
            verify_version(version)
        (version / SHARD).write_bytes(whole)
    verify_version(version)


def test_a_changed_header_is_found_without_reading_tensors(version: Path):
    data = (version / SHARD).read_bytes()
    (version / SHARD).write_bytes(data.replace(b"[8,17]", b"[17,8]"))
    with pytest.raises(ShardCorruptError, match=r"the header says F32 \[17, 8\] at \d+, the man"):
        verify_version(version, read_bytes=False)


def test_a_renamed_tensor_is_found(version: Path):
    data = (version / SHARD).read_bytes()
    (version / SHARD).write_bytes(data.replace(b"layers.1.", b"layers.9."))
    with pytest.raises(ShardCorruptError) as caught:
        verify_version(version, read_bytes=False)
    assert "the header does not have the tensor" in str(caught.value)
    assert "the manifest does not have the tensor" in str(caught.value)


def test_missing_shard(version: Path):
    (version / SHARD).unlink()
    with pytest.raises(ManifestError, match=f"file {SHARD}: the file is missing"):
        verify_version(version)


def test_an_index_that_names_an_absent_file(version: Path):
    edit_index(version, lambda names: names.update({"model.layers.0.weight": "absent.safetensors"}))
    with pytest.raises(ManifestError, match=r"places it in absent\.safetensors, the manifest in"):
        verify_version(version)


def test_an_index_without_a_tensor_and_with_one_too_many(version: Path):
    edit_index(version, lambda names: (names.pop("model.layers.0.weight"), names.update(x=SHARD)))
    with pytest.raises(ManifestError) as caught:
        verify_version(version)
    assert "model.layers.0.weight: the index places it in None" in str(caught.value)
    assert f"x: the index places it in {SHARD}, the manifest in None" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": 3}', b"\xff"])
def test_an_index_that_is_none(version: Path, content: bytes):
    (version / INDEX_FILE).write_bytes(content)
    with pytest.raises(ManifestError, match="the index"):
        verify_version(version)


def test_a_manifest_of_another_run(event: VersionComplete, version: Path):
    with pytest.raises(ManifestError, match="is of version run-1/1/v000007, expected other/1/v"):
        verify_version(version, expected_version=key(7, run_id="other"))


def test_a_manifest_that_version_complete_does_not_know(event: VersionComplete, version: Path):
    text = (version / MANIFEST_FILE).read_text()
    (version / MANIFEST_FILE).write_text(text + "\n")
    verify_version(version)
    with pytest.raises(ManifestError, match="version-complete says " + event.manifest_digest):
        verify_version(version, event.manifest_digest)


def test_no_manifest(tmp_path: Path):
    with pytest.raises(ManifestError, match="the manifest cannot be read: No such file"):
        verify_version(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Invalid JSON"),
        (b"{}", "Field required"),
        (b'{"schema_version": 9}', "schema_version: Input should be 1"),
    ],
)
def test_a_manifest_that_is_none(version: Path, content: bytes, reason: str):
    (version / MANIFEST_FILE).write_bytes(content)
    with pytest.raises(ManifestError, match=reason):
        verify_version(version)


def test_a_changed_asset(version: Path):
    flip_byte(version / "config.json", 3)
    (version / "extra" / "template.txt").write_text("longer than it was before")
    with pytest.raises(ManifestError) as caught:
        verify_version(version)
    assert "config.json: the file has digest" in str(caught.value)
    assert "extra/template.txt: the file has 25 bytes, the manifest says 13" in str(caught.value)


@pytest.mark.parametrize("name", ["stale.safetensors", "pytorch_model.bin", "sub/x.py"])
def test_files_that_a_loader_would_read_besides(version: Path, name: str):
    (version / name).parent.mkdir(exist_ok=True)
    (version / name).write_bytes(b"x")
    with pytest.raises(ManifestError, match=f"file {name}: the manifest does not have this file"):
        verify_version(version)


def test_notes_beside_the_shards_do_no_harm(version: Path):
    (version / "NOTES.md").write_text("good one")
    verify_version(version)


@pytest.mark.parametrize("path", ["../../secret.json", "/etc/hostname", "extra/../../x", "."])
def test_paths_out_of_the_directory(version: Path, path: str):
    manifest = manifest_of(version)
    asset = manifest.assets[0].model_copy(update={"path": path})
    write_manifest(version, manifest.model_copy(update={"assets": (asset,)}))
    with pytest.raises(ManifestError, match="the path leads out of the version directory"):
        verify_version(version)


def test_a_path_that_is_none(version: Path):
    manifest = manifest_of(version)
    asset = manifest.assets[0].model_copy(update={"path": "a\0b"})
    write_manifest(version, manifest.model_copy(update={"assets": (asset,)}))
    with pytest.raises(ManifestError, match=r"the (path cannot be used|file is missing)"):
        verify_version(version)


def test_a_shard_called_dot_dot(version: Path):
    manifest = manifest_of(version)
    tables = (manifest.shards[0], manifest.shards[1].model_copy(update={"file": ".."}))
    write_manifest(version, manifest.model_copy(update={"shards": tables}))
    with pytest.raises(ManifestError, match=r"file \.\.: the path leads out"):
        verify_version(version)


def test_a_link_out_of_the_directory(version: Path, tmp_path: Path):
    outside = tmp_path / "outside.safetensors"
    (version / SHARD).rename(outside)
    (version / SHARD).symlink_to(outside)
    with pytest.raises(ManifestError, match="a link out of the version directory"):
        verify_version(version)


def test_a_pipe_instead_of_a_file_does_not_hang(version: Path):
    (version / "config.json").unlink()
    os.mkfifo(version / "config.json")
    with pytest.raises(ManifestError, match=r"config\.json: the file is missing"):
        verify_version(version)


def test_all_problems_are_listed_at_once(version: Path):
    truncate(version / SHARD)
    flip_byte(version / "config.json", 0)
    edit_index(version, lambda names: names.clear())
    (version / "stale.safetensors").write_bytes(b"")
    found = inspect_version(version)
    assert found.manifest is not None
    assert len(found.problems) == 4 + 1 + 1 + 1 + 1  # index entries and its digest, ...
    with pytest.raises(ShardCorruptError, match="in 8 places") as caught:
        verify_version(version)
    assert caught.value.where["file"] == SHARD
    for problem in found.problems:
        assert str(problem) in str(caught.value)


def test_a_long_list_is_cut_in_the_text_only(tmp_path: Path):
    origin = small_checkpoint(tmp_path / "origin", tensors=MAX_LISTED + 50)
    version = directory_of(make_version(origin, tmp_path / "out", key(0)))
    edit_index(version, lambda names: names.clear())
    assert len(inspect_version(version, read_bytes=False).problems) == MAX_LISTED + 50
    with pytest.raises(ManifestError, match="; and 50 more"):
        verify_version(version, read_bytes=False)


def test_progress_can_end_the_check(version: Path):
    class EnoughError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise EnoughError

    with pytest.raises(EnoughError):
        verify_version(version, progress=stop, threads=2)
