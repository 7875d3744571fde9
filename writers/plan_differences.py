"""What a certificate can object to, and what it only reports."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class DifferenceKind(StrEnum):
    """What differs. The members below the line are notes: listed, but no reason to refuse."""

    DUPLICATE_PRODUCER = "duplicate producer"
    """Two layouts claim one rank."""
    MIXED_NAMING = "mixed naming"
    """Some producers speak Megatron names, others Hugging Face names."""
    DUPLICATE_NAME = "duplicate name"
    """One producer lists a name twice with the same part, as owner both times."""
    DISAGREEMENT = "disagreement"
    """Ranks that hold parts of one tensor differ in its dtype, shape, cut or blocks."""
    MISSING_PART = "missing part"
    """A part of a tensor that no rank publishes."""
    DUPLICATE_PART = "duplicate part"
    """A part that more than one rank publishes."""
    BAD_PARTITION = "bad partition"
    """A cut that the tensor's rule cannot follow."""
    UNKNOWN_PARAMETER = "unknown parameter"
    """A name that no rule of the family knows."""
    RULE_REFUSED = "rule refused"
    """The whole tensor's shape does not fit its rule."""
    SOURCE_OVERLAP = "source used twice"
    """A rule carries source elements to two places without saying so."""
    SOURCE_UNUSED = "source left over"
    """Source elements that a rule neither moves nor declares to be left out."""
    TARGET_OVERLAP = "target written twice"
    """Elements of an HF tensor that two moves produce."""
    TARGET_UNCOVERED = "target not covered"
    """Elements of an HF tensor that nobody produces."""
    OUT_OF_BOUNDS = "out of bounds"
    """A move that leaves its source or its target."""
    TARGET_CONFLICT = "target conflict"
    """Sources of one HF tensor that differ in its shape or dtype."""
    EMPTY_TENSOR = "empty tensor"
    """A tensor without elements: there would be nothing to wait for, and nothing to write."""
    STALE_COPY = "stale copy"
    """Missing, and a copy of the origin's would stand beside trained tensors that belong to it."""
    MISSING_TENSOR = "missing HF tensor"
    """Expected, but nobody produces it."""
    EXTRA_TENSOR = "extra HF tensor"
    """Produced, but the origin checkpoint does not have it."""
    WRONG_SHAPE = "wrong shape"
    """Produced with another shape than the origin's."""
    WRONG_DTYPE = "wrong dtype"
    """Published with another dtype than its rule demands, or the origin has."""
    # ------------------------------------------------------------------------------- notes
    OMITTED = "omitted"
    """Expected, but left out: by policy, or because the family never writes it."""
    COPIED = "copied"
    """Expected, produced by nobody, copied from the origin by policy."""
    LEFT_OUT = "left out of its source"
    """Source elements that the rule leaves out: padding, tied copies."""
    OTHER_DTYPE = "other dtype"
    """Produced with another dtype than the origin's, which the dtype policy allows."""


class Difference(NamedTuple):
    """One finding: about which tensor, seen on which ranks."""

    kind: DifferenceKind
    tensor: str
    ranks: tuple[int, ...]
    detail: str

    def __str__(self) -> str:
        subject = f" {self.tensor}" if self.tensor else ""
        where = f" (rank {_ranks(self.ranks)})" if self.ranks else ""
        return f"{self.kind}:{subject}: {self.detail}{where}"


def difference(kind: DifferenceKind, tensor: str, ranks: Iterable[int], detail: str) -> Difference:
    """A difference with its ranks sorted and unique."""
    return Difference(kind, tensor, tuple(sorted(set(ranks))), detail)


def _ranks(ranks: tuple[int, ...]) -> str:
    """Ranks as ranges: 0-3, 8."""
    parts: list[str] = []
    start = 0
    for at in range(1, len(ranks) + 1):
        if at == len(ranks) or ranks[at] != ranks[at - 1] + 1:
            first, last = ranks[start], ranks[at - 1]
            parts.append(f"{first}" if first == last else f"{first}-{last}")
            start = at
    return ", ".join(parts)
