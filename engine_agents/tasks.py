"""Work that must run to its end, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end even when the caller is cancelled; the cancellation comes after it.

    Only for work whose own waits all have deadlines. A request that is cut off half-way would
    leave nobody knowing whether the engine acts on it.
    """
    task = asyncio.ensure_future(work)
    interrupted = await _wait_for(task)
    if interrupted:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("failed while the agent was being stopped: %s", error)
        raise asyncio.CancelledError
    return task.result()


async def cancel_and_wait(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its clean-up to end, whatever its result; never interrupted."""
    task.cancel()
    if await _wait_for(task):
        raise asyncio.CancelledError


async def _wait_for(task: asyncio.Future[Any]) -> bool:
    interrupted = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            interrupted = True
    return interrupted
