"""The error tree of the whole project.

    WeightbusError
    ├── ConfigError                  an option or a combination of options that cannot work
    ├── MissingDependencyError       an optional peer (torch, megatron, ...) is not installed
    ├── DemoFailedError              a process of `weightbus demo` ended when it should not have
    ├── SchemaError                  bytes or JSON that are not what the schema says
    │   ├── UnknownSchemaVersionError
    │   ├── MalformedEventError
    │   └── EventTooLargeError
    ├── BusError                     JetStream and the way to it
    │   ├── ServerBinaryError        nats-server is missing or older than 2.14
    │   ├── ServerStartError         nats-server did not come up
    │   ├── BusUnavailableError      no answer in time                            (retry helps)
    │   ├── BusClosedError           used after close()
    │   ├── StreamMismatchError      the server's stream differs from the declared one
    │   ├── StreamFullError          the stream's limit is reached; nothing was stored
    │   ├── AlreadyPublishedError    the subject holds another message already
    │   ├── SequenceGapError         messages that were asked for are gone from the stream
    │   ├── ReaderReplacedError      a newer reader of the same name has taken over
    │   └── BlobMissingError         no blob of that name in the bucket
    ├── LayoutError                  what a producer says it holds makes no sense
    │   └── UnknownPartitionError    nobody can say which part of the whole a tensor is
    ├── StagingError                 the producer's staging arena
    │   ├── StagingFullError         every slot holds an unfinished version       (retry helps)
    │   └── StagingTooSmallError     one version does not fit into the arena
    ├── PublishError                 a version could not be published
    │   ├── VersionOrderError        weight versions only grow inside an attempt
    │   ├── VersionConflictError     two producers disagree about one version
    │   ├── VersionSkippedError      the policy `skip` left this version out
    │   └── VersionPendingError      the version has no outcome yet                (retry helps)
    ├── ConversionError              Megatron to Hugging Face
    │   ├── UnknownFamilyError
    │   ├── UnknownParameterError    names that no rule of the family knows
    │   ├── PairingError             a version ends while a group still waits for tensors
    │   └── CoverageError            the coverage certificate is refused
    ├── SourceError                  the bytes at a chunk's location
    │   ├── SourceMissingError
    │   ├── SourceTruncatedError
    │   ├── DigestMismatchError
    │   └── ReplicaMismatchError     ranks that ought to hold equal copies do not
    ├── VersionError                 version directories
    │   ├── OutputFolderError        output equal to, inside or around the origin checkpoint
    │   ├── OriginError              the origin checkpoint cannot be read
    │   ├── CommitError              a version could not be made visible
    │   ├── StorageError             the disk is full, read-only or failing           (retry helps)
    │   ├── VersionAbortedError      the version has ended without becoming visible
    │   ├── ManifestError            no manifest, or one that does not describe the folder
    │   ├── ShardCorruptError        a shard whose bytes are not those of the manifest
    │   └── DeltaError               a delta between two versions
    │       ├── DeltaFormatError     an index, entry or blob that is not what the format says
    │       ├── DeltaMappingError    index and files disagree: absent file, missing or doubled name
    │       ├── DeltaTensorError     no delta can express it: absent, or another shape or dtype
    │       ├── DeltaBaseError       the base is of another version or lineage, or has other bytes
    │       ├── DeltaChecksumError   the rebuilt tensors are not the announced ones
    │       └── DeltaLockedError     another process rebuilds this folder         (retry helps)
    └── EngineError                  SGLang and the agent beside it
        ├── EngineUnreachableError   nobody listens, or the connection broke      (retry helps)
        ├── EngineTimeoutError       no answer within the deadline
        ├── EngineRefusedError       an HTTP error or success=false
        ├── EngineLabelError         the engine names another version than it was given
        └── IllegalTransitionError   a move that the agent's state machine does not have

Every error says what happened, where (tensor, file, rank, sequence: `where`) and what to do next
(`next_step`); `retryable` says whether the same call can succeed later without a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class WeightbusError(Exception):
    """Base of every error that weightbus raises on purpose.

    Args:
        what: one sentence, what happened and why.
        where: the coordinates of the trouble (tensor, file, rank, sequence, ...).
        next_step: what the reader should do now.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self, what: str, *, where: Mapping[str, object] | None = None, next_step: str = ""
    ) -> None:
        self.what = what
        self.where: dict[str, object] = dict(where) if where is not None else {}
        self.next_step = next_step
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += " [" + ", ".join(f"{key}={value}" for key, value in self.where.items()) + "]"
        if self.next_step:
            text += f" Next: {self.next_step}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions pickle through `args`; ours are built from keywords.
        return (_rebuild, (type(self), self.what, self.where, self.next_step))


def _rebuild(
    kind: type[WeightbusError], what: str, where: dict[str, object], next_step: str
) -> WeightbusError:
    return kind(what, where=where, next_step=next_step)


class ConfigError(WeightbusError):
    """An option, or a combination of options, that cannot work."""


class MissingDependencyError(WeightbusError):
    """An optional peer is not installed; `next_step` is the pip command that installs it."""


class DemoFailedError(WeightbusError):
    """A process of the demo ended when it should not have; with the end of its log."""


class SchemaError(WeightbusError):
    """Bytes or JSON that are not what the schema says."""


class UnknownSchemaVersionError(SchemaError):
    """An event or manifest of a schema version that this program does not know."""


class MalformedEventError(SchemaError):
    """An event that does not decode, or breaks a rule of its model."""


class EventTooLargeError(SchemaError):
    """An event over the 64 KiB that fit into one message."""


class BusError(WeightbusError):
    """Trouble with JetStream or on the way to it."""


class ServerBinaryError(BusError):
    """nats-server is missing, or older than 2.14."""


class ServerStartError(BusError):
    """nats-server did not come up."""


class BusUnavailableError(BusError):
    """The server did not answer in time."""

    retryable: ClassVar[bool] = True


class BusClosedError(BusError):
    """The bus was used after `close()`."""


class StreamMismatchError(BusError):
    """The server's stream or bucket differs from the declared one."""


class StreamFullError(BusError):
    """The stream's limit is reached; nothing was stored."""


class AlreadyPublishedError(BusError):
    """The subject holds another message already (see `existing`)."""


class SequenceGapError(BusError):
    """Messages that were asked for are gone from the stream."""


class ReaderReplacedError(BusError):
    """A newer reader of the same name has taken over; this one gets nothing more."""


class BlobMissingError(BusError):
    """The bucket has no blob of that name."""


class LayoutError(WeightbusError):
    """What a producer says it holds makes no sense."""


class UnknownPartitionError(LayoutError):
    """Nobody can say which part of the whole a local tensor is."""


class StagingError(WeightbusError):
    """Trouble with the producer's staging arena."""


class StagingFullError(StagingError):
    """Every slot of the arena holds a version that is not finished."""

    retryable: ClassVar[bool] = True


class StagingTooSmallError(StagingError):
    """One version does not fit into the arena."""


class PublishError(WeightbusError):
    """A version could not be published."""


class VersionOrderError(PublishError):
    """Weight versions only grow inside an attempt."""


class VersionConflictError(PublishError):
    """Two producers disagree about one version."""


class VersionSkippedError(PublishError):
    """The policy `skip` left this version out."""


class VersionPendingError(PublishError):
    """The version has neither been completed nor aborted yet."""

    retryable: ClassVar[bool] = True


class ConversionError(WeightbusError):
    """Megatron tensors could not be turned into Hugging Face tensors."""


class UnknownFamilyError(ConversionError):
    """No conversion family of that name."""


class UnknownParameterError(ConversionError):
    """Names that no rule of the family knows; all of them are listed."""


class PairingError(ConversionError):
    """A version ended while a group still waited for tensors."""


class CoverageError(ConversionError):
    """The coverage certificate is refused; every difference is listed."""


class SourceError(WeightbusError):
    """The bytes at a chunk's location cannot be used."""


class SourceMissingError(SourceError):
    """Nothing is at the location."""


class SourceTruncatedError(SourceError):
    """The location ends before the tensor does."""


class DigestMismatchError(SourceError):
    """Bytes whose digest is not the published one."""


class ReplicaMismatchError(SourceError):
    """Ranks that ought to hold equal copies of a tensor do not; tensors and ranks are named."""


class VersionError(WeightbusError):
    """Trouble with a version directory."""


class OutputFolderError(VersionError):
    """The output folder is equal to, inside or around the origin checkpoint."""


class OriginError(VersionError):
    """The origin checkpoint cannot be read."""


class CommitError(VersionError):
    """A version could not be made visible."""


class StorageError(VersionError):
    """The disk of a version directory is full, read-only or failing."""

    retryable: ClassVar[bool] = True


class VersionAbortedError(VersionError):
    """The version has ended without becoming visible."""


class ManifestError(VersionError):
    """No manifest, or one that does not describe its folder."""


class ShardCorruptError(VersionError):
    """A shard whose bytes are not those of the manifest."""


class DeltaError(VersionError):
    """A delta between two versions that cannot be written, read or applied."""


class DeltaFormatError(DeltaError):
    """An index, entry or blob that is not what the delta format says."""


class DeltaMappingError(DeltaError):
    """A delta's index and files disagree: an absent file, a missing or doubled name."""


class DeltaTensorError(DeltaError):
    """A tensor that no delta can express: absent on one side, or of another shape or dtype."""


class DeltaBaseError(DeltaError):
    """The base is of another version or lineage, or its bytes are not those of the version."""


class DeltaChecksumError(DeltaError):
    """The rebuilt tensors do not have the announced checksums; nothing was made visible."""


class DeltaLockedError(DeltaError):
    """Another process rebuilds this folder at the moment."""

    retryable: ClassVar[bool] = True


class EngineError(WeightbusError):
    """Trouble with SGLang or the agent beside it."""


class EngineUnreachableError(EngineError):
    """Nobody listens, or the connection broke."""

    retryable: ClassVar[bool] = True


class EngineTimeoutError(EngineError):
    """The engine did not answer within the deadline."""


class EngineRefusedError(EngineError):
    """The engine answered with an HTTP error or success=false."""


class EngineLabelError(EngineError):
    """The engine names another version than the one it was given."""


class IllegalTransitionError(EngineError):
    """A move that the agent's state machine does not have."""
