"""``lease.can_allocate(n)``: True exactly when ``try_allocate(n)`` would succeed now; the same as
a number of blocks for requests that are not matched, and for ``extend``; reserves per call.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from aiokv import LeaseState
from aiokv.errors import (
    CapacityError,
    ClosedError,
    LeaseError,
    RequestTooLarge,
    TransferError,
    UsageError,
    WouldBlock,
)
from aiokv.testing import spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

VERBS = [*("attempt",) * 4, *("match",) * 2, "commit", "line", "preempt", "swap", "release"]
VERBS += ["copy", "fail", "pause", "cancel", "pass", "evict"]
POLICIES = ("none", "write_through", "nth_use:2", "write_back")


async def test_blocks_that_write_back_must_save_first_are_not_available():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="write_back") as cache:
        await cache.fill(prompt(1, 3))
        lease = cache.engine.match(prompt(2, 3))
        statistics = cache.statistics
        assert statistics.attention.device.free + statistics.evictable_blocks >= 4
        assert not lease.can_allocate(13)
        assert cache.device.offloads == [], "can_allocate saves nothing"
        assert not lease.try_allocate(13)
        assert not lease.can_allocate(13)
        await cache.finish()
        evicted = cache.statistics.attention.device.evicted_blocks
        assert lease.can_allocate(13)
        assert cache.statistics.attention.device.evicted_blocks == evicted, (
            "can_allocate evicts nothing"
        )
        assert lease.try_allocate(13)
        lease.release()


async def test_blocks_of_transfers_in_flight_are_not_available():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="write_through") as cache:
        await cache.fill(prompt(1, 3))
        assert len(cache.device.offloads) == 1
        lease = cache.engine.match(prompt(2, 3))
        assert not lease.can_allocate(13)
        await cache.finish()
        assert lease.can_allocate(13)
        lease.release()


async def test_device_hit_of_the_lease_needs_no_free_blocks():
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        holder = await cache.serve(prompt(1, 3))
        lease = cache.engine.match(prompt(1, 3)[:12])
        assert lease.can_allocate(8) == lease.try_allocate(8) == True  # noqa: E712
        lease.release()
        lease = cache.engine.match(prompt(2, 1))
        assert lease.can_allocate(4) == lease.try_allocate(4) == False  # noqa: E712
        lease.release()
        holder.release()


async def test_can_allocate_raises_the_errors_of_try_allocate():
    cache = Cache(device_blocks=4, host_blocks=0, salt_quota_blocks=3)
    async with cache:
        lease = cache.engine.match(prompt(1, 3), salt="a")
        for num_tokens, match in ((17, "device_blocks is 4"), (13, "salt_quota_blocks is 3")):
            for call in (lease.can_allocate, lease.try_allocate):
                with pytest.raises(RequestTooLarge, match=match):
                    call(num_tokens)
        assert lease.try_allocate(12)
        with pytest.raises(LeaseError, match="already"):
            lease.can_allocate(12)
        lease.release()
        with pytest.raises(LeaseError, match="released at"):
            lease.can_allocate(12)
        other = cache.engine.match(prompt(1, 3))
        closing = asyncio.ensure_future(cache.engine.aclose())
        await spin()
        with pytest.raises(ClosedError):
            other.can_allocate(4)
        other.release()
        await closing


async def test_allocatable_blocks_counts_no_block_that_write_back_must_save_first():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="write_back") as cache:
        engine = cache.engine
        await cache.fill(prompt(1, 2))
        statistics = cache.statistics
        assert statistics.attention.device.free + statistics.evictable_blocks == 4
        assert (engine.allocatable_blocks(), engine.extendable_blocks()) == (2, 2)
        assert cache.device.offloads == [], "the question saves nothing"
        lease = engine.match(prompt(2, 1))
        assert lease.try_allocate(8)
        with pytest.raises(WouldBlock):
            engine.extend([lease], 1)
        assert (engine.allocatable_blocks(), engine.extendable_blocks()) == (0, 0)
        await cache.finish()
        assert (engine.allocatable_blocks(), engine.extendable_blocks()) == (1, 1), "one is saved"
        engine.extend([lease], 4)
        lease.release()


async def test_allocatable_blocks_counts_no_block_of_a_transfer_in_flight():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="write_through") as cache:
        engine = cache.engine
        await cache.fill(prompt(1, 3))
        assert len(cache.device.offloads) == 1
        assert (engine.allocatable_blocks(), engine.extendable_blocks()) == (1, 1)
        await cache.finish()
        assert (engine.allocatable_blocks(), engine.extendable_blocks()) == (4, 4)


async def test_allocatable_blocks_leaves_reserve_quota_line_and_pauses_out_of_account_of_extend():
    async with Cache(
        device_blocks=8, host_blocks=0, reserve_blocks=2, salt_quota_blocks=4
    ) as cache:
        engine = cache.engine
        assert engine.extendable_blocks() == 8
        assert engine.allocatable_blocks(salt="a") == 4
        assert engine.allocatable_blocks(salt="a", reserve_blocks=5) == 3
        assert engine.allocatable_blocks(salt="a", reserve_blocks=100) == 0
        assert engine.allocatable_blocks(salt="a", limit=1) == 1
        first = engine.match(prompt(1, 2), salt="a")
        assert first.try_allocate(12)
        assert (engine.allocatable_blocks(salt="a"), engine.allocatable_blocks(salt="b")) == (1, 3)
        second = engine.match(prompt(2, 3), salt="a")
        waiting = asyncio.ensure_future(second.allocate(8))
        await spin()
        assert engine.allocatable_blocks(salt="a") == 0, "a lease waits for the quota of its salt"
        assert engine.allocatable_blocks(salt="b") == 3
        third = engine.match(prompt(3, 3), salt="b")
        line = asyncio.ensure_future(third.allocate(16))
        await spin()
        assert engine.allocatable_blocks(salt="b") == 0, "a lease waits for capacity"
        line.cancel()
        await spin()
        engine.pause()
        assert engine.allocatable_blocks(salt="b") == 0
        assert engine.extendable_blocks(limit=5) == 5
        engine.resume()
        assert engine.allocatable_blocks(salt="b") == 3
        waiting.cancel()
        await spin()
        for lease in (first, second, third):
            lease.release()


async def test_reserve_of_a_call_replaces_the_configured_one():
    async with Cache(device_blocks=8, host_blocks=0, reserve_blocks=2) as cache:
        engine = cache.engine
        holder = engine.match(prompt(2, 1))
        assert holder.try_allocate(8)
        lease = engine.match(prompt(1, 8))
        assert lease.can_allocate(16)
        assert not lease.can_allocate(16, reserve_blocks=3)
        assert not lease.try_allocate(16, reserve_blocks=3)
        assert lease.can_allocate(24, reserve_blocks=0)
        assert not lease.can_allocate(24)
        holder.release()
        assert lease.can_allocate(32, reserve_blocks=0)
        with pytest.raises(RequestTooLarge, match="of which reserve_blocks keeps 2"):
            lease.try_allocate(32)
        with pytest.raises(RequestTooLarge, match="of which reserve_blocks keeps 7"):
            await lease.allocate(8, reserve_blocks=7)
        assert lease.try_allocate(32, reserve_blocks=0)
        await lease.preempt()
        await lease.resume(32, reserve_blocks=0)
        lease.release()


async def test_lease_in_line_keeps_the_reserve_of_its_call():
    async with Cache(device_blocks=8, host_blocks=0, reserve_blocks=1) as cache:
        engine = cache.engine
        holders = [engine.match(prompt(seed, 1)) for seed in range(3)]
        for holder in holders:
            assert holder.try_allocate(8)
        first, second = engine.match(prompt(8, 1)), engine.match(prompt(9, 1))
        large = asyncio.ensure_future(first.allocate(8, reserve_blocks=4))
        small = asyncio.ensure_future(second.allocate(4))
        await spin()
        assert not large.done()
        assert not small.done(), "the line is served in order"
        holders[0].release()
        await spin()
        assert not large.done(), "two blocks would leave two to extend"
        assert not small.done()
        holders[1].release()
        await spin()
        assert large.done()
        assert small.done()
        for lease in (holders[2], first, second):
            lease.release()


@pytest.mark.parametrize("reserve", [-1, 1.5, "1", True, 2**31])
async def test_wrong_reserves_and_limits_are_refused(reserve):
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(prompt(1, 1))
        for call in (lease.try_allocate, lease.can_allocate):
            with pytest.raises(UsageError, match="reserve_blocks is "):
                call(4, reserve_blocks=reserve)
        for wait in (lease.allocate, lease.resume):
            with pytest.raises(UsageError, match="reserve_blocks is "):
                await wait(4, reserve_blocks=reserve)
        with pytest.raises(UsageError, match="reserve_blocks is "):
            cache.engine.allocatable_blocks(reserve_blocks=reserve)
        for question in (cache.engine.allocatable_blocks, cache.engine.extendable_blocks):
            with pytest.raises(UsageError, match="limit is "):
                question(limit=reserve)
        lease.release()


async def test_first_allocate_behind_the_hit_keeps_all_of_it():
    """The first ``allocate`` of a chunked prefill covers the whole hit, as its docstring says."""
    async with Cache(device_blocks=16, host_blocks=0) as cache:
        tokens = prompt(1, 6)
        await cache.fill(tokens)
        lease, chunk = cache.engine.match(tokens), 4
        await lease.allocate(min(lease.hit.total + chunk, len(tokens)))
        assert lease.cached_tokens == 24
        lease.release()
        lease = cache.engine.match(tokens)
        await lease.allocate(8)
        cache.engine.extend([lease], 17)
        assert lease.cached_tokens == 8, "an extension brings nothing back"
        lease.release()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quota", [None, 6])
async def test_answers_equal_attempts_in_random_states(policy, quota):
    """Quotas, pauses, leases in line, swapped ones, transfers under way and failed."""
    seen: Counter[bool] = Counter()
    for seed in range(12):
        await walk(Random(seed), policy, quota, seen)
    assert min(seen[True], seen[False]) > 50, seen


async def walk(random: Random, policy: str, quota: int | None, seen: Counter[bool]) -> None:
    cache = Cache(
        device_blocks=random.randint(6, 10),
        host_blocks=random.choice((0, 2, 6, 20)),
        write_policy=policy,
        salt_quota_blocks=quota,
        reserve_blocks=random.choice((0, 1)),
        eviction_policy=random.choice(("lru", "adaptive")),
    )
    async with cache:
        engine = cache.engine
        tokens: dict = {}  # of each lease
        waiting: dict[asyncio.Task, object] = {}
        paused = 0

        def idle(*, granted: bool) -> list:
            busy = set(waiting.values())
            still = [x for x in tokens if x not in busy and x.state is not LeaseState.SWAPPING]
            return [x for x in still if (x.state is LeaseState.GRANTED) == granted]

        for _ in range(120):
            verb = random.choice(VERBS)
            among = idle(granted=verb in ("commit", "preempt", "swap"))
            lease = random.choice(among) if among else None
            if verb == "match" and len(tokens) < 8:
                text = prompt(random.randrange(4), random.randint(1, 6))
                tokens[engine.match(text, salt=random.choice("ab"))] = text
            elif verb == "attempt" and lease is not None:
                num_tokens = random.randint(1, BLOCK_TOKENS * 7)
                try:
                    expected: object = lease.can_allocate(num_tokens)
                except (RequestTooLarge, LeaseError) as error:
                    expected = type(error)
                try:
                    got: object = lease.try_allocate(num_tokens)
                except (RequestTooLarge, LeaseError) as error:
                    got = type(error)
                assert got == expected, (policy, quota, num_tokens)
                if isinstance(got, bool):
                    seen[got] += 1
            elif (
                verb == "commit"
                and lease is not None
                and not engine.inspect.parts.scheduler.read.onloads(lease.id)
            ):
                lease.recompute_from()
                lease.commit(min(lease.num_tokens, len(tokens[lease])))
            elif verb == "line" and lease is not None and len(waiting) < 2:
                blocks = min(len(tokens[lease]) // BLOCK_TOKENS + 1, 5)
                needed = max(
                    blocks * BLOCK_TOKENS,
                    engine.inspect.parts.scheduler.read.computed_tokens(lease.id),
                )
                waiting[asyncio.ensure_future(lease.allocate(needed))] = lease
            elif verb in ("preempt", "swap") and lease is not None:
                waiting[asyncio.ensure_future(lease.preempt(swap=verb == "swap"))] = lease
            elif verb == "release" and tokens:
                gone = random.choice(list(tokens))
                del tokens[gone]
                gone.release()
            elif verb in ("copy", "fail") and cache.device.copies:
                copy = random.choice(cache.device.copies)
                copy.fail_all() if verb == "fail" else copy.complete_all()
            elif verb == "pause" and random.random() < 0.5:
                engine.resume() if paused else engine.pause()
                paused = 1 - paused
            elif verb == "cancel" and waiting:
                random.choice(list(waiting)).cancel()
            elif verb == "evict":
                evicting = asyncio.ensure_future(engine.evict(random.randint(1, 3)))
                await spin()
                evicting.cancel()
            await spin(random.choice((0, 0, 1)))
            for task in [task for task in waiting if task.done()]:
                del waiting[task]
                if not task.cancelled() and (error := task.exception()) is not None:
                    assert isinstance(error, (LeaseError, CapacityError, TransferError)), error
            assert engine.check_invariants() == []
        if paused:
            engine.resume()
        for lease in tokens:
            lease.release()
        await cache.finish()
        await asyncio.gather(*waiting, return_exceptions=True)
