"""Where a version lies: while it is made, and when it is visible.

ROOT/RUN/attempt_0001/.weight_v000007.partial   shards, assets, index, manifest: being made
ROOT/RUN/attempt_0001/.weight_v000007.tables    what each writer says about its shards
ROOT/RUN/attempt_0001/.weight_v000007.removing  being removed: nobody can make it visible any more
ROOT/RUN/attempt_0001/weight_v000007            visible: whole and described by its manifest
ROOT/RUN/.writer-0-of-2.json                    a writer's checkpoint
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..schemas.errors import OutputFolderError
from ..schemas.events import VersionKey

_HIDDEN = re.compile(r"\.weight_v(\d{6,})\.(?:partial|tables|removing)")
_ATTEMPT = re.compile(r"attempt_(\d{4,})")


@dataclass(frozen=True, slots=True)
class VersionPaths:
    """The folders of one version; all but `final` are hidden and end with the version."""

    final: Path
    partial: Path
    tables: Path
    removing: Path

    @classmethod
    def of(cls, root: Path, key: VersionKey) -> VersionPaths:
        """The folders of a version under a writers' root."""
        parent = root / key.run_id / f"attempt_{key.attempt:04d}"
        name = f"weight_v{key.weight_version:06d}"
        hidden = (parent / f".{name}.{use}" for use in ("partial", "tables", "removing"))
        return cls(parent / name, *hidden)


def hidden_folders(root: Path, run_id: str) -> list[tuple[VersionKey, Path]]:
    """Every hidden folder of a run's versions, with the version that it belongs to."""
    found: list[tuple[VersionKey, Path]] = []
    for path in sorted((root / run_id).glob("attempt_*/.weight_v*")):
        attempt = _ATTEMPT.fullmatch(path.parent.name)
        version = _HIDDEN.fullmatch(path.name)
        if attempt is not None and version is not None:
            key = VersionKey(run_id=run_id, attempt=int(attempt[1]), weight_version=int(version[1]))
            found.append((key, path))
    return found


def check_apart(root: Path, origin: Path) -> None:
    """Refuse an output folder that is equal to, inside or around the origin; links are resolved.

    Raises:
        OutputFolderError: it is; writing there could destroy the origin or copy versions into
            versions.
    """
    out, base = root.resolve(), origin.resolve()
    if out == base:
        relation = "is"
    elif out.is_relative_to(base):
        relation = "lies inside"
    elif base.is_relative_to(out):
        relation = "contains"
    else:
        return
    raise OutputFolderError(
        f"the output folder {relation} the origin checkpoint",
        where={"root": out, "origin": base},
        next_step="give the writers a folder of their own with --root",
    )
