"""Prompts of many blocks: the calls that move them hold the loop for a bounded time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine

MOST_BACKUPS = 8192  # Saver::kMostBackups
BLOCK_TOKENS = 16

pytestmark = pytest.mark.asyncio


def long_prompt(blocks: int) -> np.ndarray:
    return np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32)


def engine_for(blocks: int) -> CacheEngine:
    return CacheEngine(
        CacheConfig(
            device_blocks=blocks + 2,
            host_blocks=blocks + 2,
            block_tokens=BLOCK_TOKENS,
            write_policy="write_through",
        )
    )


async def save(engine: CacheEngine, prompt: np.ndarray) -> None:
    async with engine.match(prompt) as lease:
        await lease.allocate(len(prompt))
        lease.commit(len(prompt))
        engine.step()
    await engine.drain()


async def test_a_step_begins_a_bounded_number_of_backups_and_later_passes_the_rest():
    blocks = 2 * MOST_BACKUPS + 10
    async with engine_for(blocks) as engine, engine.match(long_prompt(blocks)) as lease:
        await lease.allocate(blocks * BLOCK_TOKENS)
        lease.commit(blocks * BLOCK_TOKENS)
        begun = []
        engine.step()
        for _ in range(3):
            host = engine.statistics().attention.host
            begun.append(host.in_flight + host.cached)
            await asyncio.sleep(0)
        assert begun == [MOST_BACKUPS, 2 * MOST_BACKUPS, blocks]


async def test_a_drain_waits_for_all_backups_of_a_long_prompt():
    blocks = 2 * MOST_BACKUPS + 10
    async with engine_for(blocks) as engine:
        await save(engine, long_prompt(blocks))
        assert engine.statistics().attention.host.cached == blocks


async def test_the_loop_runs_between_match_and_onload_of_a_long_prefetch():
    blocks = MOST_BACKUPS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt))
        await asyncio.sleep(0)
        assert engine.statistics().attention.device.in_flight == 0
        await asyncio.sleep(0)
        assert engine.statistics().attention.device.in_flight == blocks
        assert (await fetch).device_tokens == blocks * BLOCK_TOKENS


async def test_blocks_evicted_before_a_long_prefetch_is_granted_are_not_fetched():
    blocks = MOST_BACKUPS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt))
        await asyncio.sleep(0)
        await engine.evict(blocks - 1, "host")
        assert (await fetch).device_tokens == BLOCK_TOKENS


async def test_a_long_prefetch_that_is_cancelled_before_its_grant_leaves_no_lease():
    blocks = MOST_BACKUPS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt))
        await asyncio.sleep(0)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        assert engine.inspect.leases(10) == []
