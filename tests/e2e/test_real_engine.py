"""From real Megatron ranks into a real SGLang: it answers as the trainer's own model does."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from support.e2e_pipeline import RUN_ID, running_writers, train
from weightbus.bus.events import read_event
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer
from weightbus.bus.subjects import reports_filter
from weightbus.demo.check import MAX_DIFFERENCE, compare, engine_logprobs, trainer_logprobs
from weightbus.demo.megatron_cpu.origin import make_origin
from weightbus.demo.megatron_cpu.sizes import TinyRun
from weightbus.demo.sglang_cpu.server import SglangServer
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.config import AgentConfig
from weightbus.engine_agents.sglang import SglangEngine
from weightbus.schemas.events import EngineReport, VersionKey

KINDS = {
    "qwen3": TinyRun(kind="qwen3", tp=2, pp=2),
    "qwen3moe": TinyRun(kind="qwen3moe", ep=2, spec="te", grouped=True),
}
SERVED_WITHIN_S = 60.0


async def _served(bus: NatsBus, key: VersionKey) -> EngineReport:
    async with asyncio.timeout(SERVED_WITHIN_S), bus.read([reports_filter(RUN_ID)]) as reader:
        async for message in reader:
            event = read_event(message).event
            if isinstance(event, EngineReport) and event.version == key:
                return event
    raise AssertionError("the reader ended")


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", KINDS)
async def test_each_version_changes_the_answers_to_its_own(
    kind: str, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    run = KINDS[kind]
    origin = make_origin(tmp_path / "origin", run)
    with SglangServer(origin, tmp_path / "sglang.log") as server:
        engine = SglangEngine(server.url)
        bus = await NatsBus.connect(nats_server.url)
        agent = Agent(bus, engine, AgentConfig(run_id=RUN_ID, engine_name="engine-0"))
        logits: list[Path] = []
        async with asyncio.TaskGroup() as group, running_writers(nats_server, tmp_path / "out"):
            group.create_task(agent.run())
            for number, rate in ((1, 1e-2), (2, 3e-2)):
                folder = tmp_path / f"trainer-{number}"
                folder.mkdir()
                logits.append(
                    await train(
                        nats_server, folder, run, origin=origin, first=number, learning_rate=rate
                    )
                )
                # Each start of the trainer is an attempt of its own.
                key = VersionKey(run_id=RUN_ID, attempt=number, weight_version=number)
                report = await _served(bus, key)
                assert report.outcome == "serving", report
                difference, labels = await asyncio.to_thread(
                    compare, server.url, logits[-1], number
                )
                assert difference <= MAX_DIFFERENCE
                assert labels == {str(key)}
            await agent.stop()
        # The other version's answers are far away: the comparison can fail.
        first = trainer_logprobs(logits[0], 1)
        answers, _ = await asyncio.to_thread(
            engine_logprobs, server.url, np.load(logits[0] / "tokens.npy")
        )
        assert abs(answers - first).max() > 3 * MAX_DIFFERENCE
        await engine.close()
        await bus.close()
