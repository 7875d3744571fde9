"""Headers agree with the safetensors library, and files that are not whole are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save_file
from weightbus.schemas.errors import ShardCorruptError
from weightbus.schemas.safetensors_format import build_header, read_header


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=6))
def test_a_file_with_our_header_loads_in_the_library(shapes: list[tuple[int, int]]) -> None:
    arrays = {
        f"t.{number}": np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape)
        for number, shape in enumerate(shapes)
    }
    header = build_header(
        [(name, "F32", array.shape) for name, array in arrays.items()], {"k": "v"}
    )
    assert len(header) % 8 == 0
    loaded = load(header + b"".join(array.tobytes() for array in arrays.values()))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_file_of_the_library_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {"b": np.zeros((3, 5), np.float16), "a": np.arange(7, dtype=np.int64)}
    save_file(arrays, path, {"format": "pt"})
    entries, start, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    data = path.read_bytes()
    for entry in entries:
        raw = data[entry.offset : entry.offset + entry.nbytes]
        assert raw == arrays[entry.name].tobytes()
        assert entry.shape == arrays[entry.name].shape
    assert min(entry.offset for entry in entries) == start


def _file(header: dict[str, object] | bytes, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(begin: int, end: int, dtype: object = "U8", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


_ATTACKS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot hold a header"),
    "shorter than the length": (b"\1\0\0", "cannot hold a header"),
    "header length beyond the end": ((10**9).to_bytes(8, "little") + b"{}", "cannot hold a header"),
    "not json": (_file(b"{nope"), "not JSON"),
    "not an object": (_file(b"[1]"), "not a JSON object"),
    "truncated data": (_file({"a": _entry(0, 8)}, b"\0" * 7), "end at byte"),
    "trailing data": (_file({"a": _entry(0, 8)}, b"\0" * 9), "end at byte"),
    "hole": (_file({"a": _entry(0, 2), "b": _entry(4, 8)}), "b starts at"),
    "overlap": (_file({"a": _entry(0, 5), "b": _entry(4, 8)}), "b starts at"),
    "unknown dtype": (_file({"a": _entry(0, 8, dtype="Q9")}), "'a' is malformed"),
    "negative dim": (_file({"a": _entry(0, 8, shape=[-8])}), "'a' is malformed"),
    "boolean dim": (_file({"a": _entry(0, 8, shape=[True, 8])}), "'a' is malformed"),
    "shape and offsets differ": (_file({"a": _entry(0, 8, shape=[7])}), "'a' is malformed"),
    "no offsets": (_file({"a": {"dtype": "U8", "shape": [8]}}), "'a' is malformed"),
    "entry is no object": (_file({"a": 3}), "'a' is malformed"),
}


@pytest.mark.parametrize("name", _ATTACKS)
def test_a_file_that_is_not_whole_is_named(name: str, tmp_path: Path) -> None:
    data, message = _ATTACKS[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ShardCorruptError, match=message) as caught:
        read_header(path)
    assert caught.value.where["file"] == path
    assert "do not load it" in str(caught.value)


def test_every_truncation_of_a_good_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ShardCorruptError):
            read_header(path)
