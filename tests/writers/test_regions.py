"""Region arithmetic against brute force on small matrices that are not square."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conversion_executor import copy_piece
from support.conversion_hypothesis import UNHURRIED
from weightbus.schemas.errors import LayoutError
from weightbus.schemas.layout import Part
from weightbus.writers.plan_types import Piece
from weightbus.writers.regions import (
    Cut,
    Grid,
    Held,
    Move,
    box,
    cover_of,
    cut,
    cut_all,
    grids_meet,
    held_boxes,
    progressions_meet,
    view_of,
    whole_box,
)

STARTS, STEPS, COUNTS = st.integers(0, 12), st.integers(1, 6), st.integers(0, 6)
PROGRESSIONS = st.tuples(STARTS, STEPS, COUNTS)
GRIDS = st.builds(Grid, STARTS, STARTS, COUNTS, COUNTS, STEPS, STEPS)


def numbers(progression: tuple[int, int, int]) -> set[int]:
    start, step, count = progression
    return {start + i * step for i in range(count)}


def elements(grid: Grid) -> set[tuple[int, int]]:
    rows = numbers((grid.row, grid.row_step, grid.rows))
    cols = numbers((grid.col, grid.col_step, grid.cols))
    return {(row, col) for row in rows for col in cols}


@UNHURRIED
@given(PROGRESSIONS, PROGRESSIONS)
def test_progressions_meet_where_their_sets_do(
    a: tuple[int, int, int], b: tuple[int, int, int]
) -> None:
    assert progressions_meet(a, b) == bool(numbers(a) & numbers(b))


@UNHURRIED
@given(st.integers(0, 10**12), st.integers(1, 10**6), st.integers(1, 10**6))
def test_progressions_of_any_size_are_exact(start: int, a_step: int, b_step: int) -> None:
    # The first two share their start, the other two hold even and odd numbers (or odd and even).
    assert progressions_meet((start, a_step, 5), (start, b_step, 5))
    assert not progressions_meet((start, 2 * a_step, 10**6), (start + 1, 2 * b_step, 10**6))


@UNHURRIED
@given(GRIDS, GRIDS)
def test_grids_meet_where_their_elements_do(a: Grid, b: Grid) -> None:
    assert grids_meet(a, b) == bool(elements(a) & elements(b))


@UNHURRIED
@given(st.lists(GRIDS, max_size=6), st.integers(1, 20), st.integers(1, 20))
def test_cover_equals_counting_every_element(grids: list[Grid], rows: int, cols: int) -> None:
    count: dict[tuple[int, int], int] = {}
    for grid in grids:
        for element in elements(grid):
            count[element] = count.get(element, 0) + 1
    matrix = {(row, col) for row in range(rows) for col in range(cols)}
    cover = cover_of(grids, rows, cols)
    assert cover.exact == (set(count) == matrix and all(n == 1 for n in count.values()))
    assert list(cover.overlaps) == [
        (a, b)
        for a in range(len(grids))
        for b in range(a + 1, len(grids))
        if elements(grids[a]) & elements(grids[b])
    ]
    assert list(cover.outside) == [
        n for n, grid in enumerate(grids) if not elements(grid) <= matrix
    ]
    if not cover.overlaps and not cover.outside:
        missing = sorted(matrix - set(count))
        assert cover.uncovered == len(missing)
        assert cover.first_gap == (missing[0][0] if missing else -1)


def test_interleaved_columns_cover_exactly_and_a_shifted_one_does_not() -> None:
    even, odd = Grid(0, 0, 3, 4, 1, 2), Grid(0, 1, 3, 4, 1, 2)
    assert cover_of([even, odd], 3, 8).exact
    assert cover_of([even, even], 3, 8).overlaps == ((0, 1),)
    assert cover_of([even], 3, 8).uncovered == 12
    assert cover_of([even, Grid(0, 2, 3, 4, 1, 2)], 3, 8).outside == (1,)


def test_rows_before_the_first_are_outside() -> None:
    cover = cover_of([Grid(-3, 0, 4, 2, 2, 1)], 6, 2)
    assert cover.outside == (0,)
    assert not cover.exact


@pytest.mark.parametrize(
    ("shape", "view"),
    [((), (1, 1)), ((5,), (5, 1)), ((5, 3), (5, 3)), ((2, 5, 3), (10, 3)), ((0, 3), (0, 3))],
)
def test_views(shape: tuple[int, ...], view: tuple[int, int]) -> None:
    assert view_of(shape) == view


def test_a_grid_says_where_it_is() -> None:
    assert str(Grid(2, 0, 3, 4, 5, 1)) == "rows 2..12 step 5, columns 0..3"
    assert str(box(7, 1, 1, 1)) == "row 7, column 1"


# --------------------------------------------------------------------------------------- parts


@st.composite
def parts(draw: st.DrawFn) -> tuple[Part, tuple[int, ...]]:
    """A part and the shape of its whole: 1 to 3 dims, cut along the first or the last."""
    count = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dim = draw(st.sampled_from((0, len(shape) - 1)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks = [size * count for size in sizes]
    shape[dim] = sum(blocks)
    kept = tuple(blocks) if len(blocks) > 1 or draw(st.booleans()) else ()
    part = Part(dim=dim, index=draw(st.integers(0, count - 1)), count=count, blocks=kept)
    return part, tuple(shape)


def local_of(whole: np.ndarray[Any, Any], part: Part) -> np.ndarray[Any, Any]:
    """The definition of a part, in numpy."""
    if part.count == 1:
        return whole
    blocks = part.blocks if part.blocks else (whole.shape[part.dim],)
    pieces = np.split(whole, np.cumsum(blocks)[:-1], part.dim)
    return np.concatenate(
        [np.split(piece, part.count, part.dim)[part.index] for piece in pieces], part.dim
    )


@UNHURRIED
@given(parts())
def test_held_boxes_say_where_every_local_element_comes_from(
    case: tuple[Part, tuple[int, ...]],
) -> None:
    part, shape = case
    whole = np.arange(np.prod(shape)).reshape(shape)
    local = np.full(local_of(whole, part).size, -1)
    view = whole.reshape(view_of(shape))
    for held in held_boxes(part, shape):
        for row in range(held.rows):
            at = held.offset + row * held.row_stride
            assert (local[at : at + held.cols] == -1).all()
            local[at : at + held.cols] = view[held.row + row, held.col : held.col + held.cols]
    assert (local == local_of(whole, part).ravel()).all()


def test_a_cut_of_a_middle_dim_is_refused() -> None:
    with pytest.raises(LayoutError, match="dim 1 of shape"):
        held_boxes(Part(dim=1, index=0, count=2), (4, 6, 8))


def test_blocks_that_do_not_make_up_the_dim_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"blocks \(2, 2\) of 6"):
        held_boxes(Part(dim=0, index=0, count=2, blocks=(2, 2)), (6, 5))


# -------------------------------------------------------------------------------------- pieces


@st.composite
def moved(draw: st.DrawFn) -> tuple[list[Move], list[int], tuple[int, ...]]:
    """Moves of a source cut into boxes, each onto a stepped grid, the targets' columns, shapes."""
    rows_cut = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cols_cut = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    moves: list[Move] = []
    columns: list[int] = []
    row = 0
    for height in rows_cut:
        col = 0
        for width in cols_cut:
            transposed = draw(st.booleans())
            high, wide = (width, height) if transposed else (height, width)
            step_row, step_col = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            at = draw(st.integers(0, 2)), draw(st.integers(0, 2))
            grid = Grid(*at, high, wide, step_row, step_col)
            moves.append(Move(len(columns), box(row, col, height, width), grid, transposed))
            columns.append(grid.last_col + 1 + draw(st.integers(0, 2)))
            col += width
        row += height
    return moves, columns, (row, sum(cols_cut))


@UNHURRIED
@given(moved(), st.data())
def test_pieces_of_all_parts_do_what_the_moves_do_to_the_whole(
    case: tuple[list[Move], list[int], tuple[int, ...]], data: st.DataObject
) -> None:
    moves, columns, shape = case
    dim = data.draw(st.sampled_from((0, 1)))
    divisors = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
    count = data.draw(st.sampled_from(divisors))
    whole = np.arange(1, shape[0] * shape[1] + 1, dtype=np.uint64).reshape(shape)
    heights = [move.dst.last_row + 1 for move in moves]
    wanted = [np.zeros((h, w), np.uint64) for h, w in zip(heights, columns, strict=True)]
    for move in moves:
        src, dst = move.src, move.dst
        taken = whole[src.row : src.row + src.rows, src.col : src.col + src.cols]
        wanted[move.slot][
            dst.row : dst.last_row + 1 : dst.row_step, dst.col : dst.last_col + 1 : dst.col_step
        ] = taken.T if move.transposed else taken
    found = [np.zeros(target.size, np.uint64) for target in wanted]
    for index in range(count):
        part = Part(dim=dim, index=index, count=count)
        local = np.ascontiguousarray(local_of(whole, part)).ravel()
        for piece in cut_all(moves, held_boxes(part, shape), columns):
            copy_piece(Piece(*piece), local, found[piece.slot])
    for got, target in zip(found, wanted, strict=True):
        assert (got.reshape(target.shape) == target).all()


def test_a_move_outside_of_what_is_held_gives_no_piece() -> None:
    assert cut(Move(0, box(0, 0, 2, 3), box(0, 0, 2, 3)), Held(2, 0, 2, 3, 0, 3), 3) is None


def test_neighbours_are_merged_into_one_run() -> None:
    moves = [Move(0, box(row, 0, 2, 5), box(row, 0, 2, 5)) for row in (4, 0, 2)]
    pieces = cut_all(moves, held_boxes(Part(), (6, 5)), [5])
    assert pieces == (Cut(0, 1, 30, 0, 30, 1, 0, 30, 1),)
    assert Piece(*pieces[0]).is_run


def test_neighbours_of_a_strided_piece_are_merged() -> None:
    moves = [Move(0, box(row, 0, 2, 5), box(row, 3, 2, 5)) for row in (0, 2, 4)]
    pieces = cut_all(moves, held_boxes(Part(), (6, 5)), [8])
    assert pieces == (Cut(0, 6, 5, 0, 5, 1, 3, 8, 1),)
    assert not Piece(*pieces[0]).is_run


def test_a_column_of_a_vector_is_a_run() -> None:
    pieces = cut_all([Move(0, box(2, 0, 4, 1), box(0, 0, 4, 1))], held_boxes(Part(), (6,)), [1])
    assert pieces == (Cut(0, 1, 4, 2, 4, 1, 0, 4, 1),)


def test_the_whole_is_one_run() -> None:
    whole = whole_box((6, 5))
    pieces = cut_all([Move(0, whole, whole)], held_boxes(Part(), (6, 5)), [5])
    assert [Piece(*piece).is_run for piece in pieces] == [True]
