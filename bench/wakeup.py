"""Wake-up latency: time and CPU cost from the end of an event to the coroutine that awaits it.

A native stream copies 8 MiB back to back; a coroutine awaits each copy's event. Compared, on
asyncio and uvloop: ``poller`` has the expected end (timerfd, then polling), ``poller_blind``
does not, ``executor`` blocks a pool thread in ``event.synchronize()``. ``cpu_share`` is the CPU
time of the loop's thread and of the pool's over the elapsed time, the stream's thread not counted:
1.0 is one core. Latencies run from the stamp that the stream's thread sets at the event's end.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv.base.plan import ONLOAD
from aiokv.layout.regions import Regions
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cpu import CpuDevice
from aiokv.worker.poller import EventPoller

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiokv.worker.device.base import Event

COPY_BYTES = 8 << 20


def run(quick: bool) -> dict[str, Any]:
    rounds = 200 if quick else 1000
    return {
        name: {
            way: loop_run(_measure(way, rounds)) for way in ("poller", "poller_blind", "executor")
        }
        for name, loop_run in (("asyncio", asyncio.run), ("uvloop", uvloop.run))
    }


async def _measure(way: str, rounds: int) -> dict[str, float]:
    regions = Regions(num_layers=1)
    regions.add("k", layers=[np.ones((8, COPY_BYTES // 8), np.uint8)])
    arena = HostArena(num_blocks=8, pitch_bytes=regions.payload_bytes)
    arena.blocks[:] = 1
    device = CpuDevice()
    device.attach(regions, arena)
    poller = EventPoller()
    poller.open(asyncio.get_running_loop())
    pool = ThreadPoolExecutor(1)
    pool_seconds = _PoolSeconds()
    waits: dict[str, Callable[[Event, float], Awaitable[Any]]] = {
        "poller": poller.wait,
        "poller_blind": lambda event, _: poller.wait(event),
        "executor": lambda event, _: asyncio.get_running_loop().run_in_executor(
            pool, pool_seconds.synchronize, event
        ),
    }
    try:
        return await _rounds(device, waits[way], rounds, pool_seconds)
    finally:
        pool.shutdown()
        poller.close()
        await asyncio.sleep(0)
        device.close()
        arena.close()


async def _rounds(
    device: CpuDevice,
    wait: Callable[[Event, float], Awaitable[Any]],
    rounds: int,
    pool_seconds: _PoolSeconds,
) -> dict[str, float]:
    ids = np.arange(8, dtype=np.int32)
    latencies: list[float] = []
    durations: list[float] = [0.0]
    started, loop_started = time.monotonic(), time.thread_time()
    for _ in range(rounds):
        submitted = time.monotonic()
        event = device.copy(ONLOAD, ids, ids, None).layer_events[0]
        await wait(event, statistics.median(durations[-16:]))
        now = time.monotonic()
        finished = event.finished_seconds
        latencies.append(now - finished)
        durations.append(finished - submitted)
    elapsed = time.monotonic() - started
    cpu_seconds = time.thread_time() - loop_started + pool_seconds.total
    latencies.sort()
    return {
        "p50_us": latencies[rounds // 2] * 1e6,
        "p99_us": latencies[rounds * 99 // 100] * 1e6,
        "cpu_share": cpu_seconds / elapsed,
        "copy_p50_us": statistics.median(durations[1:]) * 1e6,
    }


class _PoolSeconds:
    """Return the CPU time that the pool's thread spends waiting."""

    def __init__(self) -> None:
        self.total = 0.0
        self._local = threading.local()

    def synchronize(self, event: Event) -> None:
        event.synchronize()
        # the thread's CPU time since the last call, including taking the work
        now = time.thread_time()
        self.total += now - getattr(self._local, "seen", 0.0)
        self._local.seen = now
