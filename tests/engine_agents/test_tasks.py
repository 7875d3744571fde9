import asyncio

import pytest
from weightbus.engine_agents.tasks import cancel_and_wait, finish


async def test_finish_returns_and_raises_what_the_work_does():
    async def work() -> int:
        return 3

    async def fail() -> int:
        raise ValueError("no")

    assert await finish(work()) == 3
    with pytest.raises(ValueError, match="no"):
        await finish(fail())


@pytest.mark.parametrize("cancellations", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_waits_for_the_work(cancellations: int, fails: bool):
    started, gate, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await gate.wait()
        done.set()
        if fails:
            raise ValueError("seen by the log only")

    caller = asyncio.create_task(finish(work()))
    await started.wait()
    for _ in range(cancellations):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_cancel_and_wait_waits_for_the_clean_up_although_it_is_cancelled_itself():
    started, gate, clean = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await gate.wait()
            clean.set()

    task = asyncio.create_task(work())
    await started.wait()
    ending = asyncio.create_task(cancel_and_wait(task))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert clean.is_set()
