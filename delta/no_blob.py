"""Why a codec gave no blob."""

from __future__ import annotations

import enum


class NoBlob(enum.Enum):
    """Why `encode` gave no blob."""

    UNCHANGED = "unchanged"  # the bytes are equal
    TOO_DIFFERENT = "too different"  # another method, or the whole tensor, is smaller
