"""What is known of a run: its attempts, their plans, their versions.

No order between producers is assumed: a version's events are kept as they come until the attempt's
opening and every layout are there; then the plan is made, once, and the events are fed to the
version's assembly.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ..bus.events import Received, read_event
from ..bus.interface import Bus
from ..bus.subjects import attempt_level_filter
from ..schemas.errors import LayoutError, SchemaError, WeightbusError
from ..schemas.events import AttemptOpened, LayoutPublished, Outcome, VersionKey
from ..schemas.hf_folder import read_config
from ..schemas.layout import Layout
from .assembly import Assembly
from .config import WriterConfig
from .conversion.catalogue import family_for
from .expectation import Expectation
from .paths import check_apart
from .plan import build_plan
from .plan_types import Plan
from .shard_work import VersionWork


@dataclass
class VersionTimes:
    """When this writer saw what, in seconds of the monotonic clock."""

    began: float = field(default_factory=time.monotonic)
    sealed: float | None = None
    persisted: float | None = None
    ended: float | None = None

    def stages(self) -> dict[str, float]:
        """Seconds of each stage that is over."""
        marks = [
            ("publish_s", self.began, self.sealed),
            ("persist_s", self.sealed, self.persisted),
            ("commit_s", self.persisted, self.ended),
        ]
        return {
            name: round(end - start, 3)
            for name, start, end in marks
            if start is not None and end is not None
        }


@dataclass
class VersionState:
    """One version that has not ended."""

    key: VersionKey
    first_sequence: int
    backlog: list[Received] = field(default_factory=list[Received])
    assembly: Assembly | None = None
    work: VersionWork | None = None
    outcome: Outcome | None = None
    failure: WeightbusError | None = None
    last_shard_by: int = -1
    committing: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    times: VersionTimes = field(default_factory=VersionTimes)

    def fail(self, error: WeightbusError) -> bool:
        """The version cannot be finished: stop its copies. False when its fate is known already."""
        if self.failure is not None or self.outcome is not None:
            return False
        self.failure = error
        if self.work is not None:
            self.work.stop.set()
        return True


@dataclass
class AttemptState:
    """One (re)start of the trainer. `plan` or `failure` is set once everything is known.

    `held`: what its producers hold, from the bucket.
    """

    number: int
    opened: AttemptOpened | None = None
    layouts: dict[int, LayoutPublished] = field(default_factory=dict[int, LayoutPublished])
    held: tuple[Layout, ...] = ()
    plan: Plan | None = None
    failure: WeightbusError | None = None
    versions: dict[int, VersionState] = field(default_factory=dict[int, VersionState])
    finished: set[int] = field(default_factory=set[int])

    @property
    def known(self) -> bool:
        """Whether the opening and every layout are there."""
        return self.opened is not None and len(self.layouts) >= self.opened.producers

    def forget_plan(self) -> None:
        """A newer attempt has begun and every version of this one has ended."""
        self.plan, self.held = None, ()

    @property
    def settled(self) -> bool:
        """Whether there is a plan, or it is known that there never will be."""
        return self.plan is not None or self.failure is not None


async def read_attempts(bus: Bus, run_id: str) -> list[AttemptOpened | LayoutPublished]:
    """Everything that the stream says about a run's attempts up to now, whatever its age.

    A checkpoint may lie after it: an attempt's layouts are published once, its versions for weeks.
    """
    subjects = attempt_level_filter(run_id)
    last = await bus.last(subjects)
    found: list[AttemptOpened | LayoutPublished] = []
    if last is None:
        return found
    async with bus.read([subjects]) as reader:
        async for message in reader:
            with contextlib.suppress(SchemaError):  # the main reader says so, and acts on it
                event = read_event(message).event
                if isinstance(event, AttemptOpened | LayoutPublished):
                    found.append(event)
            if message.sequence >= last.sequence:
                break
    return found


def origin_of(config: WriterConfig, opened: AttemptOpened) -> Path:
    """The origin checkpoint's folder on this machine."""
    return config.origin if config.origin is not None else Path(opened.origin)


async def make_plan(bus: Bus, config: WriterConfig, attempt: AttemptState) -> Plan:
    """The attempt's plan, from the layouts in the bucket and the origin checkpoint.

    Raises:
        WeightbusError: a layout that cannot be read, an origin that does not fit, a certificate
            that is refused; each version of the attempt ends with this error.
    """
    opened = attempt.opened
    if opened is None:
        raise LayoutError("the attempt has not been opened", where={"attempt": attempt.number})
    if len(attempt.layouts) > opened.producers:
        raise LayoutError(
            f"the attempt was opened for {opened.producers} producers, {len(attempt.layouts)} have "
            "published a layout",
            where={"attempt": attempt.number, "ranks": sorted(attempt.layouts)},
            next_step="give every trainer its own run, and every restart its own attempt",
        )
    origin = origin_of(config, opened)
    check_apart(config.root, origin)
    layouts = [await _layout(bus, event) for _, event in sorted(attempt.layouts.items())]
    attempt.held = tuple(layouts)
    return await asyncio.to_thread(_plan, config, opened, origin, layouts)


async def _layout(bus: Bus, event: LayoutPublished) -> Layout:
    data = await bus.get_blob(event.layout_digest)
    where = {"rank": event.rank, "digest": event.layout_digest}
    try:
        layout = Layout.from_bytes(data)
    except ValidationError as error:
        raise LayoutError(
            f"a layout cannot be read: {error}",
            where=where,
            next_step="run the same weightbus release on both sides",
        ) from error
    if layout.digest() != event.layout_digest or layout.producer.rank != event.rank:
        raise LayoutError("a layout is not the one that its producer announced", where=where)
    return layout


def _plan(
    config: WriterConfig, opened: AttemptOpened, origin: Path, layouts: list[Layout]
) -> Plan:  # fmt: skip
    family = family_for(layouts, read_config(origin), opened.family)
    return build_plan(
        layouts,
        Expectation.from_folder(origin),
        family,
        writers=config.count,
        max_shard_bytes=config.max_shard_bytes,
        missing=config.missing,
        dtype=config.dtype,
    )
