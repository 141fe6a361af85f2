"""Time of ``aclose`` under load: with leases held, requests waiting and transfers in flight.

Clients send requests until the engine refuses them; the bench checks that all of them ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import ClosedError

BLOCK_TOKENS = 16
PROMPT_TOKENS = 512
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
LIVE = 32
HOST_PROMPTS = 8 * LIVE
PROMPTS = 12 * LIVE
NUM_LAYERS = 4


def run(quick: bool) -> dict[str, Any]:
    rounds = 1 if quick else 10
    return {"asyncio": _measure(asyncio.run, rounds), "uvloop": _measure(uvloop.run, rounds)}


def _measure(run_loop: Any, rounds: int) -> dict[str, float]:
    results = [run_loop(_shutdown(clients=256)) for _ in range(rounds)]
    seconds = sorted(result["seconds"] for result in results)
    return {
        "aclose_p50_ms": seconds[len(seconds) // 2] * 1e3,
        "aclose_max_ms": seconds[-1] * 1e3,
        "clients": results[-1]["refused"],
        "blocks_in_flight_at_close": results[-1]["in_flight"],
    }


async def _shutdown(clients: int) -> dict[str, float]:
    device_blocks = LIVE * PROMPT_BLOCKS
    config = CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=device_blocks,
        host_blocks=HOST_PROMPTS * PROMPT_BLOCKS,
    )
    served: Counter[str] = Counter()
    warm = asyncio.Event()
    async with CacheEngine(config, regions=_regions(device_blocks)) as engine:
        tasks = [asyncio.create_task(_client(engine, i, served, warm)) for i in range(clients)]
        await warm.wait()
        statistics = engine.statistics()
        started = time.perf_counter()
        await engine.aclose()
        seconds = time.perf_counter() - started
        await asyncio.gather(*tasks)
    in_flight = statistics.attention.device.in_flight + statistics.attention.host.in_flight
    return {"seconds": seconds, "refused": served["refused"], "in_flight": in_flight}


async def _client(
    engine: CacheEngine, client: int, served: Counter[str], warm: asyncio.Event
) -> None:
    """Request random prompts, most of them on the host, until the engine is closed."""
    rng = random.Random(client)
    try:
        while True:
            first = rng.randrange(PROMPTS) * PROMPT_TOKENS
            tokens = np.arange(first, first + PROMPT_TOKENS, dtype=np.int32)
            async with engine.match(tokens) as lease:
                await lease.allocate(PROMPT_TOKENS)
                await lease.layers.wait_all()
                lease.commit(PROMPT_TOKENS)
            engine.step()
            served["requests"] += 1
            if served["requests"] == 1_000:
                warm.set()
            await asyncio.sleep(0)
    except ClosedError:
        served["refused"] += 1


def _regions(device_blocks: int) -> Regions:
    regions = Regions(num_layers=NUM_LAYERS)
    for name in ("k", "v"):
        layers = [np.zeros((device_blocks, 4_096), dtype=np.uint8) for _ in range(NUM_LAYERS)]
        regions.add(name, layers=layers)
    return regions
