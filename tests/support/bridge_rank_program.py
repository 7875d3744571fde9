"""What each torchrun rank of tests/producers/test_bridge_ranks.py does: a collective exporter.

Rank 0 has one slot and rank 1 two, and nobody ends a version: rank 0 must leave version 2 out while
rank 1 exports it, which works only if rank 0 takes part in the collectives all the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from weightbus.producers.bridge import BridgePublisher
from weightbus.producers.publisher import PublisherTimes
from weightbus.producers.staging import StagingConfig

NAMES = [f"model.layers.{n}.weight" for n in range(5)]
WAIT_S = 30.0


def export() -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor is gathered from both ranks while it is being yielded."""
    for number, name in enumerate(NAMES):
        mine = torch.full((number + 1, 4), float(dist.get_rank()))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        yield name, torch.cat(parts)


def main() -> None:
    """Every rank runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    rank = dist.get_rank()
    staging = StagingConfig(folder=arguments.out, slots=1 + rank, policy="skip")
    times = PublisherTimes(start_s=WAIT_S, close_s=0.0)
    with BridgePublisher(
        export, "/origin", "run", arguments.url, staging=staging, times=times
    ) as made:
        made.publish(1).result(WAIT_S)
        second = made.publish(2)
        second.wait_ended(WAIT_S)
        report = {
            "attempt": made.attempt,
            "owned": [tensor.name for tensor in made.layout.tensors if tensor.owned],
            "error": type(second.error).__name__,
            "message": str(second.error),
        }
        (arguments.out / f"report-{rank}.json").write_text(json.dumps(report))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
