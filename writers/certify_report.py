"""The answer of `weightbus certify`, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .certificate import Certificate, summarise
from .plan_differences import Difference

_GIB = 2**30
NOTES_SHOWN = 40


@dataclass(frozen=True, slots=True)
class CertifyReport:
    """One certification.

    Attributes:
        certificate: the verdict with every difference and note.
        expected_from: `headers`, `index` or `transformers`: who said what a version must contain.
        expected: how many tensors a version must contain.
        groups: how many groups of tensors travel together; 0 if the certificate is refused.
        largest_group: name of the largest group.
        largest_group_bytes: its bytes.
        total_bytes: bytes of a version.
    """

    certificate: Certificate
    expected_from: str
    expected: int
    groups: int
    largest_group: str
    largest_group_bytes: int
    total_bytes: int

    @property
    def ok(self) -> bool:
        """Whether a version may be written; exit status 0 if so."""
        return self.certificate.ok

    def table(self) -> str:
        """For people: a summary, then every difference, then notes with equal forms in one line."""
        c = self.certificate
        rows = [
            ("verdict", "holds" if c.ok else f"REFUSED, {len(c.differences)} differences"),
            ("family", c.family),
            ("producers", str(c.producers)),
            ("Megatron tensors", str(c.sources)),
            ("HF tensors", f"{c.targets} of {self.expected} expected (by {self.expected_from})"),
            ("missing", f"{c.missing}; {c.copied} copied from the origin"),
            ("bytes", f"{self.total_bytes} ({self.total_bytes / _GIB:.1f} GiB)"),
        ]
        if self.groups:
            rows.append(
                (
                    "groups",
                    f"{self.groups}, the largest {self.largest_group} with "
                    f"{self.largest_group_bytes} bytes",
                )
            )
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        if c.differences:
            lines += ["", "differences:", summarise(c.differences)]
        if c.notes:
            lines += ["", "notes:", summarise(c.notes, NOTES_SHOWN)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """For programs: everything, one JSON object, keys sorted."""
        c = self.certificate
        return json.dumps(
            {
                "ok": c.ok,
                "family": c.family,
                "producers": c.producers,
                "megatron_tensors": c.sources,
                "hf_tensors": c.targets,
                "expected_tensors": self.expected,
                "expected_from": self.expected_from,
                "missing_policy": c.missing,
                "copied_tensors": c.copied,
                "groups": self.groups,
                "largest_group": self.largest_group,
                "largest_group_bytes": self.largest_group_bytes,
                "total_bytes": self.total_bytes,
                "differences": _plain(c.differences),
                "notes": _plain(c.notes),
            },
            sort_keys=True,
        )


def _plain(found: Sequence[Difference]) -> list[dict[str, object]]:
    return [
        {"kind": str(d.kind), "tensor": d.tensor, "ranks": list(d.ranks), "detail": d.detail}
        for d in found
    ]
