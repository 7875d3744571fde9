"""`weightbus demo`: the whole way on one machine, with real processes and nothing pretended.

An embedded nats-server, four Megatron-core ranks that train (TP 2 x PP 2, on the CPU), two writers,
an agent, and an SGLang server whose answers are compared with the trainer's own logits.
"""

from __future__ import annotations

import asyncio
import enum
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..bus.events import read_event
from ..bus.nats_bus import NatsBus
from ..bus.server import EmbeddedServer, ServerConfig
from ..bus.subjects import reports_filter
from ..engine_agents.verify import verify_version
from ..schemas.errors import DemoFailedError, EngineTimeoutError, MissingDependencyError
from ..schemas.events import EngineReport, VersionComplete, VersionKey
from ..tools.board import read_board
from ..tools.status import render
from .check import compare
from .megatron_cpu.sizes import TinyRun
from .processes import Child
from .sglang_cpu.server import SglangServer

RUN_ID = "demo"
_WRITERS = 2


class DemoKind(enum.Enum):
    """Architectures that the demo has."""

    QWEN3 = "qwen3"
    QWEN3MOE = "qwen3moe"

    def ranks(self) -> TinyRun:
        """The model and its parallel layout."""
        if self is DemoKind.QWEN3:
            return TinyRun(kind="qwen3", tp=2, pp=2)
        return TinyRun(kind="qwen3moe", ep=2, spec="te", grouped=True)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo shows.

    Attributes:
        kind: architecture of the tiny model.
        versions: how many versions are trained and published.
        sglang_python: python of an environment with SGLang; None: no engine.
        keep: a folder for everything that the demo writes; None: a temporary one.
        deadline_s: the longest that training, conversion and serving may take.
    """

    kind: DemoKind = DemoKind.QWEN3
    versions: int = 3
    sglang_python: Path | None = None
    keep: Path | None = None
    deadline_s: float = 420.0


async def run_demo(options: DemoOptions, console: Console) -> None:
    """Run it; returns when the engine serves the last version and answers as the trainer does.

    Raises:
        DemoFailedError: a process ended.
        MissingDependencyError: torch, megatron-core or SGLang is not installed.
        WeightbusError: whatever went wrong on the way.
    """
    async with AsyncExitStack() as stack:
        folder = options.keep
        if folder is None:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="weightbus-demo-"))
            )
        folder.mkdir(parents=True, exist_ok=True)
        await _Demo(options, folder.resolve(), console, stack).run()


class _Demo:
    def __init__(
        self, options: DemoOptions, folder: Path, console: Console, stack: AsyncExitStack
    ) -> None:
        self._options, self._folder, self._stack = options, folder, stack
        self._console = console
        self._ranks = options.kind.ranks()
        self._url = ""

    async def run(self) -> None:
        async with asyncio.timeout(self._options.deadline_s):
            server = await self._stack.enter_async_context(
                EmbeddedServer(ServerConfig(store=self._folder / "jetstream"))
            )
            self._url = server.url
            self._say(f"nats-server with JetStream listens on {server.url}")
            bus = await self._stack.enter_async_context(await NatsBus.connect(server.url))
            origin = await self._make_origin()
            engine = await self._start_engine(origin)
            services = [await self._start_writer(index) for index in range(_WRITERS)]
            if engine is not None:
                services.append(await self._start_agent(engine.url))
            async with _watched(services):
                await self._train(origin)
                await self._show(bus, engine)

    async def _make_origin(self) -> Path:
        origin = self._folder / "origin"
        arguments = ["-m", "weightbus.demo.megatron_cpu.origin", str(origin)]
        await self._finish("origin", [*arguments, *self._ranks.arguments()])
        self._say(f"made a tiny random {self._ranks.kind} checkpoint to start from")
        return origin

    async def _start_engine(self, origin: Path) -> SglangServer | None:
        python = self._options.sglang_python
        if python is None:
            self._say("no engine (give --sglang-python to have one)")
            return None
        if not python.exists():
            raise MissingDependencyError(
                f"there is no {python}", next_step="make install-sglang, or leave the engine out"
            )
        engine = SglangServer(
            origin, self._folder / "sglang.log", venv=python.parent.parent
        )  # fmt: skip
        self._stack.callback(engine.stop)
        self._say("SGLang starts on the checkpoint (30 to 90 s) ...")
        await asyncio.to_thread(engine.start)
        self._say(f"SGLang serves on {engine.url}")
        return engine

    async def _start_writer(self, index: int) -> Child:
        return await self._service(
            f"writer-{index}",
            "writer", "--run-id", RUN_ID, "--root", str(self._folder / "versions"),
            "--index", str(index), "--count", str(_WRITERS), "--max-shard-gib", "0.001",
        )  # fmt: skip

    async def _start_agent(self, engine_url: str) -> Child:
        return await self._service("agent", "agent", "--run-id", RUN_ID, "--engine", engine_url)

    async def _service(self, name: str, *arguments: str) -> Child:
        command = ["-m", "weightbus", *arguments, "--bus", self._url]
        child = await Child.start(name, command, self._folder / f"{name}.log")
        self._stack.push_async_callback(child.stop)
        self._say(f"{name} runs")
        return child

    async def _train(self, origin: Path) -> None:
        run, options = self._ranks, self._options
        world = run.tp * run.pp * run.ep
        self._say(f"{world} Megatron ranks train and publish {options.versions} versions ...")
        arguments = [
            "-m", "torch.distributed.run", "--nproc-per-node", str(world),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            "-m", "weightbus.demo.megatron_cpu.train", *run.arguments(),
            "--url", self._url, "--run-id", RUN_ID, "--hf-checkpoint", str(origin),
            "--versions", str(options.versions), "--out", str(self._folder / "logits"), "--wait",
        ]  # fmt: skip
        await self._finish("trainer", arguments)

    async def _finish(self, name: str, arguments: list[str]) -> None:
        child = await Child.start(
            name, arguments, self._folder / f"{name}.log", {"OMP_NUM_THREADS": "1"}
        )
        try:
            await child.succeed(self._options.deadline_s)
        finally:
            await child.stop()

    async def _show(self, bus: NatsBus, engine: SglangServer | None) -> None:
        last = VersionKey(run_id=RUN_ID, attempt=1, weight_version=self._options.versions)
        if engine is not None:
            await _serving(bus, last, self._options.deadline_s)
        board = await read_board(bus, RUN_ID)
        self._console.print(render(board))
        outcome = board.runs[RUN_ID].versions[last.attempt, last.weight_version].outcome
        if not isinstance(outcome, VersionComplete):
            raise DemoFailedError(f"version {last} is not complete")
        await asyncio.to_thread(verify_version, Path(outcome.directory), outcome.manifest_digest)
        self._say(f"every byte of {outcome.directory} is verified")
        if engine is None:
            return
        difference, labels = await asyncio.to_thread(
            compare, engine.url, self._folder / "logits", last.weight_version
        )
        self._say(
            f"SGLang answers as Megatron does: largest difference of a log-probability "
            f"{difference:.4f}, version label {', '.join(sorted(labels))}"
        )

    def _say(self, text: str) -> None:
        self._console.print(f"• {text}", highlight=False, soft_wrap=True)


@asynccontextmanager
async def _watched(services: list[Child]) -> AsyncGenerator[None]:
    """End the block with DemoFailedError as soon as a service ends by itself."""
    async with asyncio.TaskGroup() as group:
        watchers = [group.create_task(service.watch()) for service in services]
        yield
        for watcher in watchers:
            watcher.cancel()


async def _serving(bus: NatsBus, key: VersionKey, timeout_s: float) -> None:
    """Wait until an engine reports that it serves the version."""
    failures: list[str] = []
    try:
        async with asyncio.timeout(timeout_s), bus.read([reports_filter(key.run_id)]) as reader:
            async for message in reader:
                event = read_event(message).event
                if not isinstance(event, EngineReport) or event.version != key:
                    continue
                if event.outcome == "serving":
                    return
                failures.append(f"{event.error}: {event.message}")
    except TimeoutError as error:
        raise EngineTimeoutError(
            f"no engine serves {key} after {timeout_s:g} s; failures so far: {failures}",
            next_step="read agent.log and sglang.log (--keep keeps them)",
        ) from error
