"""The whole-space view of a version as data: what every tensor becomes (see plan_survey)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from ..schemas.dtypes import DType
from .conversion.family import Conversion
from .expectation import Place
from .plan_differences import Difference
from .plan_wholes import Whole

MissingPolicy: TypeAlias = Literal["refuse", "copy", "omit"]
"""Expected tensors that nobody produces: refuse the version, copy them from the origin checkpoint,
or leave them out of it."""

DTypePolicy: TypeAlias = Literal["source", "exact"]
"""`source`: a tensor has the dtype that the trainer publishes, and another float type than the
origin's is noted. `exact`: a difference is refused. Where one side is no plain float (a quantized
origin), a difference is always refused: config.json would not fit the files."""

PLAIN_FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})


class Supply(NamedTuple):
    """One whole tensor's contribution to one target: output `slot` of its conversion."""

    whole: Whole
    conversion: Conversion
    slot: int


@dataclass(slots=True)
class Surveyed:
    """One HF tensor that the version will have."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    supplies: list[Supply]


@dataclass(slots=True)
class Survey:
    """Everything in whole space.

    `targets` by name; `conversions` by whole tensor's name; `copies` of the origin's tensors by
    name, which are targets without supplies.
    """

    wholes: list[Whole] = field(default_factory=list[Whole])
    conversions: dict[str, Conversion] = field(default_factory=dict[str, Conversion])
    copies: dict[str, Place] = field(default_factory=dict[str, Place])
    targets: dict[str, Surveyed] = field(default_factory=dict[str, Surveyed])
    differences: list[Difference] = field(default_factory=list[Difference])
    notes: list[Difference] = field(default_factory=list[Difference])
