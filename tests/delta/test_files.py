"""Delta folders: a reader of theirs accepts ours, and what does not agree is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.delta_folders import (
    bytes_of,
    changes_of,
    independent_apply,
    model,
    save_delta,
    stepped,
)  # fmt: skip
from weightbus.delta.checksums import ChecksumFormat
from weightbus.delta.codecs import Encoding
from weightbus.delta.files import (
    Change,
    DeltaShard,
    TensorBytes,
    read_delta,
    weight_map_of,
    write_shard,
)  # fmt: skip
from weightbus.delta.index import is_delta, shard_name
from weightbus.schemas.errors import (
    DeltaFormatError,
    DeltaMappingError,
    DeltaTensorError,
    ShardCorruptError,
)  # fmt: skip

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("form", ["xxh3-128", "blake3", "adler32"])
def test_an_independent_reader_accepts_ours(
    tmp_path: Path, encoding: Encoding, form: ChecksumFormat
) -> None:
    old, new = model(), stepped(model(), 1)
    folder = save_delta(tmp_path / "weight_v000007", old, new, 7, encoding, form)
    assert independent_apply(bytes_of(old), folder) == bytes_of(new)
    delta = read_delta(folder)
    assert is_delta(folder)
    assert delta.index.base_version == 6
    assert sorted(delta.entries) == ["bias", "embed", "norm", "q", "table"]


def test_gap_ulp_entries_have_both_checksums_and_their_method(tmp_path: Path) -> None:
    old, new = model(), stepped(model(), 1)
    entries = read_delta(save_delta(tmp_path / "d", old, new, 7, "gap-ulp")).entries
    assert {name: entry.method for name, entry in entries.items()} == {
        "embed": "gap-ulp", "q": "gap-ulp", "bias": "gap-ulp", "norm": "whole", "table": "xor",
    }  # fmt: skip
    assert all(entry.base is not None and entry.base != entry.new for entry in entries.values())
    assert all(e.nbytes <= len(new[n][2]) for n, e in entries.items())


def test_nothing_changed_is_an_index_without_files(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), model(), 7, "xor")
    assert [path.name for path in folder.iterdir()] == [INDEX]
    assert not read_delta(folder).entries


def test_a_full_version_is_no_delta(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    assert not is_delta(tmp_path)


def edit(folder: Path, change: Callable[[dict[str, dict[str, str]]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("delta_encoding", "lz4", "delta_encoding is 'lz4'; known are xor, overwrite, gap-ulp"),
        ("compression_format", "gzip", "compression_format is 'gzip'"),
        ("checksum_format", "md5", "checksum_format is 'md5'"),
        ("version", "seven", "version is 'seven', not a number"),
        ("base_version", "-1", "base_version is '-1', not a number"),
    ],
)
def test_unknown_index_metadata(tmp_path: Path, key: str, value: str, message: str) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    edit(folder, lambda index: index["metadata"].update({key: value}))
    with pytest.raises(DeltaFormatError, match=message):
        read_delta(folder)


def test_an_absent_shard_is_refused(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    (folder / shard_name(1, 2)).unlink()
    with pytest.raises(DeltaMappingError, match=r"absent files .*model-00001-of-00002"):
        read_delta(folder)


def test_a_file_that_nobody_names_is_refused(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    (folder / "model-00009-of-00010.safetensors").write_bytes(b"")
    with pytest.raises(DeltaMappingError, match=r"does not name \['model-00009"):
        read_delta(folder)


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    changes = changes_of(model(), stepped(model(), 1))
    write_shard(folder / "model-00002-of-00003.safetensors", changes[:1], "xor")
    edit(folder, lambda index: index["weight_map"].update(ghost="model-00002-of-00003.safetensors"))
    with pytest.raises(DeltaMappingError, match=r"embed stands in .* and model-00002"):
        read_delta(folder)
    shards = [DeltaShard("a", ("embed",), 1, 0, 1), DeltaShard("b", ("embed",), 1, 0, 1)]
    with pytest.raises(DeltaMappingError, match="embed stands in a and b"):
        weight_map_of(shards)


def test_a_missing_tensor_and_a_path_outside_are_refused(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    edit(folder, lambda index: index["weight_map"].update(ghost=shard_name(0, 2)))
    with pytest.raises(DeltaMappingError, match=r"1 tensors are not where it says: \['ghost'\]"):
        read_delta(folder)
    edit(folder, lambda index: index["weight_map"].update(ghost="../x.safetensors"))
    with pytest.raises(DeltaFormatError, match="no plain safetensors names"):
        read_delta(folder)


def test_a_truncated_file_and_no_index_are_refused(tmp_path: Path) -> None:
    folder = save_delta(tmp_path / "d", model(), stepped(model(), 1), 7, "xor")
    path = folder / shard_name(0, 2)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ShardCorruptError, match="not a whole safetensors file"):
        read_delta(folder)
    (folder / INDEX).unlink()
    with pytest.raises(DeltaFormatError, match="there is no model"):
        read_delta(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change("w", None, TensorBytes("BF16", (1,), b"ab")), "it is not in the base version"),
        (
            Change("w", TensorBytes("BF16", (2,), b"abcd"), TensorBytes("BF16", (1,), b"ab")),
            r"it was BF16 \[2\] and is BF16 \[1\]",
        ),
        (
            Change("w", TensorBytes("F16", (1,), b"ab"), TensorBytes("BF16", (1,), b"ab")),
            r"it was F16 \[1\] and is BF16 \[1\]",
        ),
    ],
)
def test_what_no_delta_can_express(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(DeltaTensorError, match=message + ".*publish a full version"):
        write_shard(tmp_path / "x.safetensors", [change], "xor")
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_comes_twice(tmp_path: Path) -> None:
    change = changes_of(model(), stepped(model(), 1))[0]
    with pytest.raises(DeltaTensorError, match="it came twice"):
        write_shard(tmp_path / "x.safetensors", [change, change], "gap-ulp")
