"""The agent's state machine, as data.

    IDLE → STAGING → STAGED → PAUSED → LOADING → VERIFYING → SERVING
                └──────────── any failure ───────────▶ RESUMED, or FENCED

Every move of the agent is a row of `TRANSITIONS`; anything else is an IllegalTransitionError.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..schemas.errors import IllegalTransitionError


class AgentState(enum.Enum):
    """Where the agent is with its engine."""

    IDLE = "idle"  # no version is being worked on; the engine serves what it served before
    STAGING = "staging"  # the version's bytes are read and verified; the engine serves on
    STAGED = "staged"  # every byte is local and good; nothing of it is served yet
    PAUSED = "paused"  # the engine was told to pause, and drops what the old weights cached
    LOADING = "loading"  # the engine's own load call runs
    VERIFYING = "verifying"  # the engine is asked which version it names, and resumed
    SERVING = "serving"  # the engine names the version and generates
    RESUMED = "resumed"  # the version failed; the engine serves the last good version
    FENCED = "fenced"  # nobody can say what the engine holds, or whether it generates

    @property
    def busy(self) -> bool:
        """Whether a version is on its way through the machine."""
        return self in _BUSY


_BUSY = frozenset(
    {
        AgentState.STAGING,
        AgentState.STAGED,
        AgentState.PAUSED,
        AgentState.LOADING,
        AgentState.VERIFYING,
    }
)
_S = AgentState

TRANSITIONS: Mapping[AgentState, frozenset[AgentState]] = MappingProxyType(
    {
        # IDLE → SERVING: the engine names the right version already. A rest state may become
        # FENCED when the engine itself goes away.
        _S.IDLE: frozenset({_S.STAGING, _S.SERVING, _S.RESUMED, _S.FENCED}),
        # Back to IDLE: superseded by a newer version, retired, or the agent is stopped. An engine
        # that was fenced stays so when the version that should have helped is bad.
        _S.STAGING: frozenset({_S.STAGED, _S.IDLE, _S.RESUMED, _S.FENCED}),
        _S.STAGED: frozenset({_S.PAUSED, _S.IDLE, _S.RESUMED}),
        _S.PAUSED: frozenset({_S.LOADING, _S.RESUMED, _S.FENCED}),
        _S.LOADING: frozenset({_S.VERIFYING, _S.RESUMED, _S.FENCED}),
        _S.VERIFYING: frozenset({_S.SERVING, _S.RESUMED, _S.FENCED}),
        _S.SERVING: frozenset({_S.STAGING, _S.RESUMED, _S.FENCED}),
        _S.RESUMED: frozenset({_S.STAGING, _S.SERVING, _S.FENCED}),
        _S.FENCED: frozenset({_S.STAGING, _S.SERVING, _S.RESUMED}),
    }
)
"""From each state, the states that may follow."""


class Machine:
    """One state, moved only along `TRANSITIONS`, and the seconds spent in each busy state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = AgentState.IDLE
        self._since = clock()
        self._timings: dict[str, float] = {}

    @property
    def state(self) -> AgentState:
        """The state now."""
        return self._state

    def move(self, target: AgentState) -> None:
        """Go to another state. Entering STAGING starts new timings.

        Raises:
            IllegalTransitionError: the table has no such move.
        """
        if target not in TRANSITIONS[self._state]:
            allowed = sorted(state.name for state in TRANSITIONS[self._state])
            raise IllegalTransitionError(
                f"the agent cannot go from {self._state.name} to {target.name}",
                where={"state": self._state.name, "allowed": " ".join(allowed)},
                next_step="this is an error of weightbus: report it with the agent's log",
            )
        now = self._clock()
        if self._state.busy:
            spent = self._timings.get(self._state.name, 0.0) + now - self._since
            self._timings[self._state.name] = spent
        if target is AgentState.STAGING:
            self._timings = {}
        self._state, self._since = target, now

    def settle(self, target: AgentState) -> None:
        """`move`, or nothing when the machine is there already."""
        if self._state is not target:
            self.move(target)

    def timings_s(self) -> dict[str, float]:
        """Seconds in each busy state (by name) that was left since STAGING was entered last."""
        return dict(self._timings)
