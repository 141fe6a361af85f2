"""Loops that replay a trace on an engine: plain, timed, windowed, and by timestamps."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError, TransferError
from aiokv.trace.format import expand_tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv import CacheEngine, Lease
    from aiokv.trace.disk_tier import DiskTier
    from aiokv.trace.format import TraceRequest
    from aiokv.trace.payload import Payload
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


@contextmanager
def _first_of_a_group(kind: type[Exception]) -> Iterator[None]:
    """Raise the first exception of a group whose exceptions are all of the class ``kind``."""
    try:
        yield
    except BaseExceptionGroup as group:
        if group.split(kind)[1] is None:
            raise group.exceptions[0] from None
        raise


class Samples:
    """Wall-clock nanoseconds per call, by operation."""

    def __init__(self) -> None:
        self.match: list[int] = []
        self.allocate: list[int] = []
        self.onload: list[int] = []
        self.commit: list[int] = []
        self.release: list[int] = []
        self.admission: list[int] = []

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
        block_tokens: tokens per block.
        payload: bytes to write and to verify; None for none.
        disk: simulated disk tier; None for none.
        model: simulated times between grant and commit; None for none.

    Attributes:
        clock: time of the replay; its CPU time excludes expansion, payload and disk tier.
        samples: times of the calls.
        failed_onloads: number of leases whose onload failed and that computed the blocks again.
    """

    def __init__(
        self,
        engine: CacheEngine,
        *,
        block_tokens: int,
        payload: Payload | None = None,
        disk: DiskTier | None = None,
        model: ServerModel | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._block_tokens = block_tokens
        self._payload = payload
        self._disk = disk
        self.clock = LoopClock()
        self.samples = Samples()
        self.failed_onloads = 0

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

    async def by_timestamps(
        self,
        requests: Sequence[TraceRequest],
        arrival_seconds: Sequence[float],
        hold_seconds: Sequence[float],
        live: int,
        progress: Progress,
    ) -> None:
        """Admit each request at its arrival, at most ``live`` at a time, and hold its lease.

        Args:
            requests: requests in order of arrival.
            arrival_seconds: arrival of each request after the start, in ascending order.
            hold_seconds: time between the commit and the release of each request.
            live: number of leases held at once; other requests wait in order of arrival.
            progress: called with 1 when a request ends.
        """
        slots = asyncio.Semaphore(live)
        loop = asyncio.get_running_loop()
        start = loop.time()
        arrivals = zip(requests, arrival_seconds, hold_seconds, strict=True)
        with self.clock.running(), _first_of_a_group(AiokvError):
            async with asyncio.TaskGroup() as tasks:
                for request, arrival, hold in arrivals:
                    if (delay := start + arrival - loop.time()) > 0:
                        await asyncio.sleep(delay)
                    tasks.create_task(self._serve(request, hold, slots, progress))
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

    async def _serve(
        self,
        request: TraceRequest,
        hold_seconds: float,
        slots: asyncio.Semaphore,
        progress: Progress,
    ) -> None:
        arrived = time.perf_counter_ns()
        async with slots:  # waiting requests hold no prompts
            lease = await self._admit(self._expand(request))
            try:
                self.samples.admission.append(time.perf_counter_ns() - arrived)
                await asyncio.sleep(hold_seconds)
            finally:
                self._release(lease, request.returns)
        progress(1)

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
                await self._wait_onload(lease)
                self.samples.onload.append(now() - allocated)
            if model is not None and request is not None:
                await model.serve(lease, request)
            self._compute(lease, tokens)
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

    async def _wait_onload(self, lease: Lease) -> None:
        try:
            await lease.layers.wait_all()
        except TransferError:
            lease.recompute_from()
            self.failed_onloads += 1

    def _compute(self, lease: Lease, tokens: Prompt) -> None:
        with self.clock.paused():
            if self._disk is not None:
                self._disk.serve(tokens, lease.cached_tokens)
            if self._payload is not None:
                self._payload.verify_cached(lease, tokens, self._block_tokens)
                self._payload.write_computed(lease, tokens, self._block_tokens)

    def _release(self, lease: Lease, label: str) -> None:
        started = time.perf_counter_ns()
        lease.release(returns=label)
        self.samples.release.append(time.perf_counter_ns() - started)
