"""A real SGLang server as a context manager: started, waited for, and ended as a process group."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

import httpx

from ...schemas.errors import (
    EngineRefusedError,
    EngineTimeoutError,
    EngineUnreachableError,
    MissingDependencyError,
)

REPOSITORY = Path(__file__).resolve().parents[2]
BASE_RELEASE = "0.5.23"
DEFAULT_VENV = REPOSITORY / ".venv-sglang"
_SHIM = Path(__file__).resolve().parent / "shim"
_INSTALL = "demo/sglang_cpu/install.sh"
_POLL_S = 0.25
_SHM = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives
_GRACE_S = 10.0
_PORT_TRIES = 3
_MAX_PORT = 50_000
_LOG_TAIL_CHARS = 3000
# The pool is bounded by its tokens. A small fraction would do, but SGLang takes what others
# allocate between its two looks at the free memory for weights of its own, and gives up.
_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--host", "127.0.0.1", "--max-total-tokens", "4096", "--context-length", "1024",
    "--mem-fraction-static", "0.5", "--disable-overlap-schedule", "--disable-cuda-graph",
)  # fmt: skip


class SglangServer:
    """An SGLang server on 127.0.0.1 that serves a model folder from the CPU (1.8 GB of memory).

    Args:
        model: the Hugging Face folder to serve.
        log: where the server's output goes.
        release: the SGLang release; others than the base one are overlays (see install.sh).
        venv: the virtual environment of the base release.
        arguments: more arguments of `sglang.launch_server`.
        ready_within_s: the longest that start-up may take.

    Raises:
        MissingDependencyError: the release is not installed; `next_step` is the command.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        release: str = BASE_RELEASE,
        venv: Path = DEFAULT_VENV,
        arguments: Sequence[str] = (),
        ready_within_s: float = 240.0,
    ) -> None:
        self._model = model
        self._log = log
        self._python = venv / "bin" / "python"
        self._overlay = None if release == BASE_RELEASE else venv.parent / ".sglang" / release
        self._arguments = tuple(arguments)
        self._ready_within_s = ready_within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._shared: set[Path] = set()
        needed = self._python if self._overlay is None else self._overlay / "sglang"
        if not needed.exists() or not self._python.exists():
            raise MissingDependencyError(
                f"SGLang {release} is not installed in {needed}",
                next_step=f"{_INSTALL} {venv} {release}",
            )

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process, which leads its process group.

        Raises:
            EngineUnreachableError: the server is not running.
        """
        if self._process is None:
            raise EngineUnreachableError("the server is not running", where={"engine": self.url})
        return self._process.pid

    @property
    def log_tail(self) -> str:
        """The end of the server's log."""
        try:
            return self._log.read_text(errors="replace")[-_LOG_TAIL_CHARS:]
        except FileNotFoundError:
            return ""

    def __enter__(self) -> SglangServer:
        """As `start`."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """As `stop`."""
        self.stop()

    def start(self) -> None:
        """Start the server; returns when it generates.

        Raises:
            EngineRefusedError: it ended; the message has the end of its log.
            EngineTimeoutError: it was not ready in time.
        """
        for tries_left in reversed(range(_PORT_TRIES)):
            self._port = _free_port()
            self._launch()
            try:
                self._wait_until_ready()
                return
            except EngineRefusedError:
                self.stop()
                # Between our look and the server's bind somebody else may have taken the port.
                if tries_left == 0 or "ddress already in use" not in self.log_tail:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the server and every process that it started; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self._shared |= _shared_memory_of(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_GRACE_S)
        # What ends by a signal leaves its shared memory behind.
        while self._shared:
            self._shared.pop().unlink(missing_ok=True)

    def _launch(self) -> None:
        command = [str(self._python), "-m", "sglang.launch_server"]
        command += ["--model-path", str(self._model), "--port", str(self._port)]
        paths = [_SHIM] if self._overlay is None else [_SHIM, self._overlay]
        environment = {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *_FLAGS, *self._arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self._ready_within_s
        with httpx.Client(base_url=self.url, trust_env=False, timeout=30.0) as client:
            while time.monotonic() < end:
                # Looked at now: a server that dies while it starts tells nobody afterwards.
                self._shared |= set() if self._process is None else _shared_memory_of(self.pid)
                code = None if self._process is None else self._process.poll()
                if code is not None:
                    raise EngineRefusedError(
                        f"the server ended with {code} before it was ready; its log ends so:\n"
                        f"{self.log_tail}",
                        where={"model": self._model, "log": self._log},
                        next_step="read the whole log",
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/health").status_code == HTTPStatus.OK:
                        return
                time.sleep(_POLL_S)
        raise EngineTimeoutError(
            f"the server was not ready within {self._ready_within_s:g} s; its log ends so:\n"
            f"{self.log_tail}",
            where={"model": self._model, "log": self._log},
            next_step="read the whole log, or wait longer on a slower machine",
        )


def _shared_memory_of(group: int) -> set[Path]:
    """The files in /dev/shm that processes of a process group have mapped.

    Found by inode: a named semaphore is mapped before it gets the name under which it stays.
    """
    inodes: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                maps = (folder / "maps").read_text().splitlines()
                inodes |= {int(line.split()[4]) for line in maps if f" {_SHM}/" in line}
        except (ProcessLookupError, FileNotFoundError, PermissionError):
            continue
    return {path for path in Path(_SHM).iterdir() if path.stat().st_ino in inodes}


def _free_port() -> int:
    """A free port below `_MAX_PORT`: SGLang adds up to 10000 to it for ports of its own."""
    with contextlib.ExitStack() as held:
        while True:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port <= _MAX_PORT:
                return port
