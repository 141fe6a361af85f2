"""CPU time for which ``engine.reset()`` holds the loop.

* ``ms_of_N_blocks``: CPU milliseconds with N cached blocks, in prompts of 1,000 blocks, and no
  open lease.
* ``ms_of_N_blocks_leased``: the same while eight leases hold one prompt each.
"""

from __future__ import annotations

import asyncio
import time

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.trace.loops import plain_loop

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 1_000
LEASES = 8


def run(quick: bool) -> dict[str, float]:
    sizes = (16_000,) if quick else (1_600_000, 10_000_000)
    return {
        f"ms_of_{blocks}_blocks{suffix}": asyncio.run(_reset(blocks, leases))
        for blocks in sizes
        for leases, suffix in ((0, ""), (LEASES, "_leased"))
    }


async def _reset(blocks: int, num_leases: int) -> float:
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=blocks, eviction_policy="lru")
    prompt = np.arange(PROMPT_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
    async with CacheEngine(config) as engine:
        for _ in range(blocks // PROMPT_BLOCKS):
            await plain_loop(engine, [(prompt, "")])
            prompt += np.int32(prompt.size)
        leases = []
        for _ in range(num_leases):
            prompt -= np.int32(prompt.size)
            lease = await engine.match(prompt)
            leases.append(await lease.allocate(prompt.size))
        started = time.thread_time()
        await engine.reset()
        held_ms = (time.thread_time() - started) * 1e3
        for lease in leases:
            lease.release()
        return held_ms
