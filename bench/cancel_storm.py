"""Cost of cancellation: many requests wait for capacity, and all are cancelled at once.

* ``storm``: a full cache and ``waiters`` tasks that await ``allocate``, cancelled at once.
* ``churn``: requests cancelled at a random pass of the loop while others run; afterwards every
  block must be free (the bench fails otherwise).
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import InternalError

BLOCK_TOKENS = 16
PROMPT_TOKENS = 1_024


def run(quick: bool) -> dict[str, Any]:
    waiters = 500 if quick else 5_000
    return {
        "storm": {
            "asyncio": asyncio.run(_storm(waiters)),
            "uvloop": uvloop.run(_storm(waiters)),
        },
        "churn": uvloop.run(_churn(waiters)),
    }


async def _storm(waiters: int) -> dict[str, float]:
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=blocks)
    async with CacheEngine(config) as engine:
        holder = await engine.match(_prompt(0))
        await holder.allocate(PROMPT_TOKENS)
        tasks = [asyncio.create_task(_hold(engine, _prompt(i + 1))) for i in range(waiters)]
        started = time.perf_counter()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        queued = time.perf_counter()
        if engine.statistics().waiting != waiters:
            raise InternalError("not every request waits for capacity")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        cancelled = time.perf_counter()
        holder.release()
        _expect_nothing_out(engine)
    return {
        "queue_us_per_waiter": (queued - started) * 1e6 / waiters,
        "cancel_us_per_waiter": (cancelled - queued) * 1e6 / waiters,
    }


async def _churn(requests: int) -> dict[str, float]:
    """Serve 64 requests at a time in the blocks of eight; half of the requests are cancelled."""
    rng = random.Random(0)
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=8 * PROMPT_TOKENS // BLOCK_TOKENS)
    cancelled = 0
    started = time.perf_counter()
    async with CacheEngine(config) as engine:
        for first in range(0, requests, 64):
            prompts = [_prompt(rng.randrange(200)) for _ in range(min(64, requests - first))]
            tasks = [asyncio.create_task(_hold(engine, tokens, passes=2)) for tokens in prompts]
            victims = rng.sample(tasks, len(tasks) // 2)
            for victim in victims:
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                cancelled += victim.cancel()
            await asyncio.wait(tasks)
        _expect_nothing_out(engine)
    seconds = time.perf_counter() - started
    return {"churned_requests_per_second": requests / seconds, "cancelled_requests": cancelled}


async def _hold(engine: CacheEngine, tokens: np.ndarray, passes: int = 0) -> None:
    async with engine.match(tokens) as lease:
        await lease.allocate(PROMPT_TOKENS)
        for _ in range(passes):
            await asyncio.sleep(0)
        lease.commit(PROMPT_TOKENS)


def _prompt(seed: int) -> np.ndarray:
    return np.arange(PROMPT_TOKENS, dtype=np.int32) + np.int32(seed * PROMPT_TOKENS)


def _expect_nothing_out(engine: CacheEngine) -> None:
    leased = engine.statistics().attention.device.leased
    if leased:
        raise InternalError(f"{leased} blocks are still leased after the storm")
