"""What a folder holds: the peers' `.weight_sync/state.json`, and our record beside it.

state.json `{"version": "000007"}` is what slime, miles, Stitch and SGLang read and write. Our
weightbus.json adds the lineage and the digest of every tensor, so that the base of the next delta
can be verified. A record of another version than state.json's is ignored: a peer has been here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from ..schemas.digest import PREFIX
from ..schemas.errors import DeltaBaseError, DeltaLockedError
from ..schemas.manifest import MANIFEST_FILE, Extent, Manifest
from .disk import write_whole

SYNC_FOLDER = ".weight_sync"
STATE_FILE = "state.json"
RECORD_FILE = "weightbus.json"
LOCK_FILE = "lock"
LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class FolderState:
    """The version of a folder.

    Args:
        version: its number, or None when the folder does not say.
        lineage: `run_id/attempt/nonce`, or empty when unknown.
        tensors: per tensor its runs of bytes with their xxh3-128; empty when unknown.
    """

    version: int | None = None
    lineage: str = ""
    tensors: Mapping[str, tuple[Extent, ...]] | None = None


def lineage_of(manifest: Manifest) -> str:
    """A version's lineage as one text."""
    key = manifest.version
    return f"{key.run_id}/{key.attempt}/{manifest.nonce}"


def read_state(folder: Path) -> FolderState:
    """What the folder says that it holds: our record, state.json or the manifest.

    Raises:
        DeltaBaseError: one of them cannot be read.
    """
    sync = folder / SYNC_FOLDER
    try:
        if (sync / STATE_FILE).exists():
            version = int(_json(sync / STATE_FILE)["version"])
            return _recorded(sync / RECORD_FILE, version) or FolderState(version)
        if (folder / MANIFEST_FILE).exists():
            text = (folder / MANIFEST_FILE).read_bytes()
            manifest = Manifest.model_validate_json(text)
            tensors = {t.name: tuple(t.extents) for s in manifest.shards for t in s.tensors}
            return FolderState(manifest.version.weight_version, lineage_of(manifest), tensors)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DeltaBaseError(
            f"the folder does not say readably which version it holds: {error}",
            where={"folder": folder},
            next_step="seed it again from a full version",
        ) from error
    return FolderState()


def _json(path: Path) -> dict[str, str]:
    return cast("dict[str, str]", json.loads(path.read_bytes()))


def _recorded(path: Path, version: int) -> FolderState | None:
    if not path.exists():
        return None
    raw = cast("dict[str, object]", json.loads(path.read_bytes()))
    if raw["version"] != version:
        return None
    digests = cast("dict[str, list[object]]", raw["tensors"])
    tensors = {
        name: (Extent.model_validate({"length": size, "digest": f"{PREFIX}{digest}"}),)
        for name, (size, digest) in digests.items()
    }
    return FolderState(version, str(raw["lineage"]), tensors)


def write_state(folder: Path, state: FolderState) -> None:
    """Record what the folder holds now; state.json last, it is what others go by."""
    sync = folder / SYNC_FOLDER
    sync.mkdir(exist_ok=True)
    record = {
        "version": state.version,
        "lineage": state.lineage,
        "tensors": {
            name: [extents[0].length, extents[0].digest.removeprefix(PREFIX)]
            for name, extents in (state.tensors or {}).items()
        },
    }
    write_whole(sync / RECORD_FILE, json.dumps(record).encode())
    write_whole(sync / STATE_FILE, json.dumps({"version": f"{state.version:06d}"}).encode())


@contextlib.contextmanager
def locked(folder: Path, timeout_s: float, *, whole: bool = False) -> Generator[None]:
    """Hold the folder's lock, the one that SGLang's `/pull_weights` takes too.

    Args:
        folder: what is rebuilt, or with `whole` the folder in which a new one is made.
        timeout_s: how long to wait for it.
        whole: lock the folder itself, which leaves no file in it.

    Raises:
        DeltaLockedError: somebody else held it for `timeout_s`.
    """
    sync = folder / SYNC_FOLDER
    (folder if whole else sync).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    flags = os.O_RDONLY if whole else os.O_RDWR | os.O_CREAT
    file = os.open(folder if whole else sync / LOCK_FILE, flags | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DeltaLockedError(
                        f"another process has held the folder's lock for {timeout_s} s",
                        where={"folder": folder},
                        next_step="find out who rebuilds this folder; give each agent its own",
                    ) from error
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(file)  # which gives the lock back
