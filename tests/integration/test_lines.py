"""Waiting lines (quota, pending blocks, capacity): each wait ends and delays no other request."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from random import Random

import pytest

from aiokv.errors import (
    AllocateTimeout,
    BrokenEngineError,
    CapacityError,
    ClosedError,
    DeviceError,
    LeaseError,
    UsageError,
)
from aiokv.testing import ManualEvent, run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

LONG = 1000.0  # seconds that no test waits for

pytestmark = pytest.mark.asyncio


async def begin(coroutine) -> asyncio.Task:
    task = asyncio.ensure_future(coroutine)
    await spin(2)
    return task


async def granted(cache: Cache, seed: int, blocks: int, salt: str = "", owner: str = ""):
    """Return a granted lease of that many blocks."""
    lease = cache.engine.match(prompt(seed, blocks)[:-1], salt=salt, owner=owner)
    await lease.allocate(blocks * BLOCK_TOKENS)
    return lease


async def result_of(value):
    return await value if inspect.isawaitable(value) else value


def matched(cache: Cache, seed: int, blocks: int, salt: str = "", owner: str = ""):
    return cache.engine.match(prompt(seed, blocks)[:-1], salt=salt, owner=owner)


def waits(cache: Cache) -> int:
    return cache.engine.inspect.parts.scheduler.read.num_waiting


def break_engine(cache: Cache) -> None:
    """Break the engine: an event query of the poller fails in a later pass."""
    event = ManualEvent()
    event.query_error = DeviceError("the device was lost")
    cache.engine.step(event)


def refuses(cache: Cache) -> bool:
    """Return whether the engine takes no more prompts."""
    try:
        cache.engine.match(prompt(1, 1)).release()
    except (ClosedError, BrokenEngineError):
        return True
    return False


# --- a wait that nothing would have ended ---------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("end", ["close", "break"])
async def test_quota_admission_in_the_pass_of_a_close_or_break(end, fits):
    """An earlier grant is kept; a request that has reached the capacity line fails."""
    async with Cache(device_blocks=8, host_blocks=0, salt_quota_blocks=4) as cache:
        first = await granted(cache, 1, 4, "a")
        other = await granted(cache, 2, 4, "b")
        ahead = matched(cache, 4, 4, "c")
        ahead_task = None if fits else await begin(ahead.allocate(16))
        lease = matched(cache, 3, 4, "a", "waiter")
        task = await begin(lease.allocate(16))
        assert len(cache.engine.inspect.dump()["waiting_for_quota"]) == 1
        first.release()  # the quota admits the waiter, which enters the capacity line in this call
        assert cache.engine.inspect.dump()["waiting_for_quota"] == []
        assert cache.statistics.waiting == (0 if fits else 1)
        closing = cache.engine.aclose()
        if end == "close":
            closing.send(None)  # in this pass; it waits for the leases now
        else:
            break_engine(cache)
        if fits:
            assert await asyncio.wait_for(task, PATIENCE_SECONDS) is lease
        else:
            with pytest.raises(ClosedError if end == "close" else BrokenEngineError):
                await asyncio.wait_for(task, PATIENCE_SECONDS)
            assert await ahead_task is ahead
        assert (lease if fits else ahead).num_tokens == 16
        await run_until_idle(lambda: refuses(cache))
        closing.close()
        assert waits(cache) == 0
        assert cache.engine.check_invariants() == []
        assert cache.engine.inspect.parts.scheduler.read.quota_held("a") == (4 if fits else 0)
        for x in (other, lease, ahead):
            x.release()


@pytest.mark.parametrize("line", ["quota", "capacity", "pending"])
async def test_lease_released_while_it_waits_fails_its_task_and_unblocks_later_requests(line):
    async with Cache(device_blocks=8, host_blocks=0, salt_quota_blocks=8) as cache:
        first = await granted(cache, 1, 6, "a")
        waiting = matched(cache, 1 if line == "pending" else 2, 6, "a", "gone")
        salt = "b" if line == "capacity" else "a"
        if line == "capacity":
            waiting = matched(cache, 2, 6, "b", "gone")
        pending = LONG if line == "pending" else 0.0
        task = await begin(waiting.allocate(24, wait_pending=pending))
        behind = matched(cache, 3, 2, salt)
        next_task = await begin(behind.allocate(8))
        assert next_task.done() == (line == "pending")
        waiting.release()
        await spin(3)
        assert next_task.done(), "the one behind it fits"
        with pytest.raises(LeaseError, match="'gone' was released while it waited"):
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert waits(cache) == 0
        assert cache.engine.check_invariants() == []
        first.release()
        behind.release()


async def test_lease_released_in_the_pass_of_its_quota_admission_counts_nothing():
    async with Cache(device_blocks=8, host_blocks=0, salt_quota_blocks=4) as cache:
        first = await granted(cache, 1, 4, "a")
        waiting = matched(cache, 2, 4, "a")
        task = await begin(waiting.allocate(16))
        first.release()
        waiting.release()
        with pytest.raises(LeaseError):
            await task
        assert cache.engine.check_invariants() == []
        (await granted(cache, 3, 4, "a")).release()


async def test_lease_that_timed_out_in_line_is_collected_and_frees_its_blocks():
    """The line keeps no reference to a removed waiter, regardless of its position."""
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        first = await granted(cache, 1, 2)
        waiting = matched(cache, 2, 4)
        task = await begin(waiting.allocate(16))
        lease = matched(cache, 3, 2)
        with contextlib.suppress(AllocateTimeout):  # pytest.raises would keep its frames
            await lease.allocate(8, priority=1, timeout=0.0)
            pytest.fail("the request was granted")
        await lease.allocate(8, priority=-1)
        gone = weakref.ref(lease)
        await spin()  # until then the loop refers to the cancelled future, and so to its frames
        with pytest.warns(ResourceWarning, match="never released"):
            del lease
        assert gone() is None
        await spin(2)
        first.release()
        await task
        waiting.release()


@pytest.mark.parametrize("priority", [None, "high", float("nan"), 1.5, [1]])
async def test_non_integer_priority_is_refused_and_nothing_changes(priority):
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        first = await granted(cache, 1, 4)
        bad, good = matched(cache, 2, 2), matched(cache, 3, 2)
        for call in (bad.allocate, bad.resume):
            with pytest.raises(UsageError, match=r"priority is .*must be an integer"):
                await call(8, priority=priority)
        assert waits(cache) == 0
        task = await begin(good.allocate(8))
        first.release()
        await task
        bad.release()
        good.release()


async def test_numpy_integers_and_bools_are_priorities():
    import numpy as np

    async with Cache(device_blocks=4, host_blocks=0) as cache:
        first = await granted(cache, 1, 4)
        leases = [matched(cache, i, 4) for i in (2, 3, 4)]
        priorities = [np.int64(2), True, 0]
        order: list[int] = []

        async def serve(index: int) -> None:
            async with leases[index] as lease:
                await lease.allocate(16, priority=priorities[index])
                order.append(index)

        tasks = [await begin(serve(index)) for index in range(3)]
        first.release()
        await asyncio.gather(*tasks)
        assert order == [2, 1, 0]


async def test_swapped_lease_is_not_resumed_before_a_higher_priority():
    """The swapped lease was first in line; one pass later another request is first."""
    async with Cache(device_blocks=8, host_blocks=32) as cache:
        swapped = await granted(cache, 1, 4)
        swapped.commit(16)
        preempting = await begin(swapped.preempt(swap=True))
        cache.device.complete_all()
        await preempting
        small, large = await granted(cache, 2, 2), await granted(cache, 3, 6)
        resuming = await begin(swapped.resume(16, priority=5))
        urgent = matched(cache, 4, 8)
        large.release()  # 6 blocks are free: the swapped lease is first in line
        step = urgent.allocate(32).__await__()
        next(step)  # needs 8: first in line, in the same pass
        await spin(3)
        assert not resuming.done()
        assert cache.engine.check_invariants() == []
        step.close()  # the urgent one is cancelled: the swapped lease is first again
        await run_until_idle(resuming.done)
        assert resuming.result() is swapped
        await cache.finish()
        for lease in (swapped, small, urgent):
            lease.release()


# --- pending blocks -------------------------------------------------------------------------------


async def test_commit_wakes_only_the_waiters_whose_part_is_indexed(monkeypatch):
    async with Cache(device_blocks=64, host_blocks=0) as cache:
        owner = cache.engine.match(prompt(1, 8))
        await owner.allocate(33)
        leases = [cache.engine.match(prompt(1, 8)[: 4 * n + 1]) for n in (2, 4, 8)]
        queried: list[int] = []
        wait_pending = cache.engine.inspect.parts.scheduler.wait_pending

        def counting(lease_id):
            queried.append(lease_id)
            return wait_pending(lease_id)

        monkeypatch.setattr(cache.engine.inspect.parts.scheduler, "wait_pending", counting)
        tasks = [
            asyncio.create_task(lease.allocate(len(prompt(1, 2)), wait_pending=LONG))
            for lease in leases
        ]
        await spin(2)
        queried.clear()
        for end, done in ((4, 0), (8, 1), (12, 1), (16, 2), (28, 2), (32, 3)):
            owner.commit(end)
            await spin(3)
            assert [task.done() for task in tasks] == [i < done for i in range(3)]
        assert queried == [lease.id for lease in leases], "one look each"
        for lease in (owner, *leases):
            lease.release()


async def test_waiter_wakes_when_an_onload_lets_the_owner_index_its_commit():
    """The commit preceded the end of the onload, so it indexed nothing."""
    async with Cache(device_blocks=32) as cache:
        await cache.fill(prompt(1, 2))
        await cache.finish()
        assert await cache.engine.evict(2) == 2
        owner = cache.engine.match(prompt(1, 6))
        await owner.allocate(25)
        lease = cache.engine.match(prompt(1, 6))
        task = await begin(lease.allocate(25, wait_pending=LONG))
        owner.commit(24)
        await spin(3)
        assert not task.done()
        cache.device.complete_all()
        await run_until_idle(task.done)
        assert lease.cached_tokens == 24
        owner.release()
        lease.release()


async def test_truncation_by_the_owner_wakes_waiters_for_the_truncated_blocks():
    async with Cache(device_blocks=32, host_blocks=0) as cache:
        owner = cache.engine.match(prompt(1, 4))
        await owner.allocate(17)
        lease = cache.engine.match(prompt(1, 4))
        task = await begin(lease.allocate(17, wait_pending=LONG))
        owner.truncate(8)
        owner.commit(8)
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert lease.cached_tokens in (0, 8)
        owner.release()
        lease.release()


async def test_second_task_that_waits_for_pending_blocks_of_a_lease_is_refused():
    async with Cache(device_blocks=32, host_blocks=0) as cache:
        owner = cache.engine.match(prompt(1, 4))
        await owner.allocate(17)
        lease = cache.engine.match(prompt(1, 4))
        task = await begin(lease.allocate(17, wait_pending=LONG))
        with pytest.raises(LeaseError, match="another task"):
            await lease.allocate(17, wait_pending=LONG)
        owner.release()
        await task
        lease.release()


# --- bounded work per pass ------------------------------------------------------------------------


async def served_by_pass(tasks: list[asyncio.Task]) -> list[int]:
    """Return the number of tasks that end in each pass of the loop, until all have ended."""
    counts = []
    left = set(tasks)
    while left:
        done = {task for task in left if task.done()}
        counts.append(len(done))
        left -= done
        await asyncio.sleep(0)
    return counts


@pytest.mark.parametrize("end", ["granted", "closed", "broken", "resumed"])
async def test_thousand_waiters_for_capacity_end_in_bounded_groups(end):
    async with Cache(device_blocks=1000, host_blocks=0) as cache:
        first = await granted(cache, 1, 1000)
        leases = [matched(cache, 2, 1) for _ in range(1000)]
        tasks = [asyncio.create_task(lease.allocate(4)) for lease in leases]
        await spin(2)
        if end == "closed":
            closing = asyncio.create_task(cache.engine.aclose())
        elif end == "broken":
            break_engine(cache)
        elif end == "granted":
            first.release()
        else:
            cache.engine.pause()
            first.release()
            assert not any(task.done() for task in tasks)
            cache.engine.resume()
        counts = await served_by_pass(tasks)
        assert max(counts) <= 64
        assert waits(cache) == 0
        for lease in (first, *leases):
            lease.release()
        if end == "closed":
            await closing
        assert cache.engine.check_invariants() == []
        for task in tasks:
            task.exception()


@pytest.mark.parametrize("end", ["commit", "release", "close"])
async def test_thousand_waiters_for_pending_blocks_end_in_bounded_groups(end):
    async with Cache(device_blocks=5000, host_blocks=0) as cache:
        owner = cache.engine.match(prompt(1, 4))
        await owner.allocate(17)

        async def request() -> None:
            async with cache.engine.match(prompt(1, 4)) as lease:
                await lease.allocate(17, wait_pending=LONG)
                lease.commit(16)

        tasks = [asyncio.create_task(request()) for _ in range(1000)]
        await spin(2)
        assert waits(cache) == 1000
        closing = asyncio.ensure_future(cache.engine.aclose() if end == "close" else spin())
        if end == "commit":
            owner.commit(16)
        elif end == "release":
            owner.release()
        while not all(task.done() for task in tasks):
            before = waits(cache)
            await asyncio.sleep(0)
            assert before - waits(cache) <= 64
        for task in tasks:
            assert isinstance(task.exception(), ClosedError if end == "close" else type(None))
        assert cache.engine.check_invariants() == []
        owner.release()
        await closing


async def test_thousand_quota_admissions_come_in_bounded_groups():
    async with Cache(device_blocks=1000, host_blocks=0, salt_quota_blocks=500) as cache:
        first = await granted(cache, 1, 500, "a")
        leases = [matched(cache, 2, 1, "a") for _ in range(1000)]
        tasks = [asyncio.create_task(lease.allocate(4)) for lease in leases]
        await spin(2)
        first.release()
        counts = []
        while not all(task.done() for task in tasks[:500]):
            before = sum(task.done() for task in tasks)
            await asyncio.sleep(0)
            counts.append(sum(task.done() for task in tasks) - before)
            assert cache.engine.inspect.parts.scheduler.read.quota_held("a") <= 500
        assert max(counts) <= 64
        assert not tasks[500].done()
        for lease in leases:  # also those in line
            lease.release()
        await asyncio.wait(tasks)
        assert sum(task.exception() is not None for task in tasks) == 500
        assert cache.engine.check_invariants() == []


async def test_pending_quiesce_visits_no_lease_at_each_release(monkeypatch):
    async with Cache(device_blocks=32, host_blocks=0) as cache:
        leases = [await granted(cache, i, 2) for i in range(1, 9)]
        quiescing = await begin(cache.engine.quiesce())
        queried = []
        read = cache.engine.inspect.parts.scheduler.read
        monkeypatch.setattr(read, "owners", lambda *which: queried.append(which) or [])
        for lease in leases:
            assert not quiescing.done()
            lease.release()
        await quiescing
        assert queried == []
        cache.engine.resume()


# --- grants ---------------------------------------------------------------------------------------


async def test_second_try_of_a_granted_lease_keeps_its_quota():
    async with Cache(device_blocks=8, host_blocks=0, salt_quota_blocks=4) as cache:
        lease = await granted(cache, 1, 4, "a")
        for call in (lease.try_allocate, lease.can_allocate):
            with pytest.raises(LeaseError, match="already"):
                call(16)
        assert cache.engine.inspect.parts.scheduler.read.quota_held("a") == 4
        assert cache.engine.check_invariants() == []
        lease.release()


@pytest.mark.parametrize("verb", ["try_allocate", "allocate"])
async def test_grant_whose_layers_are_not_known_takes_nothing(verb, monkeypatch):
    """Without its layers, the lease would read the bytes of an onload that has not arrived."""
    async with Cache(device_blocks=8, salt_quota_blocks=8) as cache:
        await cache.fill(prompt(1, 2))
        await cache.finish()
        await cache.engine.evict(2)
        lease = cache.engine.match(prompt(1, 2))

        def fail(*args):
            raise ValueError("no table")

        monkeypatch.setattr(cache.engine.inspect.parts.scheduler.read, "block_table", fail)
        with pytest.raises(ValueError, match="no table"):
            await result_of(getattr(lease, verb)(9))
        monkeypatch.undo()
        assert cache.engine.inspect.parts.scheduler.read.granted_leases == 0
        assert cache.engine.inspect.parts.scheduler.read.quota_held("") == 0
        lease.release()


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_cancellations_at_every_await_of_all_lines_leave_the_engine_consistent(seed):
    """Tasks are cancelled repeatedly, released and timed out while other tasks are granted."""
    rng = Random(seed)
    async with Cache(
        device_blocks=12, host_blocks=16, salt_quota_blocks=9, write_policy="write_back"
    ) as cache:
        live: list = []

        async def request(seed: int, blocks: int) -> None:
            tokens = prompt(seed, blocks)
            lease = cache.engine.match(tokens, salt=rng.choice("ab"))
            live.append(lease)
            try:
                await lease.allocate(
                    len(tokens),
                    priority=rng.randint(0, 2),
                    wait_pending=rng.choice((0.0, LONG)),
                    timeout=rng.choice((None, None, 0.0)),
                )
                await lease.layers.wait_all()
                lease.commit(len(tokens))
                if rng.random() < 0.3:
                    await lease.preempt(swap=rng.random() < 0.7)
                    await lease.resume(len(tokens), priority=rng.randint(0, 2))
            finally:
                live.remove(lease)
                lease.release()

        tasks = [
            asyncio.create_task(request(rng.randrange(5), rng.randint(1, 8))) for _ in range(150)
        ]
        passes = 0
        while not all(task.done() for task in tasks):
            passes += 1
            assert passes < 20_000
            if rng.random() < 0.3:
                cache.device.complete_all()
            if rng.random() < 0.15:
                task = rng.choice(tasks)
                for _ in range(rng.randint(1, 3)):
                    task.cancel()
                    if rng.random() < 0.5:
                        await asyncio.sleep(0)
            if live and rng.random() < 0.05:
                rng.choice(live).release()  # its client is gone; its task is not
            await asyncio.sleep(0)
            assert cache.engine.check_invariants() == []
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                assert isinstance(error, (LeaseError, AllocateTimeout, CapacityError)), error
        await cache.finish()
        assert waits(cache) == 0
        assert cache.engine.inspect.dump()["quota"] == {}


async def test_a_request_before_the_first_in_line_is_granted_at_once_and_others_wait():
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        engine = cache.engine
        holder, large, equal, small = [await matched(cache, i, 4) for i in range(4)]
        assert holder.try_allocate(8)
        first = await begin(large.allocate(16, priority=1))
        second = await begin(equal.allocate(4, priority=1))
        assert engine.statistics().waiting == 2
        assert not small.try_allocate(4)
        granting = small.allocate(4, priority=0)
        with pytest.raises(StopIteration):
            granting.send(None)  # it does not suspend
        assert small.num_tokens == 4
        assert engine.statistics().waiting == 2
        assert engine.check_invariants() == []
        for lease in (holder, small):
            lease.release()
        await first
        large.release()
        await second
        equal.release()
