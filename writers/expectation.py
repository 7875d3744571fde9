"""What a version must contain: names, dtypes and shapes, taken from the origin checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

from ..schemas.digest import digest_of
from ..schemas.dtypes import DType
from ..schemas.errors import OriginError
from ..schemas.hf_folder import read_folder
from ..schemas.manifest import INDEX_FILE


class Expected(NamedTuple):
    """One Hugging Face tensor; None where only its name is known (an index without files)."""

    dtype: DType | None
    shape: tuple[int, ...] | None


class Place(NamedTuple):
    """Where the origin checkpoint holds a tensor: its file's name, its first byte there."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Expectation:
    """The tensors that a version must consist of, by Hugging Face name.

    `places` says where their bytes are in the origin checkpoint, if it was read from its files.
    """

    tensors: Mapping[str, Expected]
    places: Mapping[str, Place] = field(default_factory=dict[str, Place])

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, tuple[DType | None, tuple[int, ...] | None]],
        places: Mapping[str, Place] | None = None,
    ) -> Expectation:
        """From (dtype, shape) by name, and places."""
        ordered = {name: Expected(*tensors[name]) for name in sorted(tensors)}
        found = {} if places is None else dict(places)
        return cls(MappingProxyType(ordered), MappingProxyType(found))

    @classmethod
    def from_index(cls, folder: Path) -> Expectation:
        """From a checkpoint's index alone: names without dtypes and shapes, no weights needed.

        Raises:
            OriginError: no index, or one that cannot be read.
        """
        path = folder / INDEX_FILE
        try:
            names = cast("dict[str, str]", json.loads(path.read_bytes())["weight_map"])
            return cls.of({str(name): (None, None) for name in names})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OriginError(
                f"{INDEX_FILE} cannot be read: {error!r}",
                where={"folder": folder},
                next_step="give a checkpoint folder with its index, or certify by its config",
            ) from error

    @classmethod
    def from_folder(cls, folder: Path) -> Expectation:
        """From the headers of a checkpoint folder's safetensors files; no tensor is loaded.

        Raises:
            OriginError: no weights, or an index that does not fit them.
            ShardCorruptError: a file that is not whole.
        """
        try:
            found = read_folder(folder)
        except OriginError as error:
            raise OriginError(
                f"the expected tensors cannot be read from the origin checkpoint: {error.what}",
                where=error.where,
                next_step="give the whole folder that training started from, with its safetensors "
                "files: their headers say which tensors every version must contain",
            ) from error
        return cls.of(
            {name: (t.entry.dtype, t.entry.shape) for name, t in found.items()},
            {name: Place(t.file.name, t.entry.offset) for name, t in found.items()},
        )

    def digest(self) -> str:
        """The digest of names, dtypes and shapes."""
        return digest_of(
            json.dumps([[name, *spec] for name, spec in self.tensors.items()]).encode()
        )
