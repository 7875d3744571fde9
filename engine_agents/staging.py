"""Staging: everything that can be done before the pause, while the engine serves on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..schemas.errors import ManifestError
from ..schemas.events import VersionComplete
from ..schemas.manifest import Manifest
from .activation import Holding
from .config import AgentConfig
from .labels import label_of
from .tasks import finish
from .verify import Progress, verify_version


class StagingCancelledError(Exception):
    """Raised inside the reading threads to end them."""


async def stage(
    event: VersionComplete,
    config: AgentConfig,
    outdated: Callable[[], Awaitable[None]],
) -> Holding | None:
    """Verify a version whole; reading every byte also brings it into the page cache.

    Args:
        event: the version.
        config: where folders are, and how many threads read.
        outdated: returns when the version is not wanted any more.

    Returns:
        what the engine should load, or None when the version went out of date meanwhile.

    Raises:
        ManifestError, ShardCorruptError: the version must not be loaded.
        ConfigError: the directory cannot be this machine's.
    """
    directory = config.local_directory(event.directory)
    stop = threading.Event()

    def progress(done: int, total: int) -> None:
        if stop.is_set():
            raise StagingCancelledError(f"{done} of {total} bytes")

    reading = asyncio.ensure_future(
        asyncio.to_thread(_read, directory, event, progress, config.verify_threads)
    )
    watching = asyncio.ensure_future(outdated())
    try:
        await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
        gone = watching.done() and not reading.done()
    finally:
        stop.set()
        watching.cancel()
        await finish(_settled(reading))
    if gone:
        return None
    reading.result()
    return Holding(
        model_path=config.engine_directory(directory),
        label=label_of(event.version),
        directory=directory,
        manifest_digest=event.manifest_digest,
    )


def _read(directory: Path, event: VersionComplete, progress: Progress, threads: int) -> Manifest:
    if not os.path.isdir(directory):  # noqa: PTH112 - Path.is_dir raises on folders without access
        raise ManifestError(
            "the version directory does not exist on this machine, or cannot be read",
            where={"directory": directory},
            next_step="mount the writers' folder here, or map its name (writer_paths)",
        )
    return verify_version(
        directory,
        event.manifest_digest,
        progress,
        expected_version=event.version,
        threads=threads,
    )


async def _settled(future: asyncio.Future[Manifest]) -> None:
    await asyncio.wait({future})
    if not future.cancelled():
        future.exception()
