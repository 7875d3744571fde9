"""The commands, as processes on a real server: the main job without a line of Python."""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cli_commands import service, weightbus
from support.engine_fake import FakeSglang
from support.engine_versions import small_checkpoint
from weightbus.bus.server import EmbeddedServer

pytestmark = pytest.mark.timeout(180)


async def test_a_checkpoint_goes_all_the_way_to_an_engine(
    tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    origin, root = small_checkpoint(tmp_path / "origin"), tmp_path / "versions"
    bus = nats_server.url
    common = ("--run-id", "run-1", "--bus", bus)
    async with FakeSglang() as engine:
        writer = service("writer", *common, "--root", str(root), "--index", "0", "--count", "1",
                         "--metrics-port", "0")  # fmt: skip
        agent = service("agent", *common, "--engine", engine.url, "--name", "engine-0")
        async with writer as running_writer, agent as running_agent:
            await running_writer.line_with("is live")
            published = await weightbus("publish", str(origin), *common, "--wait", "60")
            assert published.status == 0, published.err
            directory = Path(re.findall(r"complete: (.+)", published.out)[0])
            await running_agent.line_with("serving")
            assert (engine.label, engine.model_path) == ("run-1/1/v000000", str(directory))
            assert await running_agent.stop() == 0
            assert await running_writer.stop() == 0
        assert engine.sins == []
    await _check_tools(directory, _check_bytes(directory, origin), bus)


def _check_bytes(directory: Path, origin: Path) -> int:
    """The version holds the origin's tensors; returns their bytes."""
    source = load_file(origin / "model.safetensors")
    files = [load_file(file) for file in directory.glob("*.safetensors")]
    written = {name: tensor for file in files for name, tensor in file.items()}
    assert written.keys() == source.keys()
    assert all(np.array_equal(written[name], tensor) for name, tensor in source.items())
    return sum(tensor.nbytes for tensor in source.values())


async def _check_tools(directory: Path, nbytes: int, bus: str) -> None:
    verified = await weightbus("verify", str(directory), "--json")
    assert verified.json() == {
        "whole": True, "version": "run-1/1/v000000", "family": "qwen3", "shards": 1, "tensors": 4,
        "nbytes": nbytes,
    }  # fmt: skip
    status = (await weightbus("status", "--json", WEIGHTBUS_BUS=bus)).json()
    (run,) = status["runs"]
    assert run["newest_complete"] == "1/v000000"
    assert [version["stage"] for version in run["versions"]] == ["complete"]
    assert [(e["engine"], e["serving"], e["behind"]) for e in run["engines"]] == [
        ("engine-0", "1/v000000", 0)
    ]
    screen = await weightbus("status", "--bus", bus)
    assert "newest complete 1/v000000" in screen.out
    report = (await weightbus("bus", "status", "--json", "--bus", bus)).json()
    assert report["ready"]
    assert {stream["name"] for stream in report["streams"]} >= {"WEIGHTBUS", "WEIGHTBUS-REPORTS"}


async def test_a_server_of_our_own(tmp_path: Path) -> None:
    store = tmp_path / "jetstream"
    async with service("bus", "up", "--store-dir", str(store), "--port", "-1") as server:
        line = await server.line_with("listening on", stream="stdout")
        url = line.split()[-1]
        assert (await weightbus("bus", "init", "--bus", url)).status == 0
        status = await weightbus("bus", "status", "--bus", url)
        assert status.status == 0
        assert "WEIGHTBUS: 0 messages" in status.out
        again = await weightbus("bus", "up", "--store-dir", str(store), "--port", "-1")
        assert again.status == 1
        assert "ServerStartError: another nats-server uses this store folder" in again.err
        assert await server.stop() == 0


async def test_a_writer_answers_prometheus(tmp_path: Path, nats_server: EmbeddedServer) -> None:
    arguments = ("writer", "--run-id", "r", "--bus", nats_server.url, "--root", str(tmp_path / "v"),
                 "--index", "0", "--count", "1", "--metrics-port", "0")  # fmt: skip
    async with service(*arguments) as writer:
        line = await writer.line_with("metrics")
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            text = (await client.get(line.split()[-1])).text
    assert "weightbus_writer_versions_complete_total 0.0" in text
    assert "process_resident_memory_bytes" in text


_REFUSED: dict[str, tuple[list[str], str]] = {
    "no server": (
        ["bus", "status", "--bus", "nats://127.0.0.1:1"], "BusUnavailableError"),
    "no such checkpoint": (
        ["publish", "/no/such", "--run-id", "r"], "OriginError"),
    "output inside the origin": (
        ["writer", "--run-id", "r", "--root", "{origin}/out", "--origin", "{origin}",
         "--index", "0", "--count", "1"], "OutputFolderError: the output folder lies inside"),
    "not a version": (["verify", "{origin}"], "ManifestError"),
    "path rule without =": (
        ["agent", "--run-id", "r", "--engine", "http://127.0.0.1:1", "--writer-path", "x"],
        "ConfigError: 'x' is not THERE=HERE"),
    "no SGLang": (["demo", "--sglang-python", "/no/such/python"], "MissingDependencyError"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
async def test_a_named_error_is_one_line_and_status_1(
    name: str, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    arguments, message = _REFUSED[name]
    origin = small_checkpoint(tmp_path / "origin")
    filled = [argument.format(origin=origin) for argument in arguments]
    ended = await weightbus(*filled, WEIGHTBUS_BUS=nats_server.url)
    assert ended.status == 1, ended
    assert message in ended.err
    assert "Next:" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "arguments",
    [["writer"], ["writer", "--run-id", "r", "--root", "/x", "--index", "-1", "--count", "1"],
     ["agent", "--run-id", "r"], ["no-such"], ["publish"]],
)  # fmt: skip
async def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert (await weightbus(*arguments)).status == 2


@pytest.mark.parametrize(
    ("index", "count", "run_id"), [("3", "3", "r"), ("0", "1", "a.b"), ("0", "1", "")]
)
async def test_options_that_contradict_each_other_are_named(
    index: str, count: str, run_id: str, tmp_path: Path, nats_server: EmbeddedServer
) -> None:
    ended = await weightbus(
        "writer", "--run-id", run_id, "--root", str(tmp_path), "--index", index, "--count", count,
        WEIGHTBUS_BUS=nats_server.url,
    )  # fmt: skip
    assert ended.status == 1
    assert "ConfigError" in ended.err
    assert "Traceback" not in ended.err
