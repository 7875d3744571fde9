"""Names that a rank uses for its tensors -> names that are the same on every rank.

Megatron numbers layers from 0 in each pipeline chunk and experts from 0 on each expert-parallel
rank. Everything else of a name is kept, in both spec namings (Megatron's own modules and
TransformerEngine's), so that a message and a trainer's log speak of the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_INDEXED = re.compile(r"^(?P<path>.*?\blayers\.\d+)\.")
_SEQUENTIAL_EXPERT = re.compile(r"(\.local_experts\.)(\d+)(?=\.)")
_GROUPED_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)$")


def is_expert(name: str) -> bool:
    """Whether the tensor belongs to a routed expert (shared experts are ordinary MLPs)."""
    return ".experts." in name


def global_name(name: str, layer_numbers: Mapping[str, int], first_expert: int) -> str:
    """The name of a tensor that every rank agrees about.

    Args:
        name: the local name, without wrapper prefixes.
        layer_numbers: module path of an indexed layer (`decoder.layers.0`, `mtp.layers.0`) -> its
            number in the whole model, from 1, as Megatron's `layer_number` says it. A layer that
            is not in there keeps its number. Uneven stages and virtual stages need nothing else.
        first_expert: number, from 0 in the whole model, of this rank's first routed expert.
    """
    match = _INDEXED.match(name)
    if match is not None and match["path"] in layer_numbers:
        stem = match["path"].rsplit(".", 1)[0]
        name = f"{stem}.{layer_numbers[match['path']] - 1}{name[match.end('path') :]}"

    def shift(expert: re.Match[str]) -> str:
        return f"{expert[1]}{int(expert[2]) + first_expert}"

    name, found = _SEQUENTIAL_EXPERT.subn(shift, name)
    return name if found else _GROUPED_EXPERT.sub(shift, name)
