"""One valid event of every kind, as large as its model allows or small."""

from __future__ import annotations

from weightbus.schemas.events import (
    MAX_CHUNK_TENSORS,
    MAX_REPLICAS,
    AnyEvent,
    AttemptOpened,
    ChunkReady,
    ChunkTensor,
    EngineReport,
    LayoutPublished,
    Location,
    ProducerSealed,
    ReplicaDigest,
    ShardPersisted,
    VersionAborted,
    VersionComplete,
    VersionKey,
    VersionOpened,
    VersionRetired,
)

BIG = 2**62
DIGEST = "xxh3-128:" + "9" * 32


def largest_events() -> list[AnyEvent]:
    """Every kind, each field at the largest value that its model accepts (4-byte characters)."""
    text, long_text, uri, token = (
        "\U0001f9ea" * 512,
        "\U0001f9ea" * 8192,
        "\U0001f9ea" * 1024,
        "r" * 64,
    )
    key = VersionKey(run_id=token, attempt=BIG, weight_version=BIG)
    chunk_tensor = ChunkTensor(index=BIG, offset=BIG, length=BIG, digest=DIGEST)
    return [
        AttemptOpened(
            run_id=token, attempt=BIG, nonce=text, producers=BIG, naming="megatron",
            family=text, origin=text,
        ),
        LayoutPublished(
            run_id=token, attempt=BIG, rank=BIG, layout_digest=DIGEST, tensors=BIG, nbytes=BIG
        ),
        VersionOpened(version=key, producers=BIG, step=BIG),
        ChunkReady(
            version=key, rank=BIG, chunk=BIG,
            location=Location(uri=uri, offset=BIG, length=BIG),
            tensors=(chunk_tensor,) * MAX_CHUNK_TENSORS,
        ),
        ProducerSealed(
            version=key, rank=BIG, chunks=BIG, tensors=BIG, nbytes=BIG,
            replicas=(ReplicaDigest(index=BIG, digest=DIGEST),) * MAX_REPLICAS,
        ),
        ShardPersisted(
            version=key, plan_digest=DIGEST, writer=BIG, writers=BIG, shard=BIG, shards=BIG,
            file=text, nbytes=BIG, digest=DIGEST, table_digest=DIGEST,
        ),
        VersionComplete(version=key, directory=uri, manifest_digest=DIGEST, shards=BIG, nbytes=BIG),
        VersionAborted(version=key, error=text, message=long_text, by=text),
        VersionRetired(version=key, directory=uri, reason=text),
        EngineReport(
            version=key, engine=token, engine_url=text, engine_version=text, outcome="serving",
            state=text, serving_version=text, error=text, message=long_text,
            timings_s={f"{number:02d}" + "\U0001f9ea" * 62: 1e300 for number in range(32)},
        ),
    ]  # fmt: skip


def small_events() -> list[AnyEvent]:
    """Every kind once, with small numbers that differ from field to field."""
    key = VersionKey(run_id="run-1", attempt=2, weight_version=7)
    return [
        AttemptOpened(
            run_id="run-1", attempt=2, nonce="n", producers=4, naming="megatron", origin="/origin"
        ),
        LayoutPublished(
            run_id="run-1", attempt=2, rank=3, layout_digest=DIGEST, tensors=5, nbytes=6
        ),
        VersionOpened(version=key, producers=4),
        ChunkReady(
            version=key, rank=3, chunk=11,
            location=Location(uri="shm://x", offset=64, length=128),
            tensors=(ChunkTensor(index=0, offset=0, length=128, digest=DIGEST),),
        ),
        ProducerSealed(version=key, rank=3, chunks=12, tensors=5, nbytes=6),
        ShardPersisted(
            version=key, plan_digest=DIGEST, writer=1, writers=2, shard=9, shards=10,
            file="model-00010-of-00010.safetensors", nbytes=6, digest=DIGEST, table_digest=DIGEST,
        ),
        VersionComplete(version=key, directory="/v", manifest_digest=DIGEST, shards=10, nbytes=60),
        VersionAborted(version=key, error="CoverageError", message="m", by="writer-0"),
        VersionRetired(version=key, directory="/v", reason="keep-last 2"),
        EngineReport(
            version=key, engine="e0", engine_url="http://127.0.0.1:1",
            outcome="serving", state="SERVING",
        ),
    ]  # fmt: skip
