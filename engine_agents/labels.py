"""The label that an engine carries: the whole identity of a version, as readable text.

`run/attempt/v000007` (docs/adr/0040). A bare number would be the same in two attempts of a run,
and an engine of the old attempt would then pass for one of the new.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from ..schemas.events import VersionKey

_LABEL = re.compile(r"([^/]+)/(\d+)/v(\d+)")


def label_of(key: VersionKey) -> str:
    """The label of a version."""
    return str(key)


def parse_label(label: str) -> VersionKey | None:
    """The version that a label names; None for a label that weightbus did not write."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    try:
        key = VersionKey(run_id=match[1], attempt=int(match[2]), weight_version=int(match[3]))
    except ValidationError:
        return None
    return key if label_of(key) == label else None
