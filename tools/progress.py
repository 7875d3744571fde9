"""A progress bar of bytes, on a terminal only."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .running import problems


class ByteProgress:
    """Counts bytes; `advance` may be called from any thread."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=None)

    def update(self, done: int, total: int) -> None:
        """So many of so many bytes are done."""
        self._progress.update(self._task, completed=done, total=total)

    def advance(self, nbytes: int) -> None:
        """More bytes are done."""
        self._progress.advance(self._task, nbytes)


@contextmanager
def byte_progress(label: str) -> Generator[ByteProgress]:
    """Show bytes and rate on stderr while the context is open, when that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=problems, transient=True, disable=not problems.is_terminal
    ) as progress:
        yield ByteProgress(progress, label)
