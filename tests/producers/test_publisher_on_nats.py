"""The publisher on a real server that is killed and comes back."""

from pathlib import Path

import pytest
from support.staging_publishers import BytesSource
from weightbus.bus.events import end_version, publish_event
from weightbus.bus.server import EmbeddedServer
from weightbus.producers.attempts import Trainer, open_attempt
from weightbus.producers.bus_thread import bus_thread_of
from weightbus.producers.publisher import PublisherTimes, VersionPublisher
from weightbus.producers.staging import StagingConfig
from weightbus.schemas.errors import BusUnavailableError, VersionAbortedError
from weightbus.schemas.events import ProducerSealed, VersionAborted

WAIT_S = 20.0


def test_a_killed_server_costs_one_version_and_no_training_step(tmp_path: Path) -> None:
    times = PublisherTimes(publish_s=0.5, start_s=WAIT_S, close_s=WAIT_S)
    source = BytesSource({"a": b"a" * 1000, "b": b"b" * 1000})
    with EmbeddedServer() as server:
        thread, _ = bus_thread_of(server.url)
        attempt = thread.run(open_attempt(thread.bus, Trainer("run", 1, "megatron", "/o")), WAIT_S)
        publisher = VersionPublisher(
            source,
            thread,
            run_id="run",
            attempt=attempt,
            producers=1,
            staging=StagingConfig(folder=tmp_path, slots=2),
            times=times,
            owns_bus=True,
        )
        publisher.publish(1).result(WAIT_S)
        server.kill()
        lost = publisher.publish(2)  # returns: the training step goes on
        with pytest.raises(BusUnavailableError):
            lost.result(WAIT_S)
        server.restart()
        # Both slots are taken; that of version 2 becomes free when its abortion is stored.
        third = publisher.publish(3)
        assert third.result(WAIT_S).weight_version == 3
        for number in (1, 3):
            key = third.version.model_copy(update={"weight_version": number})
            aborted = VersionAborted(version=key, error="Test", message="enough", by="test")
            thread.run(end_version(thread.bus, aborted), WAIT_S)
        with pytest.raises(VersionAbortedError, match="enough"):
            third.outcome(WAIT_S)
        # What was stored before the kill is still there: the same event again is no conflict.
        sealed = ProducerSealed(
            version=third.version.model_copy(update={"weight_version": 1}),
            rank=0, chunks=1, tensors=2, nbytes=2000,
        )  # fmt: skip
        assert thread.run(publish_event(thread.bus, sealed), WAIT_S).duplicate
        publisher.close()
    assert list(tmp_path.iterdir()) == []
