"""Speed of the prefix index: CPU time through the public API, and memory per block.

* ``trace``: requests per CPU second of match, allocate, commit and release over a whole trace (the
  public one when it is here, a generated one otherwise), at three capacities and with both
  eviction policies; beside it the same calls on the native core alone. ``index_ratio`` compares
  with an older checkout.
* ``deep``/``wide``: nanoseconds per block on a single long path, and on many short ones.
* ``extend``: 64 decoding leases extended by one token in one call.
* ``memory``: bytes of the index per cached block with two tiers, excluding token ids.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.config.cache_config import EVICTION_POLICIES
from aiokv.scheduler.plans import new_core
from aiokv.trace.loops import plain_loop
from aiokv.trace.replay import ReplayOptions, load_workload, replay, workload_of
from bench.harness import find_trace
from tests.harness.synthetic_trace import generate_trace
from tests.harness.traces import trace_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.config.cache_config import EvictionPolicy
    from aiokv.trace.replay import Workload

BLOCK_TOKENS = 16
CAPACITIES = (32_000, 320_000, 1_600_000)


def run(quick: bool) -> dict[str, Any]:
    workload = _load(quick)
    return {
        "generated" if find_trace() is None else "trace": {
            f"{blocks}_blocks.{policy}": asyncio.run(_trace(workload, blocks, policy))
            for blocks in CAPACITIES
            for policy in EVICTION_POLICIES
        },
        "deep": asyncio.run(_deep(2_000 if quick else 10_000)),
        "wide": asyncio.run(_wide(2_000 if quick else 20_000)),
        "extend": asyncio.run(_extend(100 if quick else 1_000)),
        "memory": asyncio.run(_memory(workload)),
    }


def _load(quick: bool) -> Workload:
    path = find_trace()
    if path is None:
        # Long and interleaved enough to overflow the smallest capacity.
        requests = generate_trace(
            1_000 if quick else 8_000, live_conversations=300, turn_tokens=3_000
        )
        return workload_of("generated", requests)
    return load_workload(str(path), 1_000 if quick else None)


def _no_stages(stage: str, total: int) -> Callable[[int], None]:
    return lambda count: None


async def _trace(workload: Workload, device_blocks: int, policy: EvictionPolicy) -> dict[str, Any]:
    options = ReplayOptions(device_blocks=device_blocks, latencies=False, eviction_policy=policy)
    report = await replay(workload, options, _no_stages)
    blocks = sum(-(-request.input_tokens // BLOCK_TOKENS) for request in workload.requests)
    return {
        "requests_per_second": report.requests_per_second,
        "native_requests_per_second": report.requests
        / _native_seconds(workload, device_blocks, policy),
        "ns_per_block": report.index_seconds * 1e9 / blocks,
        "hit_tokens": report.hit_tokens["total"],
    }


def _native_seconds(workload: Workload, device_blocks: int, policy: EvictionPolicy) -> float:
    """Return the CPU time of the plain loop without engine and leases."""
    config = CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, eviction_policy=policy
    )
    core = new_core(config)
    prompts = trace_prompts(workload.requests)
    started = time.thread_time()
    for tokens in prompts:
        n = len(tokens)
        lease, _, _ = core.match(tokens, "")
        core.allocate(lease, n)
        core.commit(lease, n, 0)
        core.release(lease, 0)
    return time.thread_time() - started


async def _deep(blocks: int) -> dict[str, float]:
    """Measure one prompt of ``blocks`` blocks: insert, match, growth by one block per call."""
    tokens = np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32)
    async with _engine(2 * blocks) as engine:
        insert_ns = await _cpu_ns(engine, [tokens])
        hit_ns = await _cpu_ns(engine, [tokens] * 20)
        grown = [tokens[: (i + 1) * BLOCK_TOKENS] for i in range(blocks - 20, blocks)]
        await engine.reset()
        await plain_loop(engine, [(grown[0], "")])
        grow_ns = await _cpu_ns(engine, grown)
    return {
        "insert_ns_per_block": insert_ns / blocks,
        "hit_ns_per_block": hit_ns / (20 * blocks),
        "grow_ns_per_block": grow_ns / sum(len(prompt) // BLOCK_TOKENS for prompt in grown),
    }


async def _wide(prompts: int) -> dict[str, float]:
    """Measure ``prompts`` prompts of 8 blocks that share the first one: insert, match, evict."""
    blocks = 8
    shared = np.arange(BLOCK_TOKENS, dtype=np.int32)
    rest = np.arange(prompts * (blocks - 1) * BLOCK_TOKENS, dtype=np.int32) + BLOCK_TOKENS
    wide: list[NDArray[np.int32]] = [
        np.concatenate([shared, part]) for part in np.split(rest, prompts)
    ]
    async with _engine(prompts * blocks) as engine:
        insert_ns = await _cpu_ns(engine, wide)
        hit_ns = await _cpu_ns(engine, wide)
        # Twice as many prompts as fit: each one evicts as many blocks as it adds.
        others = [prompt + np.int32(1 << 30) for prompt in wide]
        evict_ns = await _cpu_ns(engine, others)
    return {
        "insert_ns_per_block": insert_ns / (prompts * blocks),
        "hit_ns_per_block": hit_ns / (prompts * blocks),
        "hit_requests_per_second": prompts / (hit_ns / 1e9),
        "evict_and_insert_ns_per_block": evict_ns / (prompts * blocks),
    }


async def _extend(calls: int) -> dict[str, float]:
    """Measure decoding: 64 leases grow by a token per call; every 16th call takes 64 blocks."""
    leases = []
    samples_us = []
    async with _engine(64 * (64 + calls // BLOCK_TOKENS + 2)) as engine:
        for i in range(64):
            lease = await engine.match(np.arange(1_024, dtype=np.int32) + np.int32(i * 1_024))
            await lease.allocate(1_024)
            leases.append(lease)
        for _ in range(calls):
            started = time.perf_counter_ns()
            engine.extend(leases, 1)
            samples_us.append((time.perf_counter_ns() - started) / 1e3)
        for lease in leases:
            lease.release()
    return {
        "64_leases_p50_us": statistics.median(samples_us),
        "64_leases_mean_us": statistics.fmean(samples_us),
        "64_leases_max_us": max(samples_us),
    }


async def _memory(workload: Workload) -> dict[str, Any]:
    options = ReplayOptions(device_blocks=320_000, host_blocks=320_000, latencies=False)
    memory = (await replay(workload, options, _no_stages)).memory
    return {
        "index_bytes_per_block": memory.index_bytes_per_block,
        "cached_blocks": memory.cached_blocks,
    }


async def _cpu_ns(engine: CacheEngine, prompts: list[NDArray[np.int32]]) -> float:
    labelled = [(tokens, "") for tokens in prompts]
    started = time.thread_time_ns()
    await plain_loop(engine, labelled)
    return time.thread_time_ns() - started


def _engine(device_blocks: int) -> CacheEngine:
    return CacheEngine(
        CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=device_blocks, eviction_policy="lru")
    )
