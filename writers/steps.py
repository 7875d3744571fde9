"""The named steps of a writer: for tracing, and the places where tests kill it."""

from __future__ import annotations

import enum
from typing import Protocol

from ..schemas.events import VersionKey


class Step(enum.Enum):
    """A moment just before something becomes true, in the order of a version's life."""

    PLAN = "plan"  # the plan of an attempt is computed
    OPEN_SHARD = "open-shard"  # a shard file is created and allocated
    COPY = "copy"  # a source or target is copied
    SYNC_SHARD = "sync-shard"  # a shard is made durable
    NAME_SHARD = "name-shard"  # a durable shard gets its name
    WRITE_TABLE = "write-table"  # a shard's table is written
    ANNOUNCE_SHARD = "announce-shard"  # shard-persisted is published
    COMMIT = "commit"  # the commit begins
    COPY_ASSETS = "copy-assets"
    WRITE_INDEX = "write-index"
    WRITE_MANIFEST = "write-manifest"
    RENAME = "rename"  # the folder becomes visible
    ANNOUNCE_COMPLETE = "announce-complete"  # version-complete is published
    CLEAN_UP = "clean-up"  # what the version left behind is removed


class Steps(Protocol):
    """Told of each step, on whatever thread takes it; what it raises ends the step."""

    def reached(self, step: Step, key: VersionKey) -> None:
        """The writer is about to take a step."""
        ...


class NoSteps:
    """Tells nobody."""

    def reached(self, step: Step, key: VersionKey) -> None:
        """Do nothing."""
