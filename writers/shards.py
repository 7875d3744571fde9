"""Groups, and which shard and writer each of them goes to."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..schemas.dtypes import ITEM_BYTES, DType
from ..schemas.errors import ConfigError
from ..schemas.manifest import MAX_SHARDS
from ..schemas.safetensors_format import build_header

DEFAULT_MAX_SHARD_BYTES = 4 * 1024**3
METADATA = {"format": "pt"}
"""transformers wants to know whose tensors a file holds."""


class ShardTensor(NamedTuple):
    """One HF tensor on its way into a shard."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


class ShardFile(NamedTuple):
    """One file: its header, its tensors in file order with their offsets, its size in bytes."""

    header: bytes
    tensors: tuple[ShardTensor, ...]
    offsets: tuple[int, ...]
    nbytes: int


def connected(names: Iterable[str], links: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Connected components of names, of which every link joins some.

    Returns:
        the components' names sorted, the components in order of their first name.
    """
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for link in links:
        for other in link[1:]:
            a, b = root(link[0]), root(other)
            # The smaller name becomes the root: the result does not depend on the links' order.
            if a != b:
                parent[max(a, b)] = min(a, b)
    members: dict[str, list[str]] = {}
    for name in sorted(parent):
        members.setdefault(root(name), []).append(name)
    return [tuple(members[name]) for name in sorted(members)]


def share_out(sizes: Mapping[str, int], *, writers: int, max_shard_bytes: int) -> list[list[str]]:
    """Put groups into shards, the largest first into the emptiest.

    Args:
        sizes: bytes of each group, by its name.
        writers: shard k belongs to writer k % writers; every writer gets equally many shards,
            unless there are too few groups.
        max_shard_bytes: no shard is larger, unless one group alone is.

    Returns:
        the groups of each shard; no shard is empty.

    Raises:
        ConfigError: a writer count or size below 1, or more shards than a version may have.
    """
    if writers < 1 or max_shard_bytes < 1:
        raise ConfigError(
            f"writers={writers} and max_shard_bytes={max_shard_bytes} must be at least 1"
        )
    if not sizes:
        return []
    order = sorted(sizes, key=lambda name: (-sizes[name], name))
    limit = max(max_shard_bytes, sizes[order[0]])
    count = max(writers, -(-sum(sizes.values()) // limit))
    while True:
        # A multiple of the writers, but never an empty shard.
        count = min(-(-count // writers) * writers, len(order))
        shards, largest = _fill(order, sizes, count)
        if largest <= limit or count == len(order):
            break
        count += 1
    if count > MAX_SHARDS:
        raise ConfigError(
            f"max_shard_bytes={max_shard_bytes} makes {count} shards, the limit is {MAX_SHARDS}",
            next_step="allow larger shards",
        )
    return shards


def _fill(
    order: Sequence[str], sizes: Mapping[str, int], count: int
) -> tuple[list[list[str]], int]:
    """The groups of each of `count` shards, and the bytes of the largest shard."""
    shards: list[list[str]] = [[] for _ in range(count)]
    # (bytes, groups, shard): groups of zero bytes are shared out too.
    heap = [(0, 0, shard) for shard in range(count)]
    largest = 0
    for name in order:
        nbytes, groups, shard = heap[0]
        heapq.heapreplace(heap, (nbytes + sizes[name], groups + 1, shard))
        shards[shard].append(name)
        largest = max(largest, nbytes + sizes[name])
    return shards, largest


def file_of(tensors: Iterable[ShardTensor]) -> ShardFile:
    """A shard file: tensors by falling item size (so that all stay aligned), then name."""
    ordered = tuple(sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.name)))
    header = build_header([(t.name, t.dtype, t.shape) for t in ordered], METADATA)
    offsets: list[int] = []
    at = len(header)
    for tensor in ordered:
        offsets.append(at)
        at += tensor.nbytes
    return ShardFile(header, ordered, tuple(offsets), at)


def file_name(index: int, count: int) -> str:
    """The name of shard `index` (from 0) of `count`, as Hugging Face numbers them."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"
