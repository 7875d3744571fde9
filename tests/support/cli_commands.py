"""The `weightbus` command as a user runs it: real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def _environment(extra: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTBUS_")}
    return {**clean, "COLUMNS": "200", "NO_COLOR": "1", **extra}


async def _start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weightbus", *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(environment),
    )  # fmt: skip


async def weightbus(*arguments: str, **environment: str) -> Finished:
    """Run a command to its end."""
    process = await _start(*arguments, **environment)
    async with asyncio.timeout(DEADLINE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


class Service:
    """A command that runs until it is stopped."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    async def line_with(self, text: str, *, stream: str = "stderr") -> str:
        """The next line that contains `text`."""
        reader = getattr(self._process, stream)
        async with asyncio.timeout(DEADLINE_S):
            while data := await reader.readline():
                line = data.decode().rstrip()
                self.lines.append(line)
                if text in line:
                    return line
        raise AssertionError(f"{text!r} never came; lines were: {self.lines}")

    async def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        if self._process.returncode is None:
            self._process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode


@asynccontextmanager
async def service(*arguments: str, **environment: str) -> AsyncGenerator[Service]:
    """A running command; stopped at the end, when the test has not done so."""
    running = Service(await _start(*arguments, **environment))
    try:
        yield running
    finally:
        await running.stop()
