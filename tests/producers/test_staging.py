"""The arena: slots, bounds, what is left behind, and the errors that name their cause."""

import errno
import os
import threading
from pathlib import Path

import pytest
from weightbus.producers.slots import MOVES, SlotState, check_move
from weightbus.producers.staging import ArenaName, StagingArena, StagingConfig
from weightbus.schemas.errors import (
    ConfigError,
    StagingError,
    StagingFullError,
    StagingTooSmallError,
)

NAME = ArenaName("run", 3, 7)


def _arena(
    folder: Path, name: ArenaName = NAME, *, slots: int = 2, slot_bytes: int | None = None
) -> StagingArena:
    config = StagingConfig(folder=folder, slots=slots, slot_bytes=slot_bytes)
    return StagingArena(name, config, version_bytes=100)


def test_slots_are_parts_of_one_file(tmp_path: Path) -> None:
    arena = _arena(tmp_path, slots=3)
    slots = [arena.acquire() for _ in range(3)]
    for slot in slots:
        slot.buffer[:4] = bytes([65 + slot.number]) * 4
    data = arena.path.read_bytes()
    assert arena.path.name == "weightbus-run-a3-r7"
    assert arena.uri == f"file://{tmp_path}/weightbus-run-a3-r7"
    assert len(data) == 3 * arena.slot_bytes
    assert [data[slot.offset : slot.offset + 4] for slot in slots] == [b"AAAA", b"BBBB", b"CCCC"]
    arena.close()


def test_shared_memory_is_the_default() -> None:
    name = ArenaName(f"t{os.getpid()}", 1, 0)
    arena = StagingArena(name, StagingConfig(), 10)
    assert arena.uri == f"shm://{name}"
    assert (Path("/dev/shm") / str(name)).exists()
    arena.close()
    assert not (Path("/dev/shm") / str(name)).exists()


def test_a_slot_is_free_again_after_release_only(tmp_path: Path) -> None:
    arena = _arena(tmp_path, slots=1)
    slot = arena.acquire()
    assert arena.states == (SlotState.FILLING,)
    arena.hold(slot)
    with pytest.raises(StagingFullError, match="all 1 slots hold versions") as caught:
        arena.acquire()
    assert caught.value.retryable
    arena.release(slot)
    assert arena.acquire().number == slot.number
    arena.close()


def test_waiting_ends_when_a_slot_is_released(tmp_path: Path) -> None:
    arena = _arena(tmp_path, slots=1)
    slot = arena.acquire()
    arena.hold(slot)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(arena.acquire(10.0).number))
    waiter.start()
    arena.release(slot)
    waiter.join(10.0)
    assert got == [0]
    arena.close()


def test_closing_wakes_who_waits(tmp_path: Path) -> None:
    arena = _arena(tmp_path, slots=1)
    arena.hold(arena.acquire())
    errors: list[StagingError] = []

    def wait() -> None:
        try:
            arena.acquire(10.0)
        except StagingError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    arena.close()
    waiter.join(10.0)
    assert "closed" in errors[0].what
    assert arena.states == (SlotState.CLOSED,)
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_while_a_view_is_held_leaves_no_file(tmp_path: Path) -> None:
    arena = _arena(tmp_path)
    slot = arena.acquire()
    arena.close()
    assert slot.buffer[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_every_page_is_there_before_the_first_copy(tmp_path: Path) -> None:
    arena = StagingArena(NAME, StagingConfig(folder=tmp_path), 10 * 4096 + 1)
    status = arena.path.stat()
    assert status.st_size == 2 * 11 * 4096
    assert status.st_blocks * 512 >= status.st_size
    arena.close()


def test_arenas_of_older_attempts_of_the_same_rank_are_removed(tmp_path: Path) -> None:
    older = [tmp_path / "weightbus-run-a1-r7", tmp_path / "weightbus-run-a2-r7"]
    dead = [tmp_path / "weightbus-run-a3-r7", tmp_path / "weightbus-run-a9-r7"]
    others = [
        tmp_path / "weightbus-run-a1-r8",
        tmp_path / "weightbus-run-a1-r77",
        tmp_path / "weightbus-run-more-a1-r7",
        tmp_path / "weightbus-run-a1-r7.txt",
    ]
    for path in (*older, *dead, *others):
        path.write_bytes(b"x")
    arena = _arena(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([arena.path, *others])
    arena.close()


def test_an_older_attempt_goes_even_when_its_trainer_still_lives(tmp_path: Path) -> None:
    old = _arena(tmp_path, ArenaName("run", 2, 7))
    new = _arena(tmp_path)
    assert list(tmp_path.iterdir()) == [new.path]
    old.close()
    new.close()


def test_a_live_producer_keeps_its_arena(tmp_path: Path) -> None:
    arena = _arena(tmp_path)
    with pytest.raises(StagingError, match="another live process holds the arena"):
        _arena(tmp_path)
    assert arena.path.exists()
    arena.close()


def test_a_slot_that_cannot_hold_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        StagingTooSmallError, match="a slot of 99 bytes cannot hold a version of 100"
    ):
        _arena(tmp_path, slot_bytes=99)
    assert list(tmp_path.iterdir()) == []


def test_missing_space_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StagingError, match="no space for a staging arena of 8192 bytes") as caught:
        _arena(tmp_path)
    assert "--shm-size" in caught.value.next_step
    assert list(tmp_path.iterdir()) == []


def test_more_shared_memory_than_there_is_is_an_error_and_not_a_signal() -> None:
    name = ArenaName(f"t{os.getpid()}", 1, 1)
    with pytest.raises(StagingError, match="no space for a staging arena"):
        StagingArena(name, StagingConfig(slots=1), 1 << 45)
    assert not (Path("/dev/shm") / str(name)).exists()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StagingError, match="cannot look into the staging folder"):
        _arena(tmp_path / "absent")


@pytest.mark.parametrize(
    "options",
    [{"slots": 0}, {"chunk_bytes": 0}, {"wait_timeout_s": -1.0}, {"policy": "drop"}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        StagingConfig(**options)  # pyright: ignore[reportArgumentType] - wrong on purpose


@pytest.mark.parametrize("old", SlotState)
@pytest.mark.parametrize("new", SlotState)
def test_moves_are_those_of_the_table(old: SlotState, new: SlotState) -> None:
    if new in MOVES[old]:
        check_move(0, old, new)
    else:
        with pytest.raises(StagingError, match=f"cannot go from {old.value} to {new.value}"):
            check_move(0, old, new)
