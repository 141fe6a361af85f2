"""Loops that replay a trace on an engine: plain, timed, windowed, and by user."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiokv.trace.format import expand_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import CacheEngine, Lease
    from aiokv.trace.disk_tier import DiskTier
    from aiokv.trace.format import TraceRequest
    from aiokv.trace.server_model import ServerModel

    Prompt = NDArray[np.int32]
    LabelledPrompt = tuple[Prompt, str]  # with the label of its release; "" for none
    Progress = Callable[[int], None]

# Requests between two passes of the event loop, where progress is drawn and Ctrl-C is delivered.
CHUNK_REQUESTS = 500
CHUNK_TOKENS = 1 << 17  # expanded at a time: 512 KiB, which stay in the cache of the core


class LoopClock:
    """CPU time of this thread, and wall-clock time, of the code that runs inside ``running()``.

    The CPU time excludes code inside ``paused()``.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.wall_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.cpu_seconds += time.thread_time() - cpu
            self.wall_seconds += time.perf_counter() - wall

    @contextmanager
    def paused(self) -> Iterator[None]:
        cpu = time.thread_time()
        try:
            yield
        finally:
            self.cpu_seconds -= time.thread_time() - cpu


class Samples:
    """Wall-clock nanoseconds per call, by operation."""

    def __init__(self) -> None:
        self.match: list[int] = []
        self.allocate: list[int] = []
        self.onload: list[int] = []
        self.commit: list[int] = []
        self.release: list[int] = []

    def by_operation(self) -> dict[str, list[int]]:
        return vars(self)


async def plain_loop(engine: CacheEngine, prompts: Sequence[LabelledPrompt]) -> None:
    """Serve one lease at a time, without clock readings; gives ``index_seconds``."""
    match = engine.match
    for tokens, label in prompts:
        lease = await match(tokens)
        n = len(tokens)
        await lease.allocate(n)
        lease.commit(n)
        lease.release(returns=label)


async def timed_loop(
    engine: CacheEngine, prompts: Sequence[LabelledPrompt], samples: Samples
) -> None:
    """Serve as the plain loop does, and time each call."""
    now = time.perf_counter_ns
    for tokens, label in prompts:
        n = len(tokens)
        started = now()
        lease = await engine.match(tokens)
        matched = now()
        await lease.allocate(n)
        allocated = now()
        lease.commit(n)
        committed = now()
        lease.release(returns=label)
        released = now()
        samples.match.append(matched - started)
        samples.allocate.append(allocated - matched)
        samples.commit.append(committed - allocated)
        samples.release.append(released - committed)


async def run_in_chunks(
    loop: Callable[[Sequence[LabelledPrompt]], Awaitable[None]],
    requests: Iterable[TraceRequest],
    progress: Progress,
) -> LoopClock:
    """Await ``loop`` on chunks of prompts; return a clock that excludes expansion and progress."""
    clock = LoopClock()
    for chunk in prompt_chunks(requests):
        with clock.running():
            await loop(chunk)
        progress(len(chunk))
        await asyncio.sleep(0)
    return clock


def prompt_chunks(requests: Iterable[TraceRequest]) -> Iterator[list[LabelledPrompt]]:
    """Yield the expanded prompts, in chunks of ``CHUNK_REQUESTS`` or of about ``CHUNK_TOKENS``."""
    chunk: list[LabelledPrompt] = []
    tokens = 0
    for request in requests:
        chunk.append((expand_tokens(request), request.returns))
        tokens += request.input_tokens
        if len(chunk) == CHUNK_REQUESTS or tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


class Replayer:
    """Serves requests by match, allocate, onload, commit and release, and times each call.

    Args:
        engine: the engine.
        disk: simulated disk tier; None for none.
        model: simulated times between grant and commit; None for none.

    Attributes:
        clock: time of the replay; its CPU time excludes expansion and disk tier.
        samples: times of the calls.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        disk: DiskTier | None = None,
        model: ServerModel | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._disk = disk
        self.clock = LoopClock()
        self.samples = Samples()

    async def window(self, requests: Sequence[TraceRequest], live: int, progress: Progress) -> None:
        """Hold up to ``live`` leases; release the oldest for a new one, or when blocks run out."""
        leases: deque[tuple[Lease, str]] = deque()
        with self.clock.running():
            try:
                for count, request in enumerate(requests, start=1):
                    if len(leases) >= live:
                        self._release(*leases.popleft())
                    lease = await self._admit(self._expand(request), leases)
                    leases.append((lease, request.returns))
                    # One pass of the loop per request: the poller sees the ends of transfers there.
                    await asyncio.sleep(0)
                    if count % CHUNK_REQUESTS == 0 or count == len(requests):
                        with self.clock.paused():
                            progress(count % CHUNK_REQUESTS or CHUNK_REQUESTS)
            finally:
                while leases:
                    self._release(*leases.popleft())
            await self._engine.drain()

    async def user(
        self, sessions: Iterator[Iterable[tuple[TraceRequest, float]]], delay: float
    ) -> None:
        """Serve sessions one after the other, and their requests each after its pause.

        Args:
            sessions: requests and the pauses before them in seconds; other users take the sessions
                between.
            delay: seconds before the first session.
        """
        await asyncio.sleep(delay)
        for session in sessions:
            for request, pause in session:
                await asyncio.sleep(pause)
                lease = await self._admit(self._expand(request), request=request)
                self._release(lease, request.returns)

    def _expand(self, request: TraceRequest) -> Prompt:
        with self.clock.paused():
            return expand_tokens(request)

    async def _admit(
        self,
        tokens: Prompt,
        older: deque[tuple[Lease, str]] | None = None,
        request: TraceRequest | None = None,
    ) -> Lease:
        """Return a committed lease; release leases of ``older`` while blocks are missing."""
        now = time.perf_counter_ns
        n = len(tokens)
        started = now()
        lease = await self._engine.match(tokens)
        matched = now()
        model = None if request is None else self._model
        try:
            if model is not None:
                model.arrived(lease)
            await self._allocate(lease, n, older)
            allocated = now()
            if model is not None:
                model.granted(lease, n)
            if not lease.layers.is_done:
                await lease.layers.wait_all()
                self.samples.onload.append(now() - allocated)
            if model is not None and request is not None:
                await model.serve(lease, request)
            if self._disk is not None:
                with self.clock.paused():
                    self._disk.serve(tokens, lease.cached_tokens)
            computed = now()
            lease.commit(n)
            self.samples.commit.append(now() - computed)
        except BaseException:
            lease.release()
            raise
        self._engine.step()
        self.samples.match.append(matched - started)
        self.samples.allocate.append(allocated - matched)
        return lease

    async def _allocate(self, lease: Lease, n: int, older: deque[tuple[Lease, str]] | None) -> None:
        while older:
            if lease.try_allocate(n):
                return
            self._release(*older.popleft())
        await lease.allocate(n)

    def _release(self, lease: Lease, label: str) -> None:
        started = time.perf_counter_ns()
        lease.release(returns=label)
        self.samples.release.append(time.perf_counter_ns() - started)
