"""One shard file on its way from nothing to durable. Everything here runs on the shard's lane.

A shard is written under a hidden name of this life of the writer and gets its own name when every
byte is verified and durable. An earlier life may have announced the shard without this one knowing
(the announcement was on its way); then the version may be committed, and its sources reused, while
this life still writes: into a file of its own, not into the one that others have begun to trust.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ..schemas.digest import digest_of
from ..schemas.errors import CommitError, StorageError
from ..schemas.events import ShardPersisted, VersionKey
from ..schemas.manifest import ManifestTensor, ShardTable
from .assets import sync_folder, write_file
from .config import WriterConfig
from .copy import Copier, CopyStoppedError, Input, PlacedExtent, merge_extents
from .paths import VersionPaths
from .plan_types import BaseCopy, Plan, Shard
from .row_blocks import assemble
from .shard_file import ShardFile, storage_error
from .steps import Step, Steps


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """Write the runs of one source."""

    shard: int
    item: Input

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.item.source.nbytes


@dataclass(frozen=True, slots=True)
class AssembleUnit:
    """Put one target together."""

    shard: int
    target: int
    inputs: Sequence[Input]

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return sum(item.source.nbytes for item in self.inputs)


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """Take one target from the origin checkpoint."""

    shard: int
    copy: BaseCopy
    file: Path
    nbytes: int


Unit: TypeAlias = StreamUnit | AssembleUnit | CopyUnit


class ShardBuilder:
    """A shard being filled.

    Args:
        key: the version.
        plan: its plan.
        shard: which file.
        paths: the version's folders.
        config: the writer's options.
        steps: told of each step.
        stop: ends copies between two blocks.
    """

    def __init__(
        self,
        key: VersionKey,
        plan: Plan,
        shard: Shard,
        paths: VersionPaths,
        config: WriterConfig,
        steps: Steps,
        stop: threading.Event,
    ) -> None:
        self._key, self._plan, self._shard = key, plan, shard
        self._paths, self._config, self._steps = paths, config, steps
        self._stop = stop
        self._file: ShardFile | None = None
        self._path = paths.partial / shard.file
        self._part = paths.partial / f".{shard.file}.{secrets.token_hex(4)}.part"
        self._placed: dict[int, list[PlacedExtent]] = {}

    def do(self, copier: Copier, unit: Unit) -> None:
        """Do one unit; doing it again after an error is safe.

        Raises:
            CopyStoppedError: the version has ended.
            SourceError, OriginError, StorageError, CommitError: as writers.copy and
                writers.row_blocks.
        """
        file = self._open()
        self._steps.reached(Step.COPY, self._key)
        if isinstance(unit, StreamUnit):
            placed = copier.stream(unit.item, self._plan.targets, file, self._stop)
            for number, extents in placed.items():
                self._placed.setdefault(number, []).extend(extents)
            return
        if isinstance(unit, CopyUnit):
            number = unit.copy.target
            self._placed[number] = copier.copy_base(
                unit.file, unit.copy.offset, self._plan.targets[number], file, self._stop
            )
            return
        target = self._plan.targets[unit.target]
        self._placed[unit.target] = assemble(
            copier, target, unit.target, unit.inputs, file, self._stop
        )

    def sync(self) -> None:
        """Make the file durable and give it its name.

        Raises:
            StorageError: begin again with `reset`.
            CommitError: the version's hidden folder is gone.
        """
        file = self._open()
        self._steps.reached(Step.SYNC_SHARD, self._key)
        if self._config.durable:
            file.sync()
        self._steps.reached(Step.NAME_SHARD, self._key)
        try:
            self._part.replace(self._path)
        except FileNotFoundError as error:
            if not self._paths.partial.exists():
                raise self._removed(error) from error
            raise StorageError(
                "a shard was removed while it was written",
                where={"version": self._key, "file": self._part},
                next_step="two writers with the same number write to one folder: stop one",
            ) from error
        except OSError as error:
            raise storage_error(error, self._path, "name a shard") from error

    def describe(self) -> ShardPersisted:
        """Write the shard's table; returns the event that announces both.

        Raises:
            StorageError: try again.
            CommitError: the version's hidden folder is gone.
        """
        self._steps.reached(Step.WRITE_TABLE, self._key)
        table = self._table()
        data = table.model_dump_json().encode()
        tables, durable = self._paths.tables, self._config.durable
        try:
            tables.mkdir(parents=True, exist_ok=True)
            write_file(tables / f"{self._shard.file}.json", [data], scratch=tables, durable=durable)
            if durable:
                for folder in (tables, self._paths.partial, self._paths.partial.parent):
                    sync_folder(folder)
        except FileNotFoundError as error:
            raise self._removed(error) from error
        except OSError as error:
            raise storage_error(error, tables, "write a shard's table") from error
        return ShardPersisted(
            version=self._key,
            plan_digest=self._plan.digest,
            writer=self._config.index,
            writers=self._config.count,
            shard=self._shard.index,
            shards=len(self._plan.shards),
            file=self._shard.file,
            nbytes=self._shard.nbytes,
            digest=table.digest,
            table_digest=digest_of(data),
        )

    def reset(self) -> None:
        """Forget the file: some bytes of it may be lost, so all are written again."""
        self.close()
        self._placed.clear()
        try:
            self._part.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, self._part, "remove a damaged shard") from error

    def _removed(self, error: FileNotFoundError) -> CommitError:
        return CommitError(
            "the version's hidden folder was removed while it was written",
            where={"version": self._key, "folder": error.filename},
            next_step="something else removes files from the versions' folder",
        )

    def close(self) -> None:
        """Close the file; idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> ShardFile:
        if self._stop.is_set():
            raise CopyStoppedError
        if self._file is None:
            self._steps.reached(Step.OPEN_SHARD, self._key)
            partial = self._paths.partial
            try:
                partial.mkdir(parents=True, exist_ok=True)
                # A killed life's, of the size of the whole shard.
                for stale in partial.glob(f".{self._shard.file}.*.part"):
                    stale.unlink(missing_ok=True)
            except OSError as error:
                raise storage_error(error, partial, "create a version's hidden folder") from error
            self._file = ShardFile(
                self._part,
                self._shard.nbytes,
                self._shard.header,
                write_behind=self._config.durable,
            )
        return self._file

    def _table(self) -> ShardTable:
        return ShardTable(
            file=self._shard.file,
            writer=self._config.index,
            nbytes=self._shard.nbytes,
            header_bytes=len(self._shard.header),
            header_digest=digest_of(self._shard.header),
            tensors=tuple(
                ManifestTensor(
                    name=self._plan.targets[number].name,
                    dtype=self._plan.targets[number].dtype,
                    shape=self._plan.targets[number].shape,
                    offset=self._plan.targets[number].offset,
                    extents=merge_extents(self._placed, number),
                )
                for number in self._shard.targets
            ),
        )
