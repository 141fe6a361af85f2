"""Time that a request waits for a shared store that has no block of its prompt.

Seven engines take turns: one without a store, one with an empty disk store, one with the empty
shared memory of ``aiokv store serve``, one of two ranks with this memory, and three with a Redis
server on this machine, which has 100,000 blocks of other prompts.

* ``disk``: the index of the store is in memory.
* ``host``: the engine reads the filter of the service.
* ``ranks``: the engine reads the filter that the first of its ranks has shared with it.
* ``followed``: the engine follows the changes of the server, so it knows that the block is missing.
* ``remembered``: it does not, but the server has answered for the same prompt before.
* ``asked``: the engine asks the server for each prompt, as it did before it knew either.

``wait_us`` is the time from the call of ``allocate`` to its end, the median of the requests;
``added_us`` is the median of the differences to the engine without a store in the same turn, and
``added_cpu_us`` the same of the CPU time of the process, threads included. The prompts have 1,024
and 32,768 tokens in blocks of 16 tokens.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.ranks import Rank, RankGroup
from aiokv.stores import DiskStore, HostStore, StoreUse
from aiokv.stores.redis import RedisStore
from tests.stores.conformance import eventually
from tests.stores.servers_redis import PROGRAM, running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BLOCK_TOKENS = 16
PROMPT_TOKENS = (1_024, 32_768)
NUM_BLOCKS = max(PROMPT_TOKENS) // BLOCK_TOKENS + 1
STORED_KEYS = 100_000
HEARTBEATS_SECONDS = 3.0


class UnfollowedStore(RedisStore):
    """A store as that of a cluster, whose changes are not followed."""

    follows_keys = False


def run(quick: bool) -> dict[str, Any]:
    """Return the times by length of the prompt and engine."""
    if PROGRAM is None:
        return {}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder)) as server,
        _service(Path(folder) / "host.sock"),
    ):
        rng = np.random.default_rng(0)
        with server.client() as client:
            for _ in range(STORED_KEYS // 1_000):
                pipe = client.pipeline(transaction=False)
                for _ in range(1_000):
                    pipe.set(f"aiokv:{rng.bytes(32).hex()}", b"")
                pipe.execute()
        return uvloop.run(_measure(server.url, Path(folder), 50 if quick else 1_000))


@contextmanager
def _service(path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "aiokv", "store", "serve", str(path), "--bytes", "64MiB"]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stderr is not None
        assert "host://" in service.stderr.readline()
        yield
    finally:
        service.kill()
        service.wait()


async def rank(path: Path, number: int) -> None:
    """Entry of a rank's process."""
    stores = [HostStore(os.environ["AIOKV_BENCH_HOST"])]
    async with Rank(path, number, _regions(), stores=stores) as worker:
        await worker.closed()


async def _measure(url: str, folder: Path, rounds: int) -> dict[str, Any]:
    uses = {
        "no_store": None,
        "disk": DiskStore(folder / "kv", bytes="64MiB"),
        "host": HostStore(folder / "host.sock"),
        "followed": RedisStore(url),
        "remembered": UnfollowedStore(url),
        "asked": StoreUse(UnfollowedStore(url), remember_missing_seconds=0.0),
    }
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(_engine([] if use is None else [use]))
            for name, use in uses.items()
        }

        os.environ["AIOKV_BENCH_HOST"] = str(folder / "host.sock")
        group = RankGroup(2, entry="bench.store_misses:rank", has_stores=True)
        engines["ranks"] = await stack.enter_async_context(CacheEngine(_config(), ranks=group))
        await _wait(engines["ranks"], np.arange(PROMPT_TOKENS[0]))  # attaches to the service
        await asyncio.sleep(HEARTBEATS_SECONDS)

        async def is_followed() -> bool:
            return engines["followed"].statistics().stores[0].filter_keys >= STORED_KEYS - 1_000

        await eventually(is_followed)
        return {
            f"{length}_tokens": await _compare(engines, length, rounds) for length in PROMPT_TOKENS
        }


def _engine(stores: list[Any]) -> CacheEngine:
    return CacheEngine(_config(), _regions(), stores=stores)


def _regions() -> Regions:
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((NUM_BLOCKS, BLOCK_TOKENS, 8), np.float32)])
    return regions


def _config() -> CacheConfig:
    return CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=NUM_BLOCKS,
        host_blocks=NUM_BLOCKS,
        model="bench",
        weights_version="1",
    )


async def _compare(engines: dict[str, CacheEngine], length: int, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    taken: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(rounds + 1):
        tokens = rng.integers(0, 1 << 30, length)
        for name in ("no_store", "remembered"):  # so that the next answer is a remembered one
            await _wait(engines[name], tokens)
        for name, engine in engines.items():
            times = await _wait(engine, tokens)
            if turn:  # the first one warms up
                taken[name].append(times)
    base = taken["no_store"]
    results: dict[str, Any] = {}
    for name, times in taken.items():
        results[name] = {"wait_us": _median(wait for wait, _ in times)}
        if times is not base:
            pairs = list(zip(times, base, strict=True))
            results[name]["added_us"] = _median(one[0] - other[0] for one, other in pairs)
            results[name]["added_cpu_us"] = _median(one[1] - other[1] for one, other in pairs)
    return results


async def _wait(engine: CacheEngine, tokens: NDArray[np.int64]) -> tuple[float, float]:
    """Return the seconds that a grant takes, and its CPU seconds."""
    async with engine.match(tokens) as lease:
        await asyncio.sleep(0)
        cpu, began = time.process_time(), time.perf_counter()
        await lease.allocate(len(tokens), wait_store=1.0)
        return time.perf_counter() - began, time.process_time() - cpu


def _median(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e6, 1)
