"""Device blocks of a server: steps, resets, weights, sleep and the end of the engine."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.errors import ClosedError, LeaseError, UsageError
from aiokv.testing import (
    ManualDevice,
    ManualEvent,
    spin,
)
from tests.harness.external import A, B, ExternalCache

pytestmark = pytest.mark.asyncio


# ---- steps


async def test_a_save_waits_for_the_step_of_its_commit():
    device = ManualDevice()
    device.computes_in_stream = True
    async with ExternalCache(device=device) as cache:
        event = ManualEvent()
        lease = await cache.write(A, range(4))
        lease.commit(12, ready=event)
        await spin(4)
        (save,) = device.offloads
        assert save.after is not None
        assert not save.after.done
        event.complete()
        await cache.finish()
        assert cache.hit(A) == (0, 3)
        lease.release()


async def test_idle_raises_where_only_its_own_task_could_close_the_step():
    device = ManualDevice()
    device.computes_in_stream = True
    async with ExternalCache(device=device) as cache:
        event = ManualEvent()
        event.complete()
        cache.engine.step(event)
        lease = await cache.compute_new(A, range(4))
        lease.release()
        with pytest.raises(UsageError, match=r"the transfers wait for the end of step 2"):
            await lease.idle()
        cache.engine.step(event)
        await spin(4)
        device.complete_all()
        await lease.idle()


# ---- control


async def test_reset_keeps_saves_in_flight_out_of_the_cache():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        released = await cache.compute_new(B, range(8, 12))
        released.release()
        task = asyncio.create_task(cache.engine.reset())
        await spin(4)
        assert not lease.is_idle  # the copy still reads its blocks
        assert not task.done()
        await cache.finish()
        await task
        assert (cache.hit(A), cache.hit(B)) == ((0, 0), (0, 0))
        assert lease.is_idle
        assert released.is_idle
        assert lease.commit(13) == 0  # of the time before the reset
        lease.release()
        assert cache.engine.statistics().releasing_leases == 0
        await cache.store(A, range(4))


async def test_a_block_is_saved_anew_while_a_save_of_before_the_reset_is_in_flight():
    async with ExternalCache() as cache:
        old = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        resetting = asyncio.create_task(cache.engine.reset())
        await spin(4)
        new = await cache.compute_new(A, range(8, 12))
        await cache.finish()
        await resetting
        assert cache.hit(A) == (0, 3)
        old.release()
        new.release()


async def test_blocks_of_old_weights_are_not_cached():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        update = cache.engine.updating_weights()
        entering = asyncio.create_task(update.__aenter__())
        while not entering.done():
            cache.device.complete_all()
            await spin(1)
        cache.memory.weights += 1
        await update.__aexit__(None, None, None)
        assert cache.hit(A) == (0, 0)
        await lease.preempt()
        await lease.allocate(13)
        lease.assign(range(8, 12))
        cache.compute(lease, A)
        lease.release()
        await cache.finish()
        await cache.check_hit(A, range(4))


async def test_cached_blocks_are_not_onloaded_during_an_update_of_weights():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease, other = await cache.granted(A), await cache.begin(B, range(8, 12))
        async with cache.engine.updating_weights():
            cache.memory.weights += 1
            with pytest.raises(LeaseError, match="dropped after the lease was allocated"):
                lease.assign(range(4))
            cache.compute(other, B)
            await cache.saves_begun()
            assert not cache.device.copies
        assert (cache.hit(A), cache.hit(B)) == ((0, 0), (0, 0))
        lease.release()
        other.release()


async def test_sleep_waits_for_saves_and_wakes_up_with_the_host_tier():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        lease.release()
        task = asyncio.create_task(cache.engine.sleep(["device"]))
        await spin(4)
        assert not task.done()
        while not task.done():
            cache.device.complete_all()
            await spin(1)
        await task
        await cache.engine.wake_up(["device"], regions=cache.memory.regions)
        await cache.check_hit(A, range(8, 12))
        await cache.engine.sleep(["host"])
        await cache.engine.wake_up(["host"])
        assert cache.hit(A) == (0, 0)


async def test_closing_waits_for_saves_and_wakes_who_waits_for_idle():
    device = ManualDevice()
    device.computes_in_stream = True
    cache = ExternalCache(device=device)
    async with cache:
        lease = await cache.compute_new(A, range(4))
        lease.release()  # its step is never closed
        task = asyncio.create_task(lease.idle())
        await spin(4)
    await task
    assert lease.is_idle
    with pytest.raises(ClosedError):
        cache.engine.match(A)


async def _released_at_pass(passes: int) -> tuple[int, bool]:
    """Commit and release a lease in one pass of a close that waits for another save.

    Returns:
        The number of saves that have begun in the end; and True if the lease is idle.
    """
    cache = ExternalCache()
    await cache.engine.__aenter__()
    saved = await cache.compute_new(A, range(4))
    await cache.saves_begun()
    late = await cache.begin(B, range(8, 12))
    closing = asyncio.create_task(cache.engine.aclose(drain_timeout=0))
    await spin(passes)
    cache.compute(late, B)
    late.release()
    await spin(8)
    assert not saved.is_idle
    found = len(cache.device.offloads), late.is_idle
    cache.device.complete_all()
    await closing
    saved.release()
    return found


async def test_closing_gives_up_saves_that_have_not_begun():
    found: set[tuple[int, bool]] = set()
    for _ in range(20):  # a timer decides in which pass the engine stops saving
        found |= {await _released_at_pass(passes) for passes in range(8)}
        if (1, True) in found:
            break
    assert (2, False) in found  # saved before the engine stops saving
    assert (1, True) in found  # queued in the pass in which the engine stops saving
    assert (2, True) not in found


async def test_a_lease_that_commits_while_the_engine_closes_is_idle_once_it_is_closed():
    """The commit queues a save that no transfer takes."""
    cache = ExternalCache()
    await cache.engine.__aenter__()
    saved = await cache.compute_new(A, range(4))
    await cache.saves_begun()
    late = await cache.begin(B, range(8, 12))
    closing = asyncio.create_task(cache.engine.aclose(drain_timeout=0))
    await spin(8)
    cache.compute(late, B)
    idle = [asyncio.create_task(lease.idle()) for lease in (saved, late)]
    cache.device.complete_all()
    await closing
    await spin(8)
    assert [task.done() for task in idle] == [True, True]
    assert saved.is_idle
    assert late.is_idle
    assert not cache.device.offloads
    saved.release()
    late.release()


async def test_a_lease_is_idle_when_the_engine_was_closed_after_its_loop():
    """No report can come any more, and the device was joined."""
    loop = asyncio.new_event_loop()
    cache = ExternalCache()

    async def open_and_save():
        await cache.engine.__aenter__()
        lease = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        return lease

    lease = await asyncio.to_thread(loop.run_until_complete, open_and_save())
    loop.close()
    cache.device.complete_all()
    await cache.engine.aclose()
    assert lease.is_idle
    await lease.idle()
    lease.release()


async def test_cancelled_allocate_leaves_no_refs():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        cache.engine.pause()
        lease = cache.engine.match(A)
        task = asyncio.create_task(lease.allocate(13))
        await spin(4)
        task.cancel()
        await spin(4)
        cache.engine.resume()
        assert await cache.engine.evict(3, "host") == 3
        lease.release()


async def test_a_granted_hit_cannot_be_evicted():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.granted(A)
        assert await cache.engine.evict(3, "host") == 0
        lease.release()
        assert await cache.engine.evict(3, "host") == 3
