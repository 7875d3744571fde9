"""publish(): what is on the bus, what is in the arena, and when a slot is free."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.staging_publishers import (
    PATIENT,
    RUN,
    BytesSource,
    end,
    make_publisher,
    memory_thread,
    of,
    published,
    read_chunk,
)
from weightbus.bus.memory import MemoryServer
from weightbus.producers.publisher import PublisherTimes, VersionPublisher
from weightbus.producers.slots import SlotState
from weightbus.producers.staging import StagingConfig
from weightbus.schemas.digest import digest_of
from weightbus.schemas.errors import (
    BusUnavailableError,
    PublishError,
    StagingTooSmallError,
    VersionAbortedError,
    VersionConflictError,
    VersionOrderError,
    VersionPendingError,
)
from weightbus.schemas.events import (
    AttemptOpened,
    ChunkReady,
    LayoutPublished,
    ProducerSealed,
    VersionAborted,
    VersionOpened,
)
from weightbus.schemas.layout import Layout

WAIT_S = 10.0
TENSORS = {"a": b"a" * 100, "tied": b"t" * 10, "b": b"b" * 300, "empty": b"", "c": b"c" * 5}


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def source() -> BytesSource:
    return BytesSource(dict(TENSORS), unowned=["tied"])


@pytest.fixture
def staging(tmp_path: Path) -> StagingConfig:
    return StagingConfig(folder=tmp_path, chunk_bytes=200)


@pytest.fixture
def publisher(
    server: MemoryServer, source: BytesSource, staging: StagingConfig
) -> Iterator[VersionPublisher]:
    with make_publisher(server, source, staging, times=PATIENT) as made:
        yield made


def test_the_layout_is_published_once_at_the_start(
    server: MemoryServer, publisher: VersionPublisher
) -> None:
    opened, layout = published(server)
    assert isinstance(opened, AttemptOpened)
    assert isinstance(layout, LayoutPublished)
    assert (opened.attempt, opened.producers) == (1, 1)
    assert layout.layout_digest == publisher.layout.digest()
    assert Layout.from_bytes(server.blobs[layout.layout_digest]) == publisher.layout
    assert layout.nbytes == 405


def test_a_version_is_opened_cut_into_chunks_and_sealed(
    server: MemoryServer, source: BytesSource, publisher: VersionPublisher
) -> None:
    handle = publisher.publish(7, step=70)
    assert handle.result(WAIT_S) == handle.version
    events = [
        event
        for event in published(server)
        if not isinstance(event, AttemptOpened | LayoutPublished)
    ]
    assert events[0] == VersionOpened(version=handle.version, producers=1, step=70)
    chunks = sorted(of(events, ChunkReady), key=lambda event: event.chunk)
    assert events[-1] == ProducerSealed(
        version=handle.version, rank=0, chunks=len(chunks), tensors=4, nbytes=405
    )
    found: dict[int, bytes] = {}
    for chunk in chunks:
        found |= read_chunk(chunk)
        for tensor in chunk.tensors:
            assert tensor.digest == digest_of(found[tensor.index])
    names = [tensor.name for tensor in source.layout.tensors]
    assert {names[index]: data for index, data in found.items()} == {
        name: data for name, data in TENSORS.items() if name != "tied"
    }
    assert [chunk.chunk for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) == 3  # 100 (+ alignment) | 300 | 0 + 5 bytes
    end(server, handle.version)


def test_the_bytes_are_those_of_the_moment_of_publishing(
    server: MemoryServer, source: BytesSource, publisher: VersionPublisher
) -> None:
    first = publisher.publish(1)
    source.values["c"] = b"C" * 5
    second = publisher.publish(2)
    source.values["c"] = b"?" * 5
    for handle, expected in ((first, b"c" * 5), (second, b"C" * 5)):
        handle.result(WAIT_S)
        chunks = [
            event for event in of(published(server), ChunkReady) if event.version == handle.version
        ]
        assert expected in {data for chunk in chunks for data in read_chunk(chunk).values()}
        end(server, handle.version)


def test_the_slot_is_held_until_the_outcome(
    server: MemoryServer, publisher: VersionPublisher
) -> None:
    handle = publisher.publish(1)
    handle.result(WAIT_S)
    assert publisher.arena.states == (SlotState.HELD, SlotState.FREE)
    assert not handle.done
    with pytest.raises(VersionPendingError, match="no outcome after 0"):
        handle.outcome(0.0)
    end(server, handle.version)
    assert handle.outcome(WAIT_S).directory == "file:///versions/v"
    assert handle.done
    assert publisher.arena.states == (SlotState.FREE, SlotState.FREE)


def test_an_aborted_version_raises_the_writers_message(
    server: MemoryServer, publisher: VersionPublisher
) -> None:
    handle = publisher.publish(1)
    handle.result(WAIT_S)
    end(server, handle.version, error="lm_head.weight is missing")
    with pytest.raises(
        VersionAbortedError, match=r"CoverageError: lm_head\.weight is missing"
    ) as caught:
        handle.outcome(WAIT_S)
    assert caught.value.where["by"] == "writer 0"
    assert isinstance(handle.error, VersionAbortedError)


def test_an_outcome_that_came_first_is_not_forgotten(
    server: MemoryServer, source: BytesSource, publisher: VersionPublisher
) -> None:
    # Another producer skipped version 5 before this one published it.
    first = publisher.publish(4)
    end(server, first.version.model_copy(update={"weight_version": 5}), error="skipped elsewhere")
    end(server, first.version)
    first.outcome(WAIT_S)  # outcomes come in order, so that of 5 has been seen
    with pytest.raises(VersionAbortedError, match="skipped elsewhere"):
        publisher.publish(5).outcome(WAIT_S)
    for number in (6, 7, 8):  # would wait for a slot without end if 5 still had one
        end(server, publisher.publish(number).version)


def test_versions_only_grow(server: MemoryServer, publisher: VersionPublisher) -> None:
    end(server, publisher.publish(3).version)
    for number in (3, 2, -1):
        with pytest.raises(VersionOrderError, match=f"weight version {number} does not follow 3"):
            publisher.publish(number)


def test_a_producer_that_disagrees_about_a_version_is_told(
    server: MemoryServer, publisher: VersionPublisher, tmp_path: Path
) -> None:
    other = make_publisher(
        server,
        BytesSource({"z": b"z"}, rank=1),
        StagingConfig(folder=tmp_path),
        attempt=publisher.attempt,
    )
    publisher.publish(1, step=10).result(WAIT_S)
    handle = other.publish(1, step=11)
    with pytest.raises(VersionConflictError, match="version-opened event of version run/1/v000001"):
        handle.result(WAIT_S)
    other.close()
    [aborted] = of(published(server), VersionAborted)
    assert (aborted.error, aborted.by) == ("VersionConflictError", "producer 1")


def test_two_producers_with_one_rank_are_refused(
    server: MemoryServer, publisher: VersionPublisher, tmp_path: Path
) -> None:
    folder = tmp_path / "other-host"
    folder.mkdir()
    with pytest.raises(VersionConflictError, match="different layout"):
        make_publisher(
            server,
            BytesSource({"z": b"z"}),
            StagingConfig(folder=folder),
            attempt=publisher.attempt,
        )
    assert list(folder.iterdir()) == []


def test_a_copy_that_fails_is_the_trainers_error_and_ends_the_version(
    server: MemoryServer, source: BytesSource, publisher: VersionPublisher
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    source.on_fill = fail
    with pytest.raises(ZeroDivisionError):
        publisher.publish(1)
    source.on_fill = lambda: None
    assert SlotState.HELD not in publisher.arena.states
    handle = publisher.publish(2)
    handle.result(WAIT_S)
    end(server, handle.version)
    publisher.close()
    assert [event.version.weight_version for event in of(published(server), VersionAborted)] == [1]


def test_publishing_does_not_wait_for_the_bus(
    server: MemoryServer, publisher: VersionPublisher
) -> None:
    server.pause()
    handle = publisher.publish(1)
    assert not handle.durable
    with pytest.raises(BusUnavailableError, match="not durable after 0"):
        handle.result(0.0)
    server.resume()
    handle.result(WAIT_S)
    end(server, handle.version)


def test_close_waits_aborts_and_removes(
    server: MemoryServer, source: BytesSource, staging: StagingConfig, tmp_path: Path
) -> None:
    publisher = make_publisher(server, source, staging)
    handle = publisher.publish(1)
    handle.result(WAIT_S)
    publisher.close()
    publisher.close()
    [aborted] = of(published(server), VersionAborted)
    assert "had no outcome when its producer closed" in aborted.message
    assert list(tmp_path.iterdir()) == []
    assert source.forgotten
    with pytest.raises(VersionAbortedError, match="no outcome when its producer closed"):
        handle.outcome(0.0)
    with pytest.raises(PublishError, match="closed"):
        publisher.publish(2)


def test_close_without_a_bus_still_removes_the_arena(
    server: MemoryServer, source: BytesSource, staging: StagingConfig, tmp_path: Path
) -> None:
    publisher = make_publisher(server, source, staging)
    server.pause()
    handle = publisher.publish(1)
    publisher.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises((PublishError, BusUnavailableError)):
        handle.result(0.0)


def test_close_leaves_a_complete_version_alone(
    server: MemoryServer, source: BytesSource, staging: StagingConfig
) -> None:
    publisher = make_publisher(server, source, staging)
    handle = publisher.publish(1)
    end(server, handle.version)
    handle.outcome(WAIT_S)
    publisher.close()
    assert of(published(server), VersionAborted) == []


def test_closing_before_the_first_version(
    server: MemoryServer, source: BytesSource, staging: StagingConfig, tmp_path: Path
) -> None:
    make_publisher(server, source, staging).close()
    assert list(tmp_path.iterdir()) == []


def test_a_producer_that_owns_nothing_takes_part(server: MemoryServer, tmp_path: Path) -> None:
    source = BytesSource({"replica": b"r"}, unowned=["replica"])
    with make_publisher(server, source, StagingConfig(folder=tmp_path)) as publisher:
        handle = publisher.publish(1)
        handle.result(WAIT_S)
        end(server, handle.version)
        handle.outcome(WAIT_S)
    [sealed] = of(published(server), ProducerSealed)
    assert (sealed.chunks, sealed.tensors, sealed.nbytes) == (0, 0, 0)


def test_no_bus_at_the_start_leaves_no_arena(
    server: MemoryServer, source: BytesSource, staging: StagingConfig, tmp_path: Path
) -> None:
    thread = memory_thread(server)
    server.pause()
    with pytest.raises(BusUnavailableError):
        VersionPublisher(
            source,
            thread,
            run_id=RUN,
            attempt=1,
            producers=1,
            staging=staging,
            times=PublisherTimes(publish_s=0.1, start_s=0.1, close_s=0.0),
        )
    server.resume()
    assert list(tmp_path.iterdir()) == []
    thread.close()


def test_an_arena_that_is_too_small_is_refused(
    server: MemoryServer, source: BytesSource, tmp_path: Path
) -> None:
    with pytest.raises(StagingTooSmallError, match="cannot hold a version of"):
        make_publisher(server, source, StagingConfig(folder=tmp_path, slot_bytes=64))


def test_a_start_that_fails_leaves_no_thread(server: MemoryServer, tmp_path: Path) -> None:
    running = set(threading.enumerate())
    small = StagingConfig(folder=tmp_path, slot_bytes=1)
    with pytest.raises(StagingTooSmallError):
        make_publisher(server, BytesSource({"a": b"a" * 4096}), small)
    assert set(threading.enumerate()) <= running
