"""The coverage certificate: proof that a version will be complete and exact, before its first byte.

It holds if (a) the parts that ranks publish make up every whole tensor once, (b) every source
element is used once (or left out as the rule says) and every HF element produced once, and (c)
names, shapes and dtypes are those of the origin checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..schemas.errors import CoverageError, UnknownParameterError
from ..schemas.layout import Layout
from .conversion.family import Family
from .expectation import Expectation
from .plan_differences import Difference, DifferenceKind
from .plan_survey import DTypePolicy, MissingPolicy, Survey, survey

LISTED = 200
"""An error message with more lines than this names equal findings of many layers in one line."""

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict: `differences` are reasons to refuse the version, `notes` are not.

    `missing` is the policy for expected tensors that nobody produces, `copied` how many of the
    targets come from the origin checkpoint by it.
    """

    family: str
    producers: int
    sources: int
    targets: int
    missing: MissingPolicy
    copied: int
    differences: tuple[Difference, ...]
    notes: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Whether the version may be written."""
        return not self.differences

    def render(self) -> str:
        """Everything, one line per difference and note."""
        verdict = "holds" if self.ok else f"REFUSED: {len(self.differences)} differences"
        lines = [
            f"coverage certificate, family {self.family}: {self.sources} tensors of "
            f"{self.producers} producers -> {self.targets} HF tensors, {self.copied} of them "
            f"copied (missing: {self.missing}): {verdict}",
            *(f"  {difference}" for difference in self.differences),
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def require(self) -> None:
        """Do nothing if the certificate holds.

        Raises:
            UnknownParameterError: names that no rule knows, with everything else that is wrong.
            CoverageError: every other difference.
        """
        if self.ok:
            return
        unknown = [d for d in self.differences if d.kind is DifferenceKind.UNKNOWN_PARAMETER]
        others = [d for d in self.differences if d.kind is not DifferenceKind.UNKNOWN_PARAMETER]
        listed = summarise(unknown + others)
        where = {"family": self.family, "producers": self.producers}
        if unknown:
            raise UnknownParameterError(
                f"{len(unknown)} parameters that the family has no rule for, "
                f"{len(others)} other differences:\n{listed}\n",
                where=where,
                next_step="add rules for these names to the family's table, or name the family "
                "that the model really is",
            )
        raise CoverageError(
            f"the coverage certificate does not hold, {len(others)} differences:\n{listed}\n",
            where=where,
            next_step="nothing was written; mend the layout, the family or the origin checkpoint "
            "that the lines above name",
        )


def certify(
    layouts: Sequence[Layout],
    expectation: Expectation,
    family: Family,
    *,
    missing: MissingPolicy = "refuse",
    dtype: DTypePolicy = "source",
) -> Certificate:
    """Check what producers hold against what a version must contain.

    Args:
        layouts: every producer's layout, in any order.
        expectation: the origin checkpoint's tensors.
        family: the conversion rules, bound to the model's config.
        missing: what to do about expected tensors that nobody produces.
        dtype: what to do about dtypes that differ from the origin's.

    Raises:
        OriginError: the config lacks a number that a rule needs.
    """
    found = survey(layouts, expectation, family, missing=missing, dtype=dtype)
    return certificate_of(found, len(layouts), family.name, missing)


def certificate_of(
    found: Survey, producers: int, family: str, missing: MissingPolicy
) -> Certificate:
    """The certificate of a finished survey."""
    return Certificate(
        family=family,
        producers=producers,
        sources=len(found.wholes),
        targets=len(found.targets),
        missing=missing,
        copied=len(found.copies),
        differences=tuple(found.differences),
        notes=tuple(found.notes),
    )


def summarise(differences: Sequence[Difference], listed: int = LISTED) -> str:
    """All of them, one line each; more than `listed` share a line per form (layers, experts)."""
    if len(differences) <= listed:
        return "\n".join(f"  {difference}" for difference in differences)
    forms: dict[tuple[DifferenceKind, str], list[Difference]] = {}
    for difference in differences:
        form = (difference.kind, _NUMBER.sub("#", difference.tensor))
        forms.setdefault(form, []).append(difference)
    lines: list[str] = []
    for (_, form), found in forms.items():
        lines.append(f"  {found[0]}")
        if len(found) > 1:
            lines[-1] += f"; {len(found) - 1} more of the form {form}, the last {found[-1].tensor}"
    return "\n".join(lines)
