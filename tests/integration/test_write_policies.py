"""Write policies: when blocks are copied to the host, and which blocks are dropped otherwise."""

from __future__ import annotations

import asyncio

import pytest

from aiokv.errors import DeviceError, WouldBlock
from aiokv.testing import run_until_idle, spin
from tests.harness.cache import Cache, prompt
from tests.harness.closing import complete_during

A, B, C, D = (prompt(seed, 2) for seed in range(1, 5))
BIG = prompt(9, 5)

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


# ---- write_through


async def test_write_through_saves_all_commits_of_a_pass_in_one_transfer():
    async with Cache(write_policy="write_through") as cache:
        leases = [await cache.serve(tokens) for tokens in (A, B)]
        await spin(2)
        (offload,) = cache.device.offloads
        assert len(offload.host_ids) == 4
        await cache.finish()
        for lease in leases:
            lease.release()
        assert await cache.engine.evict(4) == 4
        assert cache.hit(A) == cache.hit(B) == (0, 2)
        await _serve_from_host(cache, B)


async def test_blocks_that_exceed_the_host_are_skipped_and_dropped_later():
    async with Cache(write_policy="write_through", host_blocks=1) as cache:
        await cache.fill(A)
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 1
        assert cache.statistics.skipped_backups == 0, "its eviction is far: no copy is due yet"
        assert await cache.engine.evict(2) == 2
        assert cache.statistics.skipped_backups == 1
        assert cache.hit(A) == (0, 1)


# ---- nth_use


@pytest.mark.parametrize("threshold", [1, 2, 3])
async def test_selective_saves_a_hot_block_at_its_nth_use(threshold: int):
    """The blocks are referenced all the time; only their uses count."""
    async with Cache(write_policy=f"nth_use:{threshold}") as cache:
        leases = []
        for use in range(1, 4):
            leases.append(await cache.serve(A))
            await spin(2)
            assert len(cache.device.offloads) == (use >= threshold)
        (offload,) = cache.device.offloads
        table = leases[0].block_table[:2].tolist()
        assert sorted(offload.device_ids.tolist()) == sorted(table)
        await cache.finish()
        for lease in leases:
            lease.release()
        assert cache.statistics.attention.offloaded_blocks == 2


async def test_selective_counts_each_block_by_itself():
    """A shared prefix is used twice, the tails behind it once."""
    fork = A.copy()
    fork[4:] += 500
    async with Cache(write_policy="nth_use:2") as cache:
        await cache.fill(A, fork)
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 1
        assert await complete_during(cache.engine.evict(8), cache.device) == 3
        assert cache.statistics.attention.offloaded_blocks == 3, (
            "the tails are saved before their eviction"
        )
        assert (cache.hit(A), cache.hit(fork)) == ((0, 2), (0, 2))


# ---- write_back


async def test_write_back_saves_before_it_evicts_and_not_before():
    async with Cache(device_blocks=6, write_policy="write_back") as cache:
        await cache.fill(A, B)
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 0
        waiting = asyncio.create_task(cache.serve(BIG))  # 6 blocks: all of A and B have to go
        await spin(3)
        (offload,) = cache.device.offloads
        assert len(offload.host_ids) == 4, "the chain goes by one plan"
        assert cache.hit(A) == (2, 0), "still there while it is being saved"
        assert not waiting.done()
        offload.complete_all()
        (await waiting).release()
        assert cache.hit(A) == cache.hit(B) == (0, 2)
        await cache.finish()
        assert cache.statistics.dropped_blocks == 0


async def test_new_attempts_during_a_save_do_not_split_the_rest_of_the_chain():
    """Ancestors of blocks being saved were once saved one by one, with a transfer each."""
    async with Cache(device_blocks=12, host_blocks=16, write_policy="write_back") as cache:
        await cache.fill(prompt(1, 11))
        waiting = [asyncio.create_task(_serve_and_release(cache, prompt(s, 5))) for s in (2, 3)]
        await spin(3)
        for _ in range(2):
            looking = cache.engine.match(D)
            looking.release()  # each release retries the first in line
        transfers = 0
        while not all(task.done() for task in waiting):
            transfers += len(cache.device.offloads)
            cache.device.complete_all()
            await spin(1)
        await asyncio.gather(*waiting)
        assert transfers <= 3
        assert cache.hit(prompt(1, 11))[1] >= 5


async def test_a_match_rescues_blocks_that_are_being_saved():
    async with Cache(device_blocks=6, write_policy="write_back") as cache:
        await cache.fill(A)
        evicting = asyncio.create_task(cache.engine.evict(2))
        await spin(2)
        (offload,) = cache.device.offloads
        rescued = await cache.serve(A)
        assert rescued.hit.device_tokens == 8
        offload.complete_all()
        assert await evicting == 0
        assert cache.statistics.attention.device.evicted_blocks == 0
        cache.check(rescued, A)
        rescued.release()
        assert cache.hit(A) == (2, 0)


async def test_eviction_waits_for_blocks_of_a_save_in_flight():
    """Three requests in line while one save is under way: all are served, none twice."""
    async with Cache(device_blocks=4, write_policy="write_back") as cache:
        await cache.fill(A)
        tasks = [asyncio.create_task(_serve_and_release(cache, t)) for t in (BIG[:13], B, C)]
        await spin(3)
        while not all(task.done() for task in tasks):
            cache.device.complete_all()
            await spin()
        await asyncio.gather(*tasks)
        await cache.finish()
        assert cache.hit(A) == (0, 2)


@pytest.mark.parametrize("how", ["fails", "is refused", "fails from its second block on"])
async def test_blocks_that_cannot_be_saved_are_dropped_and_the_waiter_is_granted(how: str):
    async with Cache(device_blocks=6, write_policy="write_back") as cache:
        await cache.fill(A, B)
        cache.device.refuse = DeviceError("no") if how == "is refused" else None
        waiting = asyncio.create_task(cache.serve(BIG))
        await spin(3)
        if how != "is refused":
            cache.device.offloads[0].fail_all(block=int(how.endswith("on")))
        (await waiting).release()
        kept = sum(cache.hit(A)) + sum(cache.hit(B))
        assert kept <= (1 if how.endswith("on") else 0)
        assert cache.statistics.failed_blocks == (3 if how.endswith("on") else 4)


async def test_full_host_evicts_for_blocks_evicted_from_the_device():
    """The oldest host blocks are evicted first, and a waiter always gets its blocks."""
    async with Cache(device_blocks=4, host_blocks=2, write_policy="write_back") as cache:
        for tokens in (A, B, C, D, BIG[:13]):
            task = asyncio.create_task(_serve_and_release(cache, tokens))
            await run_until_idle(lambda task=task: _moved(cache, task))
        await cache.finish()
        assert cache.statistics.attention.host.evicted_blocks > 0
        assert cache.statistics.attention.host.cached > 0


async def test_host_whose_blocks_are_all_being_read_delays_no_allocation():
    """All host blocks are being onloaded: the victim cannot be saved and is dropped."""
    async with Cache(device_blocks=6, host_blocks=2, write_policy="write_back") as cache:
        await cache.fill(A)
        evicting = asyncio.create_task(cache.engine.evict(2))
        await run_until_idle(lambda: _moved(cache, evicting))
        await cache.fill(B)  # on the device, unsaved
        lease = cache.engine.match(A)
        assert lease.try_allocate(len(A))  # 3 blocks, 2 of which load from the host
        other = cache.engine.match(C)
        granted = asyncio.create_task(other.allocate(len(C)))
        await run_until_idle(granted.done)
        assert cache.hit(B) < (2, 0)
        await cache.finish()
        cache.check(lease, A)
        lease.release()
        other.release()


async def test_extend_saves_the_blocks_that_it_needs():
    """extend does not wait; the save that it starts makes the next attempt succeed."""
    async with Cache(device_blocks=5, write_policy="write_back") as cache:
        await cache.fill(A)
        lease = await cache.serve(B)  # 3 blocks: 2 are left, of A
        with pytest.raises(WouldBlock):
            cache.engine.extend([lease], 4)
        assert len(cache.device.offloads) == 1
        await cache.finish()
        cache.engine.extend([lease], 4)
        lease.release()
        assert cache.hit(A)[1] >= 1


async def test_extend_drops_blocks_that_cannot_be_saved():
    async with Cache(device_blocks=5, host_blocks=2, write_policy="write_back") as cache:
        held = await cache.serve(A)
        await held.preempt(swap=False)
        evicting = asyncio.create_task(cache.engine.evict(2))
        await run_until_idle(lambda: _moved(cache, evicting))
        held.release()
        await cache.fill(C)
        reader = cache.engine.match(A)  # holds both host copies while it loads them
        assert reader.try_allocate(8)
        cache.engine.extend([reader], 4)
        await cache.finish()
        cache.check(reader, A)
        reader.release()


# ---- watermark and reclaimed host copies


async def test_low_watermark_keeps_that_many_blocks_free_or_clean():
    async with Cache(device_blocks=8, write_policy="write_back", low_watermark_blocks=4) as cache:
        await cache.fill(A, B)  # 4 free
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 0
        await cache.fill(C)  # 2 free: two more have to be clean
        assert [len(copy.host_ids) for copy in cache.device.offloads] == [2]
        await cache.finish()
        lease = cache.engine.match(prompt(8, 3))
        assert lease.try_allocate(13), "finds clean blocks, and does not wait"
        assert cache.hit(A) == (0, 2)
        lease.release()


async def test_saved_block_that_is_used_again_no_longer_counts_for_the_watermark():
    """A used block was once still counted as evictable soon."""
    async with Cache(device_blocks=8, write_policy="write_back", low_watermark_blocks=4) as cache:
        await cache.fill(A, B, C)
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 2  # A
        await cache.fill(A)
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 4, "B goes first now"
        lease = cache.engine.match(prompt(8, 3))
        assert lease.try_allocate(13)
        assert cache.hit(B) == (0, 2)
        lease.release()


async def test_host_copies_are_reclaimed_for_blocks_near_eviction():
    """Host copies of blocks that are also on the device are reclaimed for the oldest blocks."""
    async with Cache(
        device_blocks=8, host_blocks=2, write_policy="write_through", low_watermark_blocks=5
    ) as cache:
        hot = await cache.serve(A)
        await cache.finish()
        await cache.fill(B)  # next to be evicted, while A is in use and has both host copies
        await cache.finish()
        assert cache.statistics.reclaimed_host_copies == 2
        assert await cache.engine.evict(2) == 2
        assert cache.hit(B) == (0, 2)
        assert cache.hit(A) == (2, 0)
        hot.release()


async def test_block_computed_again_beside_its_host_copy_is_on_both_tiers():
    """``min_onload_tokens`` causes the recomputation; the host copy can be reclaimed."""
    async with Cache(
        device_blocks=8, host_blocks=2, write_policy="write_through", low_watermark_blocks=5,
        min_onload_tokens=16,
    ) as cache:  # fmt: skip
        await cache.fill(A)
        await cache.finish()
        assert await cache.engine.evict(2) == 2
        hot = await cache.serve(A)  # too small an onload
        assert cache.statistics.attention.onloaded_blocks == 0
        await cache.fill(B)
        await cache.finish()
        assert cache.statistics.reclaimed_host_copies == 2
        hot.release()


async def test_saving_ahead_keeps_host_copies_of_blocks_evicted_sooner():
    """Host copies near eviction are kept: saving B in place of the older A would gain nothing."""
    async with Cache(
        device_blocks=8, host_blocks=2, write_policy="write_through", low_watermark_blocks=8
    ) as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.fill(B)
        await cache.finish()
        assert cache.statistics.reclaimed_host_copies == 0
        assert await cache.engine.evict(2) == 2
        assert cache.hit(A) == (0, 2)


async def _serve_and_release(cache: Cache, tokens):
    (await cache.serve(tokens)).release()


async def _serve_from_host(cache: Cache, tokens):
    task = asyncio.create_task(cache.serve(tokens))
    await run_until_idle(lambda: _moved(cache, task))
    lease = await task
    assert lease.hit.host_tokens > 0
    lease.release()


def _moved(cache: Cache, task: asyncio.Task) -> bool:
    cache.device.complete_all()
    return task.done()
