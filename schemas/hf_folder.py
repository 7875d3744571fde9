"""An ordinary Hugging Face checkpoint folder: its config and its tensors, without their bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .errors import OriginError
from .manifest import INDEX_FILE
from .safetensors_format import TensorEntry, read_header

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor of a checkpoint folder and the file that holds it."""

    file: Path
    entry: TensorEntry


def read_config(folder: Path) -> dict[str, object]:
    """The folder's config.json.

    Raises:
        OriginError: no such folder, no config.json, or not a JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        raw: object = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise OriginError(
            f"cannot read {CONFIG_FILE}: {error}",
            where={"folder": folder},
            next_step="give the folder of the Hugging Face checkpoint that training started from",
        ) from error
    if not isinstance(raw, dict):
        raise OriginError(f"{CONFIG_FILE} is not a JSON object", where={"folder": folder})
    return cast("dict[str, object]", raw)


def read_folder(folder: Path) -> dict[str, FolderTensor]:
    """Every tensor of a checkpoint folder, by name, from the headers of its safetensors files.

    Raises:
        OriginError: no weights, an index that names an absent file or tensor, or a name that
            stands in two files.
        ShardCorruptError: a file that is not whole.
    """
    files = _weight_files(folder)
    found: dict[str, FolderTensor] = {}
    for file in files:
        for entry in read_header(file)[0]:
            if entry.name in found:
                raise OriginError(
                    f"tensor {entry.name} stands in {found[entry.name].file.name} and {file.name}",
                    where={"folder": folder},
                    next_step="remove the stale file; the folder mixes two checkpoints",
                )
            found[entry.name] = FolderTensor(file, entry)
    return found


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        single = folder / SINGLE_FILE
        if not single.exists():
            raise OriginError(
                f"neither {INDEX_FILE} nor {SINGLE_FILE}",
                where={"folder": folder},
                next_step="give a checkpoint folder with safetensors weights",
            )
        return [single]
    try:
        weight_map = cast("dict[str, str]", json.loads(index.read_bytes())["weight_map"])
        names = sorted(set(weight_map.values()))
        unsafe = [name for name in names if Path(name).name != name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise OriginError(
            f"{INDEX_FILE} cannot be used: {error!r}", where={"folder": folder}
        ) from error
    absent = [name for name in names if name not in unsafe and not (folder / name).is_file()]
    if unsafe or absent:
        raise OriginError(
            f"{INDEX_FILE} names files that are absent {absent} or outside the folder {unsafe}",
            where={"folder": folder},
            next_step="copy the whole checkpoint",
        )
    return [folder / name for name in names]
