"""What a user decides about a writer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..schemas.base import Count, Frozen, Token

MIB = 1024 * 1024
GIB = 1024 * MIB

Seconds = Annotated[float, Field(gt=0)]


class WriterConfig(Frozen):
    """Options of writer `index` of `count`.

    Attributes:
        run_id: the run whose versions are converted.
        index, count: which writer this is; every writer of a run has the same count.
        root: folder of the version directories: ROOT/RUN/attempt_0001/weight_v000007.
        origin: the origin checkpoint's folder on this machine; None: the trainer's name for it.
        max_shard_bytes: the largest shard file, as long as a group of tensors fits.
        missing: HF tensors that nobody produces: refuse the version, copy them from the origin
            checkpoint, or leave them out.
        dtype: `source`: tensors keep the trainer's dtype; `exact`: another than the origin's is
            a difference.
        durable: files are fsynced before shard-persisted and before version-complete.
        io_threads: shard files that are written at the same time, one thread each.
        block_bytes: memory of one read or write.
        commit_grace_s: how long the others leave the commit to the writer of the last shard.
        storage_deadline_s: how long a full or failing disk is tried again before a version is
            aborted.
        bus_timeout_s: for each event, through reconnects; after it the event is tried again.
    """

    run_id: Token
    index: Count
    count: Annotated[int, Field(ge=1)]
    root: Path
    origin: Path | None = None
    max_shard_bytes: Annotated[int, Field(gt=0)] = 4 * GIB
    missing: Literal["refuse", "copy", "omit"] = "refuse"
    dtype: Literal["source", "exact"] = "source"
    durable: bool = True
    io_threads: Annotated[int, Field(ge=1, le=16)] = 2
    block_bytes: Annotated[int, Field(ge=4096, le=64 * MIB)] = MIB
    commit_grace_s: Seconds = 5.0
    storage_deadline_s: Seconds = 600.0
    bus_timeout_s: Seconds = 30.0

    @model_validator(mode="after")
    def _check(self) -> WriterConfig:
        if self.index >= self.count:
            raise ValueError(f"writer {self.index} of {self.count}: numbers start at 0")
        return self

    @property
    def name(self) -> str:
        """The writer's name in events, logs and as reader of the stream."""
        return f"writer-{self.index}-of-{self.count}"
