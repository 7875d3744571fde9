"""Region arithmetic: boxes, strided grids, and whether they cover a tensor exactly once.

Every tensor is looked at as a matrix: `[prod(shape[:-1]), shape[-1]]`, a vector as `[n, 1]`. A rule
moves a *box* of a whole source tensor onto a *grid* (a box with steps, possibly transposed) of a
target; a producer holds some boxes of the whole. All arithmetic is on exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..schemas.errors import LayoutError
from ..schemas.layout import Part

MATRIX_DIMS = 2


class Grid(NamedTuple):
    """The elements (row + i * row_step, col + j * col_step), i < rows, j < cols, of a matrix."""

    row: int
    col: int
    rows: int
    cols: int
    row_step: int = 1
    col_step: int = 1

    @property
    def elements(self) -> int:
        """How many elements it names."""
        return self.rows * self.cols

    @property
    def last_row(self) -> int:
        """The last row with an element; below `row` if there is none."""
        return self.row + (self.rows - 1) * self.row_step

    @property
    def last_col(self) -> int:
        """The last column with an element; below `col` if there is none."""
        return self.col + (self.cols - 1) * self.col_step

    def __str__(self) -> str:
        rows = _span(self.row, self.last_row, self.row_step, "row")
        return rows + ", " + _span(self.col, self.last_col, self.col_step, "column")


class Move(NamedTuple):
    """Copy a box of a whole source onto a grid of output number `slot` of the rule.

    Element (i, j) of the box goes to element (i, j) of the grid, or to (j, i) if `transposed`.
    `copy` marks a second use of source elements that another move carries already.
    """

    slot: int
    src: Grid
    dst: Grid
    transposed: bool = False
    copy: bool = False


class Held(NamedTuple):
    """A box of the whole that a producer holds: its place in the local tensor, in elements."""

    row: int
    col: int
    rows: int
    cols: int
    offset: int
    row_stride: int


class Cut(NamedTuple):
    """A piece before targets have numbers: `writers.plan_types.Piece` with a slot (same order)."""

    slot: int
    rows: int
    cols: int
    src_offset: int
    src_row_step: int
    src_col_step: int
    dst_offset: int
    dst_row_step: int
    dst_col_step: int


class Cover(NamedTuple):
    """How a set of grids covers a matrix.

    `overlaps`: pairs of grid numbers that share an element. `outside`: grids that leave the
    matrix. `uncovered`: elements in no grid (a lower bound if there are overlaps), the first of
    them in row `first_gap`.
    """

    overlaps: tuple[tuple[int, int], ...]
    outside: tuple[int, ...]
    uncovered: int
    first_gap: int

    @property
    def exact(self) -> bool:
        """Whether every element lies in exactly one grid."""
        return not self.overlaps and not self.outside and self.uncovered == 0


def view_of(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the matrix as which a tensor of this shape is looked at."""
    if len(shape) < MATRIX_DIMS:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def box(row: int, col: int, rows: int, cols: int) -> Grid:
    """A grid without steps."""
    return Grid(row, col, rows, cols)


def whole_box(shape: Sequence[int]) -> Grid:
    """The box that is the whole tensor."""
    return Grid(0, 0, *view_of(shape))


def held_boxes(part: Part, whole_shape: Sequence[int]) -> tuple[Held, ...]:
    """The boxes of the whole that a local tensor is, in the order in which it stores them.

    Raises:
        LayoutError: a cut that is neither along the first nor along the last dim, or that does
            not divide the dim.
    """
    rows, cols = view_of(whole_shape)
    if part.count == 1:
        return (Held(0, 0, rows, cols, 0, cols),)
    dim = part.dim
    if dim not in (0, len(whole_shape) - 1):
        raise LayoutError(f"a cut along dim {dim} of shape {tuple(whole_shape)} is not supported")
    size = whole_shape[dim]
    blocks = part.blocks if part.blocks else (size,)
    if sum(blocks) != size or any(block % part.count for block in blocks):
        raise LayoutError(f"blocks {blocks} of {size} elements cannot be cut into {part.count}")
    held: list[Held] = []
    start = local = 0
    unit = rows // size if dim == 0 and size else 1
    local_cols = cols // part.count
    for block in blocks:
        length = block // part.count
        at = start + part.index * length
        if dim == 0:
            held.append(Held(at * unit, 0, length * unit, cols, local * unit * cols, cols))
        else:
            held.append(Held(0, at, rows, length, local, local_cols))
        start += block
        local += length
    return tuple(held)


def cut(move: Move, held: Held, target_cols: int) -> Cut | None:
    """The part of a move that a producer holds, or None; `target_cols` of the target's matrix."""
    src, dst = move.src, move.dst
    top, left = max(src.row, held.row), max(src.col, held.col)
    rows = min(src.row + src.rows, held.row + held.rows) - top
    cols = min(src.col + src.cols, held.col + held.cols) - left
    if rows <= 0 or cols <= 0:
        return None
    down, right = top - src.row, left - src.col
    row_step, col_step = dst.row_step * target_cols, dst.col_step
    if move.transposed:
        row_step, col_step = col_step, row_step
    at = dst.row * target_cols + dst.col + down * row_step + right * col_step
    offset = held.offset + (top - held.row) * held.row_stride + left - held.col
    return _canonical(
        Cut(move.slot, rows, cols, offset, held.row_stride, 1, at, row_step, col_step)
    )


def cut_all(
    moves: Sequence[Move], held: Sequence[Held], target_cols: Sequence[int]
) -> tuple[Cut, ...]:
    """Every piece of a local tensor, in source order; neighbours that form one piece are merged.

    Args:
        moves: the rule's moves of the whole.
        held: what the producer holds of it.
        target_cols: the columns of each output's matrix, by slot.
    """
    cuts = [
        piece
        for move in moves
        for part in held
        if (piece := cut(move, part, target_cols[move.slot])) is not None
    ]
    cuts.sort(key=lambda piece: (piece.slot, piece.src_offset))
    merged: list[Cut] = []
    for piece in cuts:
        joined = _join(merged[-1], piece) if merged else None
        if joined is None:
            merged.append(piece)
        else:
            merged[-1] = joined
    merged.sort(key=lambda piece: (piece.src_offset, piece.slot))
    return tuple(merged)


def _canonical(piece: Cut) -> Cut:
    """Write a contiguous run as one row, a single column as rows of one element."""
    slot, rows, cols, src, src_row, src_col, dst, dst_row, dst_col = piece
    if cols == 1:
        if rows == 1 or src_row == dst_row == 1:
            return Cut(slot, 1, rows, src, rows, 1, dst, rows, 1)
        return Cut(slot, rows, 1, src, src_row, 1, dst, dst_row, 1)
    if src_col == dst_col == 1 and (rows == 1 or (src_row == cols and dst_row == cols)):
        return Cut(slot, 1, rows * cols, src, rows * cols, 1, dst, rows * cols, 1)
    return piece


def _join(first: Cut, second: Cut) -> Cut | None:
    """Both pieces as one, if the second continues the first in the source and in the target."""
    if first.slot != second.slot or first.rows < 1:
        return None
    src_gap = second.src_offset - first.src_offset
    dst_gap = second.dst_offset - first.dst_offset
    runs = first.rows == second.rows == 1 and first.dst_col_step == second.dst_col_step == 1
    if runs and src_gap == dst_gap == first.cols:
        total = first.cols + second.cols
        return first._replace(cols=total, src_row_step=total, dst_row_step=total)
    same = (
        first.cols == second.cols
        and first[4:6] == second[4:6]
        and first.dst_row_step == second.dst_row_step
        and first.dst_col_step == second.dst_col_step
    )
    if same and not runs:
        below = first.rows
        if src_gap == below * first.src_row_step and dst_gap == below * first.dst_row_step:
            return first._replace(rows=below + second.rows)
    return None


def progressions_meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    """Whether two progressions (start, step, count) share a number."""
    (a_start, a_step, a_count), (b_start, b_step, b_count) = a, b
    if a_count < 1 or b_count < 1:
        return False
    low = max(a_start, b_start)
    high = min(a_start + (a_count - 1) * a_step, b_start + (b_count - 1) * b_step)
    if low > high:
        return False
    if a_step == b_step == 1:
        return True
    divisor = math.gcd(a_step, b_step)
    if (b_start - a_start) % divisor:
        return False
    # Chinese remainder: x = a_start mod a_step and x = b_start mod b_step, the first x >= low.
    other = b_step // divisor
    factor = (b_start - a_start) // divisor * pow(a_step // divisor, -1, other) % other
    solution = a_start + a_step * factor
    return low + (solution - low) % (a_step * other) <= high


def grids_meet(a: Grid, b: Grid) -> bool:
    """Whether two grids share an element."""
    return progressions_meet(
        (a.row, a.row_step, a.rows), (b.row, b.row_step, b.rows)
    ) and progressions_meet((a.col, a.col_step, a.cols), (b.col, b.col_step, b.cols))


def cover_of(grids: Sequence[Grid], rows: int, cols: int) -> Cover:
    """Check that grids are disjoint, lie inside a rows x cols matrix and cover all of it."""
    outside = tuple(
        number
        for number, grid in enumerate(grids)
        if grid.elements
        and (grid.row < 0 or grid.col < 0 or grid.last_row >= rows or grid.last_col >= cols)
    )
    overlaps = _overlaps(grids)
    # Disjoint grids inside the matrix cover it exactly when their elements add up to it.
    total = sum(grid.elements for grid in grids)
    if not outside and not overlaps and total == rows * cols:
        return Cover((), (), 0, -1)
    per_row = np.zeros(rows, dtype=np.int64)
    for grid in grids:
        first = grid.row if grid.row >= 0 else grid.row % grid.row_step
        per_row[first : max(grid.last_row + 1, 0) : grid.row_step] += grid.cols
    lacking = np.maximum(cols - per_row, 0)
    gaps = np.flatnonzero(lacking)
    return Cover(overlaps, outside, int(lacking.sum()), int(gaps[0]) if gaps.size else -1)


def _overlaps(grids: Sequence[Grid]) -> tuple[tuple[int, int], ...]:
    # A sweep over rows: only grids whose row spans meet are compared.
    order = sorted(
        (number for number, grid in enumerate(grids) if grid.elements),
        key=lambda number: grids[number].row,
    )
    active: list[int] = []
    found: list[tuple[int, int]] = []
    for number in order:
        grid = grids[number]
        active = [other for other in active if grids[other].last_row >= grid.row]
        found += [
            (min(other, number), max(other, number))
            for other in active
            if grids_meet(grids[other], grid)
        ]
        active.append(number)
    return tuple(sorted(found))


def _span(first: int, last: int, step: int, what: str) -> str:
    if first == last:
        return f"{what} {first}"
    return f"{what}s {first}..{last}" + (f" step {step}" if step != 1 else "")
