"""Replicas: tensors that this rank holds and another one publishes, hashed in turn.

Data-parallel replicas, tensors that tensor parallelism does not cut, replicas of experts and tied
copies ought to equal what their owner publishes. Nobody sends them anywhere, so nobody would notice
a difference. Each version a rank hashes the next few of them, at most some bytes, in `publish`
while the weights stand still, and puts the digests into its sealing event. The owner's digests are
in its chunk events already: every replica is compared once in a round of versions, and no rank
needs to know which ones another rank is hashing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..schemas.errors import ConfigError
from ..schemas.events import MAX_REPLICAS, ReplicaDigest
from ..schemas.layout import Layout


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """How much of its replicas a rank hashes per version.

    Attributes:
        bytes_per_version: hashing stops after the tensor that reaches it, so one large tensor may
            exceed it; 0 hashes none. `publish` is blocked for it, at about 5 GB/s on a CPU.
    """

    bytes_per_version: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        """Raises ConfigError for a negative number."""
        if self.bytes_per_version < 0:
            raise ConfigError(
                f"{self.bytes_per_version} bytes of replicas cannot be hashed",
                next_step="use 0 to hash none",
            )


DEFAULT_REPLICA_CHECK = ReplicaCheck()


class ReplicaRounds:
    """Goes round the replicas of one layout.

    Args:
        layout: what the rank holds.
        digest: the digest of a tensor by its index, as it is now: of its raw bytes in the layout's
            dtype, row-major, as in chunk events.
        check: how much per version.
    """

    def __init__(
        self,
        layout: Layout,
        digest: Callable[[int], str],
        check: ReplicaCheck = DEFAULT_REPLICA_CHECK,
    ) -> None:
        self._digest, self._check = digest, check
        self._replicas = [
            (index, tensor.nbytes)
            for index, tensor in enumerate(layout.tensors)
            if not tensor.owned and tensor.nbytes > 0
        ]
        self._next = 0

    def take(self) -> tuple[ReplicaDigest, ...]:
        """Hash the next replicas; at most one round, and at most MAX_REPLICAS."""
        budget, taken = self._check.bytes_per_version, list[ReplicaDigest]()
        most = min(len(self._replicas), MAX_REPLICAS)
        while budget > 0 and len(taken) < most:
            index, nbytes = self._replicas[self._next]
            taken.append(ReplicaDigest(index=index, digest=self._digest(index)))
            budget -= nbytes
            self._next = (self._next + 1) % len(self._replicas)
        return tuple(taken)
