"""CPU time of explaining misses: through the API, and in the native core alone.

Caches without a history, with one of a quarter of the device's blocks (``quarter``) and with one of
as many (``full``) serve the same prompts by turns, some prompts at a time: prompts that fork at
every block, and the first requests of the traces of ``AIOKV_TRACE``. Of each turn, the fastest of
the rounds counts. ``cost`` and ``native_cost`` are quotients of the times with and without a
history: 1.02 means 2 % more time. ``none`` is a second cache without a history, so it shows the
noise.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.config.cache_config import EVICTION_POLICIES
from aiokv.scheduler.plans import new_core
from bench.index_loop import BLOCK_TOKENS, chunks, serve, serve_natively
from bench.index_ratio import PROMPTS_PER_FORK, write_forks, write_trace
from tests.harness.traces import find_traces

if TYPE_CHECKING:
    from aiokv.config.cache_config import EvictionPolicy

CAPACITIES = (32_000, 96_000)
REQUESTS = 1_500
HISTORIES = {"none": 0.0, "quarter": 0.25, "full": 1.0}
ROUNDS = 8


def run(quick: bool) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        loads = {"forks": Path(folder, "forks.npz")}
        write_forks(loads["forks"], 1 if quick else PROMPTS_PER_FORK)
        for trace in [] if quick else find_traces():
            name = trace.name.split(".")[0]
            loads[name] = Path(folder, f"{name}.npz")
            write_trace(loads[name], trace, REQUESTS)
        return {
            f"{name}.{blocks}_blocks.{policy}": _compare(
                str(path), policy, blocks, 1 if quick else ROUNDS
            )
            for name, path in loads.items()
            for blocks in CAPACITIES[: 1 if name == "forks" else None]
            for policy in EVICTION_POLICIES
        }


def _compare(path: str, policy: EvictionPolicy, blocks: int, rounds: int) -> dict[str, float]:
    configs = [
        CacheConfig(
            block_tokens=BLOCK_TOKENS,
            device_blocks=blocks,
            eviction_policy=policy,
            miss_history_blocks=int(share * blocks),
        )
        for share in (0.0, *HISTORIES.values())
    ]
    natively = _total([_native(configs, path, each) for each in range(rounds)])
    api = _total([asyncio.run(_api(configs, path, each)) for each in range(rounds)])
    requests = sum(len(prompts) for prompts in chunks(path, blocks))
    found = {"requests_per_second": requests / api[0]}
    for i, name in enumerate(HISTORIES, 1):
        found[f"{name}.cost"] = api[i] / api[0]
        found[f"{name}.native_cost"] = natively[i] / natively[0]
    return found


def _total(rounds: list[list[list[float]]]) -> list[float]:
    """Return the seconds per cache, of those per round, chunk and cache."""
    return [float(seconds) for seconds in np.min(rounds, axis=0).sum(axis=0)]


def _turns(caches: int, first: int) -> list[int]:
    """Return the order in which the caches serve a chunk."""
    return [(first + i) % caches for i in range(caches)]


def _native(configs: list[CacheConfig], path: str, first: int) -> list[list[float]]:
    cores = [new_core(config) for config in configs]
    times = []
    for i, prompts in enumerate(chunks(path, configs[0].device_blocks)):
        seconds = [0.0] * len(cores)
        for turn in _turns(len(cores), first + i):
            seconds[turn] = serve_natively(cores[turn], prompts)
        times.append(seconds)
    return times


async def _api(configs: list[CacheConfig], path: str, first: int) -> list[list[float]]:
    times = []
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(CacheEngine(each)) for each in configs]
        for i, prompts in enumerate(chunks(path, configs[0].device_blocks)):
            seconds = [0.0] * len(engines)
            for turn in _turns(len(engines), first + i):
                seconds[turn] = await serve(engines[turn], prompts)
            times.append(seconds)
    return times
