"""Events: bounded size, lossless codec, strict models, named refusals."""

from typing import Any

import ormsgpack
import pytest
from pydantic import ValidationError
from support.events import DIGEST, largest_events, small_events
from weightbus.schemas.codec import decode, encode
from weightbus.schemas.errors import MalformedEventError, UnknownSchemaVersionError
from weightbus.schemas.events import (
    EVENT_TYPES,
    MAX_CHUNK_TENSORS,
    MAX_EVENT_BYTES,
    AnyEvent,
    ChunkReady,
    ChunkTensor,
    VersionKey,
)


def _kind(event: AnyEvent) -> str:
    return event.kind


def test_samples_cover_every_event() -> None:
    assert {type(event) for event in small_events()} == set(EVENT_TYPES)
    assert {type(event) for event in largest_events()} == set(EVENT_TYPES)


@pytest.mark.parametrize("event", largest_events(), ids=_kind)
def test_the_largest_event_that_its_model_accepts_fits_into_a_message(event: AnyEvent) -> None:
    assert len(encode(event)) <= MAX_EVENT_BYTES


@pytest.mark.parametrize("event", [*small_events(), *largest_events()], ids=_kind)
def test_decoding_gives_the_same_event_and_encoding_the_same_bytes(event: AnyEvent) -> None:
    data = encode(event)
    assert decode(data) == event
    assert encode(decode(data)) == data


def test_a_chunk_with_one_tensor_too_many_is_refused() -> None:
    entry = ChunkTensor(index=0, offset=0, length=1, digest=DIGEST)
    chunk = next(event for event in small_events() if isinstance(event, ChunkReady))
    fields = chunk.model_dump() | {"tensors": [entry.model_dump()] * (MAX_CHUNK_TENSORS + 1)}
    with pytest.raises(ValidationError, match="at most 400"):
        ChunkReady.model_validate(fields)


@pytest.mark.parametrize("run_id", ["", "a.b", "a b", "a*", ">", "-", "x" * 65, "../up", "ä"])
def test_a_run_id_is_one_subject_token_and_one_path_segment(run_id: str) -> None:
    with pytest.raises(ValidationError):
        VersionKey(run_id=run_id, attempt=1, weight_version=0)


def test_unknown_optional_fields_pass() -> None:
    event = small_events()[2]
    data = ormsgpack.packb(event.model_dump() | {"added_later": 1})
    assert decode(data) == event


@pytest.mark.parametrize("wrong", [0, 2, "1", None])
def test_another_schema_version_is_refused_by_name(wrong: object) -> None:
    data = ormsgpack.packb(small_events()[2].model_dump() | {"schema_version": wrong})
    with pytest.raises(UnknownSchemaVersionError, match=r"this release reads 1.*sequence=9.*Next:"):
        decode(data, subject="wb.x", sequence=9)


_MALFORMED: list[tuple[bytes, str]] = [
    (b"", "is not msgpack"),
    (b"\xc1", "is not msgpack"),
    (ormsgpack.packb({"schema_version": 1, "kind": "no-such"}), "unknown event kind 'no-such'"),
    (ormsgpack.packb({"schema_version": 1}), "unknown event kind None"),
    (ormsgpack.packb({"schema_version": 1, "kind": "version-opened"}), "breaks its schema"),
]


@pytest.mark.parametrize(("data", "message"), _MALFORMED)
def test_bytes_that_are_no_event_are_named(data: bytes, message: str) -> None:
    with pytest.raises(MalformedEventError, match=message):
        decode(data, subject="wb.x", sequence=3)


@pytest.mark.parametrize("event", small_events(), ids=_kind)
def test_wrong_types_never_pass(event: AnyEvent) -> None:
    fields: dict[str, Any] = event.model_dump()
    for name, value in fields.items():
        if isinstance(value, int):
            with pytest.raises((MalformedEventError, UnknownSchemaVersionError)):
                decode(ormsgpack.packb(fields | {name: str(value)}))
