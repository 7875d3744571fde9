"""An agent, a scripted engine and a bus in memory, put together for a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from support.engine_fake import FakeSglang
from support.engine_versions import key, make_version, small_checkpoint
from weightbus.bus.events import publish_event, read_event
from weightbus.bus.memory import MemoryBus
from weightbus.bus.subjects import reports_filter
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.config import AgentConfig, RetryPolicy
from weightbus.engine_agents.engine import EngineDeadlines, PauseMode
from weightbus.engine_agents.sglang import SglangEngine
from weightbus.schemas.events import EngineReport, VersionComplete, VersionKey

DEADLINES = EngineDeadlines(info_s=2, pause_s=2, flush_s=0.2, load_s=2, continue_s=2, health_s=2)
WITHIN_S = 10.0


class World:
    """What a test plays with. Versions are made of one small checkpoint per weight version."""

    def __init__(self, bus: MemoryBus, fake: FakeSglang, folder: Path) -> None:
        self.bus = bus
        self.fake = fake
        self.folder = folder
        self.deadlines = DEADLINES
        self.config = AgentConfig(
            run_id="run-1",
            engine_name="engine-0",
            continue_within_s=0.5,
            watch_every_s=0.1,
            retry=RetryPolicy(max_tries=2, first_wait_s=0.01, max_wait_s=0.05),
        )
        self._agents: list[tuple[Agent, SglangEngine, asyncio.Task[None]]] = []

    def change(self, **changes: object) -> None:
        """Change the configuration of agents that start later."""
        self.config = AgentConfig.model_validate(
            {**self.config.model_dump(), **changes}, strict=False
        )

    def make(self, weight_version: int, attempt: int = 1, run_id: str = "run-1") -> VersionComplete:
        """A version directory; the event is not published."""
        version = key(weight_version, attempt, run_id)
        name = f"origin-{run_id}-{attempt}-{weight_version}"
        origin = small_checkpoint(self.folder / name, seed=weight_version)
        return make_version(origin, self.folder / "versions", version)

    async def complete(self, *events: VersionComplete) -> None:
        for event in events:
            await publish_event(self.bus, event)

    async def new(self, weight_version: int, attempt: int = 1) -> str:
        """Make and publish a version; returns its label."""
        event = self.make(weight_version, attempt)
        await self.complete(event)
        return str(event.version)

    def start(self) -> Agent:
        """Start an agent of its own connection to the engine."""
        engine = SglangEngine(self.fake.url, deadlines=self.deadlines, flush_retry_s=0.01)
        agent = Agent(self.bus, engine, self.config)
        self._agents.append((agent, engine, asyncio.create_task(agent.run())))
        return agent

    def task(self, agent: Agent) -> asyncio.Task[None]:
        return next(task for known, _, task in self._agents if known is agent)

    async def end(self) -> None:
        for agent, engine, task in self._agents:
            await agent.stop()
            await asyncio.wait({task})
            await engine.close()

    async def reports(self, count: int) -> list[EngineReport]:
        """The first reports, as soon as there are so many; exactly these, and no more yet."""
        found: list[EngineReport] = []
        async with self.bus.read([reports_filter("run-1")]) as reader:
            while len(found) < count:
                message = await reader.next(WITHIN_S)
                assert message is not None, f"only {found}"
                event = read_event(message).event
                assert isinstance(event, EngineReport)
                found.append(event)
        return found

    async def report_on(self, version: VersionKey | str, outcome: str) -> EngineReport:
        """Wait for a report of that outcome about a version."""
        async with self.bus.read([reports_filter("run-1")]) as reader:
            while True:
                message = await reader.next(WITHIN_S)
                assert message is not None, f"no report {outcome} on {version}"
                event = read_event(message).event
                assert isinstance(event, EngineReport)
                if str(event.version) == str(version) and event.outcome == outcome:
                    return event

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that no event tells."""
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110 - nobody sets an event for it
                await asyncio.sleep(0.005)

    def check_innocent(self) -> None:
        """The engine was handled well: not paused now, no load outside of a pause, no death."""
        assert self.fake.sins == []
        assert self.fake.paused is None


@contextlib.asynccontextmanager
async def world(folder: Path, release: str = "0.5.23") -> AsyncGenerator[World]:
    """A world; at its end every agent has stopped, and the engine was treated well."""
    async with FakeSglang(release) as fake, await MemoryBus.connect() as bus:
        made = World(bus, fake, folder)
        try:
            yield made
        finally:
            await made.end()
        made.check_innocent()


__all__ = ["PauseMode", "World", "world"]
