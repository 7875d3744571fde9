"""Four real Megatron ranks publish to a real server: layouts, bytes, and no talk among ranks."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from weightbus.bus.server import EmbeddedServer
from weightbus.schemas.layout import Layout, LocalTensor
from weightbus.writers.replicas import compare_replicas

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SUPPORT = Path(__file__).parents[1] / "support"
RANKS = 4
CASES = (
    "qwen3-tp2-pp2",
    "qwen3-pp2-vpp2-dp2",
    "qwen3-tp2-pp2-tied",
    "qwen3moe-ep2-dp4",
    "mla-tp2-ep2-sp",
    "mla-tp2-etp2-sp",
    "mla-pp2-mtp",
    "qwen3-bf16-dp4",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the ranks wrote, by case. One torchrun for all: importing Megatron dominates."""
    out = tmp_path_factory.mktemp("ranks")
    with EmbeddedServer() as server:
        finished = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run",
                "--nproc-per-node", str(RANKS),
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                str(SUPPORT / "megatron_rank_program.py"), server.url, str(out),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-6000:]
    assert list(Path("/dev/shm").glob("weightbus-qwen3-tp2*")) == []
    return {
        case: [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(RANKS)]
        for case in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_every_whole_is_published_once(case: str, reports: dict[str, list[dict[str, Any]]]) -> None:
    layouts = [Layout.model_validate_json(json.dumps(report["layout"])) for report in reports[case]]
    assert [layout.producer.rank for layout in layouts] == list(range(RANKS))
    owned: defaultdict[str, list[LocalTensor]] = defaultdict(list)
    for layout in layouts:
        for tensor in layout.tensors:
            if tensor.owned:
                owned[tensor.name].append(tensor)
    for name, tensors in owned.items():
        counts = {tensor.part.count for tensor in tensors}
        assert len(counts) == 1, name
        assert sorted(tensor.part.index for tensor in tensors) == list(range(counts.pop())), name
    assert {tensor.name for layout in layouts for tensor in layout.tensors} == set(owned)
    heads = {
        tensor.name
        for layout in layouts
        for tensor in layout.tensors
        if tensor.local_name == "output_layer.weight"
    }
    tied = case.endswith("tied")
    assert heads == {"embedding.word_embeddings.weight" if tied else "output_layer.weight"}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_published_in_one_attempt(
    case: str, reports: dict[str, list[dict[str, Any]]]
) -> None:
    assert {report["attempt"] for report in reports[case]} == {1}
    for report in reports[case]:
        owned = sum(tensor["owned"] for tensor in report["layout"]["tensors"])
        assert report["compared"] == 2 * owned
        assert owned > 0


@pytest.mark.parametrize("case", CASES)
def test_no_replica_has_drifted(case: str, reports: dict[str, list[dict[str, Any]]]) -> None:
    layouts = [Layout.model_validate_json(json.dumps(report["layout"])) for report in reports[case]]
    for version in (0, 1):
        digests = {
            rank: dict(enumerate(report["digests"][version]))
            for rank, report in enumerate(reports[case])
        }
        found = compare_replicas(layouts, digests)
        assert [str(difference) for difference in found] == []
