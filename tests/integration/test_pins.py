"""Pins and prefetch (issue 3, item 5)."""

from __future__ import annotations

import asyncio

import pytest
from kv_cache import BLOCK_TOKENS, Cache, prompt

from aiokv.errors import ClosedError, TransferError, WouldBlock
from aiokv.testing import run_until_idle, spin

A, B, C = (prompt(seed, 2) for seed in range(1, 4))
BIG = prompt(9, 5)

pytestmark = pytest.mark.asyncio


async def on_host(cache: Cache, *prompts):
    """Cached on the host alone."""
    for tokens in prompts:
        await cache.fill(tokens)
        await cache.finish()
    await cache.engine.evict(8)


async def test_a_pin_keeps_its_blocks_from_eviction_until_it_is_released():
    async with Cache() as cache:
        await cache.fill(A, B)
        await cache.finish()
        pin = await cache.engine.pin(A)
        assert pin.tokens == 8
        assert await cache.engine.evict(8) == 2
        assert (cache.hit(A), cache.hit(B)[0]) == ((2, 0), 0)
        pin.release()
        pin.release()
        assert pin.released
        assert await cache.engine.evict(8) == 2


async def test_a_pin_onloads_what_is_on_the_host():
    async with Cache() as cache:
        await on_host(cache, A)
        pinning = asyncio.create_task(cache.engine.pin(A))
        await spin(2)
        assert not pinning.done()
        cache.device.complete_all()
        pin = await pinning
        assert (pin.tokens, cache.hit(A)) == (8, (2, 0))
        lease = await cache.serve(A)
        lease.release()
        pin.release()


async def test_a_pin_without_room_says_so_and_one_of_nothing_is_empty():
    async with Cache(device_blocks=6) as cache:
        await on_host(cache, A)
        holder = await cache.serve(BIG[:17])
        with pytest.raises(WouldBlock, match="no room to pin 8 tokens"):
            await cache.engine.pin(A)
        assert (await cache.engine.pin(C)).tokens == 0
        holder.release()


async def test_a_pin_whose_copy_fails_pins_nothing():
    async with Cache() as cache:
        await on_host(cache, A)
        pinning = asyncio.create_task(cache.engine.pin(A))
        await spin(2)
        cache.device.onloads[0].fail_all(block=1)
        with pytest.raises(TransferError):
            await pinning
        assert cache.statistics.leases == 0


async def test_cancelling_a_pin_pins_nothing():
    async with Cache() as cache:
        await on_host(cache, A)
        pinning = asyncio.create_task(cache.engine.pin(A))
        await spin(2)
        pinning.cancel()
        await asyncio.wait([pinning])
        assert cache.statistics.leases == 0
        await cache.finish()
        assert cache.hit(A) == (2, 0), "bytes on their way arrive"


async def test_a_pin_ends_with_its_time():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        pin = await cache.engine.pin(A, ttl_seconds=0.001)
        await run_until_idle(lambda: pin.released)
        assert await cache.engine.evict(8) == 2


async def test_prefetch_keeps_what_it_brought_until_it_is_used():
    async with Cache() as cache:
        await on_host(cache, A, B)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=5.0))
        await spin(2)
        cache.device.complete_all()
        assert (await fetching).device_tokens == 8
        assert await cache.engine.evict(8) == 0
        lease = await cache.serve(A)  # takes it over
        assert lease.hit.device_tokens == 8
        lease.release()
        assert await cache.engine.evict(8) == 2


async def test_prefetch_lets_go_when_its_time_is_over():
    async with Cache() as cache:
        await on_host(cache, A)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=0.001))
        await spin(2)
        cache.device.complete_all()
        await fetching
        await run_until_idle(lambda: cache.statistics.leases == 0)
        assert await cache.engine.evict(8) == 2


async def test_the_use_of_a_prefetch_does_not_grant_twice():
    """The grant releases the pin, which sets room free for the next in line: in that order."""
    async with Cache(device_blocks=8) as cache:
        await on_host(cache, A)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=5.0))
        await spin(2)
        cache.device.complete_all()
        await fetching
        holder = await cache.serve(BIG)
        tasks = [asyncio.create_task(_serve_and_release(cache, t)) for t in (A, C, A)]
        await spin(2)
        holder.release()

        def ended() -> bool:
            cache.device.complete_all()
            return all(task.done() for task in tasks)

        await run_until_idle(ended)
        await asyncio.gather(*tasks)


async def _serve_and_release(cache: Cache, tokens):
    (await cache.serve(tokens)).release()


async def test_prefetch_without_room_brings_nothing():
    async with Cache(device_blocks=6) as cache:
        await on_host(cache, A)
        holder = await cache.serve(BIG[:17])
        assert (await cache.engine.prefetch(A)).total == 0
        holder.release()


async def test_a_hit_larger_than_the_device_is_not_pinned_nor_fetched():
    """It became so by a resize; no lease is left behind."""
    async with Cache(device_blocks=8) as cache:
        await on_host(cache, BIG)
        await cache.engine.resize(4)
        assert (await cache.engine.prefetch(BIG)).total == 0
        with pytest.raises(WouldBlock):
            await cache.engine.pin(BIG)
        assert cache.statistics.leases == 0


async def test_closing_releases_pins_also_those_on_their_way():
    async with Cache() as cache:
        await on_host(cache, A)
        await cache.fill(B)
        pin = await cache.engine.pin(B)
        pinning = asyncio.create_task(cache.engine.pin(A))
        await spin(2)
        closing = asyncio.create_task(cache.engine.aclose(5.0))
        await spin(2)
        assert pin.released
        cache.device.complete_all()
        with pytest.raises(ClosedError):
            await pinning
        await closing


# ---- per request


async def test_read_false_hits_nothing_and_write_false_publishes_nothing():
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        blind = cache.engine.match(A, read=False)
        await blind.allocate(len(A))
        assert (blind.hit.total, blind.cached_tokens) == (0, 0)
        cache.compute(blind, A)
        blind.release()
        silent = cache.engine.match(B, write=False)
        await silent.allocate(len(B))
        cache.compute(silent, B)
        silent.release()
        assert (cache.hit(A), cache.hit(B)) == ((2, 0), (0, 0))
        assert cache.statistics.published_blocks == 2


@pytest.mark.parametrize(("min_tokens", "onloaded"), [(8, 2), (9, 0)])
async def test_a_hit_too_small_to_be_worth_its_transfer_is_computed(min_tokens, onloaded):
    async with Cache(min_onload_tokens=min_tokens) as cache:
        await on_host(cache, A)
        task = asyncio.create_task(cache.serve(A))
        await spin(3)
        cache.device.complete_all()
        lease = await task
        assert lease.cached_tokens == onloaded * BLOCK_TOKENS
        assert cache.statistics.onloaded_blocks == onloaded
        lease.release()
