"""Who publishes a tensor that several ranks hold: decided alike on every rank, without talking.

Inside a pipeline stage the ranks of a data-parallel group hold the same dense tensors, and the
tensors that are not cut over tensor-parallel ranks are the same on those too. Routed experts have
their own grid: (expert-tensor, expert, expert-data). A tensor goes to the holder with the fewest
bytes so far, the largest tensor first; every rank works through the same list of sizes, so every
rank comes to the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ..schemas.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks of each kind one pipeline stage has.

    `dp` counts data-parallel and context-parallel replicas together, `edp` the replicas of a
    routed expert. tp * dp = etp * ep * edp = ranks of the stage.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    def check(self) -> None:
        """Raises ConfigError when the two grids do not have the same number of ranks."""
        if min(self.tp, self.dp, self.ep, self.etp, self.edp) < 1 or (
            self.tp * self.dp != self.etp * self.ep * self.edp
        ):
            raise ConfigError(
                f"tp {self.tp} x dp {self.dp} and etp {self.etp} x ep {self.ep} x expert-dp "
                f"{self.edp} are different numbers of ranks",
                next_step="initialize Megatron's expert parallel groups before the publisher",
            )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in both grids of its pipeline stage."""

    tp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    etp_rank: int = 0
    edp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """One tensor as far as ownership is concerned. `cut`: it differs between (expert-)TP ranks."""

    nbytes: int
    expert: bool
    cut: bool


def owned(holdings: Sequence[Holding], sizes: ParallelSizes, me: Coordinates) -> tuple[bool, ...]:
    """For each tensor of this rank, whether this rank publishes it.

    Args:
        holdings: this rank's tensors in model order. Ranks that hold the same tensors give them in
            the same order.
        sizes: the grids.
        me: this rank.

    Raises:
        ConfigError: grids of different sizes.
    """
    sizes.check()
    loads = [0] * sizes.stage_ranks
    mine = [False] * len(holdings)
    for expert, cut in ((False, True), (True, True), (True, False), (False, False)):
        chosen = [
            index
            for index, holding in enumerate(holdings)
            if holding.expert is expert and holding.cut is cut
        ]
        chosen.sort(key=lambda index: (-holdings[index].nbytes, index))
        weights = [holdings[index].nbytes for index in chosen]
        for group in _groups(sizes, me, expert, cut):
            assigned = _share(weights, [loads[rank] for rank in group.ranks])
            for weight, holder in zip(weights, assigned, strict=True):
                loads[group.ranks[holder]] += weight
            if group.my_place is not None:
                for index, holder in zip(chosen, assigned, strict=True):
                    mine[index] = holder == group.my_place
    return tuple(mine)


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks (numbers inside the stage) that hold the same tensors; my place among them, if any."""

    ranks: list[int]
    my_place: int | None


def _groups(sizes: ParallelSizes, me: Coordinates, expert: bool, cut: bool) -> list[_Group]:
    # Numbers inside the stage follow Megatron's default order (tp fastest). Another order only
    # makes the balance worse: places inside a group come from `me`, never from these numbers.
    if not expert:
        if cut:
            grids = [(tp, [dp * sizes.tp + tp for dp in range(sizes.dp)]) for tp in range(sizes.tp)]
            return [_Group(ranks, me.dp_rank if tp == me.tp_rank else None) for tp, ranks in grids]
        return [_Group(list(range(sizes.stage_ranks)), me.dp_rank * sizes.tp + me.tp_rank)]
    stride = sizes.etp * sizes.ep
    groups: list[_Group] = []
    for ep in range(sizes.ep):
        per_etp = [
            [edp * stride + ep * sizes.etp + etp for edp in range(sizes.edp)]
            for etp in range(sizes.etp)
        ]
        here = ep == me.ep_rank
        if cut:
            groups += [
                _Group(ranks, me.edp_rank if here and etp == me.etp_rank else None)
                for etp, ranks in enumerate(per_etp)
            ]
        else:
            place = me.etp_rank * sizes.edp + me.edp_rank
            groups.append(
                _Group([rank for ranks in per_etp for rank in ranks], place if here else None)
            )
    return groups


def _share(weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Largest first into the emptiest: the holder of each weight (weights come sorted)."""
    heap = [(load, place) for place, load in enumerate(loads)]
    heapq.heapify(heap)
    holders: list[int] = []
    for weight in weights:
        load, place = heap[0]
        heapq.heapreplace(heap, (load + weight, place))
        holders.append(place)
    return holders
