"""Program that serves until Ctrl-C, closes its engine and tells how.

Arguments: ``asyncio`` or ``uvloop``; ``held`` if a request holds a lease, for which closing waits.
"""

from __future__ import annotations

import asyncio
import sys
import threading

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import BrokenEngineError

TOKENS = list(range(9))
HELD_SECONDS = 300.0  # longer than any test waits


def new_engine() -> CacheEngine:
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8) for _ in range(2)])
    return CacheEngine(CacheConfig(block_tokens=2, device_blocks=8, host_blocks=8), regions)


async def main(engine: CacheEngine, *, held: bool) -> None:
    async with engine:
        lease = await engine.match(TOKENS).allocate(9)
        lease.commit(9)
        if not held:
            lease.release()
        print("serving", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("closing", flush=True)
            if held:  # leaving "async with" after an exception would not wait
                await engine.aclose(HELD_SECONDS)


if __name__ == "__main__":
    engine = new_engine()
    run = {"asyncio": asyncio.run, "uvloop": uvloop.run}[sys.argv[1]]
    try:
        run(main(engine, held="held" in sys.argv))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        asyncio.run(engine.aclose())
    except BrokenEngineError as error:
        sys.exit(f"aclose: {error}")
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("aiokv")]
    print(f"closed, {len(left)} threads left", flush=True)
