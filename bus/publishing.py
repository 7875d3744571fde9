"""One publication to a stream, and what its refusals mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..schemas.errors import BusUnavailableError, EventTooLargeError, StreamFullError
from .connection import Connection
from .errors import MESSAGE_TOO_LARGE, RESOURCES_EXCEEDED, STORE_FAILED, RefusedError, refusal
from .interface import Receipt

_OVERHEAD_BYTES = 1024
"""More than the headers, the subject and the record of one message take."""
_NEXT_STEP_FULL = "make room: purge finished runs, or raise the limit (see docs/bus.md)"


async def publish(
    connection: Connection,
    stream: str,
    subject: str,
    data: bytes,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
) -> Receipt:
    """Publish once and wait for the acknowledgement of durable storage.

    Raises:
        StreamFullError: a limit of the stream, account or server is reached.
        EventTooLargeError: over the stream's message size.
        BusUnavailableError: no answer, or a trouble of the server that may pass.
        RefusedError: any other refusal.
    """
    answer = await connection.request(
        subject, data, headers={"Nats-Expected-Stream": stream, **headers}, timeout_s=timeout_s
    )
    ack: dict[str, Any] = json.loads(answer.data)
    if "error" in ack:
        raise await _meaning(
            connection, stream, subject, len(data), refusal("a message", ack["error"])
        )
    return Receipt(int(ack["seq"]), bool(ack.get("duplicate", False)))


async def _meaning(
    connection: Connection, stream: str, subject: str, nbytes: int, error: RefusedError
) -> Exception:
    where = {"stream": stream, "subject": subject, "err_code": error.err_code}
    if error.err_code == MESSAGE_TOO_LARGE:
        return EventTooLargeError(error.what, where=where, next_step="send less in one message")
    if error.err_code in RESOURCES_EXCEEDED:
        return StreamFullError(error.what, where=where, next_step=_NEXT_STEP_FULL)
    if error.err_code == STORE_FAILED and await _at_limit(connection, stream, nbytes):
        return StreamFullError(error.what, where=where, next_step=_NEXT_STEP_FULL)
    if error.code >= 500:
        return BusUnavailableError(
            error.what, where=where, next_step="look at the server's log and its disk"
        )
    return error


async def _at_limit(connection: Connection, stream: str, nbytes: int) -> bool:
    """Whether such a message does not fit: tells a full stream from a failing disk."""
    info = await connection.call(f"STREAM.INFO.{stream}")
    config, state = info["config"], info["state"]
    needed = nbytes + _OVERHEAD_BYTES
    full_bytes = config["max_bytes"] > 0 and state["bytes"] + needed > config["max_bytes"]
    full_messages = config["max_msgs"] > 0 and state["messages"] >= config["max_msgs"]
    return full_bytes or full_messages
