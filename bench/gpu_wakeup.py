"""Latency from the end of a transfer to the coroutine that waits for it.

The last command of a transfer writes a flag to mapped pinned memory; a native thread that spins on
a core of its own stamps it; the coroutine stamps when it runs. Transfers run back to back, two in
the queue, and the poller gets the expected time of each.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv import _native
from aiokv.base.percentiles import percentile
from aiokv.worker.arena import HostArena
from aiokv.worker.poller import EventPoller
from bench.gpu_native import checked, library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
SAMPLES = 10_000
LARGE_SAMPLES = 400


class Case:
    """One case: transfer size, queue depth, and other work of the loop."""

    def __init__(
        self, num_bytes: int, samples: int, *, depth: int = 2, busy: bool = False, pin: bool = False
    ) -> None:
        self.num_bytes, self.samples, self.depth = num_bytes, samples, depth
        self.busy, self.pin = busy, pin


CASES = {
    "16_mib": Case(16 * MIB, SAMPLES),
    "256_mib": Case(256 * MIB, LARGE_SAMPLES),
    "64_in_flight": Case(16 * MIB, SAMPLES, depth=64),
    "busy_loop": Case(16 * MIB, SAMPLES, busy=True),
    "while_pinning": Case(16 * MIB, SAMPLES, pin=True),
}


def run() -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the result of each case."""
    for name, case in CASES.items():
        yield f"uvloop_{name}", _run(uvloop.new_event_loop, case)
    yield "asyncio_16_mib", _run(asyncio.new_event_loop, CASES["16_mib"])
    yield "uvloop_idle", {"loop_cpu_share": _idle()}


def _run(make_loop: Callable[[], asyncio.AbstractEventLoop], case: Case) -> dict[str, float]:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(_measure(case))


async def _measure(case: Case) -> dict[str, float]:
    import cupy

    runtime = cupy.cuda.runtime
    flags_memory = cupy.cuda.alloc_pinned_memory(4 * case.samples)
    flags = np.frombuffer(flags_memory, np.uint32, case.samples)
    flags[:] = 0
    stamps, woken = np.zeros(case.samples), np.zeros(case.samples)
    source = cupy.cuda.alloc_pinned_memory(case.num_bytes)
    target = cupy.empty(case.num_bytes, cupy.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = [cupy.cuda.Event(disable_timing=True) for _ in range(case.depth + 2)]
    loop = asyncio.get_running_loop()
    poller = EventPoller()
    poller.open(loop)
    native = library()
    seconds = _transfer_seconds(runtime, target, source, case.num_bytes, stream)
    spinner = native.spinner_start(flags.ctypes.data, stamps.ctypes.data, case.samples)

    def submit(i: int) -> Any:
        runtime.memcpyAsync(target.data.ptr, source.ptr, case.num_bytes, 1, stream.ptr)
        checked(native.write_flag(stream.ptr, ctypes.c_void_p(flags.ctypes.data + 4 * i)))
        event = pool[i % len(pool)]
        event.record(stream)
        return event

    stop = asyncio.Event()
    others = [asyncio.create_task(_busy(stop))] if case.busy else []
    pinning = _Pinning() if case.pin else None
    begin_cpu, begin = time.thread_time(), time.perf_counter()
    waiting: deque[asyncio.Task[None]] = deque()

    async def wait(i: int, event: Any) -> None:
        done: asyncio.Future[None] = loop.create_future()
        poller.watch(event, "copies", lambda _: done.set_result(None), seconds)
        await done
        woken[i] = time.monotonic()

    for i in range(case.samples):
        waiting.append(asyncio.create_task(wait(i, submit(i))))
        if len(waiting) == case.depth:
            await waiting.popleft()
    for task in waiting:
        await task
    elapsed, cpu = time.perf_counter() - begin, time.thread_time() - begin_cpu
    stop.set()
    for task in others:
        await task
    share = poller.statistics().cpu_share
    native.spinner_stop(spinner)
    poller.close()
    if pinning is not None:
        pinning.close()
    ordered = sorted(((woken - stamps) * 1e6).tolist())
    return {
        "p50_us": percentile(ordered, 50),
        "p99_us": percentile(ordered, 99),
        "samples": float(case.samples),
        "poller_cpu_share": share,
        "loop_cpu_share": cpu / elapsed,
        "transfer_us": seconds * 1e6,
        "lead_us": poller.lead_seconds * 1e6,
    }


def _transfer_seconds(runtime: Any, target: Any, source: Any, num_bytes: int, stream: Any) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(4):
            runtime.memcpyAsync(target.data.ptr, source.ptr, num_bytes, 1, stream.ptr)
        stream.synchronize()
        times.append((time.perf_counter() - started) / 4)
    return min(times)


async def _busy(stop: asyncio.Event) -> None:
    """A loop that is busy for 10 % of the time, 100 us at once."""
    while not stop.is_set():
        ends_at = time.perf_counter() + 100e-6
        while time.perf_counter() < ends_at:
            pass
        await asyncio.sleep(0.9e-3)


class _Pinning:
    """Pin an arena that pins longer than the samples take, and unpin it after the samples.

    Unpinning waits for the device, with the driver's lock held: nothing to do beside transfers.
    """

    def __init__(self) -> None:
        self._arena = HostArena(num_blocks=32, pitch_bytes=1 << 30)
        self._pinning = _native.cuda.HostRegistration(
            self._arena.pointer, self._arena.nbytes, device=0
        )

    def close(self) -> None:
        self._pinning.close()
        self._arena.close()


def _idle() -> float:
    """CPU share of a loop whose poller has nothing to wait for."""

    async def idle() -> float:
        poller = EventPoller()
        poller.open(asyncio.get_running_loop())
        begin_cpu, begin = time.thread_time(), time.perf_counter()
        await asyncio.sleep(0.5)
        share = (time.thread_time() - begin_cpu) / (time.perf_counter() - begin)
        poller.close()
        return share

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(idle())
