"""Blobs in a NATS object store: written once, found by name.

The format is that of every NATS client's object store: chunks on `$O.<bucket>.C.<nuid>`, then one
message of metadata on `$O.<bucket>.M.<base64 of the name>`, which makes the blob visible. Chunks of
a put that died before its metadata are never read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from ..schemas.errors import AlreadyPublishedError, BlobMissingError, BusUnavailableError
from .connection import Connection
from .errors import NO_MESSAGE, WRONG_LAST_SEQUENCE, RefusedError
from .interface import Receipt
from .publishing import publish
from .streams import BLOB_BUCKET, BLOB_CHUNKS, BLOB_META, BLOB_STREAM

CHUNK_BYTES: Final = 128 * 1024
Answer = TypeVar("Answer")


def digest_of(data: bytes) -> str:
    """The digest as object stores spell it."""
    return "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def meta_subject(name: str) -> str:
    """Where a blob's metadata is."""
    return f"{BLOB_META}.{base64.urlsafe_b64encode(name.encode()).decode()}"


class _Meta(NamedTuple):
    sequence: int
    """Of the newest metadata on the subject, 0 when there is none."""
    entry: dict[str, Any] | None
    """None also when it says that the blob was deleted."""


class BlobStore:
    """Puts and gets, each repeated through reconnects until its time-out."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def put(self, name: str, data: bytes, *, timeout_s: float) -> None:
        """Store a blob under a name that nothing else has.

        Raises:
            AlreadyPublishedError: the name has other bytes.
            StreamFullError: the bucket is full.
            BusUnavailableError, BusClosedError.
        """
        steps = _Steps(self._connection, f"storing blob {name}", timeout_s)
        digest = digest_of(data)
        before = await steps.repeat(lambda _: self._meta(name))
        if before.entry is not None:
            _same_or_raise(name, before.entry, digest)
            return
        nuid = secrets.token_hex(11)
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            headers = {"Nats-Msg-Id": f"{nuid}.{number}"}
            await steps.publish(f"{BLOB_CHUNKS}.{nuid}", chunk, headers)
        entry = {
            "name": name,
            "bucket": BLOB_BUCKET,
            "nuid": nuid,
            "size": len(data),
            "chunks": len(chunks),
            "digest": digest,
            "mtime": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            "options": {"max_chunk_size": CHUNK_BYTES},
        }
        headers = {
            "Nats-Rollup": "sub",
            "Nats-Expected-Last-Subject-Sequence": str(before.sequence),
        }
        try:
            await steps.publish(meta_subject(name), json.dumps(entry).encode(), headers)
        except RefusedError as error:
            if error.err_code not in WRONG_LAST_SEQUENCE:
                raise
            await self._settle(steps, name, nuid, digest)

    async def _settle(self, steps: _Steps, name: str, nuid: str, digest: str) -> None:
        """Somebody put this name meanwhile, or our own metadata was stored and its ack lost."""
        standing = await steps.repeat(lambda _: self._meta(name))
        if standing.entry is None:
            raise BusUnavailableError(
                f"{steps.what}: it was removed meanwhile", next_step="put it again"
            )
        if standing.entry["nuid"] != nuid:
            ours: dict[str, object] = {"filter": f"{BLOB_CHUNKS}.{nuid}"}
            await steps.repeat(lambda _: self._connection.call(f"STREAM.PURGE.{BLOB_STREAM}", ours))
        _same_or_raise(name, standing.entry, digest)

    async def get(self, name: str, *, timeout_s: float) -> bytes:
        """Fetch a blob and check its digest.

        Raises:
            BlobMissingError: no blob of that name, or some of its chunks are gone.
            BusUnavailableError, BusClosedError.
        """
        steps = _Steps(self._connection, f"fetching blob {name}", timeout_s)
        entry = (await steps.repeat(lambda _: self._meta(name))).entry
        where = {"bucket": BLOB_BUCKET, "name": name}
        if entry is None:
            raise BlobMissingError(
                "the bucket has no blob of that name",
                where=where,
                next_step="put it first; an event may name a blob only after it is stored",
            )
        data = b"".join(await self._chunks(steps, entry))
        if digest_of(data) != entry["digest"]:
            raise BlobMissingError(
                f"the blob's chunks are not what was stored ({len(data)} of {entry['size']} bytes)",
                where=where,
                next_step="delete the blob and put it again",
            )
        return data

    async def _chunks(self, steps: _Steps, entry: dict[str, Any]) -> list[bytes]:
        chunks: list[bytes] = []
        sequence = 1
        for _ in range(int(entry["chunks"])):
            wanted: dict[str, object] = {
                "seq": sequence,
                "next_by_subj": f"{BLOB_CHUNKS}.{entry['nuid']}",
            }
            found = await steps.repeat(lambda _, w=wanted: self._message(w))
            if found is None:
                break
            chunks.append(base64.b64decode(found.get("data", "")))
            sequence = int(found["seq"]) + 1
        return chunks

    async def _meta(self, name: str) -> _Meta:
        found = await self._message({"last_by_subj": meta_subject(name)})
        if found is None:
            return _Meta(0, None)
        entry: dict[str, Any] = json.loads(base64.b64decode(found["data"]))
        return _Meta(int(found["seq"]), None if entry.get("deleted") else entry)

    async def _message(self, wanted: dict[str, object]) -> dict[str, Any] | None:
        try:
            answer = await self._connection.call(f"STREAM.MSG.GET.{BLOB_STREAM}", wanted)
        except RefusedError as error:
            if error.err_code != NO_MESSAGE:
                raise
            return None
        return answer["message"]


class _Steps:
    """Several repeated requests with one deadline."""

    def __init__(self, connection: Connection, what: str, timeout_s: float) -> None:
        self.what = what
        self._connection = connection
        self._deadline = time.monotonic() + timeout_s

    async def repeat(self, attempt: Callable[[float], Awaitable[Answer]]) -> Answer:
        return await self._connection.persist(
            attempt, timeout_s=self._deadline - time.monotonic(), what=self.what
        )

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> Receipt:
        return await self.repeat(
            lambda t: publish(self._connection, BLOB_STREAM, subject, data, headers, timeout_s=t)
        )


def _same_or_raise(name: str, entry: dict[str, Any], digest: str) -> None:
    if entry["digest"] != digest:
        raise AlreadyPublishedError(
            "the bucket has another blob under this name",
            where={"bucket": BLOB_BUCKET, "name": name, "size": entry["size"]},
            next_step="name blobs by the digest of their bytes",
        )
