"""Real Megatron ranks train and publish; the converted version is the model that they trained."""

from pathlib import Path

import pytest
from support.e2e_pipeline import RUN_ID, logits_difference, running_writers, train
from weightbus.bus.server import EmbeddedServer
from weightbus.demo.megatron_cpu.origin import make_origin
from weightbus.demo.megatron_cpu.sizes import TinyRun
from weightbus.engine_agents.verify import verify_version
from weightbus.schemas.events import VersionKey
from weightbus.writers.paths import VersionPaths

MAX_DIFFERENCE = 1e-4
"""fp32 noise stays below 1e-5; the smallest mistake of a conversion moves a logit by 8e-3."""

CASES = {
    "qwen3-tp2-pp2": (TinyRun(kind="qwen3", tp=2, pp=2), "qwen3"),
    "qwen3-pp2-vpp2": (TinyRun(kind="qwen3", pp=2, vpp=2), "qwen3"),
    "qwen3moe-ep2-grouped": (TinyRun(kind="qwen3moe", ep=2, spec="te", grouped=True), "qwen3_moe"),
    "deepseek-tp2-ep2-sp-te": (
        TinyRun(kind="mla", tp=2, ep=2, etp=1, sp=True, spec="te", grouped=True), "deepseek_v3",
    ),
    "glm-tp2-ep2-sp-te": (
        TinyRun(kind="mla", tp=2, ep=2, etp=1, sp=True, spec="te"), "glm4_moe_lite",
    ),
    "qwen3-tied-pp2": (TinyRun(kind="qwen3", pp=2, tied=True), "qwen3"),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
async def test_the_version_is_the_model_that_was_trained(
    name: str, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    run, family = CASES[name]
    root = tmp_path / "versions"
    origin = make_origin(tmp_path / "origin", run, architecture=family)
    async with running_writers(nats_server, root):
        logits = await train(nats_server, tmp_path, run, origin=origin, versions=2)
    differences: list[float] = []
    for version in (1, 2):
        key = VersionKey(run_id=RUN_ID, attempt=1, weight_version=version)
        directory = VersionPaths.of(root, key).final
        manifest = verify_version(directory)
        assert manifest.family == family
        assert manifest.version == key
        assert len(manifest.shards) >= 2
        differences.append(logits_difference(directory, logits, version))
    assert max(differences) <= MAX_DIFFERENCE, differences
    # The two versions are different models: the check above can fail.
    first = VersionPaths.of(root, VersionKey(run_id=RUN_ID, attempt=1, weight_version=1)).final
    assert logits_difference(first, logits, 2) > 100 * MAX_DIFFERENCE
    left_over = [
        path for path in root.rglob("*") if ".partial" in path.name or ".tables" in path.name
    ]
    assert not left_over
