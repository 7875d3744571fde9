"""What one pull consumer sends us, checked: no lost delivery, no hidden gap. Pure bookkeeping.

A consumer numbers its deliveries 1, 2, 3, …: a hole there is a lost delivery, and the consumer is
`broken` (the reader makes another). A hole in the *stream's* numbers is normal, since other
messages lie there that our filters leave out, unless the stream has lost its beginning up to there:
messages behind such a hole are held until an audit has asked for the stream's first sequence.

Behind the tail no hole can hide anything: when all that was stored is delivered and requests are
waiting, whatever is stored later is delivered at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from .interface import Message

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Place(NamedTuple):
    """What a delivery's reply subject says; `pending`: messages for us that are left."""

    sequence: int
    delivery: int
    timestamp: datetime
    pending: int


def parse_place(reply: str) -> Place:
    """`$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<tries>.<sequence>.<delivery>.<ns>.<left>`."""
    tokens = reply.split(".")
    at = 5 if len(tokens) == 9 else 7
    nanoseconds = int(tokens[at + 2])
    return Place(
        int(tokens[at]),
        int(tokens[at + 1]),
        _EPOCH + timedelta(microseconds=nanoseconds // 1000),
        int(tokens[at + 3]),
    )


@dataclass(slots=True)
class Deliveries:
    """One consumer, as we know it."""

    last: int
    """Stream sequence up to which everything for us was delivered; first, where it begins."""
    delivered: int = 0
    """Consumer sequence of the last delivery."""
    requested: int = 0
    """Messages that our pull requests still ask for."""
    at_tail: bool = False
    audit: bool = False
    """An audit must end before anything is handed out: the consumer may be somebody else's now."""
    hole_from: int | None = None
    """First sequence of the first hole that no audit has seen."""
    broken: str = ""
    """Why the consumer must be replaced; empty while it is sound."""
    heard: float = field(default_factory=time.monotonic)
    """When it last sent anything, on the monotonic clock."""
    held: deque[Message] = field(default_factory=deque[Message])
    """Messages that wait for an audit."""
    _pulled: bool = False

    def request(self, batch: int) -> None:
        """A pull request for so many messages is about to be sent."""
        if self.requested <= 0:
            self.requested = 0
            # Nobody would have told us of a takeover while nothing was asked for.
            self.audit = self.audit or self._pulled
        self.requested += batch
        self._pulled = True

    def accept(self, subject: str, data: bytes, reply: str) -> Message | None:
        """Take a delivery; returns the message unless it must wait or is not to be trusted."""
        place = parse_place(reply)
        self.heard = time.monotonic()
        self.requested -= 1
        if self.broken:
            return None
        if place.delivery != self.delivered + 1 or place.sequence <= self.last:
            self.broken = (
                f"delivery {place.delivery} of message {place.sequence} after delivery "
                f"{self.delivered} of message {self.last}"
            )
            return None
        if place.sequence > self.last + 1 and not self.at_tail and self.hole_from is None:
            self.hole_from = self.last + 1
        self.delivered, self.last = place.delivery, place.sequence
        self.at_tail = place.pending == 0 and self.requested > 0
        message = Message(subject, data, place.sequence, place.timestamp)
        if self.held or self.audit or self.hole_from is not None:
            self.held.append(message)
            return None
        return message

    def on_status(self, headers: Mapping[str, str]) -> None:
        """Take a message without a message: heartbeat, expiry, or an end."""
        self.heard = time.monotonic()
        status = headers.get("Status", "")
        if status == "100":
            sent = int(headers.get("Nats-Last-Consumer", self.delivered))
            if sent > self.delivered:
                self.broken = f"deliveries {self.delivered + 1} to {sent} were lost"
        elif status == "408":  # the request is over, with so many messages unsent
            self.requested -= int(headers.get("Nats-Pending-Messages", self.requested))
        else:  # deleted, moved to another leader, server going down, ...: look what is true now
            self.broken = f"{status} {headers.get('Description', '')}".strip()

    def arrive_at_tail(self, stream_last: int) -> None:
        """The server has nothing for us up to this sequence that it has not delivered."""
        self.at_tail = True
        self.last = max(self.last, stream_last)

    def begin_audit(self) -> tuple[int, int | None]:
        """The number of held messages that this audit covers, and the first hole among them."""
        hole_from, self.hole_from = self.hole_from, None
        return len(self.held), hole_from

    def end_audit(self, covered: int) -> list[Message]:
        """The audit found nothing wrong; returns what may be handed out."""
        self.audit = False
        if self.hole_from is None:
            covered = len(self.held)  # what came meanwhile follows without a hole
        return [self.held.popleft() for _ in range(covered)]
