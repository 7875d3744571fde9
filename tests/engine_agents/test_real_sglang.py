"""Real SGLang servers on the CPU, brought from version to version by an agent.

One server is started per release and architecture (20 to 60 s, 1.8 GB), one at a time; a story is
told to it. A release that is not installed fails with the command that installs it.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.engine_models import TOKENS, difference, reference_logprobs, tiny_model
from support.engine_versions import directory_of, key, make_version, truncate
from weightbus.bus.events import publish_event, read_event
from weightbus.bus.memory import MemoryBus
from weightbus.bus.subjects import reports_filter
from weightbus.demo.megatron_cpu.sizes import Kind
from weightbus.demo.sglang_cpu.server import SglangServer
from weightbus.engine_agents.agent import Agent
from weightbus.engine_agents.config import AgentConfig, RetryPolicy
from weightbus.engine_agents.engine import EngineDeadlines, PauseMode
from weightbus.engine_agents.sglang import SglangEngine
from weightbus.schemas.errors import (
    EngineRefusedError,
    EngineUnreachableError,
    MissingDependencyError,
)
from weightbus.schemas.events import EngineReport, VersionComplete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SAME, OTHER = 0.1, 1.0
WITHIN_S = 90.0
DEADLINES = EngineDeadlines(load_s=60, pause_s=30)
RETRACT_KEEPS_QUEUE = {"0.5.10.post1", "0.5.15.post1"}


class Story:
    """A real server, an agent when wanted, and the versions that they are given."""

    def __init__(self, bus: MemoryBus, url: str, folder: Path) -> None:
        self.bus = bus
        self.url = url
        self.folder = folder
        self.client = httpx.AsyncClient(base_url=url, trust_env=False, timeout=WITHIN_S)

    @asynccontextmanager
    async def agent(self, mode: PauseMode = PauseMode.ABORT) -> AsyncGenerator[Agent]:
        engine = SglangEngine(self.url, deadlines=DEADLINES)
        config = AgentConfig(
            run_id="run-1",
            engine_name="engine-0",
            pause_mode=mode,
            retry=RetryPolicy(max_tries=1),
        )
        agent = Agent(self.bus, engine, config)
        running = asyncio.create_task(agent.run())
        try:
            yield agent
        finally:
            await agent.stop()
            await running
            await engine.close()

    def make(self, checkpoint: Path, weight_version: int) -> VersionComplete:
        return make_version(checkpoint, self.folder / "versions", key(weight_version))

    async def report(self, event: VersionComplete) -> EngineReport:
        """Complete a version and wait for the report on it."""
        await publish_event(self.bus, event)
        async with self.bus.read([reports_filter("run-1")]) as reader:
            while True:
                message = await reader.next(WITHIN_S)
                assert message is not None, f"no report on {event.version}"
                report = read_event(message).event
                if isinstance(report, EngineReport) and report.version == event.version:
                    return report

    async def logprobs(self) -> list[Any]:
        rows: list[Any] = []
        for row in TOKENS:
            meta = (await self.generate(row, 1, return_logprob=True, logprob_start_len=0))[
                "meta_info"
            ]
            rows.append(np.array([entry[0] for entry in meta["input_token_logprobs"][1:]]))
        return rows

    async def generate(self, tokens: list[int], count: int, **more: object) -> dict[str, Any]:
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        answer = await self.client.post(
            "/generate", json={"input_ids": tokens, "sampling_params": sampling, **more}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def start_generating(
        self, tokens: list[int], count: int
    ) -> AsyncGenerator[dict[str, Any]]:
        """The answer's pieces; the request runs once the first one is there."""
        sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": tokens, "sampling_params": sampling, "stream": True}
        async with self.client.stream("POST", "/generate", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    async def label(self) -> str:
        return (await self.client.get("/model_info")).json()["weight_version"]


@asynccontextmanager
async def story(folder: Path, origin: Path, release: str) -> AsyncGenerator[Story]:
    server = SglangServer(origin, folder / "server.log", release=release)
    await asyncio.to_thread(server.start)
    try:
        async with await MemoryBus.connect() as bus:
            told = Story(bus, server.url, folder)
            yield told
            await told.client.aclose()
    finally:
        await asyncio.to_thread(server.stop)


async def check_serves(told: Story, checkpoint: Path, others: list[Path], label: str) -> None:
    """The engine answers as `checkpoint` does, not as `others` do, names `label`, and goes on."""
    answers = await told.logprobs()
    assert difference(answers, reference_logprobs(checkpoint)) < SAME
    for other in others:
        assert difference(answers, reference_logprobs(other)) > OTHER
    assert await told.label() == label
    meta = (await told.generate(TOKENS[0], 4))["meta_info"]
    assert meta["weight_version"] == label


async def test_the_log_probabilities_tell_checkpoints_apart(tmp_path: Path):
    checkpoints = [tiny_model(tmp_path / str(seed), "qwen3", seed) for seed in range(2)]
    assert difference(*map(reference_logprobs, checkpoints)) > OTHER


@pytest.mark.parametrize(
    ("kind", "release"),
    [
        ("qwen3", "0.5.23"),
        ("qwen3moe", "0.5.23"),
        ("qwen3", "0.5.15.post1"),
        ("qwen3", "0.5.10.post1"),
    ],
)
async def test_an_agent_brings_a_real_engine_from_version_to_version(
    tmp_path: Path, kind: Kind, release: str
):
    origin, a, b = (tiny_model(tmp_path / name, kind, seed) for seed, name in enumerate("oab"))
    async with story(tmp_path, origin, release) as told:
        await check_serves(told, origin, [a, b], "default")
        async with told.agent():
            report = await told.report(told.make(a, 1))
            assert (report.outcome, report.engine_version) == ("serving", release), report.message
            await check_serves(told, a, [origin, b], "run-1/1/v000001")

            broken = told.make(b, 2)
            truncate(directory_of(broken) / "model-00001-of-00002.safetensors")
            report = await told.report(broken)
            assert (report.outcome, report.error) == ("failed", "ShardCorruptError")
            await check_serves(told, a, [origin, b], "run-1/1/v000001")

            report = await told.report(told.make(b, 3))
            assert report.outcome == "serving", report.message
            await check_serves(told, b, [origin, a], "run-1/1/v000003")
        for number, mode in enumerate(PauseMode, start=4):
            await check_change_under_load(told, release, mode, told.make(a, number))
        await check_serves(told, a, [origin, b], await told.label())


async def check_change_under_load(
    told: Story, release: str, mode: PauseMode, event: VersionComplete
) -> None:
    """Bring a version in while a request runs: no mode of any release may lose the engine."""
    lines = told.start_generating(TOKENS[1], 600)
    await anext(lines)
    async with told.agent(mode):
        report = await told.report(event)
    if mode is PauseMode.RETRACT and release in RETRACT_KEEPS_QUEUE:
        assert report.outcome == "failed"
        assert "use pause mode abort" in report.message
    else:
        assert report.outcome == "serving", report.message
    last = [line async for line in lines][-1]
    reason = last["meta_info"]["finish_reason"]["type"]
    assert reason == ("abort" if mode is PauseMode.ABORT else "length")
    assert (await told.generate(TOKENS[0], 4))["meta_info"]["completion_tokens"] == 4


async def test_a_release_that_is_not_installed_is_named_with_its_command(tmp_path: Path):
    with pytest.raises(MissingDependencyError, match=r"demo/sglang_cpu/install\.sh .* 0\.5\.99"):
        SglangServer(tmp_path, tmp_path / "log", release="0.5.99")


async def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path):
    server = SglangServer(tmp_path, tmp_path / "server.log")  # no model in there
    with pytest.raises(EngineRefusedError, match="the server ended with 1 before it was ready"):
        await asyncio.to_thread(server.start)
    with pytest.raises(EngineUnreachableError, match="is not running"):
        _ = server.pid
