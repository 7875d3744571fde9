"""One attempt for all ranks of a trainer: rank 0 opens it, the others read its number.

The number goes through torch.distributed's key-value store, which is no collective: a rank that is
late or dead is a deadline that passes, not a hang.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ..schemas.errors import BusUnavailableError, MissingDependencyError, WeightbusError
from .attempts import Trainer, open_attempt
from .bus_thread import BusThread

try:
    import torch
except ImportError as missing:
    raise MissingDependencyError(
        "torch is not installed", next_step='pip install "weightbus[torch]"'
    ) from missing

_made: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def agree_on_attempt(
    thread: BusThread, trainer: Trainer, attempt: int | None, timeout_s: float
) -> int:
    """The attempt of all ranks; every rank calls this, torch.distributed is initialized.

    Args:
        thread: where rank 0 opens the attempt.
        trainer: who starts; the run_id is the same on all ranks.
        attempt: None takes the run's next one.
        timeout_s: for each request of rank 0; the others wait twice as long.

    Raises:
        VersionConflictError: on rank 0, when another trainer holds the attempt.
        BusUnavailableError: no bus, or rank 0 did not open the attempt in time.
    """
    # The public API has no way to the default store; torch's own launchers use this one.
    c10d: Any = torch.distributed.distributed_c10d
    store: Any = c10d._get_default_store()  # noqa: SLF001
    key = f"weightbus/{trainer.run_id}/{next(_made[trainer.run_id])}"
    if torch.distributed.get_rank() == 0:
        try:
            number = thread.run(
                open_attempt(thread.bus, trainer, attempt, timeout_s=timeout_s),
                timeout_s=2 * timeout_s,
            )
        except WeightbusError as error:
            store.set(key, f"error {error}")
            raise
        store.set(key, f"attempt {number}")
        return number
    try:
        store.wait([key], timedelta(seconds=2 * timeout_s))
    except RuntimeError as error:
        raise BusUnavailableError(
            "rank 0 did not say which attempt it has opened",
            where={"rank": torch.distributed.get_rank(), "waited_s": 2 * timeout_s},
            next_step="see rank 0's log; every rank must make a publisher",
        ) from error
    word, _, rest = store.get(key).decode().partition(" ")
    if word != "attempt":
        raise BusUnavailableError(f"rank 0 could not open an attempt: {rest}")
    return int(rest)
