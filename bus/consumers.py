"""Our consumer on the server: made, asked for messages, looked at, removed.

A name has one consumer. Who creates it writes a mark of its own into the consumer's metadata, so
that a reader can tell its own from a successor's (ADR 0004).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

from ..schemas.errors import BusUnavailableError, ConfigError, ReaderReplacedError
from .connection import Connection
from .errors import CONSUMER_EXISTS, CONSUMER_NOT_FOUND, RefusedError

HEARTBEAT_S: Final = 2.0
_PULL_EXPIRES_S: Final = 30.0
_UNNAMED_LIFE_S: Final = 60
_MARK: Final = "weightbus-reader"
_NS: Final = 10**9


class Consumer:
    """One reader's consumer of a stream. Every method raises as `Connection.call`."""

    def __init__(
        self, connection: Connection, stream: str, filters: Sequence[str], name: str | None
    ) -> None:
        self.named = name is not None
        self.name = name if name is not None else f"weightbus-{secrets.token_hex(8)}"
        self.stream = stream
        self._filters = sorted(filters)
        self._connection = connection
        self._mark = secrets.token_hex(12)

    async def create(self, start_sequence: int) -> dict[str, Any]:
        """Create it anew; returns the server's description.

        Raises:
            BusUnavailableError: one of this name exists (try again after `delete`).
            ConfigError: the server made something else than was asked for.
        """
        # The place is the reader's own: nothing is acknowledged, nothing sent again (ADR 0003).
        config: dict[str, object] = {
            "name": self.name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start_sequence,
            "ack_policy": "none",
            "filter_subjects": self._filters,
            "replay_policy": "instant",
            "metadata": {_MARK: self._mark},
        }
        if self.named:
            config["durable_name"] = self.name
        else:
            config |= {"inactive_threshold": _UNNAMED_LIFE_S * _NS, "mem_storage": True}
        body = {"stream_name": self.stream, "action": "create", "config": config}
        try:
            info = await self._connection.call(f"CONSUMER.CREATE.{self.stream}.{self.name}", body)
        except RefusedError as error:
            if error.err_code in CONSUMER_EXISTS:
                raise BusUnavailableError("another reader of this name starts too") from error
            raise
        made = dict(info["config"])
        made["filter_subjects"] = sorted(made.get("filter_subjects") or [])
        wrong = [key for key in config if key != "metadata" and made.get(key) != config[key]]
        if wrong:
            raise ConfigError(
                "the server made another consumer than the one asked for: "
                + ", ".join(f"{key} {made.get(key)!r} for {config[key]!r}" for key in wrong),
                where={"stream": self.stream, "name": self.name},
                next_step="use nats-server 2.14 or newer",
            )
        return info

    async def info(self) -> dict[str, Any] | None:
        """The server's description; None when it is gone.

        Raises:
            ReaderReplacedError: the consumer of this name is another reader's.
        """
        try:
            info = await self._connection.call(f"CONSUMER.INFO.{self.stream}.{self.name}")
        except RefusedError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise
            return None
        if (info["config"].get("metadata") or {}).get(_MARK) != self._mark:
            raise ReaderReplacedError(
                "another reader of this name has taken over",
                where={"stream": self.stream, "name": self.name},
                next_step="two processes run with one name (the same writer index?): stop one",
            )
        return info

    async def delete(self) -> None:
        """Remove the consumer of this name, whoever's it is; nothing when there is none."""
        try:
            await self._connection.call(f"CONSUMER.DELETE.{self.stream}.{self.name}")
        except RefusedError as error:
            if error.err_code != CONSUMER_NOT_FOUND:
                raise

    async def pull(self, batch: int, inbox: str) -> None:
        """Ask for messages, to be sent to an inbox together with heartbeats."""
        body = {
            "batch": batch,
            "expires": int(_PULL_EXPIRES_S * _NS),
            "idle_heartbeat": int(HEARTBEAT_S * _NS),
        }
        subject = f"CONSUMER.MSG.NEXT.{self.stream}.{self.name}"
        await self._connection.send(
            f"{self._connection.config.api_prefix}.{subject}",
            json.dumps(body).encode(),
            reply=inbox,
        )
