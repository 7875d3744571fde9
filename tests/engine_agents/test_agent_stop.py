"""An agent that is stopped, cancelled or killed in each of its states, and a bus that fails."""

import asyncio
from pathlib import Path

import pytest
from support.engine_fake import CONTINUE, HEALTH, INFO, LOAD, PAUSE, FakeSglang, Step
from support.engine_versions import directory_of, key
from support.engine_world import World
from weightbus.bus.memory import MemoryBus
from weightbus.bus.streams import EVENT_STREAM
from weightbus.engine_agents import staging
from weightbus.engine_agents.activation import Activation, Holding
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.config import AgentConfig
from weightbus.engine_agents.sglang import SglangEngine
from weightbus.engine_agents.states import AgentState, Machine
from weightbus.engine_agents.verify import Progress, verify_version
from weightbus.schemas.errors import BusClosedError, MissingDependencyError
from weightbus.schemas.events import VersionKey
from weightbus.schemas.manifest import Manifest

HOW = ["stop", "cancel"]


async def end(w: World, agent: Agent, how: str) -> asyncio.Task[None]:
    """Begin to stop or cancel an agent; returns what to wait for."""
    if how == "stop":
        return asyncio.create_task(agent.stop())
    task = w.task(agent)
    task.cancel()
    return task


async def ended(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(10):
        await asyncio.wait({task})


@pytest.mark.parametrize("how", HOW)
async def test_in_idle(w: World, fake: FakeSglang, how: str):
    agent = w.start()
    await fake.arrived(INFO)
    await ended(await end(w, agent, how))
    assert w.task(agent).done()


class SlowReading:
    """Stands between the agent and verify_version: reading goes on until the agent gives up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(staging, "verify_version", self)

    def __call__(
        self,
        directory: Path,
        digest: str,
        progress: Progress,
        *,
        expected_version: VersionKey,
        threads: int,
    ) -> Manifest:
        self._loop.call_soon_threadsafe(self.begun.set)
        if expected_version == key(1):
            while True:
                progress(1, 2)
        return verify_version(directory, digest)


@pytest.mark.parametrize("how", HOW)
async def test_in_staging(w: World, fake: FakeSglang, how: str, monkeypatch: pytest.MonkeyPatch):
    reading = SlowReading(monkeypatch)
    agent = w.start()
    await w.new(1)
    await reading.begun.wait()
    assert agent.state is AgentState.STAGING
    await ended(await end(w, agent, how))
    assert agent.state is AgentState.IDLE
    assert PAUSE not in fake.paths()


async def test_a_newer_version_ends_the_staging_of_an_older_one(
    w: World, fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
):
    reading = SlowReading(monkeypatch)
    w.start()
    await w.new(1)
    await reading.begun.wait()
    await w.new(2)
    await w.report_on(key(2), "serving")
    assert [(r.version.weight_version, r.outcome) for r in await w.reports(2)] == [
        (1, "skipped"),
        (2, "serving"),
    ]
    assert len(fake.loads()) == 1


@pytest.mark.parametrize("how", HOW)
async def test_in_the_pause_before_the_load(w: World, fake: FakeSglang, how: str):
    gate = asyncio.Event()
    fake.script[PAUSE].append(Step(gate=gate))
    agent = w.start()
    await w.new(1)
    await fake.arrived(PAUSE)
    ending = await end(w, agent, how)
    await asyncio.sleep(0)
    gate.set()
    await ended(ending)
    assert agent.state is AgentState.RESUMED
    assert fake.loads() == []
    assert fake.paths()[-1] == CONTINUE
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_in_the_load(w: World, fake: FakeSglang, how: str):
    gate = asyncio.Event()
    fake.script[LOAD].append(Step(gate=gate))
    agent = w.start()
    label = await w.new(1)
    await fake.arrived(LOAD)
    ending = await end(w, agent, how)
    await asyncio.sleep(0)
    assert not ending.done()
    assert fake.paused == "abort"
    gate.set()
    await ended(ending)
    assert agent.state is AgentState.RESUMED
    assert agent.serving == fake.label == fake.weights == label
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_in_a_load_that_fails_the_last_good_version_is_still_loaded_again(
    w: World, fake: FakeSglang, how: str
):
    gate = asyncio.Event()
    agent = w.start()
    good = await w.new(0)
    await w.report_on(key(0), "serving")
    fake.script[LOAD].append(Step(gate=gate, reply=(500, "no"), corrupts=True))
    await w.new(1)
    await fake.arrived(LOAD, 2)
    ending = await end(w, agent, how)
    await asyncio.sleep(0)
    gate.set()
    await ended(ending)
    assert fake.weights == fake.label == good
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_while_the_engine_is_asked_for_its_label(w: World, fake: FakeSglang, how: str):
    gate = asyncio.Event()
    agent = w.start()
    await fake.arrived(INFO)
    fake.script[LOAD].append(Step(gate=gate))
    await w.new(1)
    await fake.arrived(LOAD)
    fake.always[INFO] = Step(gate=(asked := asyncio.Event()))
    asks = fake.paths().count(INFO)
    gate.set()
    await fake.arrived(INFO, asks + 1)
    assert agent.state is AgentState.VERIFYING
    ending = await end(w, agent, how)
    await asyncio.sleep(0)
    asked.set()
    await ended(ending)
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_while_the_engine_is_continued(w: World, fake: FakeSglang, how: str):
    gate = asyncio.Event()
    agent = w.start()
    await fake.arrived(CONTINUE)
    fake.script[CONTINUE].append(Step(gate=gate))
    await w.new(1)
    await fake.arrived(CONTINUE, 2)
    ending = await end(w, agent, how)
    await asyncio.sleep(0)
    assert not ending.done()
    gate.set()
    await ended(ending)
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_while_the_engine_proves_its_health(w: World, fake: FakeSglang, how: str):
    fake.script[HEALTH].append(Step(hang=True))
    agent = w.start()
    await w.new(1)
    await fake.arrived(HEALTH)
    await ended(await end(w, agent, how))
    assert agent.state is AgentState.RESUMED
    assert fake.paused is None


@pytest.mark.parametrize("how", HOW)
async def test_in_serving(w: World, fake: FakeSglang, how: str):
    agent = w.start()
    await w.new(1)
    await w.report_on(key(1), "serving")
    await ended(await end(w, agent, how))
    assert agent.state is AgentState.SERVING


async def test_an_owed_continue_is_tried_once_more_at_the_end(w: World, fake: FakeSglang):
    w.change(continue_within_s=0.01)
    agent = w.start()
    await fake.arrived(CONTINUE)
    refused = Step(reply=(500, "no"))
    fake.always[CONTINUE] = refused
    await w.new(1)
    await w.report_on(key(1), "failed")
    assert fake.paused is not None
    fake.always.clear()
    await agent.stop()
    assert fake.paused is None


async def test_after_a_kill_in_the_pause_the_next_agent_continues_first(w: World, fake: FakeSglang):
    fake.paused = "abort"  # what a killed agent leaves behind
    await w.new(1)
    w.start()
    await w.report_on(key(1), "serving")
    paths = fake.paths()
    assert paths[0] == CONTINUE
    assert paths.index(CONTINUE) < paths.index(PAUSE)


async def test_the_engine_is_continued_at_start_also_while_the_bus_is_away(
    w: World, fake: FakeSglang
):
    fake.paused = "abort"
    w.bus.server.disconnect()
    w.start()
    await fake.until(lambda: fake.paused is None)
    w.bus.server.reconnect()
    await w.new(1)
    await w.report_on(key(1), "serving")


async def test_an_engine_that_others_pause_is_not_continued_at_start(w: World, fake: FakeSglang):
    fake.paused = "abort"
    w.change(resume_at_start=False)
    agent = w.start()
    await fake.arrived(INFO, 2)
    assert fake.paused == "abort"
    await agent.stop()
    fake.paused = None


async def test_stop_before_run_and_twice(w: World):
    engine = SglangEngine(w.fake.url)
    agent = Agent(w.bus, engine, w.config)
    await agent.stop()
    await agent.stop()
    await agent.run()
    assert w.fake.calls == []
    await engine.close()


async def test_a_closed_bus_ends_the_agent_with_its_name(w: World, fake: FakeSglang):
    bus = await MemoryBus.connect(w.bus.server)
    engine = SglangEngine(fake.url)
    running = asyncio.create_task(Agent(bus, engine, w.config).run())
    await fake.arrived(INFO)
    await bus.close()
    with pytest.raises(BusClosedError):
        await running
    await engine.close()


async def test_reports_wait_for_the_bus_and_the_engine_does_not(w: World, fake: FakeSglang):
    w.start()
    gate = asyncio.Event()
    fake.script[LOAD].append(Step(gate=gate))
    label = await w.new(1)
    await fake.arrived(LOAD)
    w.bus.server.disconnect()
    gate.set()
    await fake.until(lambda: fake.label == label and fake.paused is None)
    w.bus.server.reconnect()
    await w.report_on(key(1), "serving")


async def test_a_stream_that_was_lost_and_begins_anew(w: World, fake: FakeSglang):
    agent = w.start()
    await w.new(5, attempt=3)
    await w.report_on(key(5, attempt=3), "serving")
    w.bus.server.purge("wb.>")
    log = w.bus.server.logs[EVENT_STREAM]
    log.first, log.last = 1, 0
    w.bus.server.changed()
    await w.until(lambda: not agent._follower.caught_up.is_set())
    await w.new(0, attempt=1)
    await w.report_on(key(0, attempt=1), "serving")
    assert fake.label == "run-1/1/v000000"


async def test_a_broken_engine_adapter_is_no_reason_to_leave_the_engine_paused(
    w: World, fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
):
    async def broken(self: SglangEngine, path: str, label: str) -> None:
        raise MissingDependencyError("a bug, or something that nobody thought of")

    monkeypatch.setattr(SglangEngine, "load_from_disk", broken)
    agent = w.start()
    await w.new(1)
    report = await w.report_on(key(1), "failed")
    assert report.state == "FENCED"
    assert fake.paused is None
    await agent.stop()


async def test_recovering_without_knowing_what_was_good_does_nothing(fake: FakeSglang):
    engine = SglangEngine(fake.url)
    machine = Machine()
    config = AgentConfig(run_id="r", engine_name="e")
    activation = Activation(engine, config, machine)
    await activation.recover()
    assert machine.state is AgentState.IDLE
    assert fake.calls == []
    await engine.close()


def test_a_holding_of_a_version_knows_its_folder(w: World):
    event = w.make(3)
    holding = Holding("/e", str(event.version), directory_of(event), event.manifest_digest)
    assert holding.directory == directory_of(event)
