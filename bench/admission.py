"""Time of an allocation that finds clean blocks, by the number of waiting requests.

The device is full of cached blocks that have a host copy, except those of one lease. ``waiters``
requests for the whole device wait in line behind that lease; requests with a better priority
repeatedly take clean blocks, compute and release. Their waiting time must not grow with the line.

* ``allocate_us``: from the call to the grant, by the number of waiters; with none the call does not
  suspend, with some it takes a pass of the loop.
* ``longest_line_ratio``: time behind one waiter divided by the time with the most waiters.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine
from aiokv.base.percentiles import percentile
from aiokv.errors import InternalError

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 64
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
DEVICE_BLOCKS = 32 * PROMPT_BLOCKS


def run(quick: bool) -> dict[str, Any]:
    lines = (0, 1, 100, 1_000) if quick else (0, 1, 100, 1_000, 10_000)
    repeats = 50 if quick else 400
    medians = {waiters: uvloop.run(_median_us(waiters, repeats)) for waiters in lines}
    return {
        "allocate_us": {f"waiters_{waiters}": median for waiters, median in medians.items()},
        "longest_line_ratio": medians[1] / medians[lines[-1]],
    }


async def _median_us(waiters: int, repeats: int) -> float:
    config = CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, host_blocks=2 * DEVICE_BLOCKS
    )
    async with CacheEngine(config) as engine:
        for seed in range(DEVICE_BLOCKS // PROMPT_BLOCKS):
            await _serve(engine, seed)
        async with engine.match(_prompt(0)) as holder:
            await holder.allocate(PROMPT_TOKENS)
            line = [asyncio.create_task(_want_everything(engine, i)) for i in range(waiters)]
            await asyncio.sleep(0)
            samples = [await _serve(engine, 1_000 + i) for i in range(repeats)]
            statistics = engine.statistics()
            for task in line:
                task.cancel()
        if line:
            await asyncio.wait(line)
        if statistics.waiting != waiters or statistics.attention.device.evicted_blocks < repeats:
            raise InternalError(f"no lease waited, or nothing was evicted: {statistics}")
    return percentile(sorted(samples), 50)


async def _serve(engine: CacheEngine, seed: int) -> float:
    """Return the microseconds of the allocation; its blocks have host copies at the end."""
    async with engine.match(_prompt(seed)) as lease:
        begin = time.perf_counter_ns()
        await lease.allocate(PROMPT_TOKENS, priority=0)
        took = (time.perf_counter_ns() - begin) / 1e3
        lease.commit(PROMPT_TOKENS)
    await engine.drain()
    return took


async def _want_everything(engine: CacheEngine, seed: int) -> None:
    async with engine.match(_prompt(100_000 + seed)[:BLOCK_TOKENS]) as lease:
        await lease.allocate(DEVICE_BLOCKS * BLOCK_TOKENS, priority=1)


def _prompt(seed: int) -> np.ndarray:
    return np.arange(PROMPT_TOKENS, dtype=np.int32) + np.int32(seed * PROMPT_TOKENS)
