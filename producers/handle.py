"""What `publish` returns: a version on its way, seen from the trainer."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from ..schemas.errors import (
    BusUnavailableError,
    VersionAbortedError,
    VersionPendingError,
    WeightbusError,
)
from ..schemas.events import Outcome, VersionAborted, VersionComplete, VersionKey


class PublishHandle:
    """One version of one producer. Thread-safe; made by publishers only."""

    def __init__(self, version: VersionKey) -> None:
        self.version = version
        self._durable: Future[None] = Future()
        self._ended: Future[VersionComplete] = Future()
        self._seen = False
        self._lock = threading.Lock()

    @property
    def durable(self) -> bool:
        """Whether every event of this producer is stored by the server."""
        return self._durable.done() and self._durable.exception() is None

    @property
    def done(self) -> bool:
        """Whether nothing more will happen: complete, aborted, skipped or failed."""
        return self._ended.done()

    @property
    def error(self) -> WeightbusError | None:
        """Why it failed or was aborted, once that is known."""
        for future in (self._durable, self._ended):
            error = future.exception() if future.done() else None
            if isinstance(error, WeightbusError):
                return error
        return None

    @property
    def retrieved(self) -> bool:
        """Whether `result` or `outcome` has raised its error to the user."""
        return self._seen

    def result(self, timeout_s: float | None = None) -> VersionKey:
        """Wait until this producer's part of the version is durable on the bus.

        Args:
            timeout_s: None waits as long as the publisher's own time-outs allow.

        Raises:
            BusUnavailableError: not acknowledged (yet). Retrying `result` helps while `done` is
                false.
            VersionAbortedError: somebody aborted the version; the message says why.
            VersionSkippedError: the policy `skip` left it out.
            StagingFullError: the policy `wait` waited for too long.
            VersionConflictError: another producer disagrees about it.
        """
        try:
            self._durable.result(timeout_s)
        except FutureTimeoutError as error:
            raise BusUnavailableError(
                f"version {self.version} is not durable after {timeout_s} s",
                where={"version": self.version},
                next_step="check the server; the publisher goes on trying, call result() again",
            ) from error
        except WeightbusError:
            self._seen = True
            raise
        return self.version

    def outcome(self, timeout_s: float | None = None) -> VersionComplete:
        """Wait until the whole version is visible in its directory.

        Raises:
            VersionPendingError: neither complete nor aborted in time.
            VersionAbortedError: aborted; the message is that of whoever aborted it.
            WeightbusError: as `result`.
        """
        try:
            return self._ended.result(timeout_s)
        except FutureTimeoutError as error:
            raise VersionPendingError(
                f"version {self.version} has no outcome after {timeout_s} s",
                where={"version": self.version},
                next_step="look for writers that are down or slow (weightbus status)",
            ) from error
        except WeightbusError:
            self._seen = True
            raise

    # The publisher's side. Each may be called again: the first answer stands.

    def set_durable(self) -> None:
        """Every event of this producer is stored."""
        with self._lock:
            if not self._durable.done():
                self._durable.set_result(None)

    def set_outcome(self, outcome: Outcome) -> None:
        """The version has ended."""
        if isinstance(outcome, VersionAborted):
            self.fail(aborted_error(outcome))
            return
        self.set_durable()
        with self._lock:
            if not self._ended.done():
                self._ended.set_result(outcome)

    def fail(self, error: WeightbusError) -> None:
        """The version will not be published by this producer, or was aborted."""
        with self._lock:
            for future in (self._durable, self._ended):
                if not future.done():
                    future.set_exception(error)

    def mark_retrieved(self) -> None:
        """The user has seen the error elsewhere."""
        self._seen = True

    def wait_ended(self, timeout_s: float) -> None:
        """Wait for the end, without raising."""
        with suppress(FutureTimeoutError, CancelledError):
            self._ended.exception(timeout_s)


def aborted_error(outcome: VersionAborted) -> VersionAbortedError:
    """The error that an aborted version is to its trainer."""
    return VersionAbortedError(
        f"version {outcome.version} was aborted: {outcome.error}: {outcome.message}",
        where={"version": outcome.version, "by": outcome.by},
        next_step="mend the cause and publish the next weight version",
    )
