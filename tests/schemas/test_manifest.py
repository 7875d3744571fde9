"""Manifests: digests compose, and a manifest that contradicts itself does not parse."""

from typing import Any

import pytest
from pydantic import ValidationError
from weightbus.schemas.digest import combine, digest_of
from weightbus.schemas.manifest import Manifest

A, B, HEADER = digest_of(b"a" * 8), digest_of(b"b" * 16), digest_of(b"h")


def _fields() -> dict[str, Any]:
    return {
        "version": {"run_id": "r", "attempt": 1, "weight_version": 7},
        "family": "qwen3",
        "plan_digest": HEADER,
        "writers": 1,
        "total_size": 24,
        "shards": [
            {
                "file": "model-00001-of-00001.safetensors",
                "writer": 0,
                "nbytes": 124,
                "header_bytes": 100,
                "header_digest": HEADER,
                "tensors": [
                    {
                        "name": "t", "dtype": "F32", "shape": [3, 2], "offset": 100,
                        "extents": [{"length": 8, "digest": A}, {"length": 16, "digest": B}],
                    }
                ],
            }
        ],
    }  # fmt: skip


def test_digests_compose_from_extents() -> None:
    manifest = Manifest.model_validate(_fields())
    shard = manifest.shards[0]
    assert shard.tensors[0].digest == combine([A, B])
    assert shard.digest == combine([HEADER, combine([A, B])])
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest


def test_a_tensor_of_one_extent_has_the_digest_of_its_bytes() -> None:
    fields = _fields()
    whole = digest_of(b"x" * 24)
    fields["shards"][0]["tensors"][0]["extents"] = [{"length": 24, "digest": whole}]
    assert Manifest.model_validate(fields).shards[0].tensors[0].digest == whole


def _set(path: str, value: object) -> dict[str, Any]:
    fields: Any = _fields()
    at = fields
    *steps, last = path.split(".")
    for step in steps:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("total_size", 25, "do not add up to 25"),
        ("shards.0.nbytes", 125, "tensors end at 124, the file at 125"),
        ("shards.0.tensors.0.offset", 104, "t starts at 104, not at 100"),
        ("shards.0.tensors.0.shape", [3, 3], "extents do not add up to 36"),
        ("shards.0.file", "../x", "pattern"),
        ("format", "other", "weightbus-manifest"),
        ("schema_version", 2, "Input should be 1"),
    ],
)
def test_a_contradiction_does_not_parse(path: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Manifest.model_validate(_set(path, value))


def test_a_tensor_or_file_named_twice_does_not_parse() -> None:
    fields = _fields()
    fields["shards"] *= 2
    fields["total_size"] = 48
    with pytest.raises(ValidationError, match="a tensor stands in the manifest twice"):
        Manifest.model_validate(fields)
