"""A process with an engine on a host store, which serves prompts until it is killed.

``python -m tests.stores.host_engine URL SEED...`` serves a prompt per seed, prints the number of
blocks in its host tier when the store has all of them, and waits.
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Final

from aiokv.stores import StoreUse, stores_from
from aiokv.testing import ScriptedDevice, run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

PROMPT_BLOCKS: Final = 10


async def serve(url: str, seeds: list[int]) -> Cache:
    """Return an open engine that has served a prompt per seed."""
    cache = engine(url)
    await cache.__aenter__()
    for count, seed in enumerate(seeds, start=1):
        await hit_blocks(cache, seed)
        await saved(cache, count)
    return cache


async def saved(cache: Cache, prompts: int) -> None:
    """Wait until the store has the blocks of so many different prompts of an engine."""
    await run_until_idle(lambda: saved_blocks(cache) >= prompts * PROMPT_BLOCKS)


def engine(url: str) -> Cache:
    """Return an engine that is not open, with a host tier of 64 blocks."""
    (use,) = stores_from([url])
    use = StoreUse(
        use.store,
        deadline_seconds=PATIENCE_SECONDS,
        lookup_deadline_seconds=PATIENCE_SECONDS,
        retry_seconds=0.01,
    )
    return Cache(device=ScriptedDevice(), device_blocks=16, host_blocks=64, stores=[use])


def host_blocks(cache: Cache) -> int:
    return cache.statistics.groups["attention"].host.cached


def saved_blocks(cache: Cache) -> int:
    """Return the blocks that the store has got from this engine, or had before."""
    store = cache.statistics.stores[0]
    return store.saved_blocks + store.present_blocks + store.loaded_blocks


async def hit_blocks(cache: Cache, seed: int) -> int:
    """Serve a prompt; return its cached blocks, whose bytes were compared."""
    lease = await cache.serve(prompt(seed, PROMPT_BLOCKS), wait_store=math.inf)
    try:
        return lease.cached_tokens // BLOCK_TOKENS
    finally:
        lease.release()


async def _main() -> None:
    cache = await serve(sys.argv[1], [int(seed) for seed in sys.argv[2:]])
    print(host_blocks(cache), flush=True)
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(_main())
