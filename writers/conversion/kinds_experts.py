"""Rule kinds for experts that Hugging Face keeps as one tensor of three dims.

Megatron has one tensor per expert; number {e} lands in its own rows of the fused tensor, which is
looked at as the matrix [experts * rows, columns]. A geometry describes expert 0, and `per_expert`
says how many rows further each next one lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..regions import Grid, Move, box, view_of
from .dims import Dims
from .kinds import Geometry, Output, misfit

_GATE_UP = 2


@dataclass(frozen=True, slots=True)
class IntoExperts:
    """One expert's tensor becomes row {e} of a tensor with one more dim in front.

    `blocks`: in how many equal blocks of rows TP cuts it (2: gate rows, then up rows).
    """

    to: str
    blocks: int = 1

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """One move; weights [n, k] go to [experts, n, k], biases [n] to [experts, n]."""
        rows, cols = view_of(shape)
        output = Output(self.to, (dims.experts, *shape))
        if len(shape) == 1:
            # A bias is a column here and a row of the fused matrix.
            move = Move(0, box(0, 0, rows, 1), box(0, 0, 1, rows), transposed=True)
            per_expert = 1
        else:
            move = Move(0, box(0, 0, rows, cols), box(0, 0, rows, cols))
            per_expert = rows
        if shape[0] % self.blocks:
            raise misfit(shape, f"dim 0 does not consist of {self.blocks} equal blocks")
        blocks = (shape[0] // self.blocks,) * self.blocks if self.blocks > 1 else ()
        return Geometry((output,), (move,), blocks=blocks, per_expert=(per_expert,))


@dataclass(frozen=True, slots=True)
class TransposedExperts:
    """One expert's weight [n, k] becomes [k, n] number {e} of a fused [experts, k, n]."""

    to: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """One transposed move."""
        rows, cols = _matrix(shape)
        output = Output(self.to, (dims.experts, cols, rows))
        move = Move(0, box(0, 0, rows, cols), box(0, 0, cols, rows), transposed=True)
        return Geometry((output,), (move,), per_expert=(cols,))


@dataclass(frozen=True, slots=True)
class InterleavedExperts:
    """Gate rows, then up rows of one expert become alternating columns: gpt_oss.

    Weight [2I, h] → [experts, h, 2I]: element (tI + i, j) is element (e, j, 2i + t), with t = 0 for
    gate and 1 for up. Bias [2I] → [experts, 2I] alike.
    """

    to: str

    def geometry(self, shape: tuple[int, ...], dims: Dims) -> Geometry:
        """Two transposed moves with a column step of 2."""
        rows, cols = view_of(shape)
        if not shape or rows % _GATE_UP:
            raise misfit(shape, "dim 0 does not consist of gate rows and as many up rows")
        size = rows // _GATE_UP
        out = (dims.experts, rows) if len(shape) == 1 else (dims.experts, cols, rows)
        moves = tuple(
            Move(
                0,
                box(part * size, 0, size, cols),
                Grid(0, part, cols, size, col_step=_GATE_UP),
                transposed=True,
            )
            for part in range(_GATE_UP)
        )
        return Geometry(
            (Output(self.to, out),), moves, blocks=(size,) * _GATE_UP, per_expert=(cols,)
        )


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != _GATE_UP:
        raise misfit(shape, "an expert's weight has two dims")
    return shape[0], shape[1]
