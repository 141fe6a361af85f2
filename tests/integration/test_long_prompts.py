"""Prompts of many blocks: the calls that move them hold the loop for a bounded time."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import ClosedError

MOST_BACKUPS = 8192  # Saver::kMostBackups
PASS_BLOCKS = 6250  # tokens per pass of a prefetch: 100,000
BLOCK_TOKENS = 16

pytestmark = pytest.mark.asyncio


def long_prompt(blocks: int) -> np.ndarray:
    return np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32)


def engine_for(blocks: int, **options: int) -> CacheEngine:
    return CacheEngine(
        CacheConfig(
            **options,
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


async def test_a_long_prefetch_brings_a_bounded_number_of_blocks_per_pass():
    blocks = 2 * PASS_BLOCKS + 10
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt, ttl_seconds=math.inf))
        begun = []
        for _ in range(3):
            await asyncio.sleep(0)
            device = engine.statistics().attention.device
            begun.append(device.in_flight + device.cached)
        assert begun == [PASS_BLOCKS, 2 * PASS_BLOCKS, blocks]
        assert (await fetch).device_tokens == blocks * BLOCK_TOKENS
        assert engine.would_hit(prompt).device_tokens == blocks * BLOCK_TOKENS
        assert await engine.evict(blocks) == 0
        async with engine.match(prompt) as lease:  # a use of all parts
            await lease.allocate(len(prompt))
        assert await engine.evict(blocks) == blocks


async def test_blocks_evicted_between_the_passes_of_a_long_prefetch_are_not_fetched():
    blocks = 2 * PASS_BLOCKS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt))
        await asyncio.sleep(0)
        assert await engine.evict(blocks, "host") == PASS_BLOCKS
        assert (await fetch).device_tokens == PASS_BLOCKS * BLOCK_TOKENS
        assert engine.would_hit(prompt).total == PASS_BLOCKS * BLOCK_TOKENS


async def test_a_long_prefetch_brings_the_parts_that_have_room():
    blocks = 2 * PASS_BLOCKS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        async with engine.match([-1]) as other:
            await other.allocate(10 * BLOCK_TOKENS)
            fetched = await engine.prefetch(prompt)
        assert fetched.device_tokens == PASS_BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("evicted", [2, 3])
async def test_a_long_prefetch_leaves_host_hits_that_are_too_short_for_an_onload(evicted: int):
    blocks = PASS_BLOCKS + 10
    prompt = long_prompt(blocks)
    async with engine_for(blocks, min_onload_tokens=3 * BLOCK_TOKENS) as engine:
        await save(engine, prompt)
        await engine.evict(evicted)
        fetched = await engine.prefetch(prompt)
        on_device = blocks if evicted == 3 else blocks - evicted
        assert fetched.device_tokens == on_device * BLOCK_TOKENS


async def test_a_long_prefetch_that_is_cancelled_between_its_passes_leaves_no_lease():
    blocks = 2 * PASS_BLOCKS
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


async def test_a_long_prefetch_does_not_begin_a_pass_after_the_engine_has_closed():
    blocks = 2 * PASS_BLOCKS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        fetch = asyncio.create_task(engine.prefetch(prompt))
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await fetch


async def test_a_long_prefetch_leaves_the_positions_that_a_request_computes():
    blocks = PASS_BLOCKS + 1
    prompt = long_prompt(blocks)[:-1]
    async with engine_for(blocks) as engine:
        await save(engine, long_prompt(blocks))
        await engine.evict(blocks)
        fetched = await engine.prefetch(prompt)
        assert fetched.device_tokens == engine.would_hit(prompt).total == PASS_BLOCKS * BLOCK_TOKENS


async def test_the_loop_runs_between_match_and_onload_of_a_long_pin():
    blocks = MOST_BACKUPS
    prompt = long_prompt(blocks)
    async with engine_for(blocks) as engine:
        await save(engine, prompt)
        await engine.evict(blocks)
        pin = asyncio.create_task(engine.pin(prompt))
        await asyncio.sleep(0)
        assert engine.statistics().attention.device.in_flight == 0
        await asyncio.sleep(0)
        assert engine.statistics().attention.device.in_flight == blocks
        assert (await pin).tokens == blocks * BLOCK_TOKENS
