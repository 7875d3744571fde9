"""The expectation: what the origin checkpoint's headers say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from weightbus.schemas.errors import OriginError, ShardCorruptError
from weightbus.writers.expectation import Expectation, Expected


def folder_with(path: Path) -> Path:
    save_file({"b": np.zeros((2, 3), np.float32), "a": np.zeros(4, np.float16)},
              path / "model-1.safetensors")  # fmt: skip
    save_file({"c": np.zeros((), np.int64)}, path / "model-2.safetensors")
    weight_map = {"b": "model-1.safetensors", "a": "model-1.safetensors",
                  "c": "model-2.safetensors"}  # fmt: skip
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_names_dtypes_and_shapes_of_all_files(tmp_path: Path) -> None:
    found = Expectation.from_folder(folder_with(tmp_path))
    assert dict(found.tensors) == {
        "a": Expected("F16", (4,)), "b": Expected("F32", (2, 3)), "c": Expected("I64", ()),
    }  # fmt: skip
    assert list(found.tensors) == ["a", "b", "c"]


def test_the_digest_is_of_names_dtypes_and_shapes(tmp_path: Path) -> None:
    found = Expectation.from_folder(folder_with(tmp_path))
    same = Expectation.of({"c": ("I64", ()), "b": ("F32", (2, 3)), "a": ("F16", (4,))})
    assert found.digest() == same.digest()
    for name, other in (
        ("b", Expected("F32", (3, 2))),
        ("b", Expected("BF16", (2, 3))),
        ("d", Expected("F32", (2, 3))),
    ):
        changed = Expectation.of({**same.tensors, name: other})
        assert changed.digest() != same.digest()


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OriginError, match=r"neither model\.safetensors\.index\.json nor") as caught:
        Expectation.from_folder(tmp_path)
    assert "give the whole folder that training started from" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    file = folder_with(tmp_path) / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ShardCorruptError, match="not a whole safetensors file"):
        Expectation.from_folder(tmp_path)
