"""Groups, their shards, and the files' headers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conversion_hypothesis import UNHURRIED
from weightbus.schemas.dtypes import ITEM_BYTES, DType
from weightbus.schemas.errors import ConfigError
from weightbus.schemas.safetensors_format import read_header
from weightbus.writers.shards import (
    ShardTensor,
    connected,
    file_name,
    file_of,
    share_out,
)

NAMES = [f"t{number}" for number in range(8)]
LINKS = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3), max_size=8)
SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@UNHURRIED
@given(LINKS)
def test_components_do_not_depend_on_the_order_of_links(links: list[list[str]]) -> None:
    found = connected(NAMES, links)
    assert sorted(name for names in found for name in names) == NAMES
    assert found == connected(reversed(NAMES), [list(reversed(link)) for link in reversed(links)])
    group = {name: number for number, names in enumerate(found) for name in names}
    assert all(len({group[name] for name in link}) == 1 for link in links)


def test_components_are_no_larger_than_links_make_them() -> None:
    links = [("b", "d"), ("d", "c"), ("e", "a")]
    assert connected("abcdef", links) == [("a", "e"), ("b", "c", "d"), ("f",)]


@UNHURRIED
@given(SIZES, st.integers(1, 5), st.integers(1, 200))
def test_every_group_has_one_shard(sizes: list[int], writers: int, limit: int) -> None:
    groups = {f"g{number:02d}": size for number, size in enumerate(sizes)}
    shards = share_out(groups, writers=writers, max_shard_bytes=limit)
    assert Counter(name for shard in shards for name in shard) == Counter(list(groups))
    assert all(shards)
    assert len(shards) % writers == 0 or len(shards) == len(groups)
    loads = [sum(groups[name] for name in shard) for shard in shards]
    assert max(loads) <= max(limit, *sizes)
    assert len(shards) >= min(writers, len(groups))
    # The largest first into the emptiest: no shard is ahead of another by more than one group.
    assert max(loads) - min(loads) <= max(sizes)


def test_the_count_is_the_smallest_multiple_of_the_writers_that_holds_everything() -> None:
    groups = {f"g{number}": 10 for number in range(12)}
    for writers, limit, count in ((1, 1000, 1), (3, 1000, 3), (2, 40, 4), (2, 45, 4), (5, 20, 10)):
        assert len(share_out(groups, writers=writers, max_shard_bytes=limit)) == count


def test_more_writers_than_groups_leaves_some_without_a_shard() -> None:
    assert share_out({"a": 1, "b": 2}, writers=5, max_shard_bytes=10) == [["b"], ["a"]]


def test_nothing_needs_no_shard() -> None:
    assert share_out({}, writers=2, max_shard_bytes=10) == []


@pytest.mark.parametrize(("writers", "limit"), [(0, 10), (1, 0)])
def test_counts_below_one_are_refused(writers: int, limit: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        share_out({"a": 1}, writers=writers, max_shard_bytes=limit)


def test_too_many_shards_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_shard_bytes=1 makes 100000 shards"):
        share_out({f"g{n}": 1 for n in range(100_000)}, writers=1, max_shard_bytes=1)


def tensor(name: str, dtype: DType, *shape: int) -> ShardTensor:
    return ShardTensor(name, dtype, shape, math.prod(shape) * ITEM_BYTES[dtype])


def test_a_file_is_aligned_and_readable(tmp_path: Path) -> None:
    tensors = [tensor("b", "U8", 3), tensor("a", "BF16", 5), tensor("z", "F32", 2, 3),
               tensor("c", "BF16", 1)]  # fmt: skip
    made = file_of(tensors)
    assert [t.name for t in made.tensors] == ["z", "a", "c", "b"]
    assert all(
        offset % ITEM_BYTES[t.dtype] == 0
        for t, offset in zip(made.tensors, made.offsets, strict=True)
    )
    path = tmp_path / "x.safetensors"
    path.write_bytes(made.header + bytes(made.nbytes - len(made.header)))
    entries, start, metadata = read_header(path)
    assert start == len(made.header)
    assert metadata == {"format": "pt"}
    assert [(e.name, e.dtype, e.shape, e.offset) for e in entries] == [
        (t.name, t.dtype, t.shape, offset)
        for t, offset in zip(made.tensors, made.offsets, strict=True)
    ]


def test_file_names() -> None:
    assert file_name(0, 12) == "model-00001-of-00012.safetensors"
