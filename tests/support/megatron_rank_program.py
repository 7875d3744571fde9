"""What each torchrun rank of tests/producers/test_megatron_ranks.py does: several cases in one go.

For each case it builds and trains a model, publishes it while nothing of torch.distributed may
communicate, and compares every published byte with the live parameters. Layouts and findings go to
OUT/<case>-<rank>.json.
"""

# ruff: noqa: E402 - the shim comes before everything that imports Megatron
from __future__ import annotations

import argparse
import contextlib
import json
import warnings
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

from weightbus.demo.megatron_cpu.cpu_shim import prepare

warnings.simplefilter("ignore")
prepare()

import pytest
import torch
import torch.distributed as dist
from weightbus.bus.events import read_event
from weightbus.bus.interface import Bus
from weightbus.demo.megatron_cpu.models import start_ranks, stop_ranks
from weightbus.demo.megatron_cpu.sizes import TinyRun
from weightbus.demo.megatron_cpu.training import TinyTrainer
from weightbus.producers.bus_thread import BusThread, bus_thread_of
from weightbus.producers.megatron import MegatronPublisher, read_layout
from weightbus.producers.publisher import PublisherTimes
from weightbus.producers.torch_digest import TorchDigests
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import BusUnavailableError, VersionConflictError
from weightbus.schemas.events import ChunkReady, VersionKey

CASES = {
    "qwen3-tp2-pp2": TinyRun("qwen3", tp=2, pp=2),
    "qwen3-pp2-vpp2-dp2": TinyRun("qwen3", pp=2, vpp=2),
    "qwen3-bf16-dp4": TinyRun("qwen3", bf16=True),
    # The stand-ins for TransformerEngine's names stay in the process: local specs come first.
    "qwen3-tp2-pp2-tied": TinyRun("qwen3", tp=2, pp=2, tied=True, spec="te"),
    "qwen3moe-ep2-dp4": TinyRun("qwen3moe", ep=2, etp=1, grouped=True, spec="te"),
    "mla-tp2-ep2-sp": TinyRun("mla", tp=2, ep=2, etp=1, sp=True, grouped=True, spec="te"),
    "mla-tp2-etp2-sp": TinyRun("mla", tp=2, etp=2, sp=True, spec="te"),
    "mla-pp2-mtp": TinyRun("mla", pp=2, mtp=1, grouped=True, spec="te"),
}
TALKING = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv",
    "isend", "monitored_barrier", "new_group", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
)  # fmt: skip
TIMES = PublisherTimes(publish_s=60.0, start_s=60.0, close_s=0.0)


@contextlib.contextmanager
def silence() -> Generator[None]:
    """Every function of torch.distributed that communicates raises."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("publishing talked to other ranks")

    with contextlib.ExitStack() as stack:
        for name in TALKING:
            stack.enter_context(mock.patch.object(dist, name, refuse))
            if hasattr(dist.distributed_c10d, name):
                stack.enter_context(mock.patch.object(dist.distributed_c10d, name, refuse))
        yield


def one_case(run: TinyRun, name: str, thread: BusThread, out: Path) -> None:
    """Train, publish two versions, compare; leave layout and counts behind."""
    start_ranks(run)
    trainer = TinyTrainer(run)
    dist.barrier()
    with silence():
        publisher = MegatronPublisher(
            trainer.chunks, trainer.config, "/origin", name, thread, times=TIMES
        )
    compared = 0
    digests: list[list[str]] = []
    hashes = TorchDigests(*read_layout(trainer.chunks, trainer.config))
    with publisher:
        for version in (1, 2):
            trainer.step()
            digests.append([hashes(index) for index in range(len(publisher.layout.tensors))])
            with silence():
                handle = publisher.publish(version, step=version)
                handle.result(60.0)
            compared += compare(trainer, publisher, thread, handle.version)
            dist.barrier()
    report = {
        "attempt": publisher.attempt,
        "compared": compared,
        "digests": digests,
        "layout": publisher.layout.model_dump(mode="json"),
    }
    (out / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    stop_ranks()


def compare(
    trainer: TinyTrainer, publisher: MegatronPublisher, thread: BusThread, key: VersionKey
) -> int:
    """Every byte in the arena, as the chunk events describe it, against the live tensors."""
    layout, getters = read_layout(trainer.chunks, trainer.config)
    assert layout == publisher.layout
    seen: set[int] = set()
    for chunk in thread.run(chunks_of(thread.bus, key, dist.get_rank()), 60.0):
        data = publisher.arena.path.read_bytes()
        for part in chunk.tensors:
            start = chunk.location.offset + part.offset
            found = data[start : start + part.length]
            tensor = layout.tensors[part.index]
            live = getters[part.index]().detach().contiguous()
            if tensor.dtype == "F32":
                live = live.float()  # an expert bias, which Float16Module has narrowed
            assert live.view(torch.uint8).numpy().tobytes() == found, tensor.name
            assert digest_of(found) == part.digest, tensor.name
            assert part.index not in seen, tensor.name
            seen.add(part.index)
    owned = {index for index, tensor in enumerate(layout.tensors) if tensor.owned}
    assert seen == owned
    return len(seen)


async def chunks_of(bus: Bus, key: VersionKey, rank: int) -> list[ChunkReady]:
    """The chunk events of one rank and version."""
    prefix = f"wb.{key.run_id}.{key.attempt}.{key.weight_version}.chunk.{rank}.*"
    chunks: list[ChunkReady] = []
    async with bus.read([prefix]) as reader:
        while (message := await reader.next(0.5)) is not None:
            event = read_event(message).event
            assert isinstance(event, ChunkReady)
            chunks.append(event)
    return chunks


def taken_attempt(thread: BusThread, name: str) -> None:
    """Another trainer holds attempt 1: rank 0 says so, and the others do not wait for long."""
    run = CASES[name]
    start_ranks(run)
    trainer = TinyTrainer(run)
    expected = VersionConflictError if dist.get_rank() == 0 else BusUnavailableError
    with pytest.raises(expected, match="another trainer has opened this attempt"):
        MegatronPublisher(
            trainer.chunks, trainer.config, "/origin", name, thread, attempt=1, times=TIMES
        )
    dist.barrier()
    stop_ranks()


def main() -> None:
    """Every rank runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    thread, _ = bus_thread_of(arguments.url)
    for name, run in CASES.items():
        one_case(run, name, thread, arguments.out)
    taken_attempt(thread, "qwen3-tp2-pp2")
    thread.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
