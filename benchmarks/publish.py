"""How long `publish()` blocks the trainer: `python benchmarks/publish.py` (about half a minute).

The ratio compares with one memcpy of the same bytes into shared memory that exists and has been
touched, alternating in the same run. The target is at most 1.25. Everything is touched first: pages
that the machine has never seen cost several times more than the copy.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from weightbus.bus.events import end_version
from weightbus.bus.server import EmbeddedServer
from weightbus.producers.bus_thread import bus_thread_of
from weightbus.producers.staging import ArenaName, StagingArena, StagingConfig
from weightbus.producers.torch_module import TorchModulePublisher
from weightbus.schemas.digest import digest_of
from weightbus.schemas.events import VersionComplete

LIMIT = 1.25
ROUNDS = 7
HIDDEN, FFN, VOCAB = 2048, 6144, 32_000
RUN = "bench-publish"


def model(gib: float) -> dict[str, torch.Tensor]:
    """Layers of a bf16 transformer until there are `gib` GiB, norms and biases among them."""
    tensors = {"embed": torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16)}
    layer = 0
    while sum(tensor.nbytes for tensor in tensors.values()) < gib * 2**30:
        shapes = {
            "norm": (HIDDEN,),
            "qkv": (HIDDEN + HIDDEN // 2, HIDDEN),
            "proj": (HIDDEN, HIDDEN),
            "fc1": (2 * FFN, HIDDEN),
            "fc2": (HIDDEN, FFN),
        }
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}"] = torch.ones(*shape, dtype=torch.bfloat16)
        layer += 1
    return tensors


class PlainCopy:
    """memcpy of `nbytes` from one touched buffer into one slot of an arena of its own."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.source = torch.ones(nbytes, dtype=torch.uint8)
        self.arena = StagingArena(ArenaName(RUN, 0, os.getpid()), StagingConfig(slots=1), nbytes)
        self.target = torch.frombuffer(self.arena.acquire().buffer, dtype=torch.uint8)

    def run(self) -> float:
        """Seconds of one copy."""
        began = time.perf_counter()
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.nbytes)
        return time.perf_counter() - began


def complete(version: object) -> VersionComplete:
    """The outcome that a writer would publish; it frees the slot."""
    return VersionComplete.model_validate(
        {
            "version": version,
            "directory": "file:///none",
            "manifest_digest": digest_of(b""),
            "shards": 1,
            "nbytes": 1,
        }
    )


def measure(gib: float, folder: Path) -> None:
    """Alternate copies and publications, print medians and the ratio."""
    tensors = model(gib)
    save_file({"embed": torch.zeros(1)}, folder / "model.safetensors")
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    plain = PlainCopy(nbytes)
    threads = torch.get_num_threads()
    copies: list[float] = []
    blocked: dict[int, list[float]] = {1: [], threads: []}
    durable: list[float] = []
    with EmbeddedServer() as server:
        bus, _ = bus_thread_of(server.url)
        with TorchModulePublisher(tensors, folder, RUN, bus) as publisher:
            for number in range(len(blocked) * (ROUNDS + 1)):
                copies.append(plain.run())
                used = list(blocked)[number % len(blocked)]
                torch.set_num_threads(used)
                began = time.perf_counter()
                handle = publisher.publish(number)
                blocked[used].append(time.perf_counter() - began)
                handle.result(60.0)
                durable.append(time.perf_counter() - began)
                bus.run(end_version(bus.bus, complete(handle.version)), 60.0)
                handle.outcome(60.0)
        bus.close()
    del plain.target
    plain.arena.close()
    # The first round is left out: the caches of the machine and of torch are cold.
    copy = statistics.median(copies[len(blocked) :])
    print(
        f"publish on {platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}: "
        f"{nbytes / 2**30:.2f} GiB in {len(tensors)} tensors, {ROUNDS} rounds"
    )
    print(f"  one memcpy                  {copy * 1e3:8.1f} ms  {nbytes / copy / 1e9:6.1f} GB/s")
    for used, seconds in blocked.items():
        block = statistics.median(seconds[1:])
        # One thread is like for like; more need cores that nobody else uses.
        verdict = "" if used > 1 else f", {'within' if block / copy <= LIMIT else 'OVER'} {LIMIT}"
        print(
            f"  publish(), {used} torch thread{'s' if used > 1 else ' '}  {block * 1e3:8.1f} ms  "
            f"{nbytes / block / 1e9:6.1f} GB/s   ratio {block / copy:4.2f}{verdict}"
        )
    print(f"  durable after               {statistics.median(durable) * 1e3:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.gib, Path(folder))


if __name__ == "__main__":
    main()
