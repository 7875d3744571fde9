"""Rule kinds of attention layers beyond plain query groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..regions import Grid, Move, box, view_of
from .dims import Dims
from .kinds import Geometry, Output, misfit


@dataclass(frozen=True, slots=True)
class GatedQkvSplit:
    """Fused attention input with an output gate, weight or bias.

    With H heads, G groups, r = H/G, head dim d, a group holds r query heads, r gate heads, a key
    and a value head: row (g(2r+2)+s)d+e. Hugging Face keeps query and gate of a head together:
    q row ((gr+i)2+j)d+e with j = 0 for the query, 1 for the gate.
    """

    query: str
    key: str
    value: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """Moves of one head each for query and gate, of one head per group for key and value."""
        heads, groups, size = dims.heads, dims.groups, dims.head_dim
        if groups == 0 or heads % groups:
            raise misfit(shape, f"{heads} heads cannot be shared out to {groups} query groups")
        per_group = heads // groups
        rows, cols = view_of(shape)
        total = groups * (2 * per_group + 2) * size
        if rows != total:
            raise misfit(
                shape,
                f"{groups} query groups of {per_group} query, {per_group} gate, a key and a value "
                f"head of {size} rows are {total} rows",
            )
        moves: list[Move] = []
        for group in range(groups):
            start = group * (2 * per_group + 2) * size
            for gate in (0, 1):
                for head in range(per_group):
                    source = start + (gate * per_group + head) * size
                    target = ((group * per_group + head) * 2 + gate) * size
                    moves.append(Move(0, box(source, 0, size, cols), box(target, 0, size, cols)))
            for slot in (1, 2):
                source = start + (2 * per_group + slot - 1) * size
                moves.append(
                    Move(slot, box(source, 0, size, cols), box(group * size, 0, size, cols))
                )
        tail = shape[1:]
        outputs = (
            Output(self.query, (2 * heads * size, *tail)),
            Output(self.key, (groups * size, *tail)),
            Output(self.value, (groups * size, *tail)),
        )
        return Geometry(outputs, tuple(moves))


@dataclass(frozen=True, slots=True)
class IndexerTurned:
    """Rows of a DSA indexer's heads: Megatron has the rotated part last, Hugging Face first.

    A head of D rows of which R are rotated: rows D-R.. come before rows ..D-R. With D = 128 and
    R = 64, as in the public models, these are the two halves swapped.
    """

    to: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """Two moves per head."""
        head, rope = dims.index_head_dim, dims.rope_dim
        rows, cols = view_of(shape)
        if not 0 < rope < head or rows % head:
            raise misfit(shape, f"rows do not consist of heads of {head} with {rope} rotated")
        plain = head - rope
        moves: list[Move] = []
        for start in range(0, rows, head):
            moves.append(Move(0, box(start, 0, plain, cols), box(start + rope, 0, plain, cols)))
            moves.append(Move(0, box(start + plain, 0, rope, cols), box(start, 0, rope, cols)))
        return Geometry((Output(self.to, shape),), tuple(moves))


@dataclass(frozen=True, slots=True)
class ColumnHalvesSwapped:
    """The right half of the columns before the left half: a projection of two joined inputs."""

    to: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:  # noqa: ARG002 - a Kind
        """Two moves."""
        rows, cols = view_of(shape)
        if len(shape) < 2 or cols % 2:
            raise misfit(shape, "the columns have no two halves")
        half = cols // 2
        moves = (
            Move(0, box(0, 0, rows, half), box(0, half, rows, half)),
            Move(0, box(0, half, rows, half), box(0, 0, rows, half)),
        )
        return Geometry((Output(self.to, shape),), moves)


@dataclass(frozen=True, slots=True)
class LinearInput:
    """Megatron's fused input of linear attention (GDN): q, k, v, z, b, a as blocks of rows.

    With K key heads of dim c, V value heads of dim w, u = V/K, the blocks have Kc, Kc, Vw, Vw, V, V
    rows; TP cuts them one by one. `separate`: Hugging Face has (qkv, z, b, a), qkv being the three
    blocks one after the other. Otherwise it has (qkvz, ba), in which each key head keeps its c
    rows of q and k and its uw rows of v and z together, and its u rows of b and a.
    """

    to: tuple[str, ...]
    separate: bool

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """A few moves if separate, six per key head otherwise."""
        sizes, heads = _linear_blocks(dims)
        rows, cols = view_of(shape)
        if rows != sum(sizes):
            raise misfit(shape, f"linear attention's q, k, v, z, b, a have {sum(sizes)} rows")
        q, _, v, _, b, _ = sizes
        if self.separate:
            out = (2 * q + v, v, b, b)
            places = list(_stacked(((0, (q, q, v)), (1, (v,)), (2, (b,)), (3, (b,)))))
        else:
            out = (2 * q + 2 * v, 2 * b)
            places = list(_per_head(sizes, heads))
        moves = tuple(
            Move(slot, box(source, 0, height, cols), box(target, 0, height, cols))
            for slot, source, target, height in places
        )
        outputs = tuple(
            Output(to, (size, *shape[1:])) for to, size in zip(self.to, out, strict=True)
        )
        return Geometry(outputs, moves, blocks=sizes)


@dataclass(frozen=True, slots=True)
class LinearConvolution:
    """The convolution over q, k, v of linear attention: the same rows, cut block by block."""

    to: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """One move."""
        blocks = _linear_blocks(dims)[0][:3]
        if not shape or shape[0] != sum(blocks):
            raise misfit(shape, f"linear attention's q, k, v have {sum(blocks)} channels")
        whole = Grid(0, 0, *view_of(shape))
        return Geometry((Output(self.to, shape),), (Move(0, whole, whole),), blocks=blocks)


_Place = tuple[int, int, int, int]
"""(slot, source row, target row, rows)."""


def _linear_blocks(dims: Dims) -> tuple[tuple[int, ...], int]:
    keys = dims.linear_key_heads * dims.linear_key_dim
    values = dims.linear_value_heads * dims.linear_value_dim
    heads = dims.linear_value_heads
    return (keys, keys, values, values, heads, heads), dims.linear_key_heads


def _stacked(outputs: Sequence[tuple[int, Sequence[int]]]) -> Iterator[_Place]:
    source = 0
    for slot, heights in outputs:
        target = 0
        for height in heights:
            yield slot, source, target, height
            source += height
            target += height


def _per_head(sizes: Sequence[int], heads: int) -> Iterator[_Place]:
    for slot, blocks in ((0, range(4)), (1, range(4, 6))):
        height = sum(sizes[block] for block in blocks) // heads
        for head in range(heads):
            target = head * height
            for block in blocks:
                part = sizes[block] // heads
                yield slot, sum(sizes[:block]) + head * part, target, part
                target += part
