"""What differs between SGLang releases: this table, and nowhere else.

Rows were found by trying each release. The load call itself always gets `flush_cache: false`, in
every release, and the cache is dropped by /flush_cache before it, while the engine is paused:

* 0.5.10 and 0.5.15 end with a failed assertion when a load call is to flush while requests wait;
* 0.5.23 answers `success: false` then, although weights and label have changed.

Nothing is computed between the flush and the load, so the order makes no other difference.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..schemas.errors import ConfigError
from .engine import PauseMode


class FlushRule(enum.Enum):
    """What a refused /flush_cache (HTTP 400) means in a pause."""

    BUSY = "busy"  # requests are just ending: ask again until the deadline
    NEVER = "never"  # requests wait, and will as long as the pause lasts: the change cannot be made
    KEPT = "kept"  # the mode keeps the cache of its requests on purpose: go on


@dataclass(frozen=True, slots=True)
class Release:
    """SGLang from `since` on, up to the next row."""

    since: tuple[int, ...]
    flush_rules: Mapping[PauseMode, FlushRule]


_RETRACT_KEEPS_QUEUE: Mapping[PauseMode, FlushRule] = MappingProxyType(
    {
        PauseMode.ABORT: FlushRule.BUSY,
        # Retracted requests count as waiting, and nothing is flushed while any waits.
        PauseMode.RETRACT: FlushRule.NEVER,
        PauseMode.IN_PLACE: FlushRule.KEPT,
    }
)
_RETRACT_FLUSHES: Mapping[PauseMode, FlushRule] = MappingProxyType(
    {
        PauseMode.ABORT: FlushRule.BUSY,
        PauseMode.RETRACT: FlushRule.BUSY,
        PauseMode.IN_PLACE: FlushRule.KEPT,
    }
)
RELEASES: tuple[Release, ...] = (
    Release((0, 5, 10), _RETRACT_KEEPS_QUEUE),
    Release((0, 5, 15), _RETRACT_KEEPS_QUEUE),
    Release((0, 5, 23), _RETRACT_FLUSHES),
)
"""Oldest first. A release between two rows is taken for the older one."""


def release_of(version: str) -> Release:
    """The row of a release, by the version that the engine gives (`0.5.15.post1`).

    A text that is no such number (a build from source, a stand-in that gives none) is taken for
    the newest row.

    Raises:
        ConfigError: older than the first row.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    number = tuple(int(part) for part in match.groups()) if match is not None else (0, 0, 0)
    if number == (0, 0, 0):
        return RELEASES[-1]
    rows = [row for row in RELEASES if row.since <= number]
    if not rows:
        raise ConfigError(
            f"SGLang {version} is older than {'.'.join(map(str, RELEASES[0].since))}",
            next_step="serve with a newer SGLang: older ones cannot pause as an agent needs it",
        )
    return rows[-1]
