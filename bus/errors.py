"""What the server's refusals mean: decisions hang on its numeric codes, never on its English."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..schemas.errors import BusError

WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
"""The subject holds a message already."""
STORE_FAILED = 10077
"""The stream's limit is reached, or the disk failed: look at the stream to tell which."""
RESOURCES_EXCEEDED = frozenset({10002, 10023, 10028, 10047})
"""A limit of the account or of the server."""
MESSAGE_TOO_LARGE = 10054
CONSUMER_NOT_FOUND = 10014
CONSUMER_EXISTS = frozenset({10013, 10148})
NO_MESSAGE = 10037
STREAM_NOT_FOUND = 10059
STREAM_EXISTS = 10058


class RefusedError(BusError):
    """The server answered a request with an error; `code` is HTTP-like, `err_code` JetStream's."""

    code: int
    err_code: int

    def __init__(
        self,
        what: str,
        *,
        where: Mapping[str, object] | None = None,
        next_step: str = "",
        code: int = 0,
        err_code: int = 0,
    ) -> None:
        self.code = code
        self.err_code = err_code
        super().__init__(what, where=where, next_step=next_step)


def may_pass(error: BusError) -> bool:
    """Whether the same request may succeed a moment later.

    A missing stream is in it: a cluster that starts says so before it has found its streams.
    """
    if isinstance(error, RefusedError):
        unavailable = error.code == 503 and error.err_code not in RESOURCES_EXCEEDED
        return unavailable or error.err_code == STREAM_NOT_FOUND
    return error.retryable


def refusal(operation: str, error: Mapping[str, Any]) -> RefusedError:
    """The error in an answer's `error` field."""
    code, err_code = int(error.get("code", 0)), int(error.get("err_code", 0))
    return RefusedError(
        f"the server refuses {operation}: {error.get('description', 'no description')}",
        where={"code": code, "err_code": err_code},
        next_step="look the number up in the server's documentation and in its log",
        code=code,
        err_code=err_code,
    )
