"""Which version an engine should serve: a pure fold over the outcomes of a run."""

from __future__ import annotations

from ..schemas.events import AnyEvent, VersionComplete, VersionKey, VersionRetired

Order = tuple[int, int]


def order_of(key: VersionKey) -> Order:
    """Later attempts win, then later versions."""
    return key.attempt, key.weight_version


class Targets:
    """The complete versions of a run.

    The target is the newest version that is complete, not retired and not rejected. A version that
    was rejected for its bytes gives way to the one before it in the same attempt, at most
    `fallback_depth` versions back; a version that the engine refused takes all older ones along:
    an engine that refuses everything must not be walked through the run's whole past.
    """

    def __init__(self, run_id: str, fallback_depth: int) -> None:
        self._run_id = run_id
        self._depth = fallback_depth
        self._complete: dict[Order, VersionComplete] = {}
        self._retired: set[Order] = set()
        self._rejected: set[Order] = set()
        self._floor: Order | None = None
        self._unreported: set[Order] = set()

    def forget(self) -> None:
        """Every version: the stream is read again. What was rejected stays so."""
        self._complete.clear()
        self._retired.clear()
        self._unreported.clear()

    def add(self, event: AnyEvent) -> bool:
        """Take an event of the run in; returns whether the target may have changed.

        Seeing an event twice changes nothing; the order between versions does not matter.
        """
        if isinstance(event, VersionComplete) and event.version.run_id == self._run_id:
            order = order_of(event.version)
            if order in self._complete:
                return False
            self._complete[order] = event
            self._unreported.add(order)
            return True
        if isinstance(event, VersionRetired) and event.version.run_id == self._run_id:
            self._retired.add(order_of(event.version))
            return True
        return False

    def target(self, current: VersionKey | None) -> VersionComplete | None:
        """The version that the engine should serve now, if there is one.

        `current` is what it serves. It is never given up for an older version, except for the
        newest one that there is: a run whose stream was lost begins again at attempt 1.
        """
        newest = sorted(self._complete, reverse=True)[: self._depth]
        for order in newest:
            if order[0] != newest[0][0] or (self._floor is not None and order <= self._floor):
                return None
            if order != newest[0] and self._is_back(order, current):
                return None
            if order not in self._retired and order not in self._rejected:
                return self._complete[order]
        return None

    def _is_back(self, order: Order, current: VersionKey | None) -> bool:
        ours = current is not None and current.run_id == self._run_id
        return ours and current is not None and order < order_of(current)

    def is_retired(self, key: VersionKey) -> bool:
        """Whether the version's directory may be gone."""
        return order_of(key) in self._retired

    def reject(self, key: VersionKey, *, with_older: bool) -> None:
        """Never choose this version again (`with_older`: nor one before it)."""
        self._rejected.add(order_of(key))
        if with_older and (self._floor is None or order_of(key) > self._floor):
            self._floor = order_of(key)

    def forgive(self) -> None:
        """The engine has started anew: what the old process refused may be tried again."""
        self._floor = None

    def reported(self, key: VersionKey) -> None:
        """Something was reported about the version: it does not count as skipped any more."""
        self._unreported.discard(order_of(key))

    def take_skipped(
        self, before: VersionKey, after: VersionKey | None, at_most: int
    ) -> list[VersionKey]:
        """Versions older than `before` (and newer than `after`) that were not reported, in order.

        Each version is returned once. Of many only the newest `at_most` are: an agent that joins
        late does not report on the whole past of a run.
        """
        limit = order_of(before)
        skipped = sorted(order for order in self._unreported if order < limit)
        self._unreported -= set(skipped)
        if after is not None and after.run_id == self._run_id:
            skipped = [order for order in skipped if order > order_of(after)]
        return [self._complete[order].version for order in skipped[-at_most:]]
