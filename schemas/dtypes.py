"""Element types, by the codes of the safetensors format."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

DType: TypeAlias = Literal[
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U16", "I16", "F16", "BF16",
    "U32", "I32", "F32", "U64", "I64", "F64",
]  # fmt: skip

ITEM_BYTES: Final[dict[DType, int]] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element."""
