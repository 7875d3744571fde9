"""The pydantic base of everything that crosses a process, and the types that all models share."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Item = TypeVar("Item")


class Frozen(BaseModel):
    """An immutable, strictly typed value.

    Unknown fields pass (a newer peer may add optional ones); wrong types never do.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def _to_tuple(value: object) -> object:
    # msgpack and JSON know only arrays; the strict models hold tuples.
    return tuple(value) if isinstance(value, list) else value


Seq: TypeAlias = Annotated[tuple[Item, ...], BeforeValidator(_to_tuple)]
"""A tuple that also accepts the list into which msgpack and JSON turn it."""

_TOKEN = r"^[A-Za-z0-9_-]{1,64}$"  # noqa: S105 - a NATS subject token, not a password


def _subject_token(value: str) -> str:
    if value == "-":
        raise ValueError("a single dash is reserved")
    return value


Token: TypeAlias = Annotated[str, Field(pattern=_TOKEN), AfterValidator(_subject_token)]
"""A name that is one NATS subject token and one path segment: letters, digits, `_` and `-`."""

Digest: TypeAlias = Annotated[str, Field(pattern=r"^xxh3-128:[0-9a-f]{32}$")]
"""`xxh3-128:` and 32 lower-case hex digits (see schemas.digest)."""

Count: TypeAlias = Annotated[int, Field(ge=0, le=2**62)]
"""A size in bytes, a number of things or an index: never negative."""

ShortText: TypeAlias = Annotated[str, Field(max_length=512)]
Uri: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
ShortName: TypeAlias = Annotated[str, Field(max_length=64)]
LongText: TypeAlias = Annotated[str, Field(max_length=8192)]
