"""Random faults at random calls: the promises always hold, and in the end the newest version."""

import asyncio
import random

import pytest
from support.engine_fake import CONTINUE, FLUSH, HEALTH, INFO, LOAD, PAUSE, SERVER, FakeSglang, Step
from support.engine_versions import key
from support.engine_world import World
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.engine import EngineDeadlines

DEADLINES = EngineDeadlines(
    info_s=0.1, pause_s=0.1, flush_s=0.1, load_s=0.1, continue_s=0.1, health_s=0.1
)
PATHS = (PAUSE, CONTINUE, FLUSH, LOAD, INFO, SERVER, HEALTH)
FAULTS = (
    Step(reply=(500, "no")),
    Step(reply=(400, {"success": False, "message": "no"})),
    Step(reply=(200, {"success": False, "message": "no"})),
    Step(hang=True),
    Step(drop=True),
    Step(lost=True),
)
LOAD_FAULTS = (
    *FAULTS,
    Step(reply=(500, "no"), corrupts=True),
    Step(drop=True, corrupts=True),
    Step(mute_label=True),
)


def plan_faults(fake: FakeSglang, chance: random.Random) -> None:
    for path in PATHS:
        for _ in range(40):
            bad = chance.random() < 0.25
            faults = LOAD_FAULTS if path == LOAD else FAULTS
            fake.script[path].append(chance.choice(faults) if bad else Step())


def watch(agent: Agent, fake: FakeSglang, lies: list[str]) -> None:
    """What the agent claims must be what the engine holds, at every call."""
    if agent.serving not in {"", fake.weights}:
        lies.append(f"the agent says {agent.serving}, the engine holds {fake.weights}")


@pytest.mark.parametrize("seed", [*range(16), 33, 47])
async def test_promises_hold_under_random_faults(w: World, fake: FakeSglang, seed: int):
    chance = random.Random(seed)
    plan_faults(fake, chance)
    w.deadlines = DEADLINES
    w.change(continue_within_s=0.3, watch_every_s=0.05)
    agent = w.start()
    lies: list[str] = []
    fake.observer = lambda: watch(agent, fake, lies)
    for number in range(6):
        await w.new(number)
        await fake.arrived(INFO, chance.randrange(1, 3) + fake.paths().count(INFO))
    fake.script.clear()
    await w.new(6)
    await w.report_on(key(6), "serving")
    assert fake.weights == fake.label == agent.serving == "run-1/1/v000006"
    assert lies == []


@pytest.mark.parametrize("seed", range(16))
async def test_an_agent_that_is_stopped_anywhere_leaves_a_whole_engine(
    w: World, fake: FakeSglang, seed: int
):
    chance = random.Random(seed)
    w.start()
    await w.new(0)
    await w.report_on(key(0), "serving")
    calls = len(fake.calls)
    await w.new(1)
    await fake.until(lambda: len(fake.calls) >= calls + chance.randrange(1, 7))
    for _ in range(chance.randrange(20)):
        await asyncio.sleep(0)
    await w.end()
    assert fake.paused is None
    assert fake.weights == fake.label
    w.start()
    await w.report_on(key(1), "serving")
