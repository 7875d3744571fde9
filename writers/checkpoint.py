"""A writer's checkpoint: the stream sequence from which it must read again after a restart.

The server's ack floor is no such thing: after a restart a durable consumer hands out what was never
delivered before what was delivered and not acknowledged. The writer keeps its own place, beside its
own output. It is only ever an optimisation: without it (or with one of another stream) the writer
reads from the beginning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from ..schemas.base import Count, Frozen, ShortText


class Checkpoint(Frozen):
    """Every version that began before `sequence` has ended.

    `nonce` is that of the newest attempt: another one at the same number means that the stream was
    lost and began again.
    """

    schema_version: Literal[1] = 1
    sequence: Count
    attempt: Count
    nonce: ShortText


def checkpoint_path(root: Path, run_id: str, name: str) -> Path:
    """Where a writer's checkpoint lies."""
    return root / run_id / f".{name}.json"


def load_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint; None when there is none that can be read."""
    try:
        return Checkpoint.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint. Raises OSError.

    It is not fsynced: an older one, or none, is only slower.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name, so that a kill leaves at most one such file, which the next save takes over.
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_bytes(checkpoint.model_dump_json().encode())
    partial.replace(path)
