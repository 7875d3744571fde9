"""The pairing state of one version: what has arrived, what waits for what. Pure: no clock, no IO.

Every writer keeps the state of every group, not only of its own shards, and rebuilds it from the
stream alone. The state belongs to one version and ends with it: `clear` leaves nothing that another
version could mistake for its own (a half that outlives its version would pair an old tensor with a
new one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schemas.errors import LayoutError, PairingError, VersionConflictError
from ..schemas.events import ChunkReady, Location, ProducerSealed, ShardPersisted, VersionKey
from .plan_types import Group, Plan, Source

_MAX_NAMED = 12
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A source that has been published: `offset` is relative to the chunk's location."""

    key: Key
    location: Location
    offset: int
    length: int
    digest: str
    chunk: int
    sequence: int


@dataclass(frozen=True, slots=True)
class GroupWait:
    """A group that is not whole: the sources that are here and those that it waits for."""

    group: Group
    arrived: tuple[Key, ...]
    missing: tuple[Key, ...]


class Assembly:
    """What the stream has said about one version.

    Args:
        key: the version.
        plan: its plan.
        producers: how many producers seal it.
    """

    def __init__(self, key: VersionKey, plan: Plan, producers: int) -> None:
        self.key = key
        self._plan = plan
        self._producers = producers
        self._arrived: dict[Key, Arrival] = {}
        self._chunks: dict[int, dict[int, ChunkReady]] = {}
        self._sealed: dict[int, ProducerSealed] = {}
        self._shards: dict[int, ShardPersisted] = {}
        self._group_of = {key: group for group in plan.groups for key in group.sources}
        self._waiting = {group.index: len(group.sources) for group in plan.groups}

    # ---- events

    def chunk(self, event: ChunkReady, sequence: int) -> list[Arrival]:
        """A chunk; returns what is new. The same event again is nothing new.

        Raises:
            VersionConflictError: a tensor that arrived in another chunk already.
            LayoutError: a tensor that the producer's layout does not have, does not own, or has
                with another size.
        """
        chunks = self._chunks.setdefault(event.rank, {})
        if event.chunk in chunks:
            return []
        arrivals = [
            Arrival(
                (event.rank, tensor.index), event.location, tensor.offset, tensor.length,
                tensor.digest, event.chunk, sequence,
            )
            for tensor in event.tensors
        ]  # fmt: skip
        for arrival in arrivals:
            self._check(arrival)
        seen: set[Key] = set()
        for arrival in arrivals:
            if arrival.key in seen:
                raise self._twice(arrival, event.chunk)
            seen.add(arrival.key)
        chunks[event.chunk] = event
        for arrival in arrivals:
            self._arrived[arrival.key] = arrival
            group = self._group_of.get(arrival.key)
            if group is not None:
                self._waiting[group.index] -= 1
        return arrivals

    def _check(self, arrival: Arrival) -> None:
        source = self._plan.sources.get(arrival.key)
        where: dict[str, object] = {
            "rank": arrival.key[0], "index": arrival.key[1],
            "chunk": arrival.chunk, "sequence": arrival.sequence,
        }  # fmt: skip
        if source is None:
            raise LayoutError(
                "a chunk holds a tensor that its producer's layout does not publish",
                where=where,
                next_step="the producer's layout and its chunks come from different models",
            )
        if arrival.length != source.nbytes:
            raise LayoutError(
                f"a chunk holds {arrival.length} bytes of a tensor of {source.nbytes}",
                where={"tensor": source.name, **where},
                next_step="the producer's layout and its chunks come from different models",
            )
        known = self._arrived.get(arrival.key)
        if known is not None:
            raise self._twice(arrival, known.chunk)

    def _twice(self, arrival: Arrival, chunk: int) -> VersionConflictError:
        return VersionConflictError(
            f"a tensor stands in chunks {chunk} and {arrival.chunk} of one producer",
            where={
                "tensor": self._plan.sources[arrival.key].name,
                "rank": arrival.key[0],
                "sequence": arrival.sequence,
            },
            next_step="two processes publish as one producer: give each trainer its own run",
        )

    def seal(self, event: ProducerSealed, sequence: int) -> None:
        """A producer has published everything.

        Raises:
            PairingError: it announced more chunks than the stream holds, or every producer has
                sealed and a group still waits; the message names what is missing.
        """
        self._sealed[event.rank] = event
        count = len(self._chunks.get(event.rank, {}))
        if count != event.chunks:
            raise PairingError(
                f"rank {event.rank} sealed the version with {event.chunks} chunks, "
                f"{count} are in the stream",
                where={"version": self.key, "rank": event.rank, "sequence": sequence},
                next_step="chunk events were lost or purged; publish the version again",
            )
        if len(self._sealed) >= self._producers:
            self._check_whole(sequence)

    def _check_whole(self, sequence: int) -> None:
        waits = self.waiting()
        unused = [
            source
            for key, source in sorted(self._plan.sources.items())
            if key not in self._arrived and key not in self._group_of
        ]
        if not waits and not unused:
            return
        lines = [self._describe(wait) for wait in waits[:_MAX_NAMED]]
        lines += [f"{source.name} of rank {source.rank}" for source in unused[:_MAX_NAMED]]
        more = len(waits) + len(unused) - len(lines)
        raise PairingError(
            f"every producer has sealed the version, but {len(waits)} groups still wait: "
            + "; ".join(lines)
            + (f"; and {more} more" if more > 0 else ""),
            where={"version": self.key, "sequence": sequence},
            next_step="a producer left out tensors of its layout; see its log",
        )

    def _describe(self, wait: GroupWait) -> str:
        missing = ", ".join(
            f"{self._plan.sources[key].name} of rank {key[0]}" for key in wait.missing[:_MAX_NAMED]
        )
        return f"{wait.group.name} waits for {missing} ({len(wait.arrived)} arrived)"

    def shard(self, event: ShardPersisted, sequence: int) -> None:
        """A writer has persisted a shard.

        Raises:
            VersionConflictError: by another plan than ours.
        """
        if (event.plan_digest, event.writers) != (self._plan.digest, self._plan.writers):
            raise VersionConflictError(
                f"writer {event.writer} of {event.writers} works by another plan than this one "
                f"of {self._plan.writers}",
                where={
                    "version": self.key, "theirs": event.plan_digest, "ours": self._plan.digest,
                    "sequence": sequence,
                },
                next_step="start all writers of a run with the same release, --count, "
                "--max-shard-gib, --missing and origin",
            )  # fmt: skip
        self._shards[event.shard] = event

    # ---- questions

    def arrival(self, key: Key) -> Arrival | None:
        """A source's arrival, when it has arrived."""
        return self._arrived.get(key)

    def has_all(self, keys: Iterable[Key]) -> bool:
        """Whether all of these sources have arrived."""
        return all(key in self._arrived for key in keys)

    def whole(self, group: int) -> bool:
        """Whether a group is whole."""
        return self._waiting[group] == 0

    def waiting(self) -> list[GroupWait]:
        """Every group that is not whole, and for what it waits."""
        return [
            GroupWait(
                group,
                tuple(key for key in group.sources if key in self._arrived),
                tuple(key for key in group.sources if key not in self._arrived),
            )
            for group in self._plan.groups
            if self._waiting[group.index]
        ]

    @property
    def sealed(self) -> bool:
        """Whether every producer has sealed the version."""
        return len(self._sealed) >= self._producers

    @property
    def shards(self) -> Sequence[ShardPersisted]:
        """The shards that are persisted, in shard order."""
        return [event for _, event in sorted(self._shards.items())]

    @property
    def persisted(self) -> bool:
        """Whether every shard is durable: the version can be committed."""
        return self.sealed and len(self._shards) == len(self._plan.shards)

    def clear(self) -> None:
        """Forget everything: the version has ended."""
        for state in (self._arrived, self._chunks, self._sealed, self._shards):
            state.clear()
        self._waiting = dict.fromkeys(self._waiting, 0)

    @property
    def empty(self) -> bool:
        """Whether nothing of the version is left."""
        return not (self._arrived or self._chunks or self._sealed or self._shards)


def sources_of_shard(plan: Plan, shard: int) -> list[Source]:
    """The sources whose pieces go to a shard."""
    return [source for source in plan.sources.values() if source.shard == shard]
