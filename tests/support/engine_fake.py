"""A stand-in for an SGLang server: real sockets on loopback, scripted behaviour, and a conscience.

It knows what the real one does to an agent that handles it wrongly: it dies of a truncated shard
and, in old releases, of a flush inside a load; and it notes every load that no pause protected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightbus.schemas.errors import ShardCorruptError
from weightbus.schemas.safetensors_format import read_header

PAUSE, CONTINUE, FLUSH = "/pause_generation", "/continue_generation", "/flush_cache"
LOAD, INFO, SERVER, HEALTH = "/update_weights_from_disk", "/model_info", "/server_info", "/health"
ORIGIN_LABEL, ORIGIN_PATH = "default", "/models/origin"
Reply = tuple[int, dict[str, Any] | str]


@dataclass(frozen=True)
class Step:
    """What happens at one call instead of the usual.

    `reply`: answered instead of acting. `hang`: no answer until the server ends. `gate`: wait for
    the event, then act as usual. `drop`: the connection breaks. `die`: the server ends.
    `mute_label`: a load that succeeds without taking the label. `corrupts`: some tensors change.
    `lost`: acts as usual, and the answer is lost.
    """

    reply: Reply | None = None
    hang: bool = False
    gate: asyncio.Event | None = None
    drop: bool = False
    die: bool = False
    mute_label: bool = False
    corrupts: bool = False
    lost: bool = False


class _DropError(Exception):
    """The connection ends without an answer."""


class FakeSglang:
    """See the module. Use as an async context manager."""

    def __init__(self, release: str = "0.5.23") -> None:
        self.release = release
        self.running_requests = 0
        self.script: dict[str, deque[Step]] = defaultdict(deque)
        self.always: dict[str, Step] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.headers: dict[str, str] = {}
        self.sins: list[str] = []
        self.observer: Callable[[], None] = lambda: None
        self.alive = False
        self.url = ""
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._came = asyncio.Condition()
        self._boot()

    def _boot(self) -> None:
        self.label, self.model_path, self.weights = ORIGIN_LABEL, ORIGIN_PATH, ORIGIN_LABEL
        self.paused: str | None = None

    async def __aenter__(self) -> FakeSglang:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def start(self, port: int = 0) -> None:
        """Start as a new process: origin weights, not paused."""
        self._boot()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port)
        self.alive = True
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def restart(self) -> None:
        """The process ends and comes back on the same port."""
        port = int(self.url.rsplit(":", 1)[1])
        await self.close()
        await self.start(port)

    async def close(self) -> None:
        """End, with all open connections."""
        self._die()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _die(self) -> None:
        self.alive = False
        if self._server is not None:
            self._server.close()
        for handler in self._handlers:
            if handler is not asyncio.current_task():
                handler.cancel()

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def loads(self) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == LOAD]

    async def arrived(self, path: str, times: int = 1, within_s: float = 10.0) -> None:
        """Wait until a path was called so many times."""
        await self.until(lambda: self.paths().count(path) >= times, within_s)

    async def until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        """Wait for a condition that calls can make true."""
        async with asyncio.timeout(within_s), self._came:
            await self._came.wait_for(condition)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        with contextlib.suppress(_DropError, ConnectionError, asyncio.CancelledError):
            async with self._noted():
                path, self.headers, body = await _read_request(reader)
                self.calls.append((path, body))
                self.observer()
            status, content = await self._act(path, body)
            data = content if isinstance(content, str) else json.dumps(content)
            head = (
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
            )
            writer.write((head + data).encode())
            await writer.drain()
        writer.close()
        self._handlers.discard(task)
        async with self._noted():
            pass

    @contextlib.asynccontextmanager
    async def _noted(self) -> AsyncGenerator[None]:
        yield
        async with self._came:
            self._came.notify_all()

    async def _act(self, path: str, body: dict[str, Any]) -> Reply:
        queue = self.script[path]
        step = queue.popleft() if queue else self.always.get(path, Step())
        await self._disturb(step)
        if step.reply is not None:
            return step.reply
        reply = self._load(body, step.mute_label) if path == LOAD else self._usual(path, body)
        if step.lost:
            raise _DropError
        return reply

    def _usual(self, path: str, body: dict[str, Any]) -> Reply:
        usual: dict[str, Callable[[], Reply]] = {
            INFO: lambda: (200, {"model_path": self.model_path, "weight_version": self.label}),
            SERVER: lambda: (200, {"version": self.release}),
            PAUSE: lambda: self._pause(str(body.get("mode", "abort"))),
            CONTINUE: self._continue,
            FLUSH: lambda: (400, "Flush cache failed.") if self._busy() else (200, "Flushed."),
            HEALTH: lambda: (200 if self.paused is None else 503, ""),
        }
        return usual[path]() if path in usual else (404, {"detail": "Not Found"})

    async def _disturb(self, step: Step) -> None:
        if step.hang:
            await asyncio.Event().wait()
        if step.gate is not None:
            await step.gate.wait()
        if step.corrupts:
            self.weights = "mixed"
        if step.die:
            self._die()
        if step.drop or step.die:
            raise _DropError

    def _pause(self, mode: str) -> Reply:
        self.paused = mode
        if mode == "abort":
            self.running_requests = 0
        return 200, {"message": "paused", "status": "ok"}

    def _continue(self) -> Reply:
        self.paused = None
        return 200, {"message": "continued", "status": "ok"}

    def _busy(self) -> bool:
        """Whether a flush is refused, by release and pause mode."""
        if self.running_requests == 0:
            return False
        return not (self.paused == "retract" and self.release == "0.5.23")

    def _load(self, body: dict[str, Any], mute_label: bool) -> Reply:
        if self.paused is None:
            self.sins.append(f"{body['model_path']} loaded without a pause")
        for shard in sorted(Path(body["model_path"]).glob("*.safetensors")):
            try:
                read_header(shard)
            except ShardCorruptError as error:
                self.sins.append(f"died of a shard: {error.what}")
                self._die()
                raise _DropError from error
        self.weights = body["weight_version"]
        self.model_path = body["model_path"]
        if not mute_label:
            self.label = body["weight_version"]
        if body.get("flush_cache", True) and self._busy():
            if self.release != "0.5.23":
                self.sins.append("died of a flush inside a load")
                self._die()
                raise _DropError
            return 400, {"success": False, "message": "Weights were updated, not flushed"}
        return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}


async def _read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, dict[str, str], dict[str, Any]]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError as error:
        raise _DropError from error
    first, *lines = head.strip().split("\r\n")
    pairs = [line.partition(": ") for line in lines]
    headers = {name.lower(): value for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    path = first.split(" ")[1].partition("?")[0]
    return path, headers, json.loads(body) if body else {}
