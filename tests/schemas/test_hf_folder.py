"""Checkpoint folders: tensors from headers; stale, absent and escaping files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from weightbus.schemas.errors import OriginError
from weightbus.schemas.hf_folder import read_config, read_folder


def _sharded(folder: Path) -> None:
    save_file({"a": np.zeros((2, 3), np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros((4,), np.float16)}, folder / "model-00002-of-00002.safetensors")
    _index(
        folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    )


def _index(folder: Path, weight_map: object) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_a_sharded_folder_and_a_single_file(tmp_path: Path) -> None:
    _sharded(tmp_path)
    found = read_folder(tmp_path)
    assert {name: (t.file.name, t.entry.dtype, t.entry.shape) for name, t in found.items()} == {
        "a": ("model-00001-of-00002.safetensors", "F32", (2, 3)),
        "b": ("model-00002-of-00002.safetensors", "F16", (4,)),
    }
    single = tmp_path / "single"
    single.mkdir()
    save_file({"c": np.zeros((1, 2), np.float64)}, single / "model.safetensors")
    assert read_folder(single).keys() == {"c"}


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match=r"neither .*index.json nor model.safetensors.*Next:"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, r"absent \['gone.safetensors'\]"),
        ({"a": "../up.safetensors"}, r"outside the folder \['../up.safetensors'\]"),
        ([1], "cannot be used"),
        ({"a": 3}, "cannot be used"),
    ],
)
def test_a_bad_index_is_named(weight_map: object, message: str, tmp_path: Path) -> None:
    _index(tmp_path, weight_map)
    with pytest.raises(OriginError, match=message):
        read_folder(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    save_file({"a": np.zeros((2, 3), np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(OriginError, match="tensor a stands in"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"'])
def test_a_bad_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(OriginError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert read_config(tmp_path) == {"model_type": "qwen3"}
