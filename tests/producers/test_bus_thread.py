"""The event loop's thread: results, deadlines, the end."""

import asyncio
import threading

import pytest
from support.staging_publishers import memory_thread
from weightbus.bus.interface import Bus, ConnectionState
from weightbus.bus.memory import MemoryServer
from weightbus.producers.bus_thread import BusThread, bus_thread_of
from weightbus.schemas.errors import BusClosedError, BusUnavailableError, ConfigError


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_results_and_errors_come_back() -> None:
    thread = memory_thread(MemoryServer())

    async def name() -> str:
        return threading.current_thread().name

    async def fail() -> None:
        raise ConfigError("wrong")

    assert thread.run(name(), 5.0) == "weightbus-bus"
    with pytest.raises(ConfigError, match="wrong"):
        thread.run(fail(), 5.0)
    thread.close()


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    thread = memory_thread(MemoryServer())
    with pytest.raises(BusUnavailableError, match=r"did not answer within 0\.01 s"):
        thread.run(_forever(), 0.01)
    thread.close()


def test_a_time_out_of_the_work_itself_is_its_own() -> None:
    thread = memory_thread(MemoryServer())

    async def late() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        thread.run(late(), 5.0)
    thread.close()


def test_close_is_idempotent_and_ends_thread_bus_and_tasks() -> None:
    thread = memory_thread(MemoryServer())
    bus = thread.bus
    pending = thread.submit(_forever())
    thread.close()
    thread.close()
    assert bus.state is ConnectionState.CLOSED
    assert pending.cancelled()
    assert "weightbus-bus" not in [other.name for other in threading.enumerate()]
    with pytest.raises(BusClosedError, match="do not publish after close"):
        thread.submit(_forever())


def test_a_factory_that_fails_leaves_no_thread() -> None:
    async def broken() -> Bus:
        raise ConfigError("no server URL")

    with pytest.raises(ConfigError, match="no server URL"):
        BusThread(broken)
    assert "weightbus-bus" not in [other.name for other in threading.enumerate()]


def test_a_shared_thread_is_not_ours_to_close() -> None:
    thread = memory_thread(MemoryServer())
    assert bus_thread_of(thread) == (thread, False)
    thread.close()


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(BusUnavailableError):
        bus_thread_of("nats://127.0.0.1:1", connect_timeout_s=0.5)
