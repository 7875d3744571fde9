"""Commit: how a version becomes visible. Any writer may do it, several at once, after any kill.

    1  read what each writer says about its shards (tables), check it against shard-persisted
    2  copy the assets of the origin          each file under a temporary name, then renamed
    3  write the index
    4  write the manifest                     the last file
    5  fsync the folder, rename it to its visible name, fsync its parent
    6  publish version-complete               exactly one outcome stands (bus.events.end_version)
    7  remove the tables

Every step writes the same bytes whoever does it, so doing it twice does no harm. Between 5 and 6
the folder is visible but nobody acts on it: readers act on the event. When the outcome that stands
is version-aborted, the folder is removed again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ..schemas.digest import digest_of
from ..schemas.errors import CommitError
from ..schemas.events import ShardPersisted, VersionComplete, VersionKey
from ..schemas.manifest import INDEX_FILE, MANIFEST_FILE, Asset, Manifest, ShardTable
from .assets import copy_asset, list_assets, sync_folder, write_file
from .paths import VersionPaths
from .plan_types import Plan
from .shard_file import storage_error
from .steps import Step, Steps


@dataclass(frozen=True, slots=True)
class Committer:
    """What a commit needs to know.

    Attributes:
        key: the version.
        nonce: of its attempt's opening.
        plan: its plan.
        paths: its folders.
        origin: the checkpoint whose assets are copied.
        durable: whether everything is fsynced.
        steps: told before each step.
    """

    key: VersionKey
    nonce: str
    plan: Plan
    paths: VersionPaths
    origin: Path
    durable: bool
    steps: Steps

    def make_visible(self, shards: Sequence[ShardPersisted]) -> VersionComplete:
        """Steps 1 to 5; blocking. Returns the event that says so.

        Raises:
            CommitError: tables or shards are missing or wrong, or the visible name is taken by
                something else.
            StorageError: the disk fails (retry helps).
            OriginError: an asset cannot be read.
        """
        tables = [self._table(event) for event in shards]
        data = self._visible(tables)
        if data is None:
            try:
                data = self._write_metadata(tables)
            except FileNotFoundError as error:
                # The hidden folder is gone: another writer has renamed it meanwhile, or it is lost.
                data = self._visible(tables)
                if data is None:
                    raise self._lost(error) from error
        return VersionComplete(
            version=self.key,
            directory=str(self.paths.final),
            manifest_digest=digest_of(data),
            shards=len(tables),
            nbytes=self.plan.total_size,
        )

    def _table(self, event: ShardPersisted) -> ShardTable:
        path = self.paths.tables / f"{event.file}.json"
        where = {"version": self.key, "file": event.file, "writer": event.writer}
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise CommitError(
                "a shard was announced but its table is not in the version's folder",
                where={**where, "table": path},
                next_step="all writers of a run must write to the same shared folder (--root)",
            ) from error
        except OSError as error:
            raise storage_error(error, path, "read a shard's table") from error
        if digest_of(data) != event.table_digest:
            raise CommitError(
                "a shard's table is not the one that was announced",
                where={**where, "table": path},
                next_step="two writers with the same number write to one folder: stop one",
            )
        try:
            return ShardTable.model_validate_json(data)
        except ValidationError as error:
            raise CommitError(f"a shard's table cannot be read: {error}", where=where) from error

    def _write_metadata(self, tables: Sequence[ShardTable]) -> bytes:
        partial, scratch = self.paths.partial, self.paths.tables
        self._check_sizes(tables)
        self.steps.reached(Step.COPY_ASSETS, self.key)
        sources = list_assets(self.origin)
        self._remove_strangers({*(table.file for table in tables), *(s.path for s in sources)})
        assets = [copy_asset(source, partial, scratch, durable=self.durable) for source in sources]
        self.steps.reached(Step.WRITE_INDEX, self.key)
        index = index_of(tables)
        write_file(partial / INDEX_FILE, [index], scratch=scratch, durable=self.durable)
        assets.append(Asset(path=INDEX_FILE, nbytes=len(index), digest=digest_of(index)))
        self.steps.reached(Step.WRITE_MANIFEST, self.key)
        data = self._manifest(tables, assets)
        write_file(partial / MANIFEST_FILE, [data], scratch=scratch, durable=self.durable)
        if self.durable:
            folders = {parent for asset in assets for parent in Path(asset.path).parents}
            for folder in sorted(folders, reverse=True):
                sync_folder(partial / folder)
        self.steps.reached(Step.RENAME, self.key)
        return self._rename(tables, data)

    def _remove_strangers(self, wanted: set[str]) -> None:
        """Files of another life of this name (a stream that was lost) must not become visible."""
        partial = self.paths.partial
        for path in sorted(partial.rglob("*")):
            name = path.relative_to(partial).as_posix()
            if not path.is_dir() and name not in wanted | {INDEX_FILE, MANIFEST_FILE}:
                path.unlink(missing_ok=True)

    def _check_sizes(self, tables: Sequence[ShardTable]) -> None:
        for table in tables:
            path = self.paths.partial / table.file
            size = path.stat().st_size  # FileNotFoundError: see make_visible
            if size != table.nbytes:
                raise CommitError(
                    f"a shard has {size} bytes, its writer announced {table.nbytes}",
                    where={"version": self.key, "file": path},
                    next_step="something else writes to the versions' folder",
                )

    def _manifest(self, tables: Sequence[ShardTable], assets: Sequence[Asset]) -> bytes:
        manifest = Manifest(
            version=self.key,
            nonce=self.nonce,
            family=self.plan.family,
            plan_digest=self.plan.digest,
            writers=self.plan.writers,
            total_size=self.plan.total_size,
            shards=tuple(tables),
            assets=tuple(sorted(assets, key=lambda asset: asset.path)),
        )
        return manifest.model_dump_json().encode()

    def _rename(self, tables: Sequence[ShardTable], data: bytes) -> bytes:
        """Make it visible; returns the manifest that is visible then."""
        final = self.paths.final
        try:
            self.paths.partial.rename(final)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise storage_error(error, final, "make a version visible") from error
            visible = self._visible(tables)
            if visible is None:
                raise self._taken() from error
            return visible
        if self.durable:
            sync_folder(final.parent)
        return data

    def _visible(self, tables: Sequence[ShardTable]) -> bytes | None:
        """The manifest of the visible folder, when that is this version with these shards.

        Raises:
            CommitError: it is this version with other shards.
        """
        data = visible_manifest(self.paths, self.key, self.nonce)
        if data is None:
            return None
        manifest = Manifest.model_validate_json(data)
        if (manifest.plan_digest, list(manifest.shards)) != (self.plan.digest, list(tables)):
            raise self._taken()
        if self.durable:  # whoever renamed it may have been killed before this
            sync_folder(self.paths.final.parent)
        return data

    def _taken(self) -> CommitError:
        return CommitError(
            "the version's visible name is taken by something else",
            where={"version": self.key, "directory": self.paths.final},
            next_step="nothing was overwritten: move the folder away, and give every run its own "
            "run_id",
        )

    def _lost(self, error: FileNotFoundError) -> CommitError:
        return CommitError(
            "a file of the version is gone: its hidden folder is not whole, and its visible one "
            "is not there or not its own",
            where={"version": self.key, "file": error.filename, "directory": self.paths.partial},
            next_step="something else removes files from the versions' folder",
        )


def visible_manifest(paths: VersionPaths, key: VersionKey, nonce: str) -> bytes | None:
    """The manifest of a version's visible folder; None when that is not there or of another run.

    Raises:
        StorageError: it cannot be read.
    """
    path = paths.final / MANIFEST_FILE
    try:
        data = path.read_bytes()
        manifest = Manifest.model_validate_json(data)
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None
    except OSError as error:
        raise storage_error(error, path, "read the manifest of a visible version") from error
    return data if (manifest.version, manifest.nonce) == (key, nonce) else None


def index_of(tables: Sequence[ShardTable]) -> bytes:
    """model.safetensors.index.json, as transformers writes it."""
    weight_map = {tensor.name: table.file for table in tables for tensor in table.tensors}
    total = sum(tensor.nbytes for table in tables for tensor in table.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def discard(paths: VersionPaths) -> None:
    """Remove the hidden folders of a version that has ended; quiet about what is gone.

    What is being made is renamed before its files go: another writer may be about to give it its
    visible name, and would make a folder visible that is half removed.
    """
    with contextlib.suppress(OSError):  # what cannot be removed now is when a writer starts
        _take_away(paths.partial, paths)
    for folder in (paths.removing, paths.tables):
        shutil.rmtree(folder, ignore_errors=True)


def withdraw(paths: VersionPaths, key: VersionKey, nonce: str) -> None:
    """Remove an aborted version, also when it was made visible a moment too late.

    After the first rename nobody can make it visible any more, so that the look at the visible
    name that follows misses nothing. A folder of that name that is not this version's stays.

    Raises:
        StorageError, CommitError: the visible folder cannot be looked at or hidden.
    """
    discard(paths)
    if visible_manifest(paths, key, nonce) is not None:
        try:
            _take_away(paths.final, paths)
        except OSError as error:
            raise storage_error(error, paths.final, "hide an aborted version") from error
        discard(paths)


def _take_away(folder: Path, paths: VersionPaths) -> None:
    """Give a folder the name of what is being removed; nothing when it is gone."""
    tries = 5  # another writer that removes the same version may be faster each time
    for left in reversed(range(tries)):
        try:
            folder.rename(paths.removing)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if left == 0 or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(paths.removing, ignore_errors=True)
