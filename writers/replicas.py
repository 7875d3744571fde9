"""Replicas that ought to be equal, compared by digest: pure.

What a producer publishes of a tensor's part has its digest in chunk events; producers that hold the
same part without publishing it tell digests of some of them with their sealing event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..schemas.errors import LayoutError, ReplicaMismatchError
from ..schemas.events import VersionKey
from ..schemas.layout import Layout, Part

_MAX_NAMED = 10


class Holder(NamedTuple):
    """One rank's copy: its digest, and what the trainer calls the tensor there."""

    rank: int
    digest: str
    owned: bool
    local_name: str


class ReplicaDifference(NamedTuple):
    """Ranks that hold the same part of one tensor with different bytes; owners first."""

    tensor: str
    part: Part
    holders: tuple[Holder, ...]

    def __str__(self) -> str:
        part = f" part {self.part.index} of {self.part.count}" if self.part.count > 1 else ""
        return f"{self.tensor}{part}: " + " != ".join(
            f"{digest[-8:]} on {_ranks(holders)}" for digest, holders in self.by_digest()
        )

    def by_digest(self) -> list[tuple[str, list[Holder]]]:
        """The holders of each digest, the owner's digest first."""
        groups: dict[str, list[Holder]] = {}
        for holder in self.holders:
            groups.setdefault(holder.digest, []).append(holder)
        return list(groups.items())


def compare_replicas(
    layouts: Sequence[Layout], digests_by_rank: Mapping[int, Mapping[int, str]]
) -> list[ReplicaDifference]:
    """Every tensor of which ranks hold the same part with different digests.

    Args:
        layouts: of all producers.
        digests_by_rank: rank -> index in its layout -> digest, of published tensors and of
            replicas alike. Tensors without a digest are not compared.

    Returns:
        the differences, by tensor and part.

    Raises:
        LayoutError: a digest of a tensor that no layout has.
    """
    held: defaultdict[tuple[str, Part], list[Holder]] = defaultdict(list)
    by_rank = {layout.producer.rank: layout for layout in layouts}
    for rank, digests in sorted(digests_by_rank.items()):
        tensors = by_rank[rank].tensors if rank in by_rank else ()
        for index, digest in sorted(digests.items()):
            if index >= len(tensors):
                raise LayoutError(
                    f"a digest of tensor number {index}, the layout has {len(tensors)}",
                    where={"rank": rank, "index": index},
                    next_step="the producer's layout and its events come from different models",
                )
            tensor = tensors[index]
            holder = Holder(rank, digest, tensor.owned, tensor.local_name)
            held[tensor.name, _place(tensor.part)].append(holder)
    return [
        ReplicaDifference(name, part, tuple(sorted(holders, key=lambda holder: not holder.owned)))
        for (name, part), holders in sorted(
            held.items(), key=lambda entry: (entry[0][0], entry[0][1].index)
        )
        if len({holder.digest for holder in holders}) > 1
    ]


def mismatch(key: VersionKey, differences: Sequence[ReplicaDifference]) -> ReplicaMismatchError:
    """The error that a version with these differences ends with."""
    lines = [str(difference) for difference in differences[:_MAX_NAMED]]
    if len(differences) > _MAX_NAMED:
        lines.append(f"{len(differences) - _MAX_NAMED} more")
    return ReplicaMismatchError(
        "ranks that ought to hold equal copies do not: " + "; ".join(lines),
        where={"version": key},
        next_step="the trainer's replicas have drifted apart; compare the gradients' reduction on "
        "the ranks named, restart from a checkpoint, or do not check (ReplicaCheck(0))",
    )


def _place(part: Part) -> Part:
    # Along which dimension the whole is cut says nothing when it is not cut.
    return Part() if part.count == 1 else part


def _ranks(holders: Sequence[Holder]) -> str:
    named = [
        f"{holder.rank} ({'owner' if holder.owned else holder.local_name or 'replica'})"
        for holder in holders[:_MAX_NAMED]
    ]
    if len(holders) > _MAX_NAMED:
        named.append(f"{len(holders) - _MAX_NAMED} more")
    return ("rank " if len(holders) == 1 else "ranks ") + ", ".join(named)
