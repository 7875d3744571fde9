"""The streams and the bucket: declared here, created, and compared with the server's answer.

    WEIGHTBUS                 wb.>    the events: one message per subject, for ever
    WEIGHTBUS-REPORTS         wbr.>   engine reports: the newest ones
    OBJ_weightbus-blobs               bucket of blobs (a standard NATS object store)

Nothing in the event stream expires by itself: an attempt's layouts are needed as long as the run
lives. When it is full it refuses (`discard: new`) instead of forgetting; see docs/bus.md for making
room.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..schemas.errors import ConfigError, StreamMismatchError
from .errors import STREAM_EXISTS, STREAM_NOT_FOUND, RefusedError, may_pass
from .subjects import EVENTS_FILTER, EVENTS_ROOT, REPORTS_FILTER, REPORTS_ROOT

EVENT_STREAM = "WEIGHTBUS"
REPORT_STREAM = "WEIGHTBUS-REPORTS"
BLOB_BUCKET = "weightbus-blobs"
BLOB_STREAM = f"OBJ_{BLOB_BUCKET}"
BLOB_CHUNKS = f"$O.{BLOB_BUCKET}.C"
BLOB_META = f"$O.{BLOB_BUCKET}.M"

MAX_MESSAGE_BYTES = 128 * 1024
"""Payload and headers of one message of either stream; an event is at most half of it."""
_DAY_S = 24 * 3600
_NS = 10**9
_READER_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """What an installation may choose. `replicas` 1 or 3; the rest in bytes and seconds."""

    replicas: int = 1
    events_max_bytes: int = 4 * 1024**3
    reports_max_bytes: int = 256 * 1024**2
    reports_max_age_s: int = 30 * _DAY_S
    blobs_max_bytes: int = 1024**3

    def __post_init__(self) -> None:
        if self.replicas not in (1, 3, 5):
            raise ConfigError("replicas is 1, 3 or 5", where={"replicas": self.replicas})
        sizes = (self.events_max_bytes, self.reports_max_bytes, self.blobs_max_bytes)
        if min(sizes) <= 0 or self.reports_max_age_s <= 0:
            raise ConfigError("stream limits are positive", where={"limits": self})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """One stream as we want it. Sizes in bytes, times in seconds, 0: without limit."""

    name: str
    description: str
    subjects: tuple[str, ...]
    max_bytes: int
    replicas: int
    max_age_s: int = 0
    max_msgs_per_subject: int = -1
    max_msg_bytes: int = -1
    discard: Literal["new", "old"] = "new"
    discard_new_per_subject: bool = False
    deny_delete: bool = False
    allow_direct: bool = False
    allow_rollup: bool = False
    duplicate_window_s: int = 120

    def request(self) -> dict[str, object]:
        """The configuration as JetStream's API spells it."""
        return {
            "name": self.name,
            "description": self.description,
            "subjects": list(self.subjects),
            "retention": "limits",
            "storage": "file",
            "discard": self.discard,
            "discard_new_per_subject": self.discard_new_per_subject,
            "max_bytes": self.max_bytes,
            "max_age": self.max_age_s * _NS,
            "max_msgs": -1,
            "max_msgs_per_subject": self.max_msgs_per_subject,
            "max_msg_size": self.max_msg_bytes,
            "max_consumers": -1,
            "num_replicas": self.replicas,
            "duplicate_window": self.duplicate_window_s * _NS,
            "no_ack": False,
            "sealed": False,
            "deny_delete": self.deny_delete,
            "deny_purge": False,
            "allow_rollup_hdrs": self.allow_rollup,
            "allow_direct": self.allow_direct,
            "compression": "none",
        }


TUNABLE = frozenset({"max_bytes", "max_age", "num_replicas", "duplicate_window", "description"})
"""Fields that an operator may have chosen otherwise; connecting accepts what it finds."""


def declared(limits: StreamLimits | None = None) -> tuple[StreamSpec, StreamSpec, StreamSpec]:
    """The event stream, the report stream and the bucket's stream."""
    chosen = StreamLimits() if limits is None else limits
    return (
        StreamSpec(
            name=EVENT_STREAM,
            description="weightbus: events of weight versions, one per subject",
            subjects=(EVENTS_FILTER,),
            max_bytes=chosen.events_max_bytes,
            replicas=chosen.replicas,
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_msg_bytes=MAX_MESSAGE_BYTES,
            deny_delete=True,
        ),
        StreamSpec(
            name=REPORT_STREAM,
            description="weightbus: engine reports",
            subjects=(REPORTS_FILTER,),
            max_bytes=chosen.reports_max_bytes,
            replicas=chosen.replicas,
            max_age_s=chosen.reports_max_age_s,
            max_msg_bytes=MAX_MESSAGE_BYTES,
            discard="old",
        ),
        StreamSpec(
            name=BLOB_STREAM,
            description="weightbus: layouts by digest",
            subjects=(f"{BLOB_CHUNKS}.>", f"{BLOB_META}.>"),
            max_bytes=chosen.blobs_max_bytes,
            replicas=chosen.replicas,
            allow_direct=True,
            allow_rollup=True,
        ),
    )


def stream_of(subject: str) -> str:
    """The stream that a subject or filter belongs to.

    Raises:
        ConfigError: neither an event nor a report subject.
    """
    root = subject.partition(".")[0]
    if root == EVENTS_ROOT:
        return EVENT_STREAM
    if root == REPORTS_ROOT:
        return REPORT_STREAM
    raise ConfigError(
        "this subject belongs to no stream of weightbus",
        where={"subject": subject},
        next_step=f"subjects begin with {EVENTS_ROOT}. or {REPORTS_ROOT}.",
    )


def check_subject(subject: str, stream: str) -> None:
    """Refuse to publish on a filter, or on a subject of another stream.

    Raises:
        ConfigError: with the subject.
    """
    if stream_of(subject) != stream or "*" in subject or ">" in subject:
        raise ConfigError(
            "this is not a subject of that stream",
            where={"subject": subject, "stream": stream},
            next_step="build subjects with weightbus.bus.subjects",
        )


def check_read(filters: Sequence[str], start_sequence: int, name: str | None) -> None:
    """Refuse arguments that `Bus.read` cannot mean.

    Raises:
        ConfigError: no filter, filters of two streams, a negative sequence, an impossible name.
    """
    if not filters or len({stream_of(subject) for subject in filters}) != 1:
        raise ConfigError(
            "a reader reads one stream: give filters of wb. or filters of wbr.",
            where={"filters": list(filters)},
        )
    if start_sequence < 1:
        raise ConfigError("sequences begin at 1", where={"start_sequence": start_sequence})
    if name is not None and _READER_NAME.fullmatch(name) is None:
        raise ConfigError(
            "a reader's name is made of letters, digits, _ and -", where={"name": name}
        )


class Api(Protocol):
    """What this module needs of a connection."""

    async def call(
        self,
        operation: str,
        body: dict[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request of JetStream's API."""
        ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A field in which the server's stream is not the declared one."""

    stream: str
    field: str
    declared: object
    found: object

    def __str__(self) -> str:
        return f"{self.stream}.{self.field}: declared {self.declared!r}, found {self.found!r}"


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """What the server says about one stream; sizes in bytes. All zero when it does not exist."""

    name: str
    exists: bool
    differences: tuple[Difference, ...] = ()
    messages: int = 0
    nbytes: int = 0
    max_bytes: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    consumers: int = 0


def diff(spec: StreamSpec, found: dict[str, Any]) -> tuple[Difference, ...]:
    """Compare a declaration with the configuration in the server's answer, field by field."""
    return tuple(
        Difference(spec.name, field, wanted, found.get(field))
        for field, wanted in spec.request().items()
        # The server leaves out what is empty or false.
        if found.get(field, type(wanted)()) != wanted
    )


async def _info(api: Api, name: str) -> dict[str, Any] | None:
    try:
        return await api.call(f"STREAM.INFO.{name}")
    except RefusedError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        return None


async def _apply(api: Api, spec: StreamSpec, *, update: bool) -> tuple[Difference, ...]:
    info = await _info(api, spec.name)
    if info is None:
        try:
            info = await api.call(f"STREAM.CREATE.{spec.name}", spec.request())
        except RefusedError as error:
            if may_pass(error):
                raise
            # Somebody else created it between our question and our request.
            info = await _info(api, spec.name) if error.err_code == STREAM_EXISTS else None
            if info is None:
                raise StreamMismatchError(
                    f"the stream cannot be created: {error.what}",
                    where={"stream": spec.name, **error.where},
                    next_step="give the server's JetStream more room, or choose smaller limits",
                ) from error
    found = diff(spec, info["config"])
    if found and update:
        try:
            info = await api.call(f"STREAM.UPDATE.{spec.name}", spec.request())
        except RefusedError as error:
            return (*found, Difference(spec.name, "(update)", "accepted", error.what))
        found = diff(spec, info["config"])
    return found


async def ensure(api: Api, specs: Sequence[StreamSpec], *, update: bool = True) -> None:
    """Create what is missing, update what differs, and compare the answers with the declaration.

    Args:
        api: the connection.
        specs: the declared streams.
        update: False leaves existing streams as they are and accepts other limits and replicas.

    Raises:
        StreamMismatchError: with every difference that remains.
    """
    remaining: list[Difference] = []
    for spec in specs:
        differences = await _apply(api, spec, update=update)
        remaining += [d for d in differences if update or d.field not in TUNABLE]
    if remaining:
        raise StreamMismatchError(
            "the server's streams are not the declared ones:\n  "
            + "\n  ".join(str(difference) for difference in remaining),
            next_step="run `weightbus bus init`; a field that cannot be changed needs the stream "
            "deleted, when no run uses it",
        )


async def status(api: Api, specs: Sequence[StreamSpec]) -> tuple[StreamStatus, ...]:
    """What the server has, without changing anything."""
    answers: list[StreamStatus] = []
    for spec in specs:
        info = await _info(api, spec.name)
        if info is None:
            answers.append(StreamStatus(spec.name, exists=False))
            continue
        state = info["state"]
        answers.append(
            StreamStatus(
                spec.name,
                exists=True,
                differences=diff(spec, info["config"]),
                messages=state["messages"],
                nbytes=state["bytes"],
                max_bytes=info["config"]["max_bytes"],
                first_sequence=state["first_seq"],
                last_sequence=state["last_seq"],
                consumers=state["consumer_count"],
            )
        )
    return tuple(answers)


async def verify(api: Api, specs: Sequence[StreamSpec]) -> tuple[Difference, ...]:
    """Every difference, without changing anything; a missing stream is one."""
    found: list[Difference] = []
    for answer in await status(api, specs):
        if not answer.exists:
            found.append(Difference(answer.name, "(stream)", "exists", "missing"))
        found += answer.differences
    return tuple(found)
