"""What a version must contain: names, dtypes and shapes, taken from the origin checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..schemas.digest import digest_of
from ..schemas.dtypes import DType
from ..schemas.errors import OriginError
from ..schemas.hf_folder import read_folder


class Expected(NamedTuple):
    """One Hugging Face tensor."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The tensors that a version must consist of, by Hugging Face name."""

    tensors: Mapping[str, Expected]

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[DType, tuple[int, ...]]]) -> Expectation:
        """From (dtype, shape) by name."""
        ordered = {name: Expected(*tensors[name]) for name in sorted(tensors)}
        return cls(MappingProxyType(ordered))

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
        return cls.of({name: (t.entry.dtype, t.entry.shape) for name, t in found.items()})

    def digest(self) -> str:
        """The digest of names, dtypes and shapes."""
        return digest_of(
            json.dumps([[name, *spec] for name, spec in self.tensors.items()]).encode()
        )
