"""The publisher: one blocking copy per version in the trainer, everything else behind its back.

`publish` copies the local shards into a free slot of the arena and returns a handle. On the bus
thread the version is then hashed and announced chunk by chunk, and the slot is freed when the
version's outcome (complete or aborted, by whoever) is seen. What goes wrong there is raised by the
handle; the training step goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from ..schemas.errors import (
    PublishError,
    StagingFullError,
    VersionOrderError,
    VersionSkippedError,
    WeightbusError,
)
from ..schemas.layout import Layout
from .attempts import publish_layout
from .bus_thread import BusThread
from .chunks import Placed, place, plan_chunks, region_bytes
from .handle import PublishHandle
from .in_flight import InFlight, Producer
from .replicas import ReplicaRounds
from .staging import ArenaName, Slot, StagingArena, StagingConfig


class TensorSource(Protocol):
    """Where a producer's tensors come from."""

    @property
    def layout(self) -> Layout:
        """What it holds; the same for every version."""
        ...

    def fill(self, slot: Slot, placed: Sequence[Placed]) -> None:
        """Copy every placed tensor, as it is now, to its offset in `slot.buffer`.

        The same slot number always comes with the same memory, so views of it can be kept.
        """
        ...

    def forget(self) -> None:
        """Drop every kept view: the memory is about to go."""
        ...


@dataclass(frozen=True, slots=True)
class PublisherTimes:
    """Deadlines of a publisher, in seconds.

    Attributes:
        publish_s: for each event, through reconnects; after it the version is given up.
        start_s: for the attempt and the layout at the start.
        close_s: how long `close` waits for versions that are on their way.
    """

    publish_s: float = 60.0
    start_s: float = 60.0
    close_s: float = 60.0


DEFAULT_STAGING = StagingConfig()
DEFAULT_TIMES = PublisherTimes()
_ABORT_S = 2.0


class VersionPublisher:
    """Publishes the versions of one producer in one attempt.

    Args:
        source: the tensors.
        bus: the thread that owns the bus.
        run_id: the run.
        attempt: an attempt that the trainer's lead producer has opened (producers.attempts).
        producers: how many producers each version has.
        staging: the arena.
        times: deadlines.
        owns_bus: whether `close`, or a start that fails, closes the bus thread too.
        replicas: hashes some of the tensors that other producers publish, in each version.

    Raises:
        StagingError, StagingTooSmallError: the arena cannot be made.
        BusUnavailableError: the layout could not be published.
        VersionConflictError: another producer has this rank.
    """

    def __init__(
        self,
        source: TensorSource,
        bus: BusThread,
        *,
        run_id: str,
        attempt: int,
        producers: int,
        staging: StagingConfig = DEFAULT_STAGING,
        times: PublisherTimes = DEFAULT_TIMES,
        owns_bus: bool = False,
        replicas: ReplicaRounds | None = None,
    ) -> None:
        self._source, self._bus, self._owns_bus = source, bus, owns_bus
        self._staging, self._times = staging, times
        self._replicas = replicas
        self._newest: int | None = None
        self._calls = threading.Lock()  # one publish at a time
        self._closing = False
        try:
            self._begin(run_id, attempt, producers)
        except BaseException:
            if owns_bus:
                bus.close()
            raise

    def _begin(self, run_id: str, attempt: int, producers: int) -> None:
        layout, bus, times = self._source.layout, self._bus, self._times
        self._producer = Producer(run_id, attempt, layout.producer.rank, producers)
        self._placed = place(
            (index, tensor.nbytes) for index, tensor in enumerate(layout.tensors) if tensor.owned
        )
        chunks = plan_chunks(self._placed, self._staging.chunk_bytes)
        name = ArenaName(run_id, attempt, layout.producer.rank)
        self._arena = StagingArena(name, self._staging, region_bytes(self._placed))
        try:
            bus.run(
                publish_layout(bus.bus, run_id, attempt, layout, timeout_s=times.start_s),
                timeout_s=2 * times.start_s + 1.0,
            )
            self._in_flight = InFlight(
                bus, self._producer, self._arena, chunks, publish_timeout_s=times.publish_s
            )
        except BaseException:
            self._arena.close()
            raise

    @property
    def attempt(self) -> int:
        """The attempt that this publisher belongs to."""
        return self._producer.attempt

    @property
    def layout(self) -> Layout:
        """What this producer holds."""
        return self._source.layout

    @property
    def arena(self) -> StagingArena:
        """The staging arena."""
        return self._arena

    def publish(self, weight_version: int, step: int | None = None) -> PublishHandle:
        """Copy the tensors as they are now and send the version on its way.

        Blocks for the copy, and with the policy `wait` for a free slot before it. Every producer
        of the attempt must call it with the same numbers; nothing is synchronised between them.

        Args:
            weight_version: larger than every earlier one of this attempt.
            step: the trainer's step, for people.

        Returns:
            the version's handle. With the policies `wait` and `skip` a version that found no slot
            is a handle that has failed already.

        Raises:
            VersionOrderError: the number does not grow.
            PublishError: after close().
            WeightbusError: only with the policy `fail`: StagingFullError, or the error of an
                earlier version that nobody has asked its handle for.
        """
        with self._calls:
            self._check(weight_version)
            handle = PublishHandle(self._producer.key(weight_version))
            self._newest = weight_version
            waits = self._staging.policy == "wait"
            try:
                slot = self._arena.acquire(self._staging.wait_timeout_s if waits else 0.0)
            except StagingFullError as error:
                return self._leave_out(handle, error)
            try:
                self._source.fill(slot, self._placed)
                replicas = () if self._replicas is None else self._replicas.take()
            except WeightbusError as error:
                self._arena.release(slot)
                self._in_flight.give_up(handle, error)
                return self._failed(handle, error)
            except BaseException:
                self._arena.release(slot)
                self._in_flight.give_up(handle, _copy_failed(handle))
                raise
            self._arena.hold(slot)
            self._in_flight.start(handle, slot, step, replicas)
            return handle

    def close(self, grace_s: float | None = None) -> None:
        """End the publisher; idempotent.

        1. Refuse further versions. 2. Wait for outcomes, at most `grace_s` (default
        `times.close_s`): until then writers read the arena. 3. Abort what has none, and follow
        outcomes no longer. 4. Remove the arena. 5. Close the bus thread, when it is ours.
        """
        with self._calls:
            if self._closing:
                return
            self._closing = True
        deadline = time.monotonic() + (self._times.close_s if grace_s is None else grace_s)
        for handle in self._in_flight.unfinished():
            handle.wait_ended(max(0.0, deadline - time.monotonic()))
        self._in_flight.stop(_ABORT_S)
        self._source.forget()
        self._arena.close()
        if self._owns_bus:
            self._bus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, weight_version: int) -> None:
        if self._closing:
            raise PublishError("the publisher is closed", next_step="make a new publisher")
        if weight_version < 0 or (self._newest is not None and weight_version <= self._newest):
            raise VersionOrderError(
                f"weight version {weight_version} does not follow {self._newest}",
                where={"run_id": self._producer.run_id, "attempt": self._producer.attempt},
                next_step="number versions upwards inside an attempt; a restarted trainer is a new "
                "attempt and may begin anywhere",
            )
        if self._staging.policy == "fail":
            failed = self._in_flight.take_failure()
            if failed is not None and failed.error is not None and not failed.retrieved:
                raise failed.error

    def _leave_out(self, handle: PublishHandle, error: StagingFullError) -> PublishHandle:
        reason: WeightbusError = error
        if self._staging.policy == "skip":
            reason = VersionSkippedError(
                f"version {handle.version} was skipped: {error.what}",
                where=error.where,
                next_step="nothing, if a later version is as good; or use the policy `wait`",
            )
        self._in_flight.give_up(handle, reason)
        return self._failed(handle, error)

    def _failed(self, handle: PublishHandle, error: WeightbusError) -> PublishHandle:
        if self._staging.policy == "fail":
            handle.mark_retrieved()
            raise error
        return handle


def _copy_failed(handle: PublishHandle) -> PublishError:
    return PublishError(
        f"the tensors of version {handle.version} could not be copied into the arena",
        next_step="see the error that publish() raised in the trainer",
    )
