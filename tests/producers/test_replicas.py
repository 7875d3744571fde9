"""Which replicas a rank hashes in which version, and that the digests are those of the chunks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.staging_publishers import (
    PATIENT,
    RUN,
    BytesSource,
    memory_thread,
    of,
    published,
)
from weightbus.bus.memory import MemoryServer
from weightbus.producers.attempts import Trainer, open_attempt
from weightbus.producers.publisher import VersionPublisher
from weightbus.producers.replicas import ReplicaCheck, ReplicaRounds
from weightbus.producers.staging import StagingConfig
from weightbus.producers.torch_digest import TorchDigests
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import ConfigError
from weightbus.schemas.events import MAX_REPLICAS, ProducerSealed
from weightbus.schemas.layout import Layout, LocalTensor, ParallelRank


def layout_of(sizes: list[int], owned: Callable[[int], bool]) -> Layout:
    return Layout(
        naming="megatron",
        producer=ParallelRank(rank=0),
        tensors=tuple(
            LocalTensor(name=f"t{n}", dtype="U8", shape=(size,), owned=owned(n))
            for n, size in enumerate(sizes)
        ),
    )


def rounds(sizes: list[int], budget: int) -> ReplicaRounds:
    """Tensor 0 is owned, all others are replicas; digests tell the index."""
    layout = layout_of(sizes, lambda n: n == 0)
    return ReplicaRounds(layout, lambda n: digest_of(b"%d" % n), ReplicaCheck(budget))


def taken(made: ReplicaRounds) -> list[int]:
    return [replica.index for replica in made.take()]


def test_every_replica_has_its_turn() -> None:
    made = rounds([9, 10, 10, 10, 10], 15)
    assert [taken(made) for _ in range(4)] == [[1, 2], [3, 4], [1, 2], [3, 4]]


def test_a_budget_for_all_takes_each_once() -> None:
    made = rounds([9, 10, 0, 10], 1_000_000)
    assert [taken(made) for _ in range(2)] == [[1, 3], [1, 3]]  # nothing is in an empty tensor


def test_a_large_replica_is_hashed_alone() -> None:
    made = rounds([9, 100, 10], 15)
    assert [taken(made) for _ in range(3)] == [[1], [2, 1], [2, 1]]


def test_the_event_stays_small() -> None:
    made = rounds([1] * (MAX_REPLICAS + 11), 1_000_000)
    assert len(taken(made)) == MAX_REPLICAS
    assert taken(made)[:11] == [*range(MAX_REPLICAS + 1, MAX_REPLICAS + 11), 1]


@pytest.mark.parametrize("sizes", [[5], [5, 5]])
def test_no_replicas_or_no_budget(sizes: list[int]) -> None:
    assert taken(rounds(sizes, 0)) == []
    assert taken(rounds([5], 10)) == []
    with pytest.raises(ConfigError, match="-1 bytes of replicas"):
        ReplicaCheck(-1)


def test_the_sealing_event_has_the_digests_of_the_moment_of_publish(tmp_path: Path) -> None:
    server = MemoryServer()
    thread = memory_thread(server)
    source = BytesSource({"a": b"a" * 10, "copy": b"old"}, unowned=["copy"])
    attempt = thread.run(open_attempt(thread.bus, Trainer(RUN, 1, "megatron", "/o")), 5.0)
    with VersionPublisher(
        source,
        thread,
        run_id=RUN,
        attempt=attempt,
        producers=1,
        staging=StagingConfig(folder=tmp_path),
        times=PATIENT,
        owns_bus=True,
        replicas=ReplicaRounds(source.layout, lambda _: digest_of(source.values["copy"])),
    ) as publisher:
        handle = publisher.publish(1)
        source.values["copy"] = b"new"
        handle.result(10.0)
    [sealed] = of(published(server), ProducerSealed)
    assert [(r.index, r.digest) for r in sealed.replicas] == [(1, digest_of(b"old"))]


def test_a_tensor_is_hashed_as_its_chunk_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.randn(7, 5).t(),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
    ]
    codes = ("F32", "F32", "I64", "BOOL", "F32")
    layout = Layout(
        naming="megatron",
        producer=ParallelRank(rank=0),
        tensors=tuple(
            LocalTensor(name=f"t{n}", dtype=code, shape=tuple(tensor.shape))
            for n, (tensor, code) in enumerate(zip(tensors, codes, strict=True))
        ),
    )
    digests = TorchDigests(layout, [lambda tensor=tensor: tensor for tensor in tensors])
    wide = tensors[1].float()  # narrower now than the layout says: converted, as the copy is
    for index, tensor in enumerate([tensors[0].contiguous(), wide, *tensors[2:]]):
        assert digests(index) == digest_of(tensor.detach().numpy().tobytes())
