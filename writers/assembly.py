"""The pairing state of one version: what has arrived, what waits for what. Pure: no clock, no IO.

Every writer keeps the state of every group, not only of its own shards, and rebuilds it from the
stream alone. The state belongs to one version and ends with it: `clear` leaves nothing that another
version could mistake for its own (a half that outlives its version would pair an old tensor with a
new one).

The same event twice is nothing new; two events that contradict each other are an error that ends
the version. Producers are not ordered against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..schemas.errors import LayoutError, PairingError, VersionConflictError
from ..schemas.events import (
    ChunkReady,
    Location,
    ProducerSealed,
    ShardPersisted,
    VersionKey,
    VersionOpened,
)
from .plan_types import Group, Plan, Source

_MAX_NAMED = 12
Key: TypeAlias = tuple[int, int]
_TWO_PUBLISHERS = "two processes publish as one producer: give each trainer its own run"


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
        ranks: the producers, each of which seals it.
    """

    def __init__(self, key: VersionKey, plan: Plan, ranks: Collection[int]) -> None:
        self.key = key
        self._plan = plan
        self._ranks = frozenset(ranks)
        self._arrived: dict[Key, Arrival] = {}
        self._chunks: dict[int, dict[int, ChunkReady]] = {}
        self._sealed: dict[int, ProducerSealed] = {}
        self._shards: dict[int, ShardPersisted] = {}
        self._group_of = {key: group.index for group in plan.groups for key in group.sources}
        self._waiting = {group.index: len(group.sources) for group in plan.groups}

    # ---- events

    def opened(self, event: VersionOpened, sequence: int) -> None:
        """The version was opened.

        Raises:
            VersionConflictError: with another number of producers than its attempt has.
        """
        if event.producers != len(self._ranks):
            raise VersionConflictError(
                f"the version was opened for {event.producers} producers, its attempt has "
                f"{len(self._ranks)}",
                where={"version": self.key, "sequence": sequence},
                next_step="give every trainer its own run, and every restart its own attempt",
            )

    def chunk(self, event: ChunkReady, sequence: int) -> list[Arrival]:
        """A chunk; returns what is new. The same event again is nothing new.

        Raises:
            VersionConflictError: a tensor that arrived before, another chunk of the same number,
                or a chunk of a producer that has sealed the version.
            LayoutError: a tensor that the producer's layout does not have, does not own, or has
                with another size.
        """
        chunks = self._chunks.setdefault(event.rank, {})
        known = chunks.get(event.chunk)
        if known == event:
            return []
        if known is not None or event.rank in self._sealed:
            already = "has sealed the version" if known is None else "has published another"
            raise VersionConflictError(
                f"chunk {event.chunk} comes from a producer that {already}",
                where={"version": self.key, "rank": event.rank, "sequence": sequence},
                next_step=_TWO_PUBLISHERS,
            )
        arrivals: dict[Key, Arrival] = {}
        for tensor in event.tensors:
            arrival = Arrival(
                (event.rank, tensor.index), event.location, tensor.offset, tensor.length,
                tensor.digest, event.chunk, sequence,
            )  # fmt: skip
            self._check(arrival, arrivals)
            arrivals[arrival.key] = arrival
        chunks[event.chunk] = event
        self._arrived |= arrivals
        for key in arrivals:
            group = self._group_of.get(key)
            if group is not None:
                self._waiting[group] -= 1
        return list(arrivals.values())

    def _check(self, arrival: Arrival, same_chunk: dict[Key, Arrival]) -> None:
        source = self._plan.sources.get(arrival.key)
        where: dict[str, object] = {
            "rank": arrival.key[0], "index": arrival.key[1],
            "chunk": arrival.chunk, "sequence": arrival.sequence,
        }  # fmt: skip
        mixed = "the producer's layout and its chunks come from different models"
        if source is None:
            raise LayoutError(
                "a chunk holds a tensor that its producer's layout does not publish",
                where=where,
                next_step=mixed,
            )
        where = {"tensor": source.name, **where}
        if arrival.length != source.nbytes:
            raise LayoutError(
                f"a chunk holds {arrival.length} bytes of a tensor of {source.nbytes}",
                where=where,
                next_step=mixed,
            )
        first = same_chunk.get(arrival.key, self._arrived.get(arrival.key))
        if first is not None:
            raise VersionConflictError(
                f"a tensor stands in chunks {first.chunk} and {arrival.chunk} of one producer",
                where=where,
                next_step=_TWO_PUBLISHERS,
            )

    def seal(self, event: ProducerSealed, sequence: int) -> None:
        """A producer has published everything.

        Raises:
            VersionConflictError: it sealed with other numbers before, or is no producer.
            PairingError: it announced other chunks than the stream holds, or every producer has
                sealed and a group still waits; the message names what is missing.
        """
        known = self._sealed.get(event.rank)
        if known == event:
            return
        where = {"version": self.key, "rank": event.rank, "sequence": sequence}
        if known is not None or event.rank not in self._ranks:
            why = "twice, with other numbers" if known is not None else "and has no layout"
            raise VersionConflictError(
                f"a producer sealed the version {why}", where=where, next_step=_TWO_PUBLISHERS
            )
        chunks = self._chunks.get(event.rank, {}).values()
        tensors = [tensor for chunk in chunks for tensor in chunk.tensors]
        found = (len(chunks), len(tensors), sum(tensor.length for tensor in tensors))
        if found != (event.chunks, event.tensors, event.nbytes):
            raise PairingError(
                f"a producer sealed the version with {event.chunks} chunks of {event.tensors} "
                f"tensors, {event.nbytes} bytes; in the stream are {found[0]} of {found[1]}, "
                f"{found[2]} bytes",
                where=where,
                next_step="chunk events were lost or purged; publish the version again",
            )
        self._sealed[event.rank] = event
        if self.sealed:
            self._check_whole(sequence)

    def _check_whole(self, sequence: int) -> None:
        waits = self.waiting()
        unused = [
            f"{source.name} of rank {source.rank}"
            for key, source in self._plan.sources.items()
            if key not in self._arrived and key not in self._group_of
        ]
        if not waits and not unused:
            return
        lines = [self._describe(wait) for wait in waits[:_MAX_NAMED]] + unused[:_MAX_NAMED]
        more = len(waits) + len(unused) - len(lines)
        raise PairingError(
            f"every producer has sealed the version, but {len(waits)} groups and {len(unused)} "
            "single tensors are not whole: "
            + "; ".join(lines)
            + (f"; and {more} more" if more > 0 else ""),
            where={"version": self.key, "sequence": sequence},
            next_step="a producer left out tensors of its layout; see its log",
        )

    def _describe(self, wait: GroupWait) -> str:
        missing = [
            f"{self._plan.sources[key].name} of rank {key[0]}" for key in wait.missing[:_MAX_NAMED]
        ]
        if len(wait.missing) > _MAX_NAMED:
            missing.append(f"{len(wait.missing) - _MAX_NAMED} more")
        return f"{wait.group.name} waits for {', '.join(missing)} ({len(wait.arrived)} arrived)"

    def shard(self, event: ShardPersisted, sequence: int) -> None:
        """A writer has persisted a shard.

        Raises:
            VersionConflictError: by another plan than ours, or twice with other bytes.
        """
        where = {
            "version": self.key, "shard": event.shard, "writer": event.writer,
            "sequence": sequence,
        }  # fmt: skip
        theirs = (event.plan_digest, event.writers, event.shards)
        ours = (self._plan.digest, self._plan.writers, len(self._plan.shards))
        shard = self._plan.shards[event.shard] if event.shard < ours[2] else None
        same = (
            theirs == ours
            and shard is not None
            and (event.writer, event.file, event.nbytes) == (shard.writer, shard.file, shard.nbytes)
        )
        if not same:
            raise VersionConflictError(
                f"writer {event.writer} of {event.writers} works by another plan "
                f"({event.plan_digest}) than this one of {self._plan.writers} ({ours[0]})",
                where=where,
                next_step="start all writers of a run with the same release, count, shard size, "
                "missing and dtype policy, and origin",
            )
        known = self._shards.setdefault(event.shard, event)
        if known != event:
            raise VersionConflictError(
                "a shard was persisted twice, with other bytes",
                where=where,
                next_step="the source changed between two reads: publish the version again",
            )

    # ---- questions

    def arrival(self, key: Key) -> Arrival | None:
        """A source's arrival, when it has arrived."""
        return self._arrived.get(key)

    def digests(self) -> dict[int, dict[int, str]]:
        """By rank and layout index, the digests of what is published and of the replicas looked at.

        A producer publishes a tensor once, whoever else holds the same part; of those others, a
        seal brings the digests of some.
        """
        found: dict[int, dict[int, str]] = {}
        for (rank, index), arrival in self._arrived.items():
            found.setdefault(rank, {})[index] = arrival.digest
        for rank, event in self._sealed.items():
            replicas = {replica.index: replica.digest for replica in event.replicas}
            found.setdefault(rank, {}).update(replicas)
        return found

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
        return len(self._sealed) == len(self._ranks)

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
        return not (
            self._arrived or self._chunks or self._sealed or self._shards
            or any(self._waiting.values())
        )  # fmt: skip


def sources_of_shard(plan: Plan, shard: int) -> list[Source]:
    """The sources whose pieces go to a shard."""
    return [source for source in plan.sources.values() if source.shard == shard]
