"""Rebuild a folder from a base and consecutive deltas; a crash at any moment recovers.

A new folder is built hidden beside its place and renamed when every tensor is verified and durable.
A folder that is its own base is rebuilt beside the old files, inside `.weight_sync/next`:

1. every tensor is verified and the changed files are written there, durable;
2. the journal is written: from here the update only goes forward;
3. state.json is removed (a peer that comes now seeds again), each file is renamed over the old one;
4. record and state.json are written, the journal is removed.

Before 2 a crash leaves the old version and some files that the next call removes; after 2 the next
call (or `recover`) finishes 3 and 4, whose every step may be repeated.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..schemas.errors import DeltaBaseError, DeltaFormatError, OutputFolderError
from ..schemas.hf_folder import read_folder
from ..schemas.manifest import MANIFEST_FILE, Extent
from .build import build_files
from .disk import storage_error, sync_folder, write_whole
from .files import Delta, read_delta
from .fold import chains_of
from .state import (
    STATE_FILE,
    SYNC_FOLDER,
    FolderState,
    locked,
    read_state,
    write_state,
)

NEXT_FOLDER = "next"
JOURNAL_FILE = "journal.json"


def _no_step(step: str) -> None:
    del step


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """How to rebuild.

    Args:
        base_version: the base's number where the folder does not say it (0: the origin checkpoint).
        threads: tensors that are rebuilt at the same time; each needs the largest tensor's memory.
        lock_timeout_s: how long to wait for another process that rebuilds the same folder.
        on_step: told of each step before it is taken, for tracing and for tests that kill there.
    """

    base_version: int | None = None
    threads: int = 2
    lock_timeout_s: float = 60.0
    on_step: Callable[[str], None] = _no_step


def apply_delta(
    base_folder: Path,
    delta_folders: Sequence[Path],
    target_folder: Path,
    options: ApplyOptions | None = None,
) -> FolderState:
    """Bring a folder from the base's version to that of the last delta.

    The base's bytes are verified against our record, its manifest and the deltas, the result
    against the deltas, before anything becomes visible. `target_folder` may be `base_folder`.

    Args:
        base_folder: a full checkpoint folder; never changed unless it is the target.
        delta_folders: consecutive deltas, oldest first, of weightbus or a peer. Those that the base
            has already are passed over.
        target_folder: absent, or of the asked version already, or the base.
        options: see `ApplyOptions`.

    Raises:
        DeltaError: see the family in schemas.errors; the target is as before.
        OutputFolderError: the target is another folder that exists.
        OriginError, ShardCorruptError: base or delta are not whole.
        StorageError: the disk does not take it.
    """
    chosen = options if options is not None else ApplyOptions()
    deltas = [read_delta(folder) for folder in delta_folders]
    base, target = base_folder.resolve(), target_folder.resolve()
    lock = target if base == target else target.parent
    try:
        with locked(lock, chosen.lock_timeout_s, whole=base != target):
            if base == target:
                return _update(base, deltas, chosen)
            return _make(base, deltas, target, chosen)
    except OSError as error:
        raise storage_error(target, error) from error


def recover(folder: Path, options: ApplyOptions | None = None) -> FolderState:
    """Finish or undo an update of this folder that was killed; what it holds then.

    Raises:
        DeltaLockedError: an update is running.
        StorageError: the disk does not take it.
    """
    chosen = options if options is not None else ApplyOptions()
    try:
        with locked(folder, chosen.lock_timeout_s):
            _finish(folder, chosen.on_step)
            return read_state(folder)
    except OSError as error:
        raise storage_error(folder, error) from error


def _following(base: Path, state: FolderState, deltas: Sequence[Delta]) -> list[Delta]:
    """The deltas that the base lacks, checked to follow it and each other."""
    at, left = (
        state.version,
        [d for d in deltas if state.version is None or d.index.version > state.version],
    )
    for delta in left:
        index = delta.index
        if index.base_version != at or index.version <= index.base_version:
            raise DeltaBaseError(
                f"the delta to version {index.version} is based on {index.base_version}, "
                f"here is {'an unknown version' if at is None else at}",
                where={"base": base, "delta": delta.folder},
                next_step="apply the missing deltas first, or take a full version",
            )
        at = index.version
    lineages = {d.index.lineage for d in deltas if d.index.lineage}
    if state.lineage:
        lineages.add(state.lineage)
    if len(lineages) > 1:
        raise DeltaBaseError(
            f"base and deltas are of different lineages: {', '.join(sorted(lineages))}",
            where={"base": base},
            next_step="seed the folder from a full version of the new lineage",
        )
    return left


def _state_of(folder: Path, chosen: ApplyOptions) -> FolderState:
    state = read_state(folder)
    if state.version is None:
        return FolderState(chosen.base_version, state.lineage, state.tensors)
    return state


def _built(
    base: Path, work: Path, deltas: Sequence[Delta], state: FolderState, chosen: ApplyOptions,
    *, every_file: bool,
) -> tuple[FolderState, list[str]]:  # fmt: skip
    tensors = read_folder(base)
    chains = chains_of(tensors, deltas)
    unknown = sorted(set(tensors) ^ set(state.tensors)) if state.tensors is not None else []
    if unknown:
        raise DeltaBaseError(
            f"the base's tensors are not those of its version: {unknown[:10]}",
            where={"base": base},
            next_step="seed the folder from a full version",
        )
    digests, files = build_files(
        tensors, chains, state.tensors, work, threads=chosen.threads, every_file=every_file
    )
    lineage = next((d.index.lineage for d in deltas if d.index.lineage), state.lineage)
    kept = {name: (extent,) for name, extent in digests.items()}
    return FolderState(deltas[-1].index.version, lineage, kept), files


def _make(
    base: Path, deltas: Sequence[Delta], target: Path, chosen: ApplyOptions
) -> FolderState:  # fmt: skip
    state = _state_of(base, chosen)
    wanted = deltas[-1].index.version if deltas else state.version
    if target.exists():
        held = read_state(target)
        lineages = {
            lin for lin in (held.lineage, deltas[-1].index.lineage if deltas else "") if lin
        }
        if held.version == wanted and wanted is not None and len(lineages) <= 1:
            return held
        raise OutputFolderError(
            f"the target exists and holds version {held.version}",
            where={"target": target},
            next_step="give a folder that does not exist, or the base itself",
        )
    left = _following(base, state, deltas)
    if not left:
        raise DeltaBaseError(
            f"no delta leads on from version {state.version}",
            where={"base": base},
            next_step="use the base as it is",
        )
    work = target.parent / f".{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    try:
        chosen.on_step("build")
        work.mkdir()
        made, files = _built(base, work, left, state, chosen, every_file=True)
        chosen.on_step("copy-assets")
        _copy_assets(base, work, set(files))
        chosen.on_step("write-state")
        write_state(work, made)
        sync_folder(work)
        chosen.on_step("rename")
        work.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    chosen.on_step("done")
    return made


def _copy_assets(base: Path, work: Path, weights: set[str]) -> None:
    for path in sorted(base.rglob("*")):
        part = path.relative_to(base)
        if part.parts[0] == SYNC_FOLDER or str(part) in weights or str(part) == MANIFEST_FILE:
            continue  # the manifest has the base's digests, the state the base's version
        if path.is_dir():
            (work / part).mkdir(parents=True, exist_ok=True)
        else:
            (work / part).parent.mkdir(parents=True, exist_ok=True)
            write_whole(work / part, path.read_bytes())


def _update(folder: Path, deltas: Sequence[Delta], chosen: ApplyOptions) -> FolderState:
    _finish(folder, chosen.on_step)
    state = _state_of(folder, chosen)
    left = _following(folder, state, deltas)
    if not left:
        return state
    work = folder / SYNC_FOLDER / NEXT_FOLDER
    try:
        chosen.on_step("build")
        work.mkdir()
        made, files = _built(folder, work, left, state, chosen, every_file=False)
        chosen.on_step("write-journal")
        sync_folder(work)
        journal = {
            "version": made.version, "lineage": made.lineage, "files": files,
            "tensors": {n: [e.length, e.digest] for n, (e,) in (made.tensors or {}).items()},
        }  # fmt: skip
        write_whole(folder / SYNC_FOLDER / JOURNAL_FILE, json.dumps(journal).encode())
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    _finish(folder, chosen.on_step)
    return made


def _finish(folder: Path, on_step: Callable[[str], None]) -> None:
    """Steps 3 and 4 of an update whose journal is there; without one, remove what was built."""
    sync = folder / SYNC_FOLDER
    work, path = sync / NEXT_FOLDER, sync / JOURNAL_FILE
    if not path.exists():
        shutil.rmtree(work, ignore_errors=True)
        return
    try:
        raw = cast("dict[str, object]", json.loads(path.read_bytes()))
        files = cast("list[str]", raw["files"])
        version, lineage = cast("int", raw["version"]), cast("str", raw["lineage"])
        digests = cast("dict[str, tuple[int, str]]", raw["tensors"])
    except (ValueError, KeyError) as error:
        raise DeltaFormatError(
            f"the journal of an update cannot be read: {error!r}",
            where={"file": path},
            next_step="remove the folder and seed it from a full version",
        ) from error
    on_step("invalidate")
    (sync / STATE_FILE).unlink(missing_ok=True)
    (folder / MANIFEST_FILE).unlink(missing_ok=True)  # it has the old version's digests
    sync_folder(sync)
    for file in files:
        on_step(f"replace {file}")
        if (work / file).exists():
            os.replace(work / file, folder / file)  # noqa: PTH105 - one call, on both
    sync_folder(folder)
    on_step("write-state")
    tensors = {n: (Extent(length=size, digest=d),) for n, (size, d) in digests.items()}
    write_state(folder, FolderState(version, lineage, tensors))
    on_step("clean-up")
    path.unlink()
    shutil.rmtree(work, ignore_errors=True)
    sync_folder(sync)
    on_step("done")
