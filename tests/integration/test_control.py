"""Pause, quiesce, reset, resize and new weights with transfers in flight and requests waiting."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.errors import BrokenEngineError, ClosedError, RequestTooLarge, UsageError, WouldBlock
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import Cache, prompt

A, B, C = (prompt(seed, 2) for seed in range(1, 4))

pytestmark = pytest.mark.asyncio


async def serve_and_release(cache: Cache, tokens):
    lease = await cache.serve(tokens)
    hit = lease.hit
    lease.release()
    return hit


# ---- pause and quiesce


async def test_pause_counts_and_requests_wait_in_line():
    async with Cache() as cache:
        cache.engine.pause()
        cache.engine.pause()
        tasks = [asyncio.create_task(serve_and_release(cache, t)) for t in (A, B, A)]
        await spin(3)
        cache.engine.resume()
        await spin(3)
        assert cache.statistics.waiting == 3
        assert not cache.engine.match(C).try_allocate(9)
        cache.engine.resume()
        assert [hit.total for hit in await asyncio.gather(*tasks)] == [0, 0, 8]
        with pytest.raises(UsageError, match="without pause"):
            cache.engine.resume()


async def test_resume_without_pause_leaves_a_sleeping_engine_asleep():
    async with Cache(host_blocks=0) as cache:
        await cache.engine.sleep(["device"])
        with pytest.raises(UsageError, match=r"without pause.*wake_up"):
            cache.engine.resume()
        lease = cache.engine.match(A)
        assert not lease.try_allocate(9)
        lease.release()
        await cache.engine.wake_up(regions=cache.memory.regions)
        await cache.engine.sleep(["device"])
        await cache.engine.wake_up(regions=cache.memory.regions)
        (await cache.serve(A)).release()


async def test_resume_without_pause_does_not_end_a_weight_update():
    async with Cache(host_blocks=0) as cache:
        await cache.fill(A)
        async with cache.engine.updating_weights():
            with pytest.raises(UsageError, match="without pause"):
                cache.engine.resume()
            lease = cache.engine.match(A)
            assert not lease.try_allocate(9)
        assert lease.try_allocate(9)
        assert lease.cached_tokens == 0
        lease.release()


async def test_resume_ends_a_quiesce_that_has_returned_and_none_that_waits():
    async with Cache(host_blocks=0) as cache:
        lease = await cache.serve(A)
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(2)
        with pytest.raises(UsageError, match="without pause"):
            cache.engine.resume()
        lease.release()
        await quiet
        waiting = cache.engine.match(B)
        assert not waiting.try_allocate(9)
        cache.engine.resume()
        assert waiting.try_allocate(9)
        waiting.release()
        with pytest.raises(UsageError, match="quiesce"):
            cache.engine.resume()


async def test_pause_lasts_through_sleep_and_weight_update_and_its_resume_ends_neither():
    async with Cache(host_blocks=0) as cache:
        cache.engine.pause()
        await cache.engine.sleep(["device"])
        await cache.engine.wake_up(regions=cache.memory.regions)
        async with cache.engine.updating_weights():
            pass
        lease = cache.engine.match(A)
        assert not lease.try_allocate(9)
        async with cache.engine.updating_weights():
            cache.engine.resume()
            assert not lease.try_allocate(9)
        assert lease.try_allocate(9)
        lease.release()


async def test_reset_returns_when_a_transfer_that_it_waits_for_is_cancelled():
    async with Cache(device_blocks=9) as cache:
        await cache.fill(A, B, C)
        await cache.finish()
        await cache.engine.evict(9)
        leases = [cache.engine.match(tokens) for tokens in (A, B, C)]
        for lease in leases:
            await lease.allocate(9)
        resetting = asyncio.create_task(cache.engine.reset())
        await spin(3)
        assert not resetting.done()
        assert cache.engine.statistics().worker.attention.onload.queued == 1, "the device has two"
        for lease in reversed(leases):
            lease.release()
        cache.device.complete_all()
        await resetting


def in_streams(**options) -> Cache:
    """A device on which the model computes in a stream."""
    cache = Cache(host_blocks=0, **options)
    cache.device.computes_in_stream = True
    return cache


@pytest.mark.parametrize("verb", ["quiesce", "sleep"])
async def test_quiesce_and_sleep_wait_for_the_event_of_a_released_leases_step(verb):
    async with in_streams() as cache:
        still = getattr(cache.engine, verb)
        event = ManualEvent()
        lease = await cache.serve(A)
        lease.release(after=event)
        with pytest.raises(TimeoutError, match="step 1 is closed, but its event is not done"):
            await still(timeout=0.001)
        waiting = asyncio.create_task(still())
        await spin(5)
        assert not waiting.done()
        assert not cache.engine.asleep
        event.complete()
        await waiting
        if verb == "quiesce":
            cache.engine.resume()
        else:
            await cache.engine.wake_up(regions=cache.memory.regions)


async def test_quiesce_names_the_open_step_that_uses_blocks_and_waits_until_it_has_ended():
    async with in_streams() as cache:
        (await cache.serve(A)).release()
        with pytest.raises(TimeoutError, match=r"step 1 is open and uses blocks.*engine\.step"):
            await cache.engine.quiesce(0.001)
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(3)
        event = ManualEvent()
        cache.engine.step(event)
        await spin(3)
        assert not quiet.done()
        event.complete()
        await quiet
        cache.engine.resume()


async def test_quiesce_waits_for_a_step_that_is_closed_while_it_drains():
    async with Cache() as cache:
        cache.device.computes_in_stream = True
        (await cache.serve(A)).release()
        cache.engine.step()
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(3)
        assert cache.device.offloads, "the backup is in flight"
        event = ManualEvent()
        cache.engine.step(event)
        cache.device.complete_all()
        await spin(5)
        assert not quiet.done()
        event.complete()
        await quiet
        cache.engine.resume()


async def test_quiesce_ends_when_the_engine_breaks():
    async with in_streams() as cache:
        event = ManualEvent()
        (await cache.serve(A)).release(after=event)
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(3)
        event.query_error = RuntimeError("the device is gone")
        event.complete()
        with pytest.raises(BrokenEngineError, match="the device is gone"):
            await quiet


@pytest.mark.parametrize("verb", ["quiesce", "resize"])
async def test_close_with_leases_out_ends_control_calls_that_wait_for_them(verb):
    cache = Cache(host_blocks=0)
    await cache.engine.__aenter__()
    lease = await cache.serve(A)
    args = [2] if verb == "resize" else []
    waiting = asyncio.create_task(getattr(cache.engine, verb)(*args))
    await spin(2)
    await cache.engine.aclose(0.0)
    with pytest.raises(ClosedError):
        await waiting
    lease.release()


async def test_granted_leases_continue_while_paused():
    async with Cache(write_policy="none") as cache:
        lease = await cache.serve(A)
        cache.engine.pause()
        cache.engine.extend([lease], 4)
        lease.append([1, 2, 3])
        assert lease.commit(12) == 1
        lease.release()
        cache.engine.resume()


async def test_quiesce_waits_for_leases_and_for_transfers_that_follow_from_them():
    async with Cache() as cache:
        lease = await cache.serve(A)
        quiet = asyncio.create_task(cache.engine.quiesce(PATIENCE_SECONDS))
        waiting = asyncio.create_task(serve_and_release(cache, B))
        await spin(3)
        lease.release()
        await spin(3)
        assert not quiet.done(), "the backup is in flight"
        cache.device.complete_all()
        await quiet
        statistics = cache.statistics
        assert (
            statistics.attention.host.in_flight,
            statistics.attention.device.leased,
            statistics.waiting,
        ) == (
            0,
            0,
            1,
        )
        cache.engine.resume()
        await waiting


async def test_quiesce_that_times_out_names_owners_and_ends_its_pause():
    async with Cache() as cache:
        lease = cache.engine.match(A, owner="req-7")
        await lease.allocate(9)
        with pytest.raises(TimeoutError, match="req-7"):
            await cache.engine.quiesce(0.001)
        (await cache.serve(B)).release()
        lease.release()


async def test_quiesce_that_is_cancelled_or_closed_ends_its_pause():
    async with Cache() as cache:
        lease = await cache.serve(A)
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(2)
        quiet.cancel()
        await asyncio.wait([quiet])
        assert quiet.cancelled()
        (await cache.serve(B)).release()
        again = asyncio.create_task(cache.engine.quiesce())
        await spin(2)
        closing = asyncio.create_task(cache.engine.aclose(PATIENCE_SECONDS))
        await spin(2)
        again.cancel()
        await asyncio.wait([again])
        assert again.cancelled(), "and not ClosedError in its place"
        lease.release()
        while not closing.done():
            cache.device.complete_all()
            await spin()


# ---- reset


async def test_reset_with_transfers_in_flight_and_requests_waiting():
    async with Cache(device_blocks=6) as cache:
        await cache.fill(A)
        await cache.finish()
        assert await cache.engine.evict(2) == 2
        loading = asyncio.create_task(cache.serve(A))
        await spin(2)
        waiting = asyncio.create_task(serve_and_release(cache, prompt(5, 4)))
        await spin(2)
        resetting = asyncio.create_task(cache.engine.reset())
        await spin(3)
        assert not resetting.done(), "an onload is in flight"
        assert cache.hit(A) == (0, 0)
        cache.device.complete_all()
        await resetting
        lease = await loading
        assert lease.cached_tokens == 8, "its own blocks stay, and their bytes were right"
        lease.release()
        await waiting
        assert cache.hit(A) == (0, 0)


async def test_reset_that_times_out_has_still_cleared_the_index():
    async with Cache(device_blocks=6) as cache:
        await cache.fill(A)
        with pytest.raises(TimeoutError):
            await cache.engine.reset(0.001)
        assert cache.hit(A) == (0, 0)
        cache.device.complete_all()
        await cache.engine.reset(PATIENCE_SECONDS)


async def test_reset_does_not_wait_for_later_transfers():
    """Transfers are always in flight under load; reset waits only for earlier ones."""
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        (first,) = cache.device.offloads
        resetting = asyncio.create_task(cache.engine.reset())
        await spin(2)
        await cache.fill(B)
        assert len(cache.device.offloads) == 2
        first.complete_all()
        await resetting
        await cache.finish()


async def test_reset_frees_host_blocks_of_granted_leases():
    """The leases use the device copies only; host copies had been held until the leases ended."""
    async with Cache() as cache:
        lease = await cache.serve(A)
        await cache.finish()
        assert cache.statistics.attention.host.cached == 2
        await cache.engine.reset()
        assert cache.statistics.attention.host.free == 8
        cache.check(lease, A)
        lease.release()


async def test_commit_of_a_lease_from_before_the_reset_is_not_cached():
    async with Cache() as cache:
        lease = cache.engine.match(A)
        await lease.allocate(9)
        await cache.engine.reset()
        cache.compute(lease, A)
        lease.release()
        assert cache.hit(A) == (0, 0)
        assert cache.statistics.attention.device.free == 8


# ---- weights


async def test_an_update_of_weights_holds_requests_and_clears_the_index():
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        old = await cache.serve(B)
        entered, leave = asyncio.Event(), asyncio.Event()

        async def update():
            async with cache.engine.updating_weights(PATIENCE_SECONDS):
                entered.set()
                await leave.wait()
                cache.memory.weights += 1

        updating = asyncio.create_task(update())
        await spin(3)
        assert not entered.is_set(), "a backup reads the old blocks"
        cache.device.complete_all()
        await entered.wait()
        waiting = asyncio.create_task(serve_and_release(cache, A))
        await spin(3)
        assert not waiting.done()
        leave.set()
        await updating
        assert (await waiting).total == 0
        old.commit(9)
        old.release()
        assert cache.hit(B) == (0, 0), "old weights publish nothing"
        assert cache.hit(A) == (2, 0)
        assert (await serve_and_release(cache, A)).device_tokens == 8


async def test_fork_during_an_update_has_the_blocks_of_its_parent():
    """The parent has blocks of the new weights where another request has cached old ones."""
    async with Cache(device_blocks=16, host_blocks=0) as cache:
        parent = cache.engine.match(A)
        await parent.allocate(9)
        await cache.fill(A)
        async with cache.engine.updating_weights():
            cache.memory.weights += 1
            cache.compute(parent, A)
            child = parent.fork()
            for lease in (parent, child):
                cache.memory.check(lease.block_table[:2], cache.memory.words(A))
        child.release()
        parent.release()
        assert cache.hit(A) == (0, 0)


async def test_blocks_that_are_committed_during_an_update_are_not_cached():
    async with Cache(device_blocks=16) as cache:
        first, second = cache.engine.match(A), cache.engine.match(B)
        await first.allocate(9)
        await second.allocate(9)
        async with cache.engine.updating_weights(version="2"):
            cache.compute(first, A)  # with the old weights
            cache.memory.weights += 1
            cache.compute(second, B)
            await spin(2)
            assert not cache.device.copies, "nothing is saved to host memory"
            assert (cache.hit(A), cache.hit(B)) == ((0, 0), (0, 0))
            with pytest.raises(WouldBlock):
                await first.preempt(swap=True)
        assert (cache.hit(A), cache.hit(B)) == ((0, 0), (0, 0))
        await first.preempt()
        await first.resume(9)
        assert first.cached_tokens == 0
        cache.compute(first, A)
        assert cache.hit(A) == (2, 0), "granted after the update"
        first.release()
        second.release()
        await cache.finish()


async def test_cached_blocks_are_hit_until_an_update_is_entered_and_not_inside():
    async with Cache(device_blocks=16) as cache:
        await cache.fill(A)
        entered, leave = asyncio.Event(), asyncio.Event()

        async def update():
            async with cache.engine.updating_weights():
                entered.set()
                await leave.wait()

        updating = asyncio.create_task(update())
        await spin(3)
        assert cache.hit(A) == (2, 0), "the entry waits for the backup of A"
        cache.device.complete_all()
        await entered.wait()
        assert cache.hit(A) == (0, 0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert cache.hit(A) == (0, 0)


async def test_an_update_that_cannot_begin_changes_nothing():
    async with Cache() as cache:
        await cache.fill(A)
        with pytest.raises(TimeoutError):
            async with cache.engine.updating_weights(0.001):
                pytest.fail("entered while a transfer was in flight")
        assert (await serve_and_release(cache, A)).device_tokens == 8


async def test_an_update_whose_body_raises_still_clears_the_index():
    """The weights are unknown after an update that raised."""
    async with Cache(host_blocks=0) as cache:
        await cache.fill(A)
        with pytest.raises(ZeroDivisionError):
            async with cache.engine.updating_weights():
                raise ZeroDivisionError
        assert cache.hit(A) == (0, 0)
        (await cache.serve(A)).release()


# ---- resize


async def test_shrinking_waits_for_leases_on_removed_blocks():
    async with Cache(device_blocks=12, host_blocks=0) as cache:
        low, high = await cache.serve(A), await cache.serve(B)
        resizing = asyncio.create_task(cache.engine.resize(4, PATIENCE_SECONDS))
        await spin(3)
        low.release()
        await spin(2)
        assert not resizing.done()
        high.release()
        await resizing
        assert cache.statistics.attention.device.blocks == 4
        with pytest.raises(RequestTooLarge):
            await cache.serve(prompt(5, 4))
        await cache.engine.resize(12)
        (await cache.serve(prompt(5, 4))).release()


async def test_shrinking_completes_at_the_end_of_a_transfer():
    """No lease ends: the removed blocks are only being saved."""
    async with Cache(device_blocks=12) as cache:
        await cache.fill(A, B, C)
        resizing = asyncio.create_task(cache.engine.resize(2))
        await spin(3)
        assert not resizing.done()
        cache.device.complete_all()
        await resizing
        assert cache.statistics.attention.device.blocks == 2


async def test_shrinking_keeps_blocks_with_a_host_copy():
    """Blocks beyond the new size lost their host copies, too."""
    async with Cache(device_blocks=12) as cache:
        await cache.fill(A, B, C)
        await cache.finish()
        await cache.engine.resize(3)
        assert [cache.hit(tokens) for tokens in (A, B, C)] == [(2, 0), (1, 1), (0, 2)]
        assert cache.statistics.dropped_blocks == 0
        serving = asyncio.create_task(serve_and_release(cache, B))  # compares the bytes
        await run_until_idle(lambda: (cache.device.complete_all(), serving.done())[1])
        assert (await serving).host_tokens == 4


async def test_shrinking_evicts_the_descendants_of_a_removed_block():
    """The second block has a low id, the first a high one, which has to go (I2)."""
    async with Cache(device_blocks=4, write_policy="write_through") as cache:
        held = [await cache.serve(prompt(seed, 1)[:4]) for seed in (7, 8, 9)]
        first = await cache.serve(A[:4])
        held[0].release()
        await cache.finish()
        assert await cache.engine.evict(1) == 1
        second = cache.engine.match(A)
        assert second.try_allocate(8)
        assert second.block_table.tolist() == [3, 0]
        cache.compute(second, A[:8], 1)
        for lease in (first, second, *held[1:]):
            lease.release()
        await cache.finish()
        await cache.engine.resize(3)
        assert cache.hit(A) == (0, 2)


async def test_shrinking_completes_at_the_end_of_a_step():
    device = ManualDevice()
    device.computes_in_stream = True
    async with Cache(device_blocks=12, host_blocks=0, device=device) as cache:
        leases = [await cache.serve(tokens) for tokens in (A, B)]
        for lease in leases:
            lease.release()
        event = ManualEvent()
        cache.engine.step(event)
        resizing = asyncio.create_task(cache.engine.resize(2))
        await spin(3)
        assert not resizing.done()
        event.complete()
        await resizing


async def test_shrinking_completes_at_a_truncation():
    async with Cache(device_blocks=12, host_blocks=0) as cache:
        lease = await cache.serve(A)
        cache.engine.extend([lease], 4 * 6)
        resizing = asyncio.create_task(cache.engine.resize(4))
        await spin(3)
        assert not resizing.done()
        lease.truncate(9)
        await resizing
        lease.release()


async def test_a_resize_that_times_out_names_the_owners_and_changes_nothing():
    async with Cache() as cache:
        lease = cache.engine.match(A, owner="req-7")
        await lease.allocate(9)
        with pytest.raises(TimeoutError, match="req-7"):
            await cache.engine.resize(2, 0.001)
        assert cache.statistics.attention.device.blocks == 8
        lease.release()
        for blocks in (9, 0):
            with pytest.raises(UsageError, match=f"resize: device_blocks is {blocks}[,;]"):
                await cache.engine.resize(blocks)


async def test_a_resize_that_times_out_evicts_nothing():
    """The block beyond the new size is owned only by the swap of a released lease."""
    async with Cache(
        device_blocks=16, host_blocks=32, write_policy="write_back", low_watermark_blocks=0
    ) as cache:
        low = cache.engine.match(prompt(7, 8))
        await low.allocate(32)
        cached = cache.engine.match(prompt(1, 4))
        await cached.allocate(17)
        cache.compute(cached, prompt(1, 4)[:16])
        cached.truncate(16)
        cached.release()
        swapped = cache.engine.match(C[:3])
        await swapped.allocate(3)
        swapped.commit(3)
        swapping = asyncio.create_task(swapped.preempt(swap=True))
        await spin(3)
        assert cache.device.offloads[0].device_ids.tolist() == [12]
        swapped.release()
        low.release()
        assert cache.hit(prompt(1, 4)) == (4, 0)
        with pytest.raises(TimeoutError):
            await cache.engine.resize(8, 0.001)
        assert cache.hit(prompt(1, 4)) == (4, 0)
        assert cache.statistics.attention.device.blocks == 16
        cache.device.complete_all()
        await swapping
        await cache.engine.resize(8)
        assert cache.statistics.attention.device.blocks == 8


async def test_shrinking_fails_a_waiting_request_that_no_longer_fits():
    async with Cache(host_blocks=0) as cache:
        holder = await cache.serve(A)
        waiting = asyncio.create_task(cache.serve(prompt(5, 6)))
        await spin(2)
        await cache.engine.resize(4)
        with pytest.raises(RequestTooLarge):
            await waiting
        holder.release()


async def test_growing_grants_waiting_requests():
    async with Cache(host_blocks=0) as cache:
        await cache.engine.resize(4)
        holder = await cache.serve(A)
        waiting = asyncio.create_task(cache.serve(B))
        await spin(2)
        assert not waiting.done()
        await cache.engine.resize(8)
        (await waiting).release()
        holder.release()


async def test_control_calls_on_a_closed_engine_are_refused():
    async with Cache() as cache:
        await cache.engine.aclose()
        for verb in (cache.engine.reset, cache.engine.quiesce):
            with pytest.raises(ClosedError):
                await verb()
        with pytest.raises(ClosedError):
            cache.engine.pause()


async def test_quiesce_returns_after_a_step_that_finished_while_being_closed():
    """A device that computes before it returns reports the step's end while the step is closed."""
    async with Cache(host_blocks=0) as cache:
        for _ in range(3):
            cache.engine.step()
            await cache.engine.quiesce(timeout=PATIENCE_SECONDS)
            cache.engine.resume()
