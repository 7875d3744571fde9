"""The demo's child processes: each with a log of its own, ended by process id, in reverse order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..schemas.errors import DemoFailedError

_GRACE_S = 15.0
_TAIL_CHARS = 3000


class Child:
    """One child process that leads a process group."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python ARGUMENTS` of this interpreter."""
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment if environment is not None else {})},
                start_new_session=True,
            )
        return cls(name, process, log)

    async def succeed(self, timeout_s: float) -> None:
        """Wait for exit status 0.

        Raises:
            DemoFailedError: another status, or not in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                status = await self._process.wait()
        except TimeoutError as error:
            raise self._failed(f"has not ended after {timeout_s:g} s") from error
        if status != 0:
            raise self._failed(f"ended with status {status}")

    async def watch(self) -> None:
        """Wait until it ends, and raise: a service must not end by itself."""
        raise self._failed(f"ended with status {await self._process.wait()}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to its process group after a grace time; idempotent."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    def _failed(self, what: str) -> DemoFailedError:
        tail = self.log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
        return DemoFailedError(
            f"{self.name} {what}; its log ends:\n{tail}\n",
            where={"log": self.log},
            next_step="run the demo again with --keep to keep every log",
        )
