"""Granted leases that the engine releases unless they are used in time."""

from __future__ import annotations

import asyncio
import gc
import math
import warnings
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig, CacheEngine, LeaseState
from aiokv.errors import LeaseError, TransferError, UnreleasedLeaseWarning, UsageError, WouldBlock
from aiokv.testing import (
    record,
    replay_transitions,
    run_until_idle,
    running_clock,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import Cache, prompt
from tests.harness.closing import complete_during
from tests.harness.external import ExternalCache

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiokv import Lease

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

PROMPT = prompt(1, 2)  # 9 positions, 3 blocks


async def test_unused_lease_is_released_when_its_ttl_has_passed():
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT, owner="r1")
        await lease.allocate(9, ttl_seconds=5.0)
        await clock.advance(4.9)
        assert lease.state is LeaseState.GRANTED
        assert cache.statistics.attention.device.free == 5
        await clock.advance(0.2)
        assert lease.state is LeaseState.RELEASED
        statistics = cache.statistics
        assert (statistics.attention.device.free, statistics.leases, statistics.expired_leases) == (
            8,
            0,
            1,
        )
        expected = (
            r"r1, expired at \d+-\d+-\d+ \d+:\d+:\d+\.\d+ UTC, unused for 5 s> cannot be used"
        )
        for use in (lambda: lease.commit(4), lambda: lease.block_table, lease.keep):
            with pytest.raises(LeaseError, match=expected) as caught:
                use()
            assert "ttl_seconds" in caught.value.hint
        with pytest.raises(LeaseError, match=expected):
            cache.engine.extend([lease], 1)
        lease.release()
        assert "expired at" in repr(lease)


async def test_try_allocate_and_expire_after_begin_the_limit_too():
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        first, second = cache.engine.match(PROMPT), cache.engine.match(PROMPT)
        assert first.try_allocate(9, ttl_seconds=1.0)
        assert second.try_allocate(9)
        second.expire_after(1.0)
        await clock.advance(0.5)
        second.expire_after(1.0)
        await clock.advance(0.6)
        assert first.state is LeaseState.RELEASED
        assert second.state is LeaseState.GRANTED, "the second call has replaced the limit"
        await clock.advance(0.5)
        assert second.state is LeaseState.RELEASED
        assert cache.statistics.expired_leases == 2


async def compute(engine: CacheEngine, lease: Lease) -> None:
    with engine.computing([lease]):
        pass


async def fork(engine: CacheEngine, lease: Lease) -> None:
    lease.fork().release()


async def preempt_and_resume(engine: CacheEngine, lease: Lease) -> None:
    await lease.preempt()
    assert lease.try_allocate(9)


USES: dict[str, Callable[[CacheEngine, Lease], Awaitable[None] | object]] = {
    "keep": lambda engine, lease: lease.keep(),
    "infinite": lambda engine, lease: lease.expire_after(math.inf),
    "commit": lambda engine, lease: lease.commit(4),
    "advance": lambda engine, lease: engine.advance(engine.batch([lease]), [9]),
    "append": lambda engine, lease: lease.append([7]),
    "extend": lambda engine, lease: engine.extend([lease], 1),
    "truncate": lambda engine, lease: lease.truncate(9),
    "computing": compute,
    "fork": fork,
    "preempt": preempt_and_resume,
    "receive": lambda engine, lease: lease.receive(timeout=PATIENCE_SECONDS),
    "send": lambda engine, lease: engine.send(lease, b""),
}


@pytest.mark.parametrize("use", USES)
async def test_use_ends_the_limit(use: str):
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(10, ttl_seconds=1.0)
        result = USES[use](cache.engine, lease)
        if asyncio.iscoroutine(result):
            await result
        assert clock.timers == 0
        await clock.advance(10.0)
        assert lease.state is LeaseState.GRANTED
        lease.release()
        assert cache.statistics.expired_leases == 0


async def test_swap_ends_the_limit_and_a_refused_use_does_not():
    clock = running_clock()
    async with Cache() as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        for refused in (
            lambda: lease.commit(10),
            lambda: lease.append([1]),
            lambda: cache.engine.extend([lease, lease], 1),
            lambda: cache.engine.computing([lease, lease]).__enter__(),
            lambda: cache.engine.extend([lease], 1000),
        ):
            with pytest.raises((LeaseError, WouldBlock)):
                refused()
        lease.block_table, lease.hit_blocks, lease.usage  # noqa: B018
        assert clock.timers == 1
        swapping = asyncio.ensure_future(lease.preempt(swap=True))
        await spin()
        assert clock.timers == 0
        await cache.finish()
        await swapping
        lease.release()


async def test_advance_ends_the_limit_of_the_leases_that_it_advances_only():
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        engine = cache.engine
        leases = [engine.match(prompt(seed, 1)) for seed in (1, 2, 3)]
        for lease in leases:
            await lease.allocate(5)
        batch = engine.batch(leases)
        with engine.computing(batch) as step:
            batch.remove(leases[0])
        for lease in leases:
            lease.expire_after(1.0)
        assert engine.advance(step, [7, 7, 7], [1, 1, 0]) == ()
        await clock.advance(2.0)
        expired = [lease.state is LeaseState.RELEASED for lease in leases]
        assert expired == [True, False, True]
        leases[1].release()


async def test_only_granted_leases_can_expire():
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT)
        with pytest.raises(LeaseError, match="only a granted lease can expire"):
            lease.expire_after(1.0)
        for wrong in (-1.0, math.nan, "1", None):
            with pytest.raises(UsageError, match="seconds is"):
                lease.expire_after(wrong)
        for wrong in (-1.0, math.nan, "1"):
            with pytest.raises(UsageError, match="ttl_seconds is"):
                await lease.allocate(9, ttl_seconds=wrong)
            with pytest.raises(UsageError, match="ttl_seconds is"):
                lease.try_allocate(9, ttl_seconds=wrong)
        assert lease.state is LeaseState.MATCHED
        lease.release()


async def test_expiry_gives_the_blocks_to_a_lease_that_waits():
    clock = running_clock()
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        first, second = cache.engine.match(PROMPT), cache.engine.match(prompt(2, 2))
        await first.allocate(9, ttl_seconds=1.0)
        waiting = asyncio.ensure_future(second.allocate(9, ttl_seconds=2.0))
        await clock.advance(0.9)
        assert not waiting.done()
        await clock.advance(0.2)
        assert waiting.done()
        await clock.advance(1.8)
        assert second.state is LeaseState.GRANTED, "its limit begins with its grant"
        await clock.advance(0.3)
        assert second.state is LeaseState.RELEASED
        await waiting


async def test_blocks_of_a_batch_stay_with_it_after_the_expiry():
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9)
        with cache.engine.computing([lease]):
            lease.expire_after(1.0)
            await clock.advance(2.0)
            assert lease.state is LeaseState.RELEASED
            assert cache.statistics.attention.device.free == 5
            assert cache.statistics.releasing_leases == 1
        assert cache.statistics.attention.device.free == 8


async def test_onload_in_flight_keeps_its_blocks_after_the_expiry():
    clock = running_clock()
    async with Cache(write_policy="write_through") as cache:
        await cache.fill(PROMPT)
        await cache.finish()
        await cache.engine.evict(8)
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        assert len(cache.device.onloads) == 1
        await clock.advance(2.0)
        assert lease.state is LeaseState.RELEASED
        assert cache.statistics.attention.device.in_flight == 2, "the copy still writes them"
        assert cache.engine.check_invariants() == []
        await cache.finish()
        assert sum(cache.hit(PROMPT)) == 2


async def test_collected_lease_does_not_expire_and_its_timer_keeps_no_lease():
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del lease
            gc.collect()
        assert [warning.category for warning in caught] == [UnreleasedLeaseWarning]
        await spin(2)
        assert clock.timers == 0
        await clock.advance(2.0)
        assert (cache.statistics.leases, cache.statistics.expired_leases) == (0, 0)


async def test_close_stops_the_timers_and_a_drain_waits_for_the_expiry():
    clock = running_clock()
    cache = Cache(host_blocks=0)
    async with cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        closing = asyncio.ensure_future(cache.engine.aclose(10.0))
        await clock.advance(1.1)
        await closing
        assert lease.state is LeaseState.RELEASED
    config = CacheConfig(block_tokens=4, device_blocks=8, drain_timeout_seconds=0.0)
    async with CacheEngine(config) as engine:
        lease = engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        assert clock.timers == 1
    assert clock.timers == 0
    lease.release()


async def test_expiry_is_a_recorded_transition():
    clock = running_clock()
    engine = CacheEngine(CacheConfig(block_tokens=4, device_blocks=8))
    recording = record(engine)
    async with engine:
        lease = engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        await clock.advance(2.0)
        engine.match(PROMPT).release()
    names = [transition.name for transition in recording.log.transitions]
    assert names.count("expire") == 1
    assert replay_transitions(recording.log) == len(names)


# ---- together with other verbs


async def test_sleep_waits_for_an_expiry_and_leases_expire_after_it():
    clock = running_clock()
    async with Cache() as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        sleeping = asyncio.ensure_future(cache.engine.sleep(["device", "host"]))
        await clock.advance(0.9)
        assert not sleeping.done()
        await clock.advance(0.2)
        await sleeping
        assert lease.state is LeaseState.RELEASED
        waiting = cache.engine.match(PROMPT)
        granting = asyncio.ensure_future(waiting.allocate(9, ttl_seconds=1.0))
        await clock.advance(5.0)
        assert not granting.done(), "a tier is asleep"
        await cache.engine.wake_up(["device", "host"], regions=cache.memory.regions)
        await granting
        await clock.advance(0.9)
        assert waiting.state is LeaseState.GRANTED, "its limit begins with its grant"
        await clock.advance(0.2)
        assert waiting.state is LeaseState.RELEASED
        assert cache.statistics.expired_leases == 2


async def test_expiry_during_an_update_of_the_weights_caches_nothing():
    clock = running_clock()
    async with Cache() as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9)
        cache.compute(lease, PROMPT)
        lease.expire_after(1.0)
        updating = cache.engine.updating_weights()
        await complete_during(updating.__aenter__(), cache.device)
        await clock.advance(1.1)
        assert lease.state is LeaseState.RELEASED
        await updating.__aexit__(None, None, None)
        cache.memory.weights += 1
        assert cache.hit(PROMPT) == (0, 0)
        assert cache.statistics.attention.device.free == 8


async def test_expiry_in_a_batch_leaves_its_computed_blocks_unindexed_and_uncorrupted():
    """The runner still writes the blocks, which no other lease may get."""
    clock = running_clock()
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9)
        other = cache.engine.match(prompt(2, 2))
        with cache.engine.computing([lease]):
            table = lease.block_table
            lease.expire_after(1.0)
            waiting = asyncio.ensure_future(other.allocate(9, ttl_seconds=1.0))
            await clock.advance(1.5)
            assert not waiting.done()
            cache.memory.write(table, cache.memory.words(prompt(7, 3)))
            with pytest.raises(LeaseError, match="expired"):
                lease.commit(9)
        await waiting
        cache.compute(other, prompt(2, 2))
        await clock.advance(5.0)
        cache.check(other, prompt(2, 2))
        assert other.state is LeaseState.GRANTED, "its commit has ended the limit"
        assert cache.hit(PROMPT) == (0, 0)
        other.release()


async def test_preempted_lease_gets_a_limit_with_its_next_grant_only():
    clock = running_clock()
    async with Cache(write_policy="none") as cache:
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        await lease.preempt()
        with pytest.raises(LeaseError, match="only a granted lease"):
            lease.expire_after(1.0)
        lease.keep()
        await clock.advance(5.0)
        assert lease.state is LeaseState.MATCHED
        await lease.allocate(9, ttl_seconds=1.0)
        cache.compute(lease, PROMPT)  # a use
        swapping = asyncio.ensure_future(lease.preempt(swap=True))
        await spin(2)
        with pytest.raises(LeaseError, match="only a granted lease"):
            lease.expire_after(1.0)
        await complete_during(swapping, cache.device)
        await complete_during(lease.resume(9), cache.device)
        await complete_during(lease.layers.wait_all(), cache.device)
        lease.expire_after(1.0)
        await clock.advance(1.1)
        assert lease.state is LeaseState.RELEASED
        assert cache.statistics.expired_leases == 1


async def test_a_swap_that_fails_leaves_no_limit():
    clock = running_clock()
    async with Cache(write_policy="none") as cache:
        lease = await cache.serve(PROMPT)
        lease.expire_after(1.0)
        swapping = asyncio.ensure_future(lease.preempt(swap=True))
        await run_until_idle(lambda: bool(cache.device.offloads))
        cache.device.offloads[0].fail_all()
        with pytest.raises(TransferError):
            await swapping
        await clock.advance(5.0)
        assert lease.state is LeaseState.GRANTED
        lease.release()


async def test_leases_compute_the_blocks_promised_by_an_expired_lease():
    clock = running_clock()
    async with Cache() as cache:
        first, second = cache.engine.match(PROMPT), cache.engine.match(PROMPT)
        await first.allocate(9, ttl_seconds=1.0)
        waiting = asyncio.ensure_future(second.allocate(9, wait_pending=60, ttl_seconds=1.0))
        await clock.advance(0.9)
        assert not waiting.done()
        await clock.advance(0.2)  # the lease that promised the blocks has expired
        await waiting
        assert second.cached_tokens == 0
        await clock.advance(0.8)
        assert second.state is LeaseState.GRANTED
        await clock.advance(0.2)
        assert second.state is LeaseState.RELEASED


@pytest.mark.parametrize("phase", ["onload", "save"])
async def test_expired_external_lease_is_idle_after_its_transfers(phase: str):
    clock = running_clock()
    async with ExternalCache() as cache:
        if phase == "onload":
            await cache.store(PROMPT, range(3))
        lease = cache.engine.match(PROMPT)
        await lease.allocate(9, ttl_seconds=1.0)
        lease.assign([5, 6, 7])
        await clock.advance(2.0)
        assert lease.state is LeaseState.GRANTED, "assign has ended the limit"
        if phase == "save":
            cache.compute(lease, PROMPT)
            await cache.saves_begun()
        lease.expire_after(1.0)
        await clock.advance(1.1)
        assert lease.state is LeaseState.RELEASED
        assert not lease.is_idle
        idle = asyncio.ensure_future(lease.idle())
        await spin(2)
        assert not idle.done()
        await cache.finish()
        await idle
        assert lease.is_idle
        assert cache.hit(PROMPT) == (0, 2)
        assert cache.statistics.expired_leases == 1


@pytest.mark.parametrize("end", ["release", "keep", "preempt"])
async def test_lease_that_ends_or_is_kept_leaves_no_timer(end):
    clock = running_clock()
    async with Cache(host_blocks=0) as cache:
        lease, other = cache.engine.match(PROMPT), cache.engine.match(PROMPT)
        before = clock.timers
        await lease.allocate(9, ttl_seconds=60.0)
        await other.allocate(9, ttl_seconds=60.0)
        assert clock.timers == before + 2
        match end:
            case "release":
                lease.release()
            case "keep":
                lease.keep()
            case "preempt":
                await lease.preempt(swap=False)
        assert clock.timers == before + 1
        lease.release()
        other.release()
        assert clock.timers == before
