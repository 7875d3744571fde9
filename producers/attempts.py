"""Attempts: a trainer that (re)starts takes the next number, its producers say what they hold."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ..bus.events import publish_event
from ..bus.interface import Bus, SubjectTakenError
from ..bus.subjects import attempts_filter, parse_subject
from ..schemas.errors import ConfigError, VersionConflictError
from ..schemas.events import AttemptOpened, LayoutPublished
from ..schemas.layout import Layout, Naming

_MAX_TRIES = 1000


def _nonce() -> str:
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Trainer:
    """One (re)start of a trainer, as its attempt's opening describes it.

    Attributes:
        run_id: the run; letters, digits, `_` and `-`, at most 64.
        producers: how many producers publish each version.
        naming: names of the tensors in all of its layouts.
        origin: the Hugging Face checkpoint that training started from.
        family: conversion family; empty means by the origin's `model_type`.
        nonce: tells two trainers of one run apart.
    """

    run_id: str
    producers: int
    naming: Naming
    origin: str
    family: str = ""
    nonce: str = field(default_factory=_nonce)

    def opening(self, attempt: int) -> AttemptOpened:
        """The event that opens the attempt.

        Raises:
            ConfigError: a run_id or another field that no event can carry.
        """
        try:
            return AttemptOpened(
                run_id=self.run_id,
                attempt=attempt,
                nonce=self.nonce,
                producers=self.producers,
                naming=self.naming,
                family=self.family,
                origin=self.origin,
            )
        except ValidationError as error:
            raise ConfigError(
                f"this trainer cannot be announced: {error}",
                where={"run_id": self.run_id, "attempt": attempt},
                next_step="use letters, digits, `_` and `-` (at most 64) for the run_id",
            ) from error


def origin_of(hf_checkpoint: str | Path) -> str:
    """How the attempt's opening names the origin checkpoint.

    A folder becomes its absolute path, since writers run in other working directories; the name of
    a model on a hub stays what it is (writers are then told the folder by their own option).
    """
    path = Path(hf_checkpoint)
    return str(path.resolve()) if path.exists() else str(hf_checkpoint)


async def open_attempt(
    bus: Bus, trainer: Trainer, attempt: int | None = None, *, timeout_s: float = 30.0
) -> int:
    """Open the run's next attempt, or a given one; exactly one producer of a trainer does this.

    Args:
        bus: where to.
        trainer: who starts.
        attempt: None takes the number after the last one, and the one after that when another
            trainer was faster.
        timeout_s: for each request.

    Returns:
        the attempt's number.

    Raises:
        VersionConflictError: another trainer holds the given attempt.
        ConfigError: a trainer that no event can describe.
        BusUnavailableError: no answer in time.
    """
    trainer.opening(0)
    if attempt is not None:
        try:
            await publish_event(bus, trainer.opening(attempt), timeout_s=timeout_s)
        except SubjectTakenError as taken:
            raise VersionConflictError(
                "another trainer has opened this attempt",
                where={"run_id": trainer.run_id, "attempt": attempt, **taken.where},
                next_step="leave `attempt` out, or pass the number after the last one",
            ) from taken
        return attempt
    last = await bus.last(attempts_filter(trainer.run_id))
    number = 1 if last is None else parse_subject(last.subject).attempt + 1
    for candidate in range(number, number + _MAX_TRIES):
        try:
            await publish_event(bus, trainer.opening(candidate), timeout_s=timeout_s)
        except SubjectTakenError:
            continue  # another trainer of this run was faster
        return candidate
    raise VersionConflictError(
        f"{_MAX_TRIES} attempts in a row were taken by others",
        where={"run_id": trainer.run_id, "attempt": number},
        next_step="give every trainer its own run_id",
    )


async def publish_layout(
    bus: Bus, run_id: str, attempt: int, layout: Layout, *, timeout_s: float = 60.0
) -> None:
    """Put a producer's layout into the bucket and say so.

    Raises:
        VersionConflictError: another producer with this rank has published another layout.
        BusUnavailableError: no answer in time.
    """
    digest = layout.digest()
    await bus.put_blob(digest, layout.to_bytes(), timeout_s=timeout_s)
    event = LayoutPublished(
        run_id=run_id,
        attempt=attempt,
        rank=layout.producer.rank,
        layout_digest=digest,
        tensors=len(layout.tensors),
        nbytes=layout.owned_bytes,
    )
    try:
        await publish_event(bus, event, timeout_s=timeout_s)
    except SubjectTakenError as taken:
        raise VersionConflictError(
            "another producer with this rank has published a different layout",
            where={"rank": layout.producer.rank, **taken.where},
            next_step="every producer of a run needs its own rank, and a restarted trainer its "
            "own attempt",
        ) from taken
