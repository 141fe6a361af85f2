"""Equal prompts that arrive together are computed once, and every wait ends."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiokv.errors import ClosedError
from aiokv.scheduler.granting import Granting
from aiokv.testing import run_until_idle, spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

A, B = prompt(1, 4), prompt(2, 4)
LONG = 1000.0  # seconds: a missing wake-up exceeds the time limit of a test

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


async def serve_and_release(cache: Cache, tokens, **allocate):
    lease = await cache.serve(tokens, **allocate)
    try:
        await spin()
        return lease.cached_tokens
    finally:
        lease.release()


async def owner_of(cache: Cache, tokens=A):
    """Return a granted lease that has computed nothing yet."""
    lease = cache.engine.match(tokens, owner="owner")
    await lease.allocate(len(tokens))
    return lease


async def test_a_hundred_equal_prompts_compute_their_prefix_once():
    async with Cache(device_blocks=128, host_blocks=0) as cache:
        tasks = [
            asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG)) for _ in range(100)
        ]
        cached = await asyncio.gather(*tasks)
        assert sorted(cached) == [0] + [16] * 99
        assert cache.statistics.published_blocks == 4


async def test_without_wait_pending_each_request_computes_its_prefix():
    async with Cache(device_blocks=16) as cache:
        leases = [await owner_of(cache) for _ in range(3)]
        assert [lease.cached_tokens for lease in leases] == [0, 0, 0]
        assert len({id_ for lease in leases for id_ in lease.block_table.tolist()}) == 15
        for lease in leases:
            cache.compute(lease, A)
            lease.release()
        assert cache.statistics.published_blocks == 4, "the first proof wins"


async def test_pending_tokens_are_reported_and_longer_prompts_wait_for_the_common_part():
    longer = prompt(1, 6)
    async with Cache(device_blocks=32) as cache:
        owner = await owner_of(cache)
        lease = cache.engine.match(longer)
        assert lease.pending_tokens == 16
        waiting = asyncio.create_task(lease.allocate(len(longer), wait_pending=LONG))
        await spin(3)
        assert not waiting.done()
        cache.compute(owner, A)
        await waiting
        assert (lease.cached_tokens, lease.pending_tokens) == (16, 0)
        cache.check(lease, longer)
        owner.release()
        lease.release()


async def test_waiter_holds_no_blocks_and_follows_chunked_commits_of_the_owner():
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        words = cache.memory.words(A, "", 0)
        cache.memory.write(owner.block_table[:4], words)
        waiting = asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG))
        for end in (4, 9, 12):
            owner.commit(end)
            await spin(3)
            assert not waiting.done()
            assert (
                cache.statistics.attention.device.leased + cache.statistics.attention.device.cached
                == 5
            )
        owner.commit(16)
        assert await waiting == 16
        owner.release()


@pytest.mark.parametrize("end", ["releases", "is cancelled", "is preempted", "is collected"])
async def test_early_end_of_the_owner_makes_its_waiters_compute(end: str):
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        tasks = [
            asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG)) for _ in range(3)
        ]
        await spin(3)
        if end == "is collected":
            with pytest.warns(ResourceWarning, match="never released"):
                del owner
        elif end == "is preempted":
            await owner.preempt(swap=False)  # a resume would wait in line
        elif end == "is cancelled":
            request = asyncio.create_task(_hold(owner))
            await spin()
            request.cancel()
            await asyncio.wait([request])
        else:
            owner.release()
        assert sorted(await asyncio.gather(*tasks)) == [0, 16, 16]
        if end == "is preempted":
            owner.release()


async def _hold(lease):
    async with lease:
        await asyncio.get_running_loop().create_future()


async def test_a_deadline_ends_the_wait_and_the_prefix_is_computed_again():
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        assert await serve_and_release(cache, A, wait_pending=0.001) == 0
        cache.compute(owner, A)
        owner.release()
        assert cache.hit(A) == (4, 0)


async def test_an_owner_whose_onload_fails_wakes_its_waiters():
    """The pending blocks of the owner depend on blocks that did not arrive."""
    async with Cache(device_blocks=32) as cache:
        await cache.fill(prompt(1, 2))
        await cache.finish()
        assert await cache.engine.evict(2) == 2
        owner = await owner_of(cache)
        (onload,) = cache.device.onloads
        tasks = [
            asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG)) for _ in range(2)
        ]
        await spin(3)
        assert not any(task.done() for task in tasks)
        onload.fail_all()
        assert sorted(await asyncio.gather(*tasks)) == [0, 16]
        assert owner.recompute_from() == 0
        cache.compute(owner, A, first=0)
        owner.release()


async def test_retracted_grant_wakes_the_waiters_for_its_pending_blocks():
    """The owner is cancelled in the pass in which it is granted."""
    async with Cache(device_blocks=6) as cache:
        holder = await owner_of(cache, B)
        owner = asyncio.create_task(cache.serve(A))
        await spin(2)
        waiter = cache.engine.match(A)
        holder.release()  # grants to the owner, which has not run yet
        assert waiter.pending_tokens == 16
        waiting = asyncio.create_task(waiter.allocate(len(A), wait_pending=LONG))
        owner.cancel()
        await asyncio.wait([owner])
        await waiting
        waiter.release()


@pytest.mark.parametrize("what", ["reset", "update"])
async def test_reset_ends_waits_for_pending_blocks(what: str):
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        waiting = asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG))
        await spin(3)
        if what == "reset":
            await cache.engine.reset()
        else:
            async with cache.engine.updating_weights():
                cache.memory.weights += 1
        assert await waiting == 0
        owner.commit(16)
        owner.release()
        assert cache.hit(A) == (4, 0), "of the waiter"


async def test_close_ends_the_wait_for_pending_blocks():
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        waiting = asyncio.create_task(serve_and_release(cache, A, wait_pending=LONG))
        await spin(3)
        closing = asyncio.create_task(cache.engine.aclose())
        with pytest.raises(ClosedError):
            await waiting
        owner.release()
        await closing


async def test_requests_of_other_tenants_do_not_wait_for_pending_blocks():
    async with Cache(device_blocks=16) as cache:
        owner = await owner_of(cache)
        lease = cache.engine.match(A, salt="other")
        await lease.allocate(len(A), wait_pending=LONG)
        assert lease.cached_tokens == 0
        lease.release()
        silent = cache.engine.match(B, write=False)
        await silent.allocate(len(B))
        other = cache.engine.match(B)
        assert other.pending_tokens == 0, "it will publish nothing"
        other.release()
        silent.release()
        owner.release()


async def test_a_storm_of_a_thousand_requests_neither_starves_nor_leaks():
    """Three requests fit at a time; a third is cancelled at random, and large ones wait in line."""
    rng = random.Random(5)
    async with Cache(device_blocks=16, host_blocks=32, write_policy="write_back") as cache:
        sizes = [rng.choice((1, 2, 4, 15)) for _ in range(1000)]
        tasks = [
            asyncio.create_task(
                serve_and_release(
                    cache,
                    prompt(rng.randrange(12), blocks),
                    priority=rng.randint(0, 2),
                    wait_pending=rng.choice((0.0, LONG)),
                )
            )
            for blocks in sizes
        ]
        victims = set(rng.sample(range(1000), 333))
        doomed = sorted(victims)
        rng.shuffle(doomed)

        def step() -> bool:
            cache.device.complete_all()
            if doomed and rng.random() < 0.7:
                tasks[doomed.pop()].cancel()
            return not doomed and all(task.done() for task in tasks)

        await run_until_idle(step)
        for index, task in enumerate(tasks):
            assert index in victims or not task.cancelled()
            assert task.cancelled() or task.result() % BLOCK_TOKENS == 0
        await cache.finish()
        statistics = cache.statistics
        assert (statistics.leases, statistics.waiting, statistics.attention.device.leased) == (
            0,
            0,
            0,
        )
        assert statistics.attention.device.free + statistics.attention.device.cached == 16


async def test_grant_examines_only_the_first_waiter(monkeypatch):
    """With a thousand waiters, a grant of clean blocks retries only the first in line."""
    async with Cache(device_blocks=8, host_blocks=0) as cache:
        holder = await owner_of(cache, prompt(1, 6))
        tasks = [asyncio.create_task(serve_and_release(cache, A)) for _ in range(1000)]
        await spin(3)
        tries = 0
        attempt = Granting.attempt

        def counting(*args, **options):
            nonlocal tries
            tries += 1
            return attempt(*args, **options)

        monkeypatch.setattr(Granting, "attempt", counting)
        cache.engine.match(B).release()
        assert tries == 0, "a lease without blocks makes no room"
        cache.engine.pause()
        cache.engine.resume()
        assert tries == 1
        holder.release()
        assert await asyncio.gather(*tasks) == [0] + [16] * 999
        assert tries <= 4 * 1000
