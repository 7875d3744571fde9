"""Versions on their way, on the bus thread: announce them, follow their outcomes, free their slots.

A slot belongs to its version until the version has its outcome *and* the bus thread has stopped
reading the slot. A version that could not be announced is aborted as soon as the bus answers, so
that no writer waits for it and no slot stays taken.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..bus.events import end_version, read_event
from ..bus.subjects import outcomes_filter
from ..schemas.digest import digest_of
from ..schemas.errors import BusClosedError, PublishError, WeightbusError
from ..schemas.events import Outcome, ReplicaDigest, VersionAborted, VersionComplete, VersionKey
from .announce import Announcement, aborted_by, announce
from .bus_thread import BusThread
from .chunks import ChunkPlan
from .handle import PublishHandle
from .staging import Slot, StagingArena

_log = logging.getLogger("weightbus.producers")
_RETRY_S = 0.5
_MAX_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class Producer:
    """Who publishes: one rank in one attempt of a run, one of `producers`."""

    run_id: str
    attempt: int
    rank: int
    producers: int

    def key(self, weight_version: int) -> VersionKey:
        """The identity of one of its versions."""
        return VersionKey(run_id=self.run_id, attempt=self.attempt, weight_version=weight_version)


@dataclass(slots=True, eq=False)
class _Version:
    """`announcing` is true while the bus thread reads the slot."""

    handle: PublishHandle
    slot: Slot | None
    step: int | None
    replicas: tuple[ReplicaDigest, ...] = ()
    announcing: bool = True
    outcome: Outcome | None = None
    released: bool = False

    @property
    def number(self) -> int:
        return self.handle.version.weight_version


class InFlight:
    """The versions of one producer that have not ended. Thread-safe.

    Args:
        bus: the thread to work on.
        producer: who.
        arena: where the slots come from.
        chunks: how a slot is cut.
        publish_timeout_s: deadline of each event, through reconnects.
    """

    def __init__(
        self,
        bus: BusThread,
        producer: Producer,
        arena: StagingArena,
        chunks: Sequence[ChunkPlan],
        *,
        publish_timeout_s: float,
    ) -> None:
        self._bus, self._producer, self._arena = bus, producer, arena
        self._chunks, self._timeout_s = tuple(chunks), publish_timeout_s
        self._lock = threading.Lock()
        self._versions: dict[int, _Version] = {}
        self._newest = -1
        # Outcomes of versions that other producers were faster to publish and to end.
        self._early: dict[int, Outcome] = {}
        self._failed: PublishHandle | None = None
        self._follower: Future[None] = bus.submit(self._follow())

    def start(
        self,
        handle: PublishHandle,
        slot: Slot,
        step: int | None,
        replicas: tuple[ReplicaDigest, ...] = (),
    ) -> None:
        """Announce a staged version in the background."""
        version = _Version(handle, slot, step, replicas)
        self._begin(version, self._announce(version))

    def give_up(self, handle: PublishHandle, reason: WeightbusError) -> None:
        """Fail a version that was not staged, and abort it for everybody in the background."""
        handle.fail(reason)
        version = _Version(handle, None, None, announcing=False)
        self._begin(version, self._abandon(version, reason))

    def take_failure(self) -> PublishHandle | None:
        """The handle of the newest version that failed since the last call, if one did."""
        with self._lock:
            failed, self._failed = self._failed, None
        return failed

    def unfinished(self) -> list[PublishHandle]:
        """The versions that have no outcome yet, oldest first."""
        with self._lock:
            return [version.handle for version in self._versions.values()]

    def stop(self, timeout_s: float) -> None:
        """Abort what has not ended, and follow outcomes no longer.

        Args:
            timeout_s: for each abortion; without an answer the version stays as it is.
        """
        with self._lock:
            late = list(self._versions.values())
        for version in late:
            reason = PublishError(
                f"version {version.handle.version} had no outcome when its producer closed",
                where={"rank": self._producer.rank},
                next_step="close the publisher after the writers have finished, or give it time",
            )
            aborted = self._aborted(version, reason)
            with suppress(WeightbusError):
                outcome = self._bus.run(
                    end_version(self._bus.bus, aborted, timeout_s=timeout_s),
                    timeout_s=timeout_s + 1.0,
                )
                self._on_outcome(outcome)
            version.handle.fail(reason)
        self._follower.cancel()

    def _begin(self, version: _Version, work: Coroutine[Any, Any, None]) -> None:
        with self._lock:
            self._newest = version.number
            self._versions[version.number] = version
            early = self._early.pop(version.number, None)
            self._early = {n: o for n, o in self._early.items() if n > version.number}
        if early is not None:
            self._on_outcome(early)
        try:
            self._bus.submit(work)
        except BusClosedError as error:
            version.handle.fail(error)
            self._finish(version)

    async def _announce(self, version: _Version) -> None:
        slot = version.slot
        if slot is None:
            return

        def digests(chunk: ChunkPlan) -> list[str]:
            return [digest_of(slot.buffer[part.offset : part.end]) for part in chunk.tensors]

        part = Announcement(
            version=version.handle.version,
            rank=self._producer.rank,
            producers=self._producer.producers,
            step=version.step,
            chunks=[(self._arena.uri, slot.offset, chunk) for chunk in self._chunks],
            digests=digests,
            replicas=version.replicas,
        )
        try:
            whole = await announce(
                self._bus.bus,
                part,
                timeout_s=self._timeout_s,
                stopped=lambda: version.outcome is not None,
            )
        except WeightbusError as error:
            version.handle.fail(error)
            self._no_longer_announcing(version)
            await self._abandon(version, error)
            return
        if whole:
            version.handle.set_durable()
        self._no_longer_announcing(version)

    async def _abandon(self, version: _Version, reason: WeightbusError) -> None:
        """Abort the version, trying until the bus answers: its slot depends on it."""
        with self._lock:
            self._failed = version.handle
        _log.error("version %s is given up: %s", version.handle.version, reason)
        wait_s = _RETRY_S
        while version.outcome is None:
            try:
                outcome = await end_version(
                    self._bus.bus, self._aborted(version, reason), timeout_s=self._timeout_s
                )
            except BusClosedError:
                return
            except WeightbusError as error:
                _log.warning("cannot abort version %s yet: %s", version.handle.version, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _MAX_RETRY_S)
            else:
                self._on_outcome(outcome)

    def _aborted(self, version: _Version, reason: WeightbusError) -> VersionAborted:
        return aborted_by(self._producer.rank, version.handle.version, reason)

    async def _follow(self) -> None:
        """See the outcomes of this attempt's versions, for ever."""
        filters = [outcomes_filter(self._producer.run_id, self._producer.attempt)]
        while True:
            try:
                async with self._bus.bus.read(filters) as reader:
                    async for message in reader:
                        event = read_event(message).event
                        if isinstance(event, VersionComplete | VersionAborted):
                            self._on_outcome(event)
            except BusClosedError:
                return
            except WeightbusError as error:
                # From the beginning again: outcomes that were seen before change nothing.
                _log.warning("following outcomes failed, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)

    def _on_outcome(self, outcome: Outcome) -> None:
        number = outcome.version.weight_version
        with self._lock:
            version = self._versions.get(number)
            if version is None:
                if number > self._newest:
                    self._early[number] = outcome
                return
            if version.outcome is not None:
                return
            version.outcome = outcome
            if isinstance(outcome, VersionAborted):
                self._failed = version.handle
        if isinstance(outcome, VersionAborted):
            _log.error(
                "version %s was aborted by %s: %s", outcome.version, outcome.by, outcome.message
            )
        if not version.announcing:
            self._finish(version)

    def _no_longer_announcing(self, version: _Version) -> None:
        with self._lock:
            version.announcing = False
        if version.outcome is not None:
            self._finish(version)

    def _finish(self, version: _Version) -> None:
        """Free the slot: nobody needs its bytes any more, and we do not read them.

        Then tell the handle, so that whoever waited for the outcome finds the slot free.
        """
        with self._lock:
            if version.released:
                return
            version.released = True
            self._versions.pop(version.number, None)
        if version.slot is not None:
            self._arena.release(version.slot)
        if version.outcome is not None:
            version.handle.set_outcome(version.outcome)
