"""Attempts: numbers, other trainers, run names."""

from pathlib import Path

import pytest
from weightbus.bus.memory import MemoryBus, MemoryServer
from weightbus.producers.attempts import Trainer, open_attempt, origin_of
from weightbus.schemas.errors import ConfigError, VersionConflictError


def _trainer(run_id: str = "run") -> Trainer:
    return Trainer(run_id, 1, "hf", "/origin")


async def test_a_restarted_trainer_takes_the_next_number() -> None:
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:
        assert await open_attempt(bus, _trainer()) == 1
        assert await open_attempt(bus, _trainer()) == 2
        assert await open_attempt(bus, _trainer("other")) == 1
        assert await open_attempt(bus, _trainer(), 9) == 9
        assert await open_attempt(bus, _trainer()) == 10


async def test_opening_again_after_a_lost_answer_is_the_same_attempt() -> None:
    async with await MemoryBus.connect(MemoryServer()) as bus:
        trainer = _trainer()
        assert await open_attempt(bus, trainer, 4) == 4
        assert await open_attempt(bus, trainer, 4) == 4


async def test_an_attempt_of_another_trainer_is_refused() -> None:
    async with await MemoryBus.connect(MemoryServer()) as bus:
        await open_attempt(bus, _trainer(), 1)
        with pytest.raises(VersionConflictError, match="another trainer has opened this attempt"):
            await open_attempt(bus, _trainer(), 1)


async def test_the_faster_of_two_trainers_gets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MemoryServer()
    async with await MemoryBus.connect(server) as bus:

        async def nothing_yet(*_: object, **__: object) -> None:
            return None

        await open_attempt(bus, _trainer())
        monkeypatch.setattr(bus, "last", nothing_yet)
        assert await open_attempt(bus, _trainer()) == 2


@pytest.mark.parametrize("run_id", ["", "-", "a.b", "a b", "x" * 65])
async def test_a_run_id_that_no_subject_can_carry_is_refused(run_id: str) -> None:
    async with await MemoryBus.connect(MemoryServer()) as bus:
        with pytest.raises(ConfigError, match="cannot be announced") as caught:
            await open_attempt(bus, _trainer(run_id))
        assert "letters, digits" in caught.value.next_step


def test_an_origin_folder_is_named_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "origin").mkdir()
    assert origin_of("origin") == str(tmp_path / "origin")
    assert origin_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
