"""StoreThreads: a cancelled caller waits for its job, and closing waits for all jobs."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import StoreError
from aiokv.stores.threads import StoreThreads
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio


class Job:
    """A job that runs until it is released."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.release = threading.Event()
        self.unwanted: threading.Event | None = None

    def __call__(self, unwanted: threading.Event) -> str:
        self.unwanted = unwanted
        self.began.set()
        assert self.release.wait(PATIENCE_SECONDS)
        return "done"

    @property
    def is_unwanted(self) -> bool:
        return self.unwanted is not None and self.unwanted.is_set()


@asynccontextmanager
async def started(count: int) -> AsyncIterator[StoreThreads]:
    """Close the threads at the end of a test."""
    threads = StoreThreads("test", count)
    try:
        yield threads
    finally:
        await threads.aclose()


async def passes() -> None:
    """Let all tasks run as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_results_and_errors_are_those_of_the_job() -> None:
    async with started(1) as threads:
        assert await threads.run(lambda _: 7) == 7
        assert await threads.run_copies(lambda _: 7, 3) == [7, 7, 7]
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda _: 1 // 0)


async def test_a_cancelled_caller_waits_for_its_job() -> None:
    async with started(1) as threads:
        job = Job()
        task = asyncio.create_task(threads.run(job))
        await passes()
        assert job.began.wait(PATIENCE_SECONDS)
        for _ in range(2):  # a second cancellation changes nothing
            task.cancel()
            await passes()
            assert not task.done()
            assert job.is_unwanted
        job.release.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_cancelled_job_that_waits_for_a_thread_never_begins() -> None:
    async with started(1) as threads:
        first, second = Job(), Job()
        running = asyncio.create_task(threads.run(first))
        waiting = asyncio.create_task(threads.run(second))
        await passes()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        first.release.set()
        assert await running == "done"
        assert not second.began.is_set()


async def test_a_failed_copy_stops_the_others() -> None:
    ended = threading.Event()
    turns = iter([True, False])

    def job(unwanted: threading.Event) -> None:
        if next(turns):
            assert unwanted.wait(PATIENCE_SECONDS)
            ended.set()
        else:
            raise OSError("broken")

    async with started(2) as threads:
        with pytest.raises(OSError, match="broken"):
            await threads.run_copies(job, 2)
        assert ended.is_set(), "the other copy has ended before the error is raised"


async def test_closing_waits_for_running_jobs_and_refuses_others() -> None:
    threads = StoreThreads("test", 1)
    first, second = Job(), Job()
    running = asyncio.create_task(threads.run(first))
    waiting = asyncio.create_task(threads.run(second))
    await passes()
    assert first.began.wait(PATIENCE_SECONDS)
    closing = asyncio.create_task(threads.aclose())
    await passes()
    assert not closing.done()
    assert first.is_unwanted
    first.release.set()
    await closing
    assert await running == "done"
    with pytest.raises(StoreError, match="closed before the operation began"):
        await waiting
    with pytest.raises(StoreError, match="is closed"):
        await threads.run(first)
    await threads.aclose()
    assert not second.began.is_set()
