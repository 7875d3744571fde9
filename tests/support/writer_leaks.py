"""What a writer that has ended must not leave in its process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def nothing_left(folder: Path) -> Generator[None]:
    """After the block: no thread of a writer, no task but the test's, no open file in `folder`."""
    before, running = asyncio.all_tasks(), set(threading.enumerate())
    yield
    threads = [thread.name for thread in set(threading.enumerate()) - running]
    assert [name for name in threads if "weightbus" in name] == []
    assert {task.get_name() for task in asyncio.all_tasks() - before} == set()
    assert [path for path in open_files() if path.is_relative_to(folder)] == []


def open_files() -> list[Path]:
    """What the descriptors of this process point to."""
    found: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(link.readlink())
    return found
