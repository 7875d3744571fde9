"""docker-compose.yml: what it promises, checked; its NATS config runs in the real server."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def test_it_has_a_broker_two_writers_and_an_agent(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services.keys() == {"nats", "writer-0", "writer-1", "agent"}
    indices = [
        next(part for part in services[f"writer-{k}"]["command"] if part.startswith("--index="))
        for k in (0, 1)
    ]
    assert indices == ["--index=0", "--index=1"]
    assert all("--count=2" in services[f"writer-{k}"]["command"] for k in (0, 1))
    for name in ("writer-0", "writer-1", "agent"):
        assert services[name]["depends_on"]["nats"]["condition"] == "service_healthy"


def test_the_broker_keeps_its_store_in_a_named_volume_and_has_a_health_check(
    compose: dict[str, Any],
) -> None:
    nats = compose["services"]["nats"]
    config = compose["configs"]["nats"]["content"]
    mounts = dict(mount.split(":")[:2] for mount in nats["volumes"])
    assert re.search(r'store_dir: "(.+)"', config)[1] == mounts["jetstream"]  # pyright: ignore[reportOptionalSubscript]
    assert "jetstream" in compose["volumes"]
    assert "healthz" in " ".join(nats["healthcheck"]["test"])


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_real_server_accepts_the_config(compose: dict[str, Any], tmp_path: Path) -> None:
    config = compose["configs"]["nats"]["content"].replace('"/data"', f'"{tmp_path}/data"')
    assert "sync_interval: always" in config
    path = tmp_path / "nats.conf"
    path.write_text(config)
    binary = Path(sys.executable).parent / "nats-server"
    checked = subprocess.run(
        [binary, "-t", "--config", path], capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stderr
