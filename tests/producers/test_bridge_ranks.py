"""Two real ranks whose exporter is a collective: one leaves a version out, and nobody hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.bridge_rank_program import NAMES
from weightbus.bus.server import EmbeddedServer

PROGRAM = Path(__file__).parents[1] / "support" / "bridge_rank_program.py"


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_rank_without_a_slot_keeps_nobody_waiting(tmp_path: Path) -> None:
    with EmbeddedServer() as server:
        finished = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
                str(PROGRAM), server.url, str(tmp_path),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-6000:]
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["attempt"] for report in reports] == [1, 1]
    assert sorted(name for report in reports for name in report["owned"]) == NAMES
    assert all(report["owned"] for report in reports)
    assert reports[0]["error"] == "VersionSkippedError"
    assert reports[1]["error"] == "VersionAbortedError"
    assert "VersionSkippedError" in reports[1]["message"]
    assert list(tmp_path.glob("weightbus-*")) == []
