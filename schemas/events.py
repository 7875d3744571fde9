"""The events on the stream: what happened to which version, small enough for one message each.

    attempt-opened ─ layout-published (one per producer)              once per attempt
    version-opened ─ chunk-ready … ─ producer-sealed (per producer)
                   ─ shard-persisted (per shard) ─ version-complete │ version-aborted
                   ─ version-retired                                  per version
    engine-report                                                     second stream

Every event but the report is published once (see bus.subjects: one subject, one message). Events of
one kind that several processes may publish (version-opened by each producer, the outcome by each
writer) have the same bytes from all of them, so the second publisher finds its own message there.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from .base import Count, Digest, Frozen, LongText, Seq, ShortName, ShortText, Token, Uri
from .layout import Naming

MAX_EVENT_BYTES = 64 * 1024
MAX_CHUNK_TENSORS = 400
"""Tensors in one chunk: with the longest numbers, 400 entries stay below MAX_EVENT_BYTES."""
MAX_REPLICAS = 400
"""Digests of replicas in one sealing event; the same bound."""


class VersionKey(Frozen):
    """The identity of a version. Versions of different runs or attempts never mix."""

    run_id: Token
    attempt: Count
    weight_version: Count

    def __str__(self) -> str:
        return f"{self.run_id}/{self.attempt}/v{self.weight_version:06d}"


class Location(Frozen):
    """Where bytes are: `file:///path`, `shm://name`; `offset` and `length` in bytes."""

    uri: Uri
    offset: Count
    length: Count


class ChunkTensor(Frozen):
    """One whole local tensor in a chunk: `offset` is relative to the chunk's location."""

    index: Count
    offset: Count
    length: Count
    digest: Digest


class Event(Frozen):
    """Base of all events."""

    schema_version: Literal[1] = 1


class AttemptOpened(Event):
    """A trainer (re)started: a new attempt of the run, with `producers` producers.

    `nonce` tells two trainers of the same run apart: the second to come gets the next attempt.
    `family` is the conversion family; empty means: by `model_type` of the origin's config.json.
    """

    kind: Literal["attempt-opened"] = "attempt-opened"
    run_id: Token
    attempt: Count
    nonce: ShortText
    producers: Annotated[int, Field(ge=1)]
    naming: Naming
    family: ShortText = ""
    origin: ShortText


class LayoutPublished(Event):
    """A producer's layout lies in the bucket under `layout_digest`."""

    kind: Literal["layout-published"] = "layout-published"
    run_id: Token
    attempt: Count
    rank: Count
    layout_digest: Digest
    tensors: Count
    nbytes: Count


class VersionOpened(Event):
    """A version begins. The first producer's message stands; the others must agree with it."""

    kind: Literal["version-opened"] = "version-opened"
    version: VersionKey
    producers: Annotated[int, Field(ge=1)]
    step: Count | None = None


class ChunkReady(Event):
    """Some whole local tensors of one producer lie at one location."""

    kind: Literal["chunk-ready"] = "chunk-ready"
    version: VersionKey
    rank: Count
    chunk: Count
    location: Location
    tensors: Annotated[Seq[ChunkTensor], Field(max_length=MAX_CHUNK_TENSORS)]


class ReplicaDigest(Frozen):
    """The digest of a local tensor that another producer publishes, as in chunk events."""

    index: Count
    digest: Digest


class ProducerSealed(Event):
    """A producer has published all of its `chunks` chunks of the version.

    `replicas`: digests of some of the tensors that it holds and does not own (others in each
    version), to be compared with those of their owners.
    """

    kind: Literal["producer-sealed"] = "producer-sealed"
    version: VersionKey
    rank: Count
    chunks: Count
    tensors: Count
    nbytes: Count
    replicas: Annotated[Seq[ReplicaDigest], Field(max_length=MAX_REPLICAS)] = ()


class ShardPersisted(Event):
    """A writer has made one shard durable, in the version's hidden folder.

    `digest` is the shard's, `table_digest` that of the writer's table of tensors beside it (both
    as in schemas.manifest). `plan_digest` must be the same from every writer.
    """

    kind: Literal["shard-persisted"] = "shard-persisted"
    version: VersionKey
    plan_digest: Digest
    writer: Count
    writers: Annotated[int, Field(ge=1)]
    shard: Count
    shards: Annotated[int, Field(ge=1)]
    file: ShortText
    nbytes: Count
    digest: Digest
    table_digest: Digest


class VersionComplete(Event):
    """The version is visible: `directory` holds it whole, with its manifest."""

    kind: Literal["version-complete"] = "version-complete"
    version: VersionKey
    directory: Uri
    manifest_digest: Digest
    shards: Annotated[int, Field(ge=1)]
    nbytes: Count


class VersionAborted(Event):
    """The version ended without becoming visible. `error` is the name of a weightbus error."""

    kind: Literal["version-aborted"] = "version-aborted"
    version: VersionKey
    error: ShortText
    message: LongText
    by: ShortText


class VersionRetired(Event):
    """The version's directory is being removed; nobody may start to read it."""

    kind: Literal["version-retired"] = "version-retired"
    version: VersionKey
    directory: Uri
    reason: ShortText


class EngineReport(Event):
    """What an agent did with a version. `timings_s` are the seconds spent in each state."""

    kind: Literal["engine-report"] = "engine-report"
    version: VersionKey
    engine: Token
    engine_url: ShortText
    engine_version: ShortText = ""
    outcome: Literal["serving", "failed", "skipped"]
    state: ShortText
    serving_version: ShortText = ""
    error: ShortText = ""
    message: LongText = ""
    timings_s: dict[ShortName, float] = Field(default_factory=dict, max_length=32)


AnyEvent: TypeAlias = (
    AttemptOpened
    | LayoutPublished
    | VersionOpened
    | ChunkReady
    | ProducerSealed
    | ShardPersisted
    | VersionComplete
    | VersionAborted
    | VersionRetired
    | EngineReport
)
Outcome: TypeAlias = VersionComplete | VersionAborted
"""Exactly one of them ends a version: they share a subject."""
EVENT_TYPES: tuple[type[AnyEvent], ...] = (
    AttemptOpened,
    LayoutPublished,
    VersionOpened,
    ChunkReady,
    ProducerSealed,
    ShardPersisted,
    VersionComplete,
    VersionAborted,
    VersionRetired,
    EngineReport,
)
