"""A TCP proxy in front of a server, for accidents on the line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlparse


class Line:
    """Passes bytes on until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._mute = False
        self._cut_at: bytes = b""
        self.cuts = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection now."""
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    def cut_before_answer(self, to: bytes) -> None:
        """Break the connection when the server is about to send something that contains `to`."""
        self._cut_at = to

    def mute(self, *, on: bool) -> None:
        """Swallow everything in both directions while the connections stay open."""
        self._mute = on

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _accept(
        self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter
    ) -> None:
        try:
            server_in, server_out = await asyncio.open_connection(*self._target)
        except OSError:
            client_out.transport.abort()
            return
        self._writers |= {client_out, server_out}
        for source, sink, inbound in (
            (client_in, server_out, False),
            (server_in, client_out, True),
        ):
            task = asyncio.create_task(self._pump(source, sink, client_out, inbound=inbound))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
        *,
        inbound: bool,
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if inbound and self._cut_at and self._cut_at in data:
                    self._cut_at = b""
                    self.cuts += 1
                    client.transport.abort()
                    break
                if not self._mute:
                    sink.write(data)
                    await sink.drain()
        self._writers.discard(sink)
        sink.transport.abort()


@asynccontextmanager
async def line_to(url: str) -> AsyncGenerator[Line]:
    """A proxy in front of a NATS URL."""
    target = urlparse(url)
    line = Line(target.hostname or "127.0.0.1", target.port or 4222)
    await line.start()
    try:
        yield line
    finally:
        await line.stop()
