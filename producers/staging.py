"""The staging arena: one file that is mapped once and copied into again and again.

Copying into pages that exist is several times faster than writing fresh ones, so the file is
allocated, mapped and touched when the arena is made (that cost is paid at start, never in
`publish`), and a version goes into one of its `slots`. A slot is free again when its version is
complete or aborted. The arena's size bounds the memory; what happens when every slot is taken is
the user's choice: `wait`, `skip` or `fail`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ..schemas.errors import ConfigError, StagingError, StagingFullError, StagingTooSmallError
from .slots import SlotState, check_move

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - shared memory is the purpose, see ArenaName
_PAGE_BYTES = mmap.PAGESIZE

Policy: TypeAlias = Literal["wait", "skip", "fail"]


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """How a producer stages its versions.

    Attributes:
        folder: where the arena lies; None means shared memory (/dev/shm). The writers must reach
            the same path. A folder on a disk works and is as slow as its page cache.
        slots: versions that can be staged at once.
        slot_bytes: size of one slot; None means what one version of this producer needs.
        policy: what `publish` does when every slot is taken. `wait` blocks it, `skip` leaves the
            version out (all producers: the version is aborted), `fail` raises.
        wait_timeout_s: how long `wait` waits before it gives the version up.
        chunk_bytes: size that a chunk aims at.
    """

    folder: Path | None = None
    slots: int = 2
    slot_bytes: int | None = None
    policy: Policy = "wait"
    wait_timeout_s: float = 600.0
    chunk_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work."""
        if self.slots < 1 or self.chunk_bytes < 1 or self.wait_timeout_s < 0:
            raise ConfigError(
                f"staging with {self.slots} slots, chunks of {self.chunk_bytes} bytes and a wait "
                f"of {self.wait_timeout_s} s cannot work",
                next_step="use at least one slot, one byte and no negative wait",
            )
        if self.policy not in {"wait", "skip", "fail"}:
            raise ConfigError(
                f"unknown staging policy {self.policy!r}", next_step="use wait, skip or fail"
            )


@dataclass(frozen=True, slots=True)
class ArenaName:
    """Whose arena it is; also the name of its file, `weightbus-<run>-a<attempt>-r<rank>`."""

    run_id: str
    attempt: int
    rank: int

    def __str__(self) -> str:
        return f"weightbus-{self.run_id}-a{self.attempt}-r{self.rank}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot in use: its number, its memory, and where its first byte lies in the arena's file."""

    number: int
    buffer: memoryview
    offset: int


class StagingArena:
    """Slots in one mapped file. Thread-safe; `close` is idempotent.

    Args:
        name: whose it is. Arenas of older attempts of the same run and rank are removed: their
            versions have been aborted by the new attempt.
        config: folder, slots, policy.
        version_bytes: bytes of one version of this producer.

    Raises:
        StagingTooSmallError: `slot_bytes` is less than one version needs.
        StagingError: the folder does not exist, has no space left, or the file cannot be mapped.
    """

    def __init__(self, name: ArenaName, config: StagingConfig, version_bytes: int) -> None:
        self._slot_bytes = _slot_bytes(config, version_bytes, name)
        self._config = config
        folder = SHM_FOLDER if config.folder is None else config.folder.resolve()
        self._path = folder / str(name)
        self._changed = threading.Condition()
        self._states = [SlotState.FREE] * config.slots
        remove_older_arenas(folder, name)
        self._map, self._lock = _create(self._path, self._slot_bytes * config.slots)

    @property
    def path(self) -> Path:
        """The arena's file."""
        return self._path

    @property
    def uri(self) -> str:
        """How chunk events name it: `shm://<name>` or `file:///<path>`."""
        return f"shm://{self._path.name}" if self._config.folder is None else self._path.as_uri()

    @property
    def slot_bytes(self) -> int:
        """Size of one slot."""
        return self._slot_bytes

    @property
    def states(self) -> tuple[SlotState, ...]:
        """The state of every slot now."""
        with self._changed:
            return tuple(self._states)

    def acquire(self, timeout_s: float = 0.0) -> Slot:
        """Take a free slot for filling.

        Args:
            timeout_s: how long to wait for one; 0 does not wait.

        Raises:
            StagingFullError: none became free in time.
            StagingError: the arena is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._refuse_closed()
                if SlotState.FREE in self._states:
                    number = self._states.index(SlotState.FREE)
                    self._move(number, SlotState.FILLING)
                    return self._slot(number)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StagingFullError(
                        f"all {len(self._states)} slots hold versions that are not finished",
                        where={"arena": self._path, "waited_s": timeout_s},
                        next_step="look for writers that are down or slow (weightbus status), "
                        "publish less often, or use more slots",
                    )
                self._changed.wait(left)

    def hold(self, slot: Slot) -> None:
        """The slot is filled: it stays as it is until `release`."""
        with self._changed:
            self._move(slot.number, SlotState.HELD)

    def release(self, slot: Slot) -> None:
        """The slot's version has its outcome, or was never announced: it is free again."""
        with self._changed:
            if self._states[slot.number] is not SlotState.CLOSED:
                self._move(slot.number, SlotState.FREE)
                self._changed.notify_all()

    def close(self) -> None:
        """Remove the file. Readers that have it open keep their bytes; later ones find nothing."""
        with self._changed:
            if SlotState.CLOSED in self._states:
                return
            for number in range(len(self._states)):
                self._move(number, SlotState.CLOSED)
            self._changed.notify_all()
        self._path.unlink(missing_ok=True)
        os.close(self._lock)
        try:
            self._map.close()
        except BufferError:
            # Somebody still holds a view (a tensor made from it): the last one unmaps it.
            return

    def _slot(self, number: int) -> Slot:
        offset = number * self._slot_bytes
        view = memoryview(self._map)[offset : offset + self._slot_bytes]
        return Slot(number, view, offset)

    def _move(self, number: int, state: SlotState) -> None:
        check_move(number, self._states[number], state)
        self._states[number] = state

    def _refuse_closed(self) -> None:
        if SlotState.CLOSED in self._states:
            raise StagingError(
                "the arena is closed",
                where={"arena": self._path},
                next_step="do not publish after close()",
            )


def remove_older_arenas(folder: Path, name: ArenaName) -> list[Path]:
    """Remove what earlier attempts of the same run and rank left; returns what was removed.

    A live producer holds a lock on its arena, so an arena with a higher attempt number that nobody
    holds (its stream was lost and attempts began anew) goes too.

    Raises:
        StagingError: the folder cannot be read, or a live producer holds the arena of this name.
    """
    pattern = re.compile(rf"weightbus-{re.escape(name.run_id)}-a(\d+)-r{name.rank}")
    removed: list[Path] = []
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise StagingError(
            f"cannot look into the staging folder: {error}",
            where={"folder": folder},
            next_step="create it on every host, or use shared memory (folder=None)",
        ) from error
    for path in entries:
        match = pattern.fullmatch(path.name)
        if match is None or (int(match[1]) >= name.attempt and _is_locked(path)):
            continue
        path.unlink(missing_ok=True)
        removed.append(path)
    if (folder / str(name)).exists():
        raise StagingError(
            "another live process holds the arena of this run, attempt and rank",
            where={"arena": folder / str(name)},
            next_step="end the other trainer, or give this one its own run_id",
        )
    return removed


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _slot_bytes(config: StagingConfig, version_bytes: int, name: ArenaName) -> int:
    wanted = version_bytes if config.slot_bytes is None else config.slot_bytes
    if wanted < version_bytes:
        raise StagingTooSmallError(
            f"a slot of {wanted} bytes cannot hold a version of {version_bytes} bytes",
            where={"arena": name},
            next_step=f"leave slot_bytes out, or set it to {version_bytes} or more",
        )
    return -(-max(wanted, 1) // _PAGE_BYTES) * _PAGE_BYTES


def _create(path: Path, nbytes: int) -> tuple[mmap.mmap, int]:
    """Make the file at its full size, lock it, map it and touch every page."""
    try:
        return _allocate_and_map(path, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        missing = error.errno == errno.ENOSPC
        raise StagingError(
            f"no space for a staging arena of {nbytes} bytes"
            if missing
            else f"cannot make a staging arena: {error}",
            where={"arena": path, "bytes": nbytes},
            next_step="enlarge /dev/shm (docker: --shm-size), use fewer slots, or set a folder"
            if missing
            else "check the folder and its permissions",
        ) from error


def _allocate_and_map(path: Path, nbytes: int) -> tuple[mmap.mmap, int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Memory that does not exist is an error here, and not a SIGBUS in the middle of a copy.
        os.posix_fallocate(descriptor, 0, nbytes)
        mapped = mmap.mmap(descriptor, nbytes)
        # One write to each page: the first copy is then as fast as the later ones.
        mapped[::_PAGE_BYTES] = bytes(nbytes // _PAGE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return mapped, descriptor
