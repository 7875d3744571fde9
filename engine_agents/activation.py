"""The change of weights itself: pause → flush → load → label → continue.

    attend    continue the engine if that is owed, and ask what it holds
    activate  bring the engine to a staged version; whatever happens, it is continued at the end
    recover   bring it back to the last good version when nobody knows what it holds

Three facts are kept here, and survive every failure: `good`, what the engine held last that is
known to be whole; `unknown`, whether it may hold something else now (a load failed and could not be
undone); `owed`, whether it may be paused because of us.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from ..schemas.errors import (
    EngineError,
    EngineLabelError,
    EngineTimeoutError,
    EngineUnreachableError,
    WeightbusError,
)
from .config import AgentConfig
from .engine import Engine, EngineInfo
from .states import AgentState, Machine
from .tasks import finish
from .verify import verify_version

_log = logging.getLogger(__name__)
_CONTINUE_RETRY_S = 0.2
_CONTINUE_RETRY_MAX_S = 5.0


@dataclass(frozen=True, slots=True)
class Holding:
    """Weights that an engine can load.

    `model_path` is the engine's name for the folder; `directory` this machine's, and None for what
    the engine was started with, which has no manifest.
    """

    model_path: str
    label: str
    directory: Path | None = None
    manifest_digest: str | None = None


class Activation:
    """Changes the weights of one engine; see the module's docstring."""

    def __init__(self, engine: Engine, config: AgentConfig, machine: Machine) -> None:
        self._engine = engine
        self._config = config
        self._machine = machine
        self.good: Holding | None = None
        self.unknown = False
        self.owed = config.resume_at_start
        # Labels that say nothing about the weights: a way back that failed may have left them.
        self._doubted: set[str] = set()
        self.release = ""
        self.pause_s = 0.0
        self.cache_kept = False

    @property
    def fenced(self) -> bool:
        """Whether the engine must not be counted on: unknown weights, or perhaps paused."""
        return self.unknown or self.owed

    async def attend(self) -> bool:
        """Continue the engine if owed, and look at what it holds.

        Returns:
            whether it holds something else than before: it was restarted, or somebody else (or a
            load call of ours that outlived its deadline) has changed it.
        """
        if self.owed:
            await finish(self._continue_once())
        info: EngineInfo = await self._engine.probe()
        self.release = info.release
        if self.good is not None and info.label == self.good.label:
            return False
        if self.unknown and info.label in self._doubted:
            return False
        # An engine takes a label only with the last byte of a version, or when it starts.
        self.good = Holding(info.model_path, info.label)
        self._settle(self.good)
        return True

    async def leave(self) -> None:
        """The agent ends: one more try to continue the engine, if that is still owed."""
        if self.owed:
            try:
                await finish(self._continue_once())
            except EngineError as error:
                _log.warning("left without continuing the engine; start an agent again: %s", error)

    async def activate(self, goal: Holding) -> None:
        """Bring the engine from STAGED to SERVING.

        Raises:
            EngineError: it did not work. The machine is in RESUMED (the engine serves `good`) or
                FENCED.
            asyncio.CancelledError: the same after a cancellation, with the engine continued; a
                load call that was already under way is waited for.
        """
        await self._paused(goal)
        self._machine.move(AgentState.SERVING)

    async def recover(self) -> None:
        """Load the last good version again, from a rest state to RESUMED.

        Raises:
            WeightbusError: it did not work; the machine is in FENCED.
        """
        if self.good is None:
            return
        self._machine.move(AgentState.STAGING)
        try:
            await asyncio.to_thread(_still_whole, self.good)
        except WeightbusError:
            self._machine.move(AgentState.FENCED)
            raise
        self._machine.move(AgentState.STAGED)
        await self._paused(self.good)
        self._machine.move(AgentState.RESUMED)

    async def _paused(self, goal: Holding) -> None:
        """From STAGED to VERIFYING, with the engine continued; to RESUMED or FENCED on an error."""
        self._machine.move(AgentState.PAUSED)
        began = asyncio.get_running_loop().time()
        self.owed = True
        try:
            try:
                await finish(self._engine.pause(self._config.pause_mode))
                self.cache_kept = not await finish(self._engine.flush(self._config.pause_mode))
                await finish(self._load(goal))
            finally:
                await finish(self._continue())
                self.pause_s = asyncio.get_running_loop().time() - began
            if self.owed:
                raise EngineTimeoutError(
                    f"the engine did not continue within {self._config.continue_within_s:g} s",
                    where={"engine": self._engine.url},
                    next_step="it is tried on; restart the engine if it stays so",
                )
        except BaseException:
            self._machine.move(AgentState.FENCED if self.fenced else AgentState.RESUMED)
            raise
        await self.prove_health()

    async def prove_health(self) -> None:
        """Let the engine generate; on an error the machine is in FENCED."""
        if not self._config.check_health:
            return
        try:
            await self._engine.health()
        except BaseException as error:
            ill = isinstance(error, WeightbusError) or self.fenced
            self._machine.settle(AgentState.FENCED if ill else AgentState.RESUMED)
            raise

    async def _load(self, goal: Holding) -> None:
        self._machine.move(AgentState.LOADING)
        self.unknown = True
        try:
            await self._take(goal, verifying=True)
        except (EngineTimeoutError, EngineUnreachableError):
            raise  # it hangs or is gone: a second load call could only make it worse
        except EngineError as error:
            await self._undo(goal, error)
            raise
        self._settle(goal)

    def _settle(self, holding: Holding) -> None:
        """The engine holds exactly this."""
        self.good = holding
        self.unknown = False
        self._doubted.clear()

    async def _take(self, goal: Holding, *, verifying: bool) -> None:
        await self._engine.load_from_disk(goal.model_path, goal.label)
        if verifying:
            self._machine.move(AgentState.VERIFYING)
        label = await self._engine.label()
        if label != goal.label:
            self._doubted.add(label)
            raise EngineLabelError(
                f"the engine loaded {goal.label} and names {label!r}",
                where={"engine": self._engine.url, "model_path": goal.model_path},
                next_step="does somebody else change this engine's weights?",
            )

    async def _undo(self, goal: Holding, error: EngineError) -> None:
        """A load failed and may have left some tensors behind: load the last good version again.

        SGLang's own way back reads the new folder a second time, so it cannot be relied on.
        """
        good = self.good
        if good is None:
            return
        _log.warning("loading failed, going back to %s: %s", good.label, error)
        try:
            await asyncio.to_thread(_still_whole, good)
            await self._take(good, verifying=False)
        except WeightbusError as second:
            self._doubted |= {goal.label, good.label}
            _log.error("%s cannot be loaded again; the engine is fenced: %s", good.label, second)
            return
        self._settle(good)

    async def _continue(self) -> None:
        """Continue the engine, trying until `continue_within_s` is over; never raises EngineError.

        When it does not work the debt stays in `owed`, and `attend` pays it first of all.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._config.continue_within_s
        wait_s = _CONTINUE_RETRY_S
        while True:
            try:
                await self._continue_once()
            except EngineError as error:
                _log.warning("the engine is paused and does not continue: %s", error)
            else:
                return
            if loop.time() + wait_s >= end:
                return
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _CONTINUE_RETRY_MAX_S)

    async def _continue_once(self) -> None:
        await self._engine.continue_()
        self.owed = False


def _still_whole(holding: Holding) -> None:
    """Names, sizes and headers, without reading tensors: an engine is paused meanwhile."""
    if holding.directory is not None:
        verify_version(holding.directory, holding.manifest_digest, read_bytes=False)
