"""The agent: keeps one engine on the newest version of a run.

`run()` has three tasks: the follower (stream → targets), the worker (targets → engine) and the
reporter (reports → stream). Only the worker talks to the engine, so there is one change at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from ..bus.interface import Bus
from ..schemas.errors import WeightbusError
from ..schemas.events import VersionComplete, VersionKey
from .activation import Activation, Holding
from .config import AgentConfig
from .engine import Engine
from .follow import Follower
from .labels import label_of, parse_label
from .reports import OUTCOMES, Reporter
from .staging import stage
from .states import AgentState, Machine
from .targets import Targets
from .tasks import cancel_and_wait, finish

_log = logging.getLogger(__name__)
_MAX_SKIP_REPORTS = 32
Failure = tuple[VersionKey | None, str, int]
"""What tells two failures apart: version, kind of error, how often the engine had to load it."""


class Agent:
    """Follows a run's complete versions and brings one engine to the newest.

    An engine is never left paused: whatever fails, and when the agent is cancelled, the engine is
    continued before `run` ends; after a kill -9 the next agent of that engine continues it first.
    The agent owns neither the bus nor the engine; whoever made them closes them after `run`.

    Args:
        bus: an open bus.
        engine: the engine; nobody else may change its weights.
        config: see AgentConfig.
    """

    def __init__(self, bus: Bus, engine: Engine, config: AgentConfig) -> None:
        self._config = config
        self._engine = engine
        self._machine = Machine()
        self._targets = Targets(config.run_id, config.fallback_depth)
        self._activation = Activation(engine, config, self._machine)
        self._reporter = Reporter(bus, engine, config, self._machine, self._activation)
        self._changed = asyncio.Event()
        self._follower = Follower(
            bus, config.run_id, config.engine_name, self._targets, self._changed
        )
        self._tries: dict[VersionKey, int] = {}
        self._failures = 0
        self._last_failure: Failure | None = None
        self._stopping = False
        self._main: asyncio.Task[None] | None = None

    @property
    def state(self) -> AgentState:
        """The state now."""
        return self._machine.state

    @property
    def serving(self) -> str:
        """The label of the weights that the engine serves; empty when nobody can say."""
        good = self._activation.good
        return "" if good is None or self._activation.fenced else good.label

    def numbers(self) -> dict[str, float]:
        """Figures for a monitoring system: counters end in `_total`, seconds in `_seconds`.

        `serving_version` is -1 while the engine serves no version of weightbus, or nobody knows.
        """
        key = parse_label(self.serving)
        counts = self._reporter.counts
        return {
            **{f"versions_{outcome}_total": float(counts[outcome]) for outcome in OUTCOMES},
            "serving_version": -1.0 if key is None else float(key.weight_version),
            "serving_attempt": -1.0 if key is None else float(key.attempt),
            "fenced": float(self._machine.state is AgentState.FENCED),
            "pause_seconds": self._activation.pause_s,
        }

    async def run(self) -> None:
        """Work until `stop()` or until cancelled.

        Raises:
            ReaderReplacedError: another agent of the same run and engine has started.
            BusClosedError: the bus was closed.
        """
        if self._stopping:
            return
        main = self._main = asyncio.create_task(self._tasks(), name="weightbus-agent")
        try:
            await asyncio.wait({main})
        finally:
            await cancel_and_wait(main)
        if not main.cancelled():
            main.result()

    async def stop(self) -> None:
        """End `run`; returns when the engine is continued and the last reports are sent.

        May be called before `run` (which then does nothing), twice, and from anywhere.
        """
        self._stopping = True
        if self._main is not None:
            await cancel_and_wait(self._main)

    async def _tasks(self) -> None:
        work = [self._work(), self._follower.follow(), self._reporter.send_all()]
        tasks = [asyncio.create_task(item) for item in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await finish(self._end(*tasks))

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        """In order: the engine is continued first, then nothing is read or reported any more."""
        for task in tasks:
            await cancel_and_wait(task)
        await self._reporter.send_last()

    def _target(self) -> VersionComplete | None:
        if not self._follower.caught_up.is_set():
            return None
        return self._targets.target(parse_label(self.serving))

    async def _work(self) -> None:
        try:
            await self._begin()
            while True:
                self._changed.clear()
                await self._wait(await self._step())
        finally:
            await self._activation.leave()

    async def _begin(self) -> None:
        """Resume the engine before anything else, also while the bus is away."""
        try:
            await self._activation.attend()
        except WeightbusError as error:
            _log.warning("the engine is not there yet: %s", error)
        await self._follower.caught_up.wait()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
            self._failures = 0  # something new came: no reason to wait any longer

    async def _step(self) -> float:
        """Do what is to be done now; returns the seconds after which to look again."""
        target = self._target()
        tries = self._tries_of(target)
        try:
            if target is None or self._is_served(target):
                await self._watch()
            else:
                await self._bring_to(target)
        except WeightbusError as error:
            return self._failed(target, error, tries)
        self._failures = 0
        self._last_failure = None
        target = self._target()
        return self._config.watch_every_s if target is None or self._is_served(target) else 0.0

    def _is_served(self, target: VersionComplete) -> bool:
        return self._machine.state is AgentState.SERVING and self.serving == label_of(
            target.version
        )

    async def _watch(self) -> None:
        """Nothing to change: is the engine still what it was?"""
        if await self._activation.attend():
            _log.info("the engine holds %s now", self.serving)
            self._machine.settle(AgentState.RESUMED)
            self._targets.forgive()
        if self._activation.unknown:
            await self._activation.recover()
            self._targets.forgive()
        elif self._machine.state is AgentState.FENCED:
            await self._activation.prove_health()
            self._machine.move(AgentState.RESUMED)

    async def _bring_to(self, event: VersionComplete) -> None:
        if await self._activation.attend():
            self._targets.forgive()
        key = event.version
        self._report_skipped(key)
        if self.serving == label_of(key):
            await self._activation.prove_health()
            self._machine.settle(AgentState.SERVING)
            self._report_serving(key, {}, "the engine had it already")
            return
        goal = await self._stage(event)
        if goal is None:
            return
        self._tries[key] = self._tries.get(key, 0) + 1
        await self._activation.activate(goal)
        message = "the cache of running requests was kept" if self._activation.cache_kept else ""
        self._report_serving(key, self._timings(), message)

    async def _stage(self, event: VersionComplete) -> Holding | None:
        self._machine.move(AgentState.STAGING)
        try:
            goal = await stage(event, self._config, lambda: self._outdated(event))
        except asyncio.CancelledError:
            self._machine.move(AgentState.IDLE)
            raise
        if goal is None or not self._wanted(event):
            self._machine.move(AgentState.IDLE)
            return None
        self._machine.move(AgentState.STAGED)
        return goal

    async def _outdated(self, event: VersionComplete) -> None:
        while self._wanted(event):
            self._changed.clear()
            await self._changed.wait()

    def _wanted(self, event: VersionComplete) -> bool:
        return self._target() == event

    def _failed(self, target: VersionComplete | None, error: WeightbusError, tries: int) -> float:
        """Settle, report and decide about another try; returns the seconds to wait before it.

        `tries` is how often the engine had been asked to load the target before this step.
        """
        self._failures += 1
        wait_s = self._config.retry.wait_s(self._failures)
        staging = self._machine.state is AgentState.STAGING
        if staging:
            fenced = self._activation.fenced
            self._machine.move(AgentState.FENCED if fenced else AgentState.RESUMED)
        elif target is None or self._tries_of(target) == tries:
            self._machine.settle(AgentState.FENCED)  # the engine is not there, or ill
        if target is None:
            self._note_failure((None, type(error).__name__, 0), error)
            return wait_s
        key = target.version
        if staging and not error.retryable:
            self._targets.reject(key, with_older=False)
            prospect = "This version is not tried again."
        elif self._tries_of(target) >= self._config.retry.max_tries:
            self._targets.reject(key, with_older=True)
            prospect = f"Tried {self._tries_of(target)} times; the next version is tried again."
        else:
            prospect = f"Tried again in {wait_s:g} s."
        if self._note_failure((key, type(error).__name__, self._tries_of(target)), error):
            self._targets.reported(key)
            self._reporter.report(
                key, "failed", error=error, message=prospect, timings_s=self._timings()
            )
        return wait_s if self._target() in (target, None) else 0.0

    def _note_failure(self, failure: Failure, error: WeightbusError) -> bool:
        """Whether it is a new failure: an engine that stays away is reported once."""
        new = failure != self._last_failure
        self._last_failure = failure
        if new:
            _log.warning("%s", error)
        return new

    def _tries_of(self, target: VersionComplete | None) -> int:
        return 0 if target is None else self._tries.get(target.version, 0)

    def _report_serving(self, key: VersionKey, timings_s: dict[str, float], message: str) -> None:
        self._targets.reported(key)
        self._reporter.report(key, "serving", message=message, timings_s=timings_s)

    def _report_skipped(self, key: VersionKey) -> None:
        after = parse_label(self.serving)
        for skipped in self._targets.take_skipped(key, after, _MAX_SKIP_REPORTS):
            self._reporter.report(skipped, "skipped", message=f"superseded by {key}")

    def _timings(self) -> dict[str, float]:
        """Seconds in each state of the last change; `PAUSE_TOTAL`: from pause to continued."""
        timings = self._machine.timings_s()
        if AgentState.PAUSED.name in timings:
            timings["PAUSE_TOTAL"] = self._activation.pause_s
        return timings
