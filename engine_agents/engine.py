"""An engine, as the agent sees it. `sglang.SglangEngine` is the real one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field

from ..schemas.base import Frozen

Seconds = Annotated[float, Field(gt=0)]


class PauseMode(enum.Enum):
    """What happens to requests that run when the engine is paused."""

    ABORT = "abort"  # they end early, with what they have
    RETRACT = "retract"  # they go back to the queue and are computed again on the new weights
    IN_PLACE = "in_place"  # they stay, with the cache that the old weights made


class EngineDeadlines(Frozen):
    """The longest that each call to an engine may take, in seconds."""

    info_s: Seconds = 15.0
    pause_s: Seconds = 60.0
    flush_s: Seconds = 10.0
    load_s: Seconds = 1800.0
    continue_s: Seconds = 15.0
    health_s: Seconds = 30.0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says about itself.

    `model_path` and `label` are those of the weights that it loaded last; `release` is the
    version of the engine's program, empty when it does not say.
    """

    release: str
    model_path: str
    label: str


class Engine(Protocol):
    """The calls that a change of version needs.

    Every call has a deadline and raises EngineUnreachableError, EngineTimeoutError or
    EngineRefusedError (with the engine's own words). Every call may be repeated.
    """

    @property
    def url(self) -> str:
        """Where the engine is, for reports and messages."""
        ...

    async def probe(self) -> EngineInfo:
        """Ask what the engine is and what it holds."""
        ...

    async def label(self) -> str:
        """The label of the weights that the engine holds."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when no request runs any more."""
        ...

    async def flush(self, mode: PauseMode) -> bool:
        """Drop what the old weights cached, while paused in `mode`.

        Returns:
            False when the mode keeps the cache of running requests on purpose, and some are there.
        """
        ...

    async def load_from_disk(self, model_path: str, label: str) -> None:
        """Load a checkpoint folder (a path on the engine's machine) and take its label."""
        ...

    async def continue_(self) -> None:
        """Generate again; does nothing when the engine is not paused."""
        ...

    async def health(self) -> None:
        """Return when the engine has proved that it generates."""
        ...

    async def close(self) -> None:
        """Release the connection; idempotent."""
        ...
