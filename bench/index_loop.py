"""CPU time per request of the prefix index, in the aiokv of the Python that runs this file.

``python -P bench/index_loop.py FILE POLICY BLOCKS`` prints it as JSON, in µs, for prompts of token
ids in a file of NumPy: through the API (``api_us``), and by the native core alone (``native_us``).
The file uses only names that aiokv has had since its index had a node per block, so that
``bench.index_ratio`` can run it with an older checkout.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.scheduler.plans import new_core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from aiokv._native import Core

    Prompts = list[NDArray[np.int32]]

BLOCK_TOKENS = 16
CHUNK_TOKENS = 1 << 17  # prompts of this size stay in the cache of the core until they are served


def main() -> None:
    path, policy, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    config: Any = {"block_tokens": BLOCK_TOKENS, "device_blocks": blocks, "eviction_policy": policy}
    gc.collect()
    gc.freeze()
    times = {
        "native_us": _native(CacheConfig(**config), path, blocks),
        "api_us": asyncio.run(_api(CacheConfig(**config), path, blocks)),
    }
    print(json.dumps(times))


def chunks(path: str, blocks: int) -> Iterator[Prompts]:
    """Expand the prompts that fit, some at a time."""
    with np.load(path) as file:
        ids, ends, lengths, unit = file["ids"], file["ends"], file["lengths"], int(file["unit"])
    offsets = np.arange(unit, dtype=np.int32)
    chunk: Prompts = []
    size = first = 0
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        if -(-length // BLOCK_TOKENS) <= blocks:
            expanded = np.add.outer(ids[first:end] * np.int32(unit), offsets).reshape(-1)
            chunk.append(expanded[:length].copy())
            size += length
        first = end
        if size >= CHUNK_TOKENS:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _native(config: CacheConfig, path: str, blocks: int) -> float:
    core = new_core(config)
    seconds, requests = 0.0, 0
    for prompts in chunks(path, blocks):
        seconds += serve_natively(core, prompts)
        requests += len(prompts)
    return seconds * 1e6 / requests


async def _api(config: CacheConfig, path: str, blocks: int) -> float:
    seconds, requests = 0.0, 0
    async with CacheEngine(config) as engine:
        for prompts in chunks(path, blocks):
            seconds += await serve(engine, prompts)
            requests += len(prompts)
    return seconds * 1e6 / requests


def serve_natively(core: Core, prompts: Prompts) -> float:
    """Return the seconds of CPU that the native core takes for the prompts."""
    began = time.thread_time()
    for tokens in prompts:
        length = len(tokens)
        lease = core.match(tokens, "")[0]
        core.allocate(lease, length)
        core.commit(lease, length, 0)
        core.release(lease, 0)
    return time.thread_time() - began


async def serve(engine: CacheEngine, prompts: Prompts) -> float:
    """Return the seconds of CPU that the prompts take through the API."""
    await asyncio.sleep(0)
    began = time.thread_time()
    for tokens in prompts:
        lease = engine.match(tokens)
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        lease.release()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
