"""The states of a staging slot, and the moves between them as data."""

from __future__ import annotations

import enum
from types import MappingProxyType

from ..schemas.errors import StagingError


class SlotState(enum.Enum):
    """What a slot of the arena is doing."""

    FREE = "free"  # anybody may take it
    FILLING = "filling"  # the trainer copies its shards into it
    HELD = "held"  # its bytes are announced, or about to be: writers read them
    CLOSED = "closed"  # the arena is gone


MOVES = MappingProxyType(
    {
        SlotState.FREE: frozenset({SlotState.FILLING, SlotState.CLOSED}),
        # A copy that failed frees the slot at once: nobody was told about it.
        SlotState.FILLING: frozenset({SlotState.HELD, SlotState.FREE, SlotState.CLOSED}),
        # Only the version's outcome frees it: until then a writer may read it.
        SlotState.HELD: frozenset({SlotState.FREE, SlotState.CLOSED}),
        SlotState.CLOSED: frozenset[SlotState](),
    }
)


def check_move(slot: int, old: SlotState, new: SlotState) -> None:
    """Raises StagingError for a move that is not in the table (a programming error)."""
    if new not in MOVES[old]:
        raise StagingError(
            f"a slot cannot go from {old.value} to {new.value}",
            where={"slot": slot},
            next_step="report this; the arena's bookkeeping is wrong",
        )
