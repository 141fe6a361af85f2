"""StoreThreads: blocking calls of a store in threads, which a cancelled caller waits for."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from aiokv.errors import StoreError
from aiokv.stores.waiting import all_ended

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class StoreThreads:
    """Threads that run the blocking calls of one store.

    A job gets an event that is set when its result is no longer wanted; a job that takes long
    checks it between two accesses to host blocks.
    """

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=f"aiokv-{name}")
        self._running: set[_Running] = set()
        self._closed = False

    async def run(self, job: Callable[[threading.Event], _T]) -> _T:
        """Run a job in a thread and return its result; see :meth:`run_copies`."""
        (result,) = await self.run_copies(job, 1)
        return result

    async def run_copies(self, job: Callable[[threading.Event], _T], copies: int) -> list[_T]:
        """Run a job in several threads at the same time, and return the results of all.

        Raises:
            StoreError: the threads are closed, or were closed before a copy began.
            Exception: the first one that a copy raised, when all copies have ended.

        Cancellation: ends when all copies have ended; a copy that has not begun never begins.
        """
        if self._closed:
            raise StoreError("the store is closed")
        unwanted = threading.Event()
        futures = [self._executor.submit(job, unwanted) for _ in range(copies)]
        running = _Running(futures, unwanted)
        self._running.add(running)
        try:
            await running.ended()
        finally:
            self._running.discard(running)
        if any(future.cancelled() for future in futures):
            raise StoreError("the store was closed before the operation began")
        return [future.result() for future in futures]

    async def aclose(self) -> None:
        """End the jobs in flight and the threads. Idempotent.

        Cancellation: takes effect when the jobs have ended.
        """
        self._closed = True
        jobs = list(self._running)
        for running in jobs:
            running.stop()
        try:
            for running in jobs:
                await running.ended()
        finally:
            self._executor.shutdown()  # idle threads end; others end after their job


class _Running:
    """Copies of a job that were submitted together."""

    def __init__(self, futures: list[Future[_T]], unwanted: threading.Event) -> None:
        self._futures = futures
        self._unwanted = unwanted

    def stop(self) -> None:
        """End running copies early, and drop those that have not begun."""
        self._unwanted.set()
        for future in self._futures:
            future.cancel()

    async def ended(self) -> None:
        """Wait until no copy runs. A failed copy, and a cancellation, stop the others."""
        waiters = [asyncio.wrap_future(future) for future in self._futures]
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not all(waiter.done() for waiter in waiters):
                self.stop()
            await all_ended(waiters)
