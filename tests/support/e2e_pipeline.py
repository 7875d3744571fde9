"""The whole way for tests: real ranks under torchrun, real writers on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer
from weightbus.demo.megatron_cpu.sizes import TinyRun
from weightbus.demo.processes import Child
from weightbus.writers.config import WriterConfig
from weightbus.writers.service import Writer

RUN_ID = "e2e"
DEADLINE_S = 200.0


@asynccontextmanager
async def running_writers(
    server: EmbeddedServer, root: Path, *, count: int = 2, max_shard_bytes: int = 200_000
) -> AsyncGenerator[list[Writer]]:
    """Writers of RUN_ID, each on a connection of its own; stopped at the end."""
    async with AsyncExitStack() as stack:
        writers: list[Writer] = []
        for index in range(count):
            bus = await stack.enter_async_context(await NatsBus.connect(server.url))
            config = WriterConfig(
                run_id=RUN_ID, index=index, count=count, root=root, max_shard_bytes=max_shard_bytes
            )
            writers.append(Writer(bus, config))
        async with asyncio.TaskGroup() as group:
            for writer in writers:
                group.create_task(writer.run())
            yield writers
            for writer in writers:
                await writer.stop()


async def train(
    server: EmbeddedServer,
    folder: Path,
    run: TinyRun,
    *,
    origin: Path,
    first: int = 1,
    versions: int = 1,
    learning_rate: float = 1e-2,
    mode: str = "raw",
) -> Path:
    """Train, publish and wait for each version's completion; returns the folder of logits."""
    world = max(run.tp * run.pp, run.ep * run.expert_tp * run.pp)
    arguments = [
        "-m", "torch.distributed.run", "--nproc-per-node", str(world),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        "-m", "weightbus.demo.megatron_cpu.train", *run.arguments(),
        "--url", server.url, "--run-id", RUN_ID, "--hf-checkpoint", str(origin),
        "--first", str(first), "--versions", str(versions), "--out", str(folder / "logits"),
        "--learning-rate", str(learning_rate), "--wait", "--megatron-to-hf-mode", mode,
    ]  # fmt: skip
    child = await Child.start("ranks", arguments, folder / "ranks.log", {"OMP_NUM_THREADS": "1"})
    try:
        await child.succeed(DEADLINE_S)
    finally:
        await child.stop()
    return folder / "logits"


def load(directory: Path) -> Any:
    """The version as transformers loads it; every key must fit."""
    auto: Any = transformers.AutoModelForCausalLM
    model, info = auto.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager", dtype="auto"
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def logits_difference(directory: Path, logits: Path, weight_version: int) -> float:
    """max |Δlogit| between transformers on the version and Megatron on its own weights."""
    tokens = torch.from_numpy(np.load(logits / "tokens.npy"))
    reference = np.load(logits / f"logits_v{weight_version:06d}.npy")
    with torch.no_grad():
        answer = load(directory)(tokens).logits.numpy()
    return float(np.abs(answer - reference[..., : answer.shape[-1]]).max())
