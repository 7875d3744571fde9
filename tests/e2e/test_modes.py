"""Raw and bridge mode: the same weights make the same files, byte for byte."""

from pathlib import Path

import pytest
from support.e2e_pipeline import RUN_ID, running_writers, train
from weightbus.bus.server import EmbeddedServer
from weightbus.demo.megatron_cpu.origin import make_origin
from weightbus.demo.megatron_cpu.sizes import TinyRun
from weightbus.engine_agents.verify import verify_version
from weightbus.schemas.events import VersionKey
from weightbus.writers.paths import VersionPaths

CASES = {
    "untied": TinyRun(kind="qwen3"),
    "tied-bf16": TinyRun(kind="qwen3", tied=True, bf16=True),
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
async def test_both_modes_make_the_same_files(
    name: str, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    run, root = CASES[name], tmp_path / "versions"
    origin = make_origin(tmp_path / "origin", run)
    # One shard: which tensors share a file depends on how they arrive, their bytes do not.
    async with running_writers(nats_server, root, count=1, max_shard_bytes=2**30):
        for mode in ("raw", "bridge"):
            folder = tmp_path / mode
            folder.mkdir()
            await train(nats_server, folder, run, origin=origin, versions=2, mode=mode)
    for version in (1, 2):
        folders = [
            VersionPaths.of(
                root, VersionKey(run_id=RUN_ID, attempt=attempt, weight_version=version)
            ).final
            for attempt in (1, 2)
        ]
        manifests = [verify_version(folder) for folder in folders]
        files = [sorted(shard.file for shard in manifest.shards) for manifest in manifests]
        assert files[0] == files[1]
        assert len(files[0]) == 1
        raw, bridge = ((folder / files[0][0]).read_bytes() for folder in folders)
        assert raw == bridge
