"""Events as bytes: msgpack maps. The same event always gives the same bytes."""

from __future__ import annotations

from typing import Any, cast

import ormsgpack
from pydantic import ValidationError

from .errors import EventTooLargeError, MalformedEventError, UnknownSchemaVersionError
from .events import EVENT_TYPES, MAX_EVENT_BYTES, AnyEvent

_BY_KIND: dict[str, type[AnyEvent]] = {
    cast("str", event.model_fields["kind"].default): event for event in EVENT_TYPES
}
SCHEMA_VERSION = 1


def encode(event: AnyEvent) -> bytes:
    """Serialize an event.

    Raises:
        EventTooLargeError: over 64 KiB (the models' bounds make this a programming error).
    """
    data = ormsgpack.packb(event.model_dump())
    if len(data) > MAX_EVENT_BYTES:
        raise EventTooLargeError(
            f"a {event.kind} event of {len(data)} bytes is over {MAX_EVENT_BYTES}",
            next_step="publish fewer tensors per chunk",
        )
    return data


def decode(data: bytes, *, subject: str = "", sequence: int | None = None) -> AnyEvent:
    """Parse an event.

    Args:
        data: what `encode` made, perhaps by another release.
        subject: where it came from, for messages.
        sequence: its stream sequence, for messages.

    Raises:
        UnknownSchemaVersionError: another major schema version.
        MalformedEventError: not msgpack, an unknown kind, or a field that breaks its model.
    """
    where = {"subject": subject, "sequence": sequence}
    try:
        raw: object = ormsgpack.unpackb(data)
    except ormsgpack.MsgpackDecodeError as error:
        raise MalformedEventError(
            f"an event of {len(data)} bytes is not msgpack: {error}",
            where=where,
            next_step="find out who else publishes on this subject",
        ) from error
    fields = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    version = fields.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UnknownSchemaVersionError(
            f"an event has schema version {version!r}, this release reads {SCHEMA_VERSION}",
            where=where,
            next_step="run the same weightbus release on both sides",
        )
    kind = _BY_KIND.get(str(fields.get("kind")))
    if kind is None:
        raise MalformedEventError(
            f"unknown event kind {fields.get('kind')!r}; known are {', '.join(sorted(_BY_KIND))}",
            where=where,
            next_step="run the same weightbus release on both sides",
        )
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise MalformedEventError(
            f"a {fields.get('kind')} event breaks its schema: {error}",
            where=where,
            next_step="run the same weightbus release on both sides",
        ) from error
