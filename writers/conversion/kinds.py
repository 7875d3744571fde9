"""The kinds of conversion rules: how one whole Megatron tensor becomes Hugging Face tensors.

A kind only knows shapes and the config's dims. It answers with a `Geometry` in whole space; what
the producers hold of it is cut later. The formulas are those of the two formats (Megatron-core's
`linear_qkv`, `linear_fc1`; transformers' module weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ...schemas.dtypes import DType
from ...schemas.errors import ConversionError
from ..regions import Grid, Move, box, view_of, whole_box
from .dims import Dims


class Output(NamedTuple):
    """A Hugging Face tensor that a rule produces.

    `template` becomes its name when the rule's indices ({l} layer, {e} expert, {i} MTP layer, {m}
    the HF layer number of that MTP layer) are filled in. `optional`: produced only where the
    origin checkpoint has it. `dtype`: the only dtype in which the trainer may hold it; None for
    any.
    """

    template: str
    shape: tuple[int, ...]
    optional: bool = False
    dtype: DType | None = None


class Left(NamedTuple):
    """Source elements that a rule leaves out on purpose."""

    box: Grid
    reason: str


class Geometry(NamedTuple):
    """What a rule does with a whole tensor of one shape.

    `blocks`: the blocks along dim 0 that a producer must cut one by one (see schemas.layout.Part);
    empty if the tensor is cut as one block.
    `per_expert`: how many rows of each output one expert fills, where the outputs hold all experts
    of a layer: then the moves are expert 0's. Empty otherwise.
    """

    outputs: tuple[Output, ...]
    moves: tuple[Move, ...]
    left: tuple[Left, ...] = ()
    blocks: tuple[int, ...] = ()
    per_expert: tuple[int, ...] = ()


class Kind(Protocol):
    """One kind of rule, with its target names."""

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """The moves for a whole tensor of this shape.

        Raises:
            ConversionError: the shape does not fit the rule.
            OriginError: the config lacks a number that the rule needs.
        """
        ...


@dataclass(frozen=True, slots=True)
class Rename:
    """The same tensor under another name; `dtype`: see Output.

    `blocks`: in how many equal blocks of rows TP cuts it (2: gate rows, then up rows, which stay
    one tensor in Hugging Face too).
    """

    to: str
    dtype: DType | None = None
    blocks: int = 1

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:  # noqa: ARG002 - a Kind
        """One move of everything."""
        whole = whole_box(shape)
        blocks: tuple[int, ...] = ()
        if self.blocks > 1:
            if not shape or shape[0] % self.blocks:
                raise misfit(shape, f"dim 0 does not consist of {self.blocks} equal blocks")
            blocks = (shape[0] // self.blocks,) * self.blocks
        output = Output(self.to, shape, dtype=self.dtype)
        return Geometry((output,), (Move(0, whole, whole),), blocks=blocks)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Equal blocks of rows, one per target, cut one by one under TP: GLU's gate rows, up rows."""

    to: tuple[str, ...]

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:  # noqa: ARG002 - a Kind
        """One move per block."""
        count = len(self.to)
        if not shape or shape[0] % count:
            raise misfit(shape, f"dim 0 does not consist of {count} equal blocks")
        size = shape[0] // count
        out = (size, *shape[1:])
        rows, cols = view_of(out)
        moves = tuple(
            Move(slot, box(slot * rows, 0, rows, cols), box(0, 0, rows, cols))
            for slot in range(count)
        )
        return Geometry(tuple(Output(to, out) for to in self.to), moves, blocks=(size,) * count)


@dataclass(frozen=True, slots=True)
class QkvSplit:
    """Fused attention input, weight or bias: per query group its query heads, key head, value head.

    With H heads, G groups, r = H/G, head dim d: row (g(r+2)+s)d+e is row (gr+s)d+e of q for s < r,
    row gd+e of k for s = r, of v for s = r+1.
    """

    query: str
    key: str
    value: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """Three moves per group."""
        heads, groups, size = dims.heads, dims.groups, dims.head_dim
        if groups == 0 or heads % groups:
            raise misfit(shape, f"{heads} heads cannot be shared out to {groups} query groups")
        per_group = heads // groups
        rows, cols = view_of(shape)
        if rows != groups * (per_group + 2) * size:
            raise misfit(shape, f"{groups} query groups of {per_group} + 2 heads of {size} rows "
                          f"are {groups * (per_group + 2) * size} rows")  # fmt: skip
        moves: list[Move] = []
        for group in range(groups):
            start = group * (per_group + 2) * size
            for slot, first, count in ((0, 0, per_group), (1, per_group, 1), (2, per_group + 1, 1)):
                height = count * size
                source = box(start + first * size, 0, height, cols)
                moves.append(Move(slot, source, box(group * height, 0, height, cols)))
        tail = shape[1:]
        outputs = (
            Output(self.query, (heads * size, *tail)),
            Output(self.key, (groups * size, *tail)),
            Output(self.value, (groups * size, *tail)),
        )
        return Geometry(outputs, tuple(moves))


@dataclass(frozen=True, slots=True)
class VocabCut:
    """Rows up to vocab_size; the rest is Megatron's padding.

    `mtp_copy`: the template of the copies that some checkpoints hold once more per MTP layer ({m}).
    They are written where the origin checkpoint has them.
    """

    to: str
    mtp_copy: str = ""

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """One move of the real rows, and one per copy."""
        vocab = dims.vocab
        rows, cols = view_of(shape)
        if not shape or shape[0] < vocab:
            raise misfit(shape, f"vocab_size is {vocab}")
        out = (vocab, *shape[1:])
        kept = box(0, 0, rows // shape[0] * vocab, cols)
        copies = self._copies(dims)
        outputs = (Output(self.to, out), *(Output(copy, out, optional=True) for copy in copies))
        moves = tuple(Move(slot, kept, kept, copy=slot > 0) for slot in range(len(outputs)))
        if kept.rows == rows:
            return Geometry(outputs, moves)
        padding = Left(box(kept.rows, 0, rows - kept.rows, cols), "vocabulary padding")
        return Geometry(outputs, moves, (padding,))

    def _copies(self, dims: Dims) -> Sequence[str]:
        if not self.mtp_copy:
            return ()
        # A config without num_nextn_predict_layers may stand beside weights of one MTP layer.
        layers = range(dims.layers, dims.layers + max(1, dims.mtp_layers))
        return [self.mtp_copy.replace("{m}", str(layer)) for layer in layers]


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing of it is written."""

    reason: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:  # noqa: ARG002 - a Kind
        """No moves."""
        return Geometry((), (), (Left(whole_box(shape), self.reason),))


@dataclass(frozen=True, slots=True)
class UnlessTied:
    """`kind`, except that a tied model's tensor is a copy of the embedding and is dropped."""

    kind: Kind

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """The geometry of `kind`, or no moves."""
        if dims.tied:
            return Drop("copy of the tied embedding").geometry(shape, dims)
        return self.kind.geometry(shape, dims)


@dataclass(frozen=True, slots=True)
class Refused:
    """A tensor that the family knows and cannot convert right; `reason` says why."""

    reason: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:  # noqa: ARG002 - a Kind
        """Never a geometry.

        Raises:
            ConversionError: always, with the reason.
        """
        raise ConversionError(f"it cannot be converted: {self.reason}")


@dataclass(frozen=True, slots=True)
class Either:
    """`then` if the origin checkpoint has a tensor of the form `marker`, else `otherwise`.

    The family chooses when it is fitted to an origin (Family.fitted); before that it is
    `otherwise`.
    """

    marker: str
    then: Kind
    otherwise: Kind

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """The geometry of `otherwise`."""
        return self.otherwise.geometry(shape, dims)


def misfit(shape: tuple[int, ...], why: str) -> ConversionError:
    """The error of a shape that a rule does not understand."""
    return ConversionError(f"shape {list(shape)} does not fit the rule: {why}")
