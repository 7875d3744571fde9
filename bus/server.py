"""A nats-server of our own, in its own process, for demos, tests and small installations.

Start: lock the store -> write the configuration -> start the process -> wait for its ports file.
Stop:  SIGTERM -> wait -> SIGKILL -> remove what was temporary. By process id, never by name.

The process inherits the descriptor that holds the store's lock, so two servers can never share a
store folder, also when the one who started the first is long dead.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ..schemas.errors import ConfigError, ServerStartError
from .server_binary import checked_server

_POLL_S = 0.005
_LOG_TAIL_BYTES = 4096

# PR_SET_PDEATHSIG is sent when the *thread* that forked ends, so it is asked for only on the main
# thread. It is set after exec in this launcher (no Python between fork and exec in the parent), and
# the parent is looked at again, because it may have died before the request.
_LAUNCHER = """
import ctypes, os, sys
parent = int(sys.argv[1])
if parent:
    try:
        ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    except (OSError, AttributeError):
        pass
    if os.getppid() != parent:
        os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How to run the embedded server.

    `store` None means a temporary folder that is removed at the end; `port` and `monitoring_port`
    -1 mean: chosen by the server (`monitoring_port` None: no monitoring).
    """

    store: Path | None = None
    host: str = "127.0.0.1"
    port: int = -1
    monitoring_port: int | None = None
    server_name: str = "weightbus"
    """Unique in a cluster."""
    max_payload_bytes: int = 1024 * 1024
    max_store_bytes: int = 64 * 1024**3
    binary: Path | None = None
    extra: str = ""
    """More lines for the server's configuration file, at its top level (accounts, TLS, ...)."""
    start_timeout_s: float = 15.0
    stop_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_payload_bytes < 256 * 1024:
            raise ConfigError(
                "blob chunks and events need a max_payload of at least 256 KiB",
                where={"max_payload_bytes": self.max_payload_bytes},
                next_step="leave max_payload_bytes at its default of 1 MiB",
            )
        if min(self.start_timeout_s, self.stop_timeout_s) <= 0:
            raise ConfigError(
                "time-outs are positive",
                where={
                    "start_timeout_s": self.start_timeout_s,
                    "stop_timeout_s": self.stop_timeout_s,
                },
            )


class EmbeddedServer:
    """A nats-server child process; `with` and `async with` start and stop it.

    `url` is where it listens; `store` its JetStream folder; `log_file` what it says.
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = ServerConfig() if config is None else config
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: Path | None = None
        self._locked = False
        self._ports: dict[str, list[str]] = {}
        self._port = self.config.port

    # ---- what it is

    @property
    def url(self) -> str:
        """The client URL. Raises ServerStartError before the start."""
        return self._address("nats")

    @property
    def monitoring_url(self) -> str:
        """The monitoring URL. Raises ServerStartError when monitoring is off."""
        return self._address("monitoring")

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def store(self) -> Path:
        """The folder of JetStream's data. Raises ServerStartError for a temporary one not there."""
        store = self.config.store if self.config.store is not None else self._temporary
        if store is None:
            raise ServerStartError("the server has no folder yet", next_step="start it first")
        return store

    @property
    def log_file(self) -> Path:
        """The server's log, beside its data."""
        return self.store / "nats-server.log"

    # ---- start

    def start(self) -> Self:
        """Start and wait until clients can connect; idempotent while it runs.

        Raises:
            ServerBinaryError: no nats-server, or an old one.
            ServerStartError: the store is in use, or it did not come up; with the log's tail.
        """
        if self.running:
            return self
        deadline = self._begin()
        while not self._ready(deadline):
            time.sleep(_POLL_S)
        return self

    async def start_async(self) -> Self:
        """`start` without blocking the event loop."""
        if self.running:
            return self
        deadline = self._begin()
        while not self._ready(deadline):  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(_POLL_S)
        return self

    def _begin(self) -> float:
        try:
            return self._launch()
        except BaseException:
            self._clean_up()
            raise

    def _launch(self) -> float:
        binary = checked_server(self.config.binary)
        if self.config.store is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="weightbus-nats-"))
        store = self.store
        store.mkdir(parents=True, exist_ok=True)
        lock = self._take_lock(store)
        try:
            self._locked, self._ports = True, {}
            work = self._work
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            (work / "server.conf").write_text(self._configuration(work, store))
            parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
            command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(parent)]
            command += [str(binary), "-c", str(work / "server.conf")]
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock.fileno(),),
                )
        finally:
            lock.close()  # the child holds it now
        return time.monotonic() + self.config.start_timeout_s

    def _take_lock(self, store: Path) -> IO[bytes]:
        lock = (store / ".weightbus-lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ServerStartError(
                "another nats-server uses this store folder",
                where={"store": store},
                next_step="stop it, or give this one a folder of its own",
            ) from error
        return lock

    def _configuration(self, work: Path, store: Path) -> str:
        config = self.config
        lines = [
            f'listen: "{config.host}:{self._port}"',
            f"server_name: {json.dumps(config.server_name)}",
            f"ports_file_dir: {json.dumps(str(work))}",
            f"max_payload: {config.max_payload_bytes}",
            "jetstream {",
            f"  store_dir: {json.dumps(str(store))}",
            f"  max_file_store: {config.max_store_bytes}",
            # The default flushes every two minutes: a power cut would lose acknowledged events.
            "  sync_interval: always",
            "}",
        ]
        if config.monitoring_port is not None:
            lines.append(f'http: "{config.host}:{config.monitoring_port}"')
        return "\n".join([*lines, config.extra, ""])

    def _ready(self, deadline: float) -> bool:
        process = self._process
        if process is None or process.poll() is not None:
            status = None if process is None else process.returncode
            raise self._not_started(f"nats-server ended with status {status} while starting")
        ports = self._read_ports(process.pid)
        if ports is not None:
            self._ports = ports
            self._port = int(self.url.rpartition(":")[2])
            return True
        if time.monotonic() > deadline:
            self.kill()
            raise self._not_started(
                f"nats-server was not ready after {self.config.start_timeout_s:g} s"
            )
        return False

    def _read_ports(self, pid: int) -> dict[str, list[str]] | None:
        try:
            ports = json.loads((self._work / f"nats-server_{pid}.ports").read_bytes())
        except (FileNotFoundError, ValueError):  # not there, or half written
            return None
        return ports if ports.get("nats") else None

    def _not_started(self, what: str) -> ServerStartError:
        tail = ""
        if self.log_file.is_file():
            tail = self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        self._clean_up()
        return ServerStartError(
            f"{what}; its log ends:\n{tail}\n",
            where={"store": self.config.store, "port": self.config.port},
            next_step="fix what the last lines of the log complain about",
        )

    # ---- stop

    def stop(self) -> None:
        """Stop cleanly, by force after the deadline; idempotent. Removes what was temporary."""
        if self._terminate():
            try:
                self._wait(self.config.stop_timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._clean_up()

    async def stop_async(self) -> None:
        """`stop` without blocking the event loop."""
        if self._terminate():
            deadline = time.monotonic() + self.config.stop_timeout_s
            while self.running and time.monotonic() < deadline:  # noqa: ASYNC110 - a process
                await asyncio.sleep(_POLL_S)
            self.kill()
        self._clean_up()

    def kill(self) -> None:
        """SIGKILL, as a crash; the store stays. Does nothing when it is not running."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.kill()
        self._wait(self.config.stop_timeout_s)
        self._process = None

    def restart(self) -> Self:
        """Start again on the same port and store, after `kill` or after a clean stop of it now."""
        if self._terminate():
            self._wait(self.config.stop_timeout_s)
        self._process = None
        return self.start()

    def _terminate(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            return False
        self._process.send_signal(signal.SIGTERM)
        return True

    def _wait(self, timeout_s: float) -> None:
        if self._process is not None:
            self._process.wait(timeout_s)

    def _clean_up(self) -> None:
        self._process = None
        self._ports = {}
        if self._locked:  # else the folder is somebody else's
            shutil.rmtree(self._work, ignore_errors=True)
            self._locked = False
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    # ---- bits

    @property
    def _work(self) -> Path:
        """Configuration and ports file; made anew by each start."""
        return self.store / "run"

    def _address(self, kind: str) -> str:
        addresses = self._ports.get(kind)
        if not addresses:
            raise ServerStartError(
                f"the server has no {kind} address",
                next_step="start it first"
                if kind == "nats"
                else "set ServerConfig.monitoring_port, and start it first",
            )
        return addresses[0]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return await self.start_async()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop_async()
