"""The `weightbus` command: the composition root."""

from __future__ import annotations

import enum
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from . import __version__
from .bus.config import BusConfig
from .bus.nats_bus import NatsBus
from .bus.server import EmbeddedServer, ServerConfig
from .bus.streams import StreamLimits
from .demo.run import DemoKind, DemoOptions, run_demo
from .engine_agents.agent import Agent
from .engine_agents.config import AgentConfig, PathRule
from .engine_agents.engine import EngineDeadlines, PauseMode
from .engine_agents.sglang import SglangEngine
from .engine_agents.verify import verify_version
from .producers.hf_folder import publish_hf_folder
from .schemas.errors import ConfigError, WeightbusError
from .tools.board import read_board
from .tools.bus_report import BusReport, bus_report
from .tools.metrics import metrics_endpoint
from .tools.progress import byte_progress
from .tools.running import (
    FAILED,
    BusSettings,
    configured,
    ended,
    fail,
    log_to_stderr,
    run,
    screen,
    serve,
)
from .tools.status import render, to_json
from .tools.waiting import wait_for_outcome
from .writers.certify_command import certify_checkpoint
from .writers.config import WriterConfig
from .writers.described import Parallel
from .writers.service import Writer

app = typer.Typer(
    name="weightbus",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bus_app = typer.Typer(no_args_is_help=True, help="The server, its streams and its bucket.")
app.add_typer(bus_app, name="bus")

BusUrl = Annotated[
    str | None,
    typer.Option("--bus", help="NATS URL; default $WEIGHTBUS_BUS, then nats://127.0.0.1:4222."),
]
RunId = Annotated[str, typer.Option(help="The training run.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
MetricsHost = Annotated[str, typer.Option(help="Address of the Prometheus endpoint.")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of the Prometheus endpoint; 0: any; left out: none.")
]


class Missing(enum.Enum):
    """What to do about HF tensors that nobody produces."""

    REFUSE = "refuse"
    COPY = "copy"
    OMIT = "omit"


class Expect(enum.Enum):
    """Who says what a version must contain."""

    AUTO = "auto"
    HEADERS = "headers"
    INDEX = "index"
    TRANSFORMERS = "transformers"


def main() -> None:
    """Run the command line."""
    app()


def _show_version(value: bool) -> None:
    if value:
        screen.print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Carry the weights of a model in training to the engines that serve it."""


def _config(url: str | None, name: str) -> BusConfig:
    try:
        return BusSettings().config(url, name)
    except WeightbusError as error:
        raise fail(error) from error


@bus_app.command("up")
def bus_up(
    store_dir: Annotated[Path, typer.Option(help="JetStream's folder; kept.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Client port; -1: chosen by the server.")] = 4222,
    monitoring_port: Annotated[
        int | None, typer.Option(help="HTTP monitoring port; left out: none.")
    ] = None,
) -> None:
    """Run a nats-server with JetStream in the foreground, with the streams that weightbus needs."""

    async def up() -> None:
        config = ServerConfig(
            store=store_dir, host=host, port=port, monitoring_port=monitoring_port
        )
        async with EmbeddedServer(config) as server:
            async with await NatsBus.connect(BusConfig(url=server.url)):
                screen.print(f"listening on {server.url}", highlight=False, soft_wrap=True)
            await serve(ended(server), server.stop_async)

    run(up())


@bus_app.command("init")
def bus_init(
    bus: BusUrl = None,
    replicas: Annotated[int, typer.Option(help="1, or 3 on a cluster.")] = 1,
    events_gib: Annotated[float, typer.Option(help="Room for events.")] = 4.0,
) -> None:
    """Create the streams and the bucket on a server, or bring them to this declaration."""

    async def init() -> None:
        limits = StreamLimits(replicas=replicas, events_max_bytes=int(events_gib * 2**30))
        config = replace(_config(bus, "init"), streams=limits, create_streams=False)
        async with await NatsBus.connect(config) as connected:
            await connected.ensure_streams()
            for stream in await connected.stream_status():
                screen.print(f"{stream.name}: ready, {stream.messages} messages")

    run(init())


@bus_app.command("status")
def bus_status(bus: BusUrl = None, as_json: AsJson = False) -> None:
    """Show the server, the streams and how far each reader is; exit 1 when something differs."""

    async def look() -> BusReport:
        async with await NatsBus.connect(_read_only(bus)) as connected:
            return await bus_report(connected)

    report = run(look())
    if as_json:
        screen.print_json(json.dumps(report.to_json()))
    else:
        screen.print(report.render(), soft_wrap=True, highlight=False)
    if not report.ready:
        raise typer.Exit(FAILED)


@app.command()
def demo(
    sglang_python: Annotated[
        Path | None, typer.Option(help="Python of an environment with SGLang; left out: no engine.")
    ] = None,
    kind: Annotated[DemoKind, typer.Option(help="Architecture.")] = DemoKind.QWEN3,
    versions: Annotated[int, typer.Option(min=1, help="How many to train and publish.")] = 3,
    keep: Annotated[Path | None, typer.Option(help="Folder that keeps everything.")] = None,
) -> None:
    """The whole way on this machine: Megatron ranks, two writers, an agent, SGLang (CPU only)."""
    options = DemoOptions(kind=kind, versions=versions, sglang_python=sglang_python, keep=keep)
    run(run_demo(options, screen))


@app.command()
def publish(
    hf_dir: Annotated[Path, typer.Argument(help="Checkpoint folder; stays in place until done.")],
    run_id: RunId,
    weight_version: Annotated[int, typer.Option(min=0)] = 0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for its outcome; 0: do not.")] = 0.0,
    bus: BusUrl = None,
) -> None:
    """Publish an ordinary Hugging Face checkpoint folder as a version (to seed version 0)."""

    async def go() -> None:
        async with await NatsBus.connect(_config(bus, "publish")) as connected:
            with byte_progress("publish") as progress:
                key = await publish_hf_folder(
                    hf_dir, run_id, connected, weight_version, on_chunk=progress.advance
                )
            screen.print(f"published {key}", highlight=False)
            if wait > 0:
                done = await wait_for_outcome(connected, key, timeout_s=wait)
                screen.print(f"complete: {done.directory}", highlight=False, soft_wrap=True)

    run(go())


@app.command()
def writer(
    run_id: RunId,
    root: Annotated[Path, typer.Option(help="Folder of the version directories.")],
    index: Annotated[int, typer.Option(min=0, help="This writer's number, from 0.")],
    count: Annotated[int, typer.Option(min=1, help="How many writers the run has.")],
    origin: Annotated[
        Path | None, typer.Option(help="Origin checkpoint; default: the trainer's path.")
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest shard file.")] = 4.0,
    missing: Annotated[
        Missing, typer.Option(help="HF tensors that nobody produces.")
    ] = Missing.REFUSE,
    durable: Annotated[
        bool, typer.Option(help="fsync every file before a version is complete.")
    ] = True,
    bus: BusUrl = None,
    log_level: LogLevel = "info",
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
) -> None:
    """Convert a run's versions and persist this writer's shards, until stopped."""
    log_to_stderr(log_level)

    async def work() -> None:
        config = configured(
            WriterConfig,
            run_id=run_id, index=index, count=count, root=root, origin=origin,
            max_shard_bytes=int(max_shard_gib * 2**30), durable=durable,
            missing=missing.value,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            connected = await stack.enter_async_context(
                await NatsBus.connect(_config(bus, f"writer-{index}"))
            )
            service = Writer(connected, config)
            stack.enter_context(
                metrics_endpoint(metrics_host, metrics_port, "writer", service.numbers)
            )
            await serve(service.run(), service.stop)

    run(work())


@app.command()
def agent(
    run_id: RunId,
    engine: Annotated[str, typer.Option(help="URL of the SGLang server.")],
    name: Annotated[
        str, typer.Option(help="The engine's name in reports; default: from its URL.")
    ] = "",
    pause_mode: Annotated[
        PauseMode, typer.Option(help="What happens to running requests.")
    ] = PauseMode.ABORT,
    versions_root: Annotated[
        Path | None, typer.Option(help="Refuse version directories outside of this folder.")
    ] = None,
    writer_path: Annotated[
        list[str] | None, typer.Option(help="THERE=HERE: a writers' folder under its name here.")
    ] = None,
    engine_path: Annotated[
        list[str] | None, typer.Option(help="HERE=THERE: a folder here under the engine's name.")
    ] = None,
    load_deadline_s: Annotated[
        float, typer.Option(min=1.0, help="The longest that the engine's load call may take.")
    ] = 1800.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="WEIGHTBUS_ENGINE_API_KEY", help="Bearer token.")
    ] = None,
    bus: BusUrl = None,
    log_level: LogLevel = "info",
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_port: MetricsPort = None,
) -> None:
    """Keep one SGLang engine on the newest complete version of a run, until stopped."""
    log_to_stderr(log_level)

    async def work() -> None:
        config = configured(
            AgentConfig,
            run_id=run_id, engine_name=name if name else engine_name_of(engine),
            pause_mode=pause_mode, versions_root=versions_root,
            writer_paths=tuple(map(_path_rule, writer_path if writer_path is not None else ())),
            engine_paths=tuple(map(_path_rule, engine_path if engine_path is not None else ())),
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            connected = await stack.enter_async_context(
                await NatsBus.connect(_config(bus, f"agent-{config.engine_name}"))
            )
            deadlines = EngineDeadlines(load_s=load_deadline_s)
            sglang = SglangEngine(engine, deadlines=deadlines, api_key=api_key)
            stack.push_async_callback(sglang.close)
            service = Agent(connected, sglang, config)
            stack.enter_context(
                metrics_endpoint(metrics_host, metrics_port, "agent", service.numbers)
            )
            await serve(service.run(), service.stop)

    run(work())


def engine_name_of(url: str) -> str:
    """A subject token for an engine that has no name: host and port of its URL."""
    bare = url.split("://", 1)[-1].strip("/")
    return "".join(letter if letter.isalnum() else "-" for letter in bare)[:64]


def _path_rule(text: str) -> PathRule:
    there, separator, here = text.partition("=")
    if not separator or not there or not here:
        raise ConfigError(
            f"{text!r} is not THERE=HERE", next_step="give two absolute folders, joined by `=`"
        )
    return PathRule(there=there, here=here)


@app.command()
def status(
    run_id: Annotated[str | None, typer.Option(help="One run; default: all.")] = None,
    bus: BusUrl = None,
    as_json: AsJson = False,
) -> None:
    """One screen: runs, versions and what each waits for, engines and which lags."""

    async def look() -> None:
        async with await NatsBus.connect(_read_only(bus)) as connected:
            board = await read_board(connected, run_id)
        if as_json:
            screen.print_json(json.dumps(to_json(board)))
        else:
            screen.print(render(board))

    run(look())


def _read_only(url: str | None) -> BusConfig:
    return replace(_config(url, "status"), create_streams=False)


@app.command()
def certify(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder, or a config.json.")],
    parallel: Annotated[
        str, typer.Option(help="A described layout, e.g. tp=8,pp=16,ep=32,spec=te.")
    ] = "",
    layout: Annotated[
        list[Path] | None, typer.Option(help="Layout files of producers, instead of --parallel.")
    ] = None,
    family: Annotated[str, typer.Option(help="Family; default: by the model's type.")] = "",
    missing: Annotated[
        Missing, typer.Option(help="HF tensors that nobody produces.")
    ] = Missing.REFUSE,
    expect: Annotated[
        Expect, typer.Option(help="Who says what a version must contain.")
    ] = Expect.AUTO,
    as_json: AsJson = False,
) -> None:
    """Prove a mapping complete and exact before the first byte; exit 1 when it is refused."""
    try:
        report = certify_checkpoint(
            model,
            parallel=Parallel.parse(parallel) if parallel else None,
            layouts=layout if layout is not None else (),
            family=family,
            missing=missing.value,
            expect=expect.value,
        )
    except WeightbusError as error:
        raise fail(error) from error
    if as_json:
        screen.print_json(report.to_json())
    else:
        screen.print(report.table(), soft_wrap=True, highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command()
def verify(
    version_dir: Annotated[Path, typer.Argument(help="A version directory.")],
    threads: Annotated[int, typer.Option(min=1, help="Files read at the same time.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Check a version directory whole: manifest, index, headers, and every byte."""
    try:
        with byte_progress("verify") as progress:
            manifest = verify_version(version_dir, progress=progress.update, threads=threads)
    except WeightbusError as error:
        if as_json:
            screen.print_json(json.dumps({"whole": False, "error": str(error)}))
        raise fail(error) from error
    facts = {
        "whole": True,
        "version": str(manifest.version),
        "family": manifest.family,
        "shards": len(manifest.shards),
        "tensors": sum(len(shard.tensors) for shard in manifest.shards),
        "nbytes": manifest.total_size,
    }
    if as_json:
        screen.print_json(json.dumps(facts))
    else:
        screen.print(
            f"{facts['version']}: whole; {facts['tensors']} tensors in {facts['shards']} shards, "
            f"{manifest.total_size / 2**20:.1f} MiB, every byte verified",
            highlight=False,
        )
