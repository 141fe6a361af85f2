"""CPU time for which ``engine.reset()`` holds the loop, without open leases.

* ``ms_of_N_blocks``: CPU milliseconds with N cached blocks, in prompts of 1,000 blocks.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.trace.loops import plain_loop

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 1_000


def run(quick: bool) -> dict[str, float]:
    sizes = (16_000,) if quick else (1_600_000, 10_000_000)
    return {f"ms_of_{blocks}_blocks": asyncio.run(_reset(blocks)) for blocks in sizes}


async def _reset(blocks: int) -> float:
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=blocks, eviction_policy="lru")
    prompt = np.arange(PROMPT_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    async with CacheEngine(config) as engine:
        for _ in range(blocks // PROMPT_BLOCKS):
            await plain_loop(engine, [(prompt, "")])
            prompt += np.int32(prompt.size)
        started = time.thread_time()
        await engine.reset()
        return (time.thread_time() - started) * 1e3
