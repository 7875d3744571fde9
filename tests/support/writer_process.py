"""A writer as a process that dies by SIGKILL at a step, and says on stdout which step it takes.

    python writer_process.py '{"url": …, "kill_at": 7, "config": {…}}'

`kill_at` counts the steps (writers.steps) of this life from 1, or is a step's name; 0: never. One
line per step ("step 7 copy"), one for each of the writer's log records ("log …").
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightbus.bus.nats_bus import BusConfig, NatsBus
from weightbus.schemas.events import VersionComplete, VersionKey
from weightbus.tools.running import serve
from weightbus.writers.config import WriterConfig
from weightbus.writers.service import Writer
from weightbus.writers.steps import Step

DEADLINE_S = 60.0


class DeadlySteps:
    """Prints each step; kills this process at the n-th, or at the first of a name."""

    def __init__(self, kill_at: int | str) -> None:
        self._kill_at = kill_at
        self._count = itertools.count(1)

    def reached(self, step: Step, key: VersionKey) -> None:
        number = next(self._count)
        _say(f"step {number} {step.value}")
        if self._kill_at in (number, step.value):
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _say(f"log {record.getMessage()}".replace("\n", " | "))


def _say(line: str) -> None:
    # One write each: lines of several threads must not mix.
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def _main(options: dict[str, Any]) -> None:
    logging.basicConfig(level="INFO", handlers=[_Lines()])
    config = WriterConfig.model_validate_json(json.dumps(options["config"]))
    bus = BusConfig(
        url=options["url"], name=config.name, attempt_timeout_s=1.0, reconnect_pause_max_s=0.1,
        ping_interval_s=0.5,
    )  # fmt: skip
    async with await NatsBus.connect(bus) as connected:
        writer = Writer(connected, config, DeadlySteps(options["kill_at"]))
        await serve(writer.run(), writer.stop)


@dataclass
class WriterProcess:
    """One life of a writer, seen from the test."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list[str])

    async def line_with(self, *texts: str) -> str | None:
        """The next line with one of the texts; None when the process has ended."""
        stdout = self.process.stdout
        assert stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while data := await stdout.readline():
                line = data.decode().rstrip()
                self.lines.append(line)
                if any(text in line for text in texts):
                    return line
        return None

    async def has_cleaned_up(self, complete: VersionComplete, *, started_before: bool) -> None:
        """Read on until the writer has cleaned up behind a version.

        Args:
            complete: the version's end.
            started_before: whether the writer was started before the version was published; a
                later one may have found it complete at its start.
        """
        text = f"version {complete.version} complete"

        def enough(line: str) -> bool:
            return text in line or (not started_before and line.endswith(" 0 versions in progress"))

        while not any(enough(line) for line in self.lines):
            assert await self.line_with(text, "versions in progress") is not None, self.lines[-20:]

    async def ended(self) -> int:
        """Read to the end; the exit status, minus the signal's number."""
        assert await self.line_with("\0") is None
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def stop(self) -> None:
        """SIGTERM; the writer must end well."""
        if self.process.returncode is None:
            self.process.terminate()
        assert await self.ended() == 0, self.lines[-20:]


@asynccontextmanager
async def writer_process(
    url: str, root: Path, *, index: int, count: int, kill_at: int | str = 0, **options: object
) -> AsyncGenerator[WriterProcess]:
    """A writer in a process of its own; gone at the end, whatever happened."""
    config = {"run_id": "run", "index": index, "count": count, "root": str(root), **options}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__,
        json.dumps({"url": url, "kill_at": kill_at, "config": config}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield WriterProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
