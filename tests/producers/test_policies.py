"""What publish() does when every slot is taken, and when an earlier version failed."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from support.staging_publishers import (
    PATIENT,
    QUICK,
    BytesSource,
    end,
    make_publisher,
    of,
    published,
)
from weightbus.bus.memory import MemoryServer
from weightbus.producers.handle import PublishHandle
from weightbus.producers.publisher import VersionPublisher
from weightbus.producers.staging import Policy, StagingConfig
from weightbus.schemas.errors import (
    BusUnavailableError,
    StagingFullError,
    VersionAbortedError,
    VersionSkippedError,
)
from weightbus.schemas.events import VersionAborted

WAIT_S = 10.0
Make = Callable[..., VersionPublisher]


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def make(server: MemoryServer, tmp_path: Path) -> Make:
    def build(policy: Policy, wait_timeout_s: float = WAIT_S) -> VersionPublisher:
        staging = StagingConfig(
            folder=tmp_path, slots=1, policy=policy, wait_timeout_s=wait_timeout_s
        )
        return make_publisher(server, BytesSource({"a": b"a"}), staging, times=PATIENT)

    return build


def _aborted(server: MemoryServer) -> list[tuple[int, str]]:
    return [
        (event.version.weight_version, event.error)
        for event in of(published(server), VersionAborted)
    ]


def test_wait_waits_for_the_slot(server: MemoryServer, make: Make) -> None:
    with make("wait") as publisher:
        first = publisher.publish(1)
        handles: list[PublishHandle] = []
        trainer = Thread(target=lambda: handles.append(publisher.publish(2)))
        trainer.start()
        assert handles == []
        end(server, first.version)
        trainer.join(WAIT_S)
        assert handles[0].result(WAIT_S).weight_version == 2
        end(server, handles[0].version)


def test_wait_gives_the_version_up_in_the_end(server: MemoryServer, make: Make) -> None:
    with make("wait", wait_timeout_s=0.01) as publisher:
        first = publisher.publish(1)
        handle = publisher.publish(2)
        with pytest.raises(StagingFullError, match="all 1 slots hold versions"):
            handle.result(WAIT_S)
        end(server, first.version)
        first.outcome(WAIT_S)
        third = publisher.publish(3)
        third.result(WAIT_S)
        end(server, third.version)
    assert _aborted(server) == [(2, "StagingFullError")]


def test_skip_leaves_the_version_out_and_says_so_to_everybody(
    server: MemoryServer, make: Make
) -> None:
    with make("skip") as publisher:
        first = publisher.publish(1)
        skipped = publisher.publish(2)
        assert skipped.done
        for wait in (skipped.result, skipped.outcome):
            with pytest.raises(
                VersionSkippedError, match=r"run/1/v000002 was skipped: all 1 slots"
            ):
                wait(WAIT_S)
        end(server, first.version)
        first.outcome(WAIT_S)
        third = publisher.publish(3)
        third.result(WAIT_S)
        end(server, third.version)
    assert _aborted(server) == [(2, "VersionSkippedError")]


def test_fail_raises_in_the_training_step(server: MemoryServer, make: Make) -> None:
    with make("fail") as publisher:
        first = publisher.publish(1)
        with pytest.raises(StagingFullError, match="all 1 slots") as caught:
            publisher.publish(2)
        assert "weightbus status" in caught.value.next_step
        end(server, first.version)
        first.outcome(WAIT_S)
        third = publisher.publish(3)  # the error of version 2 was raised already
        third.result(WAIT_S)
        end(server, third.version)
    assert _aborted(server) == [(2, "StagingFullError")]


def test_fail_raises_an_earlier_error_that_nobody_asked_for(
    server: MemoryServer, make: Make
) -> None:
    with make("fail") as publisher:
        first = publisher.publish(1)
        end(server, first.version, error="no rule knows x")
        first.wait_ended(WAIT_S)
        with pytest.raises(VersionAbortedError, match="no rule knows x"):
            publisher.publish(2)
        second = publisher.publish(2)
        end(server, second.version)


@pytest.mark.parametrize("policy", ["wait", "skip", "fail"])
def test_an_error_that_the_handle_has_raised_is_not_raised_again(
    server: MemoryServer, make: Make, policy: Policy
) -> None:
    with make(policy) as publisher:
        first = publisher.publish(1)
        first.result(WAIT_S)
        end(server, first.version, error="no rule knows x")
        with pytest.raises(VersionAbortedError):
            first.outcome(WAIT_S)
        second = publisher.publish(2)
        second.result(WAIT_S)
        end(server, second.version)


def test_a_lost_bus_fails_the_handle_and_the_next_version_works(
    server: MemoryServer, tmp_path: Path
) -> None:
    staging = StagingConfig(folder=tmp_path, slots=1)
    publisher = make_publisher(server, BytesSource({"a": b"a"}), staging, times=QUICK)
    server.disconnect()
    lost = publisher.publish(1)
    with pytest.raises(BusUnavailableError, match=r"no answer within 0\.3 s"):
        lost.result(WAIT_S)
    server.reconnect()
    handle = publisher.publish(2)  # the one slot is free when version 1 has been aborted
    handle.result(WAIT_S)
    end(server, handle.version)
    handle.outcome(WAIT_S)
    publisher.close()
    assert _aborted(server) == [(1, "BusUnavailableError")]
