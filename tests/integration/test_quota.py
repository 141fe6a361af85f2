"""The salt quota is fair within a salt, independent between salts, and freed exactly."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from aiokv.errors import (
    AllocateTimeout,
    BrokenEngineError,
    ClosedError,
    RequestTooLarge,
    WouldBlock,
)
from aiokv.testing import ManualEvent, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.served import Served

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


def quota_engine(limit: int = 4, device_blocks: int = 16) -> Served:
    return Served(device_blocks=device_blocks, write_policy="none", salt_quota_blocks=limit)


async def begin(coroutine) -> asyncio.Task:
    task = asyncio.ensure_future(coroutine)
    await spin(2)
    return task


def prompt(i: int, blocks: int = 2) -> list[int]:
    return [i * 100 + j for j in range(2 * blocks)]


async def test_first_come_first_served_within_a_salt():
    async with quota_engine() as served:
        match = served.engine.match
        big = await match(prompt(1, 4), salt="a").allocate(8)
        second = match(prompt(2, 3), salt="a")
        third = match(prompt(3, 1), salt="a")
        tasks = [await begin(second.allocate(6)), await begin(third.allocate(2))]
        fourth = match(prompt(4, 1), salt="a")
        assert not fourth.try_allocate(2)  # would overtake
        big.truncate(4)
        await spin(2)
        assert not any(task.done() for task in tasks)  # the small one does not overtake either
        big.release()
        await asyncio.gather(*tasks)
        assert not fourth.try_allocate(2)
        second.release()
        assert fourth.try_allocate(2)
        for lease in (third, fourth):
            lease.release()


async def test_salts_do_not_wait_for_each_other():
    async with quota_engine() as served:
        match = served.engine.match
        first = await match(prompt(1, 4), salt="a").allocate(8)
        waiting = match(prompt(2), salt="a")
        task = await begin(waiting.allocate(4))
        async with match(prompt(3, 4), salt="b") as other, match(prompt(3, 4)) as unsalted:
            await other.allocate(8, timeout=0.0)
            await unsalted.allocate(8, timeout=0.0)
        first.release()
        await task
        waiting.release()


async def test_more_than_the_quota_is_refused_at_once():
    async with quota_engine() as served:
        lease = served.engine.match(prompt(1, 5), salt="a")
        with pytest.raises(RequestTooLarge, match="salt_quota_blocks is 4"):
            await lease.allocate(10)
        with pytest.raises(RequestTooLarge):
            lease.try_allocate(10)
        await lease.allocate(8)  # nothing was counted
        lease.release()


async def test_a_timeout_names_the_quota_and_counts_nothing():
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1, 3), salt="a").allocate(6)
        second = served.engine.match(prompt(2), salt="a")
        with pytest.raises(AllocateTimeout, match="'a' holds 3 of the 4 blocks"):
            await second.allocate(4, timeout=0.0)
        third = await served.engine.match(prompt(3, 1), salt="a").allocate(2)
        for lease in (first, second, third):
            lease.release()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0


@pytest.mark.parametrize("how", ["cancel", "release"])
async def test_cancelled_or_released_waiter_unblocks_the_next_one(how):
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1, 3), salt="a").allocate(6)
        large = served.engine.match(prompt(2, 4), salt="a")
        small = served.engine.match(prompt(3, 1), salt="a")
        tasks = [await begin(large.allocate(8)), await begin(small.allocate(2))]
        if how == "cancel":
            tasks[0].cancel()
        else:
            large.release()
            first.release()
        await spin(4)
        assert tasks[1].done()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease in (first, large, small):
            lease.release()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0


async def test_cancellation_in_the_pass_of_the_quota_admission_admits_the_next_one():
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1, 4), salt="a").allocate(8)
        leases = [served.engine.match(prompt(i, 4), salt="a") for i in (2, 3)]
        tasks = [await begin(lease.allocate(8)) for lease in leases]
        first.release()  # admits the second lease
        tasks[0].cancel()
        await tasks[1]
        leases[1].release()
        assert tasks[0].cancelled()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0
        leases[0].release()


async def test_growth_beyond_the_quota_delays_other_leases_only():
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1, 3), salt="a").allocate(6)
        served.engine.extend([first], 6)  # beyond the quota: decoding continues
        second = served.engine.match(prompt(2, 1), salt="a")
        assert not second.try_allocate(2)
        first.truncate(8)
        assert not second.try_allocate(2)
        task = await begin(second.allocate(2))
        first.truncate(6)
        await task
        first.release()
        second.release()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0


async def test_forks_count_towards_the_quota():
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1), salt="a").allocate(4)
        child = first.fork()
        with pytest.raises(WouldBlock, match="quota"):
            child.fork()
        first.release()
        child.fork().release()
        child.release()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0


async def test_preemption_frees_quota_and_resume_waits_in_line():
    async with quota_engine() as served:
        first = await served.engine.match(prompt(1, 4), salt="a").allocate(8)
        first.commit(8)
        second = served.engine.match(prompt(2, 4), salt="a")
        task = await begin(second.allocate(8))
        preempting = await begin(first.preempt(swap=True))
        assert not task.done()
        await served.complete_offloads()
        await preempting
        await task
        resuming = await begin(first.resume(8))
        assert not resuming.done()
        await second.preempt()
        await resuming
        first.release()
        second.release()
        assert served.engine.inspect.parts.scheduler.read.quota_held("a") == 0


async def test_close_fails_quota_waiters():
    served = quota_engine()
    async with served:
        first = await served.engine.match(prompt(1, 4), salt="a").allocate(8)
        second = served.engine.match(prompt(2), salt="a")
        task = await begin(second.allocate(4))
        closing = await begin(served.engine.aclose())
        with pytest.raises(ClosedError):
            await task
        first.release()
        second.release()
        await closing


async def test_broken_device_fails_quota_waiters():
    served = quota_engine()
    served.device.computes_in_stream = True
    async with served:
        first = await served.engine.match(prompt(1, 4), salt="a").allocate(8)
        second = served.engine.match(prompt(2), salt="a")
        task = await begin(second.allocate(4))
        event = ManualEvent()
        served.engine.step(event)
        event.query_error = RuntimeError("the device is lost")
        with pytest.raises(BrokenEngineError):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        event.query_error = None
        first.release()
        second.release()


async def test_random_cancellations_leak_no_quota_and_never_exceed_it():
    async with quota_engine(device_blocks=8) as served:
        random = Random(3)
        live: set[object] = set()

        async def request(i: int) -> None:
            salt, blocks = "abc"[i % 3], random.randint(1, 4)
            async with served.engine.match(prompt(i, blocks), salt=salt) as lease:
                await lease.allocate(2 * blocks, timeout=None if i % 4 else 0.0)
                live.add(lease)
                held = sum(len(x.block_table) for x in live if x.salt == salt)
                assert held <= 4
                await spin(random.randint(0, 5))
                live.discard(lease)

        tasks = [asyncio.create_task(request(i)) for i in range(200)]
        for _ in range(60):
            await spin(1)
            random.choice(tasks).cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        unexpected = [
            r
            for r in results
            if r is not None and not isinstance(r, (asyncio.CancelledError, AllocateTimeout))
        ]
        assert unexpected == []
        assert sum(result is None for result in results) > 50
        assert [served.engine.inspect.parts.scheduler.read.quota_held(salt) for salt in "abc"] == [
            0,
            0,
            0,
        ]
        assert served.engine.statistics().attention.device.free == 8


async def test_request_that_fits_does_not_overtake_one_that_waits_for_the_same_quota():
    async with quota_engine() as served:
        match = served.engine.match
        first = await match(prompt(1, 3), salt="a").allocate(6)
        second, third = match(prompt(2, 2), salt="a"), match(prompt(3, 1), salt="a")
        task = await begin(second.allocate(4))
        assert not third.can_allocate(2)
        assert not third.try_allocate(2)
        first.release()
        await task
        assert third.can_allocate(2)
        assert third.try_allocate(2)
        second.release()
        third.release()
