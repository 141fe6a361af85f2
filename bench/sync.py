"""Time of a scheduler's thread for one crossing to the engine's thread, as its calls grow.

A server decodes 64 requests of 1,024 tokens in 16-token blocks, whose answers have 32 tokens: per
step, 2 requests end and 2 begin. The calls of one step of its scheduler cross together: 2 releases,
2 matches of cached prompts, 2 grants of these, one ``extend`` of all running requests, 56 commits,
and the end of the step.

* ``crossing_us.calls_64``: from the first recorded call to the last answer: recording, two switches
  of threads and of the GIL, and the calls themselves.
* ``crossing_us.calls_1``: the same for one ``commit``.
* ``same_calls_on_the_loop_us``: the 64 calls, made by code that runs on the engine's own loop.
* ``crossing_us.beside_python``: the 64 calls, after a pause, while another thread runs Python code
  without a break, which gives the GIL up only after ``sys.getswitchinterval()``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig
from aiokv.base.percentiles import percentile
from aiokv.errors import InternalError
from aiokv.sync import SyncEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv import CacheEngine, Lease
    from aiokv.sync import Calls, SyncLease

PROMPT_TOKENS = 1_024
RUNNING = 64
JOINING = 2  # requests that end, and that begin, per step
COMMITS = 56


def run(quick: bool) -> dict[str, Any]:
    repeats = 200 if quick else 3_000
    with SyncEngine(CacheConfig(device_blocks=RUNNING * 1_000)) as engine:
        prompts = [_prompt(i) for i in range(RUNNING)]
        running = [engine.match(prompt) for prompt in prompts]
        for lease in running:
            lease.allocate(PROMPT_TOKENS).result()
            lease.commit(PROMPT_TOKENS)
        step = _Step(running, prompts[:JOINING])

        def cross() -> None:
            calls = engine.calls()
            step.record(calls)
            calls.run()

        cross()
        crossing = {
            "calls_64": _measure(cross, repeats),
            "calls_1": _measure(lambda: running[0].commit(PROMPT_TOKENS), repeats),
            "beside_python": _beside_python(cross, repeats // 20),
        }
        _release(engine, step.joined)
        inner = [lease.inner for lease in running]
        on_loop = engine.call(_on_the_loop, engine.cache, inner, prompts[:JOINING], repeats)
        _release(engine, running)
        if engine.statistics().leases:
            raise InternalError(f"leases are left: {engine.statistics()}")
    return {"crossing_us": crossing, "same_calls_on_the_loop_us": on_loop}


def _release(engine: SyncEngine, leases: list[SyncLease]) -> None:
    with engine.calls() as calls:
        for lease in leases:
            calls.release(lease)


class _Step:
    """Calls of one scheduler step; the requests that join in one step end in the next one."""

    def __init__(self, running: list[SyncLease], prompts: list[np.ndarray]) -> None:
        self._running = running
        self._prompts = prompts
        self.joined: list[SyncLease] = []

    def record(self, calls: Calls) -> None:
        for lease in self.joined:
            calls.release(lease)
        self.joined = [calls.match(prompt) for prompt in self._prompts]
        for lease in self.joined:
            calls.try_allocate(lease, PROMPT_TOKENS)
        calls.extend(self._running, 1)
        for lease in self._running[:COMMITS]:
            calls.commit(lease, PROMPT_TOKENS)
        calls.step()


def _on_the_loop(
    cache: CacheEngine, running: list[Lease], prompts: list[np.ndarray], repeats: int
) -> dict[str, float]:
    joined: list[Lease] = []

    def step() -> None:
        nonlocal joined
        for lease in joined:
            lease.release()
        joined = [cache.match(prompt) for prompt in prompts]
        for lease in joined:
            lease.try_allocate(PROMPT_TOKENS)
        cache.extend(running, 1)
        for lease in running[:COMMITS]:
            lease.commit(PROMPT_TOKENS)
        cache.step()

    measured = _measure(step, repeats)
    for lease in joined:
        lease.release()
    return measured


def _beside_python(function: Callable[[], None], repeats: int) -> dict[str, float]:
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return _measure(function, repeats, pause_seconds=0.002)
    finally:
        ended.set()
        thread.join()


def _measure(
    function: Callable[[], object], repeats: int, pause_seconds: float = 0.0
) -> dict[str, float]:
    """Return percentiles of the microseconds of ``function``, without the pauses before it."""
    samples = []
    for _ in range(repeats):
        if pause_seconds:
            time.sleep(pause_seconds)
        begin = time.perf_counter_ns()
        function()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    samples.sort()
    return {"p50": percentile(samples, 50), "p99": percentile(samples, 99)}


def _prompt(seed: int) -> np.ndarray:
    return np.arange(PROMPT_TOKENS, dtype=np.int32) + np.int32(seed * PROMPT_TOKENS)
