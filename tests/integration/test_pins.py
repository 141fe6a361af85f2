"""Pins and prefetches."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit, Item
from aiokv.errors import ClosedError, TransferError, UsageError, WouldBlock
from aiokv.testing import run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

A, B, C = (prompt(seed, 2) for seed in range(1, 4))
BIG = prompt(9, 5)

pytestmark = pytest.mark.asyncio


async def on_host(cache: Cache, *prompts):
    """Leave the prompt cached on the host only."""
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


async def test_pin_onloads_host_blocks():
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


async def test_pin_without_free_blocks_raises_and_pin_without_a_hit_is_empty():
    async with Cache(device_blocks=6) as cache:
        await on_host(cache, A)
        holder = await cache.serve(BIG[:17])
        with pytest.raises(WouldBlock, match="no room on the device for 8 cached tokens"):
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


async def test_pin_ends_when_its_ttl_expires():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        pin = await cache.engine.pin(A, ttl_seconds=0.001)
        await run_until_idle(lambda: pin.released)
        assert await cache.engine.evict(8) == 2


async def test_prefetch_keeps_its_blocks_until_they_are_used():
    async with Cache() as cache:
        await on_host(cache, A, B)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=1000.0))
        await spin(2)
        cache.device.complete_all()
        assert (await fetching).device_tokens == 8
        assert await cache.engine.evict(8) == 0
        lease = await cache.serve(A)  # takes it over
        assert lease.hit.device_tokens == 8
        lease.release()
        assert await cache.engine.evict(8) == 2


async def test_prefetch_releases_its_blocks_when_its_ttl_expires():
    async with Cache() as cache:
        await on_host(cache, A)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=0.001))
        await spin(2)
        cache.device.complete_all()
        await fetching
        await run_until_idle(lambda: cache.statistics.leases == 0)
        assert await cache.engine.evict(8) == 2


async def test_the_use_of_a_prefetch_does_not_grant_twice():
    """The grant releases the pin first, and then the freed blocks go to the next in line."""
    async with Cache(device_blocks=8) as cache:
        await on_host(cache, A)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=1000.0))
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


async def test_prefetch_without_free_blocks_onloads_nothing():
    async with Cache(device_blocks=6) as cache:
        await on_host(cache, A)
        holder = await cache.serve(BIG[:17])
        assert (await cache.engine.prefetch(A)).total == 0
        holder.release()


async def test_a_hit_larger_than_the_device_is_not_pinned_nor_fetched():
    """The hit exceeds the device after a resize; no lease remains."""
    async with Cache(device_blocks=8) as cache:
        await on_host(cache, BIG)
        await cache.engine.resize(4)
        assert (await cache.engine.prefetch(BIG)).total == 0
        with pytest.raises(WouldBlock):
            await cache.engine.pin(BIG)
        assert cache.statistics.leases == 0


async def test_close_releases_pins_and_pins_that_are_loading():
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


async def test_pin_remains_after_uses_of_its_prefix():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        pin = await cache.engine.pin(A)
        for _ in range(2):
            (await cache.serve(A)).release()
            assert not pin.released
            assert await cache.engine.evict(8) == 0
        pin.release()


async def test_prefetches_and_pins_are_no_use_of_a_prefetch():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        for _ in range(2):
            await cache.engine.prefetch(A, ttl_seconds=math.inf)
        pin = await cache.engine.pin(A)
        (await cache.serve(B)).release()
        assert cache.engine.inspect.dump()["pins"] == 3
        (await cache.serve(A)).release()
        assert cache.engine.inspect.dump()["pins"] == 1
        assert not pin.released
        pin.release()


async def test_a_lease_from_before_the_prefetch_is_no_use_of_it():
    async with Cache() as cache:
        holder = await cache.serve(A)
        await cache.engine.prefetch(A, ttl_seconds=math.inf)
        (await cache.serve(B)).release()
        holder.release()
        assert cache.engine.inspect.dump()["pins"] == 1
        (await cache.serve(A)).release()
        assert cache.engine.inspect.dump()["pins"] == 0


async def test_a_lease_that_hits_a_part_of_a_prefetch_is_no_use_of_it():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.engine.prefetch(A, ttl_seconds=math.inf)
        lease = cache.engine.match(A[:6])
        await lease.allocate(6)
        assert lease.cached_tokens == 4
        lease.release()
        assert cache.engine.inspect.dump()["pins"] == 1
        longer = np.append(A, [7, 8, 9])
        (await cache.serve(longer)).release()
        assert cache.engine.inspect.dump()["pins"] == 0


async def test_a_prefetch_that_is_used_while_it_loads_keeps_nothing():
    async with Cache() as cache:
        await on_host(cache, A)
        fetching = asyncio.create_task(cache.engine.prefetch(A, ttl_seconds=math.inf))
        await spin(2)
        using = asyncio.create_task(cache.serve(A))
        await spin(2)
        cache.device.complete_all()
        assert (await fetching).device_tokens == 8
        (await using).release()
        assert cache.engine.inspect.dump()["pins"] == 0
        assert cache.statistics.leases == 0


async def test_a_grant_ends_no_pin_that_it_does_not_hit():
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A, B)
        await cache.engine.prefetch(A, ttl_seconds=math.inf)
        pin = await cache.engine.pin(B)
        pins = []
        for tokens in (B, C, A, A):
            (await cache.serve(tokens)).release()
            pins.append(cache.engine.inspect.dump()["pins"])
        assert pins == [2, 2, 1, 1]
        assert not pin.released
        pin.release()
        assert cache.engine.inspect.dump()["pins"] == 0


@pytest.mark.parametrize("verb", ["pin", "prefetch"])
async def test_pins_and_prefetches_are_of_the_items_of_the_prompt(verb):
    image, other = Item(b"cat", 4, 4), Item(b"dog", 4, 4)
    async with Cache() as cache:
        for items in ([image], [other], []):
            async with cache.engine.match(A, items=items) as lease:
                await lease.allocate(9)
                lease.commit(9)
        await cache.finish()
        if verb == "pin":
            assert (await cache.engine.pin(A, items=[image])).tokens == 8
        else:
            await cache.engine.prefetch(A, items=[image], ttl_seconds=math.inf)
        await cache.engine.evict(8)

        def device_hit(*items: Item) -> int:
            lease = cache.engine.match(A, items=items)
            tokens = lease.hit.device_tokens
            lease.release()
            return tokens

        assert (device_hit(image), device_hit(other), device_hit()) == (8, 4, 4)
        await end_by_reset(cache)


@pytest.mark.parametrize("verb", ["pin", "prefetch"])
@pytest.mark.parametrize("keyword", ["salt", "adapter"])
async def test_pins_and_prefetches_are_of_the_salt_and_adapter_of_the_prompt(verb, keyword):
    async with Cache() as cache:
        for name in ("x", "y"):
            async with cache.engine.match(A, **{keyword: name}) as lease:
                await lease.allocate(9)
                lease.commit(9)
        await cache.finish()
        more = {} if verb == "pin" else {"ttl_seconds": math.inf}
        await getattr(cache.engine, verb)(A, **{keyword: "x"}, **more)
        assert await cache.engine.evict(8) == 2
        await end_by_reset(cache)


async def test_a_pin_of_whole_blocks_keeps_the_last_one():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        pin = await cache.engine.pin(A[:8])
        assert pin.tokens == 8
        await cache.engine.evict(8)
        assert cache.hit(A) == (2, 0)
        pin.release()
        assert (await cache.engine.prefetch(A[:8])).device_tokens == 4, "what a match would hit"


@pytest.mark.parametrize("seconds", ["60", float("nan"), -1, None])
@pytest.mark.parametrize("verb", ["pin", "prefetch"])
async def test_a_bad_ttl_takes_nothing(verb, seconds):
    if (verb, seconds) == ("pin", None):
        return
    async with Cache() as cache:
        await on_host(cache, A)
        with pytest.raises(UsageError, match="ttl_seconds is"):
            await getattr(cache.engine, verb)(A, ttl_seconds=seconds)
        assert cache.statistics.leases == 0
        assert cache.engine.inspect.dump()["pins"] == 0
        assert cache.hit(A) == (0, 2)
        assert not cache.device.onloads


# ---- reset, new weights


async def end_by_reset(cache: Cache) -> None:
    resetting = asyncio.create_task(cache.engine.reset())
    await spin(3)
    cache.device.complete_all()
    await resetting


async def end_by_new_weights(cache: Cache) -> None:
    async with cache.engine.updating_weights():
        cache.memory.weights += 1


@pytest.mark.parametrize(
    ("end", "reason"), [(end_by_reset, "reset"), (end_by_new_weights, "weights")]
)
async def test_pins_end_when_the_index_is_cleared(end, reason):
    async with Cache() as cache:
        await cache.fill(A, B)
        await cache.finish()
        pin = await cache.engine.pin(A)
        await cache.engine.prefetch(B, ttl_seconds=math.inf)
        assert "released" not in repr(pin)
        await end(cache)
        assert pin.released
        assert reason in pin.release_reason
        assert f"<Pin 8 tokens, released: {pin.release_reason}>" == repr(pin)
        assert cache.engine.inspect.dump()["pins"] == 0
        assert cache.statistics.attention.device.free == 8
        pin.release()
        assert reason in pin.release_reason


@pytest.mark.parametrize("verb", ["pin", "prefetch"])
async def test_a_reset_while_the_blocks_of_a_pin_load_leaves_nothing_pinned(verb):
    async with Cache() as cache:
        await on_host(cache, A)
        more = {} if verb == "pin" else {"ttl_seconds": math.inf}
        bringing = asyncio.create_task(getattr(cache.engine, verb)(A, **more))
        await spin(2)
        await end_by_reset(cache)
        brought = await bringing
        if verb == "pin":
            assert (brought.tokens, brought.released) == (0, True)
        else:
            assert brought.total == 0
        assert cache.statistics.leases == 0
        assert cache.statistics.attention.device.free == 8


async def test_a_prefetch_without_tensors_returns_when_a_match_finds_the_blocks():
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=8, host_blocks=8)
    async with CacheEngine(config) as engine:
        async with engine.match(A) as lease:
            await lease.allocate(9)
            lease.commit(9)
        await engine.drain()
        await engine.evict(8)
        assert await engine.prefetch(A) == Hit(8, 0)
        async with engine.match(A) as lease:
            assert lease.hit == Hit(8, 0)


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
async def test_hit_below_min_onload_tokens_is_computed(min_tokens, onloaded):
    async with Cache(min_onload_tokens=min_tokens) as cache:
        await on_host(cache, A)
        task = asyncio.create_task(cache.serve(A))
        await spin(3)
        cache.device.complete_all()
        lease = await task
        assert lease.cached_tokens == onloaded * BLOCK_TOKENS
        assert cache.statistics.attention.onloaded_blocks == onloaded
        lease.release()


async def test_release_of_a_pin_resumes_leases_that_wait_for_its_blocks():
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        await cache.finish()
        pin = await cache.engine.pin(prompt(1, 5))
        longer = cache.engine.match(prompt(1, 5))
        task = asyncio.create_task(longer.allocate(21, wait_pending=1000.0))
        await spin(3)
        pin.release()
        assert cache.engine.check_invariants() == []
        await run_until_idle(task.done)
        longer.release()


@pytest.mark.parametrize("verb", ["pin", "prefetch"])
async def test_no_lease_waits_for_blocks_that_a_pin_names(verb):
    """A pin computes nothing: other leases must compute the blocks that it does not hold."""
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        await cache.finish()
        more = {} if verb == "pin" else {"ttl_seconds": math.inf}
        await getattr(cache.engine, verb)(prompt(1, 5), **more)
        longer = cache.engine.match(prompt(1, 5))
        assert longer.pending_tokens == 0
        longer.release()
        await end_by_reset(cache)


async def test_quota_of_a_used_prefetch_serves_the_next_lease_of_the_salt():
    async with Cache(device_blocks=8, host_blocks=0, salt_quota_blocks=6) as cache:
        async with cache.engine.match(A, salt="a") as lease:
            await lease.allocate(9)
            lease.commit(9)
        await cache.engine.prefetch(A, salt="a", ttl_seconds=math.inf)
        holder = cache.engine.match(prompt(7, 6)[:-1], salt="b")
        await holder.allocate(24)
        user = cache.engine.match(A, salt="a")
        behind = cache.engine.match(prompt(8, 2)[:-1], salt="a")
        tasks = [asyncio.create_task(lease.allocate(n)) for lease, n in ((user, 9), (behind, 8))]
        await spin(2)
        assert not any(task.done() for task in tasks), "one waits for capacity, one for the quota"
        holder.release()
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_SECONDS)
        assert cache.engine.inspect.dump()["pins"] == 0
        user.release()
        behind.release()
