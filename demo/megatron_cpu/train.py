r"""Train a tiny Megatron model and publish its versions.

A program for torchrun:

    torchrun --nproc-per-node 4 -m weightbus.demo.megatron_cpu.train --kind qwen3 --tp 2 --pp 2 \
        --url nats://127.0.0.1:4222 --run-id demo --hf-checkpoint ORIGIN --versions 3 --out LOGITS

Each version is an optimizer step. After it the ranks publish, then compute the logits of fixed
tokens with Megatron itself; the last stage writes them as OUT/logits_v000001.npy ([batch, length,
vocab] float32) beside OUT/tokens.npy. Rank 0 writes one JSON line for each event to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from .cpu_shim import prepare

prepare()

import numpy as np  # noqa: E402 - the shim comes before torch's users
import torch  # noqa: E402

from ...producers.bridge import export_with_bridge  # noqa: E402
from ...producers.modes import MODES, make_publisher  # noqa: E402
from ...producers.publisher import PublisherTimes, VersionPublisher  # noqa: E402
from ...producers.staging import StagingConfig  # noqa: E402
from .models import start_ranks, stop_ranks  # noqa: E402
from .sizes import TINY, TinyRun  # noqa: E402
from .tiny_bridge import TinyBridge  # noqa: E402
from .training import TinyTrainer  # noqa: E402

LENGTH = 16
BATCH = 2


def fixed_tokens(vocab: int) -> Any:
    """The tokens whose logits are compared: [BATCH, LENGTH] int64, not a special token among."""
    return np.random.default_rng(7).integers(4, vocab, (BATCH, LENGTH))


def main() -> None:
    """Command line; every rank runs it."""
    arguments = _parse()
    run = TinyRun.from_arguments(arguments)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", timeout=timedelta(seconds=arguments.collective_timeout_s)
    )
    start_ranks(run)
    trainer = TinyTrainer(run, learning_rate=arguments.learning_rate)
    tokens = fixed_tokens(TINY.vocab)
    if arguments.out is not None and torch.distributed.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        np.save(arguments.out / "tokens.npy", tokens)
    torch.distributed.barrier()
    mode: str = arguments.megatron_to_hf_mode
    publisher = make_publisher(
        mode,
        trainer.chunks,
        trainer.config,
        arguments.hf_checkpoint,
        arguments.run_id,
        arguments.url,
        export=export_with_bridge(TinyBridge(run), trainer.chunks) if mode == "bridge" else None,
        attempt=arguments.attempt,
        staging=StagingConfig(folder=arguments.staging),
        times=PublisherTimes(close_s=arguments.wait_s),
    )
    _say("ready", attempt=publisher.attempt, nbytes=publisher.layout.owned_bytes)
    with publisher:
        for version in range(arguments.first, arguments.first + arguments.versions):
            _one_version(arguments, trainer, publisher, version, tokens)
    torch.distributed.barrier()
    stop_ranks()
    torch.distributed.destroy_process_group()


def _one_version(
    arguments: argparse.Namespace,
    trainer: TinyTrainer,
    publisher: VersionPublisher,
    version: int,
    tokens: Any,
) -> None:
    trainer.step()
    began = time.monotonic()
    handle = publisher.publish(version, step=version)
    _say("published", weight_version=version, blocked_s=time.monotonic() - began)
    _write_logits(arguments.out, trainer, version, tokens)
    handle.result(arguments.wait_s)
    _say("durable", weight_version=version, after_s=time.monotonic() - began)
    if arguments.wait:
        complete = handle.outcome(arguments.wait_s)
        _say(
            "complete",
            weight_version=version,
            after_s=time.monotonic() - began,
            directory=complete.directory,
        )


def _write_logits(out: Path | None, trainer: TinyTrainer, version: int, tokens: Any) -> None:
    if out is None:
        return
    logits = trainer.logits(torch.from_numpy(tokens))
    # The last rank is the last stage, and holds what every rank of it has gathered.
    if (
        logits is not None
        and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    ):
        target = out / f"logits_v{version:06d}.npy"
        partial = target.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, logits.numpy())
        partial.rename(target)


def _say(event: str, **fields: Any) -> None:
    if torch.distributed.get_rank() == 0:
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    TinyRun.add_arguments(parser)
    parser.add_argument("--url", required=True, help="NATS server")
    parser.add_argument("--run-id", required=True, help="run_id")
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="the origin")
    parser.add_argument("--megatron-to-hf-mode", choices=MODES, default="raw")
    parser.add_argument("--versions", type=int, default=1, help="how many to publish")
    parser.add_argument("--first", type=int, default=1, help="the first weight version")
    parser.add_argument("--attempt", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder for reference logits")
    parser.add_argument("--staging", type=Path, default=None, help="arena folder, not /dev/shm")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--wait", action="store_true", help="wait for each version's outcome")
    parser.add_argument("--wait-s", type=float, default=120.0, help="deadline of each wait")
    parser.add_argument("--collective-timeout-s", type=float, default=120.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
