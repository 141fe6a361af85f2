"""Device blocks of a server: onloads and saves that fail, and blocks behind them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Hit, LeaseState
from aiokv.errors import TransferError
from aiokv.testing import (
    ScriptedStore,
    run_until_idle,
    spin,
)
from tests.harness.cache import prompt
from tests.harness.external import LONG, A, B, C, ExternalCache

pytestmark = pytest.mark.asyncio


async def test_a_failed_onload_lowers_the_cached_positions():
    async with ExternalCache() as cache:
        lease, copy = await cache.onload(A, range(8, 12))
        copy.fail(0, block=1)
        copy.complete(1)
        with pytest.raises(TransferError) as error:
            await lease.layers.wait_all()
        assert error.value.first_bad_token == 4
        await lease.idle()
        assert lease.state is LeaseState.FAILED
        assert lease.recompute_from() == 4
        assert cache.hit(A) == (0, 1)  # what failed may be wrong in host memory
        cache.compute(lease, A, first=1)
        await cache.finish()
        assert cache.hit(A) == (0, 3)
        lease.release()
        await cache.store(A, range(12, 16))


async def test_blocks_that_were_computed_behind_a_failed_onload_are_not_cached():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.begin(LONG, range(8, 15))
        cache.memory.write([11, 12, 13], cache.memory.words(LONG)[3:])
        assert lease.commit(len(LONG)) == 0  # the end of the onload decides
        await cache.saves_begun()
        assert not cache.device.offloads
        cache.device.onloads[0].fail_all(block=2)
        await lease.idle()
        await cache.finish()
        assert cache.hit(LONG) == (0, 2)
        assert lease.recompute_from() == 8
        cache.compute(lease, LONG, first=2)
        await cache.finish()
        assert cache.hit(LONG) == (0, 6)
        lease.release()


async def test_blocks_behind_a_hit_are_saved_when_its_onload_has_ended():
    async with ExternalCache(verify="checksum") as cache:
        await cache.store(A, range(4))
        lease = await cache.begin(LONG, range(8, 15))
        cache.memory.write([11, 12, 13], cache.memory.words(LONG)[3:])
        assert lease.commit(len(LONG)) == 0
        await cache.finish()
        assert cache.hit(LONG) == (0, 6)
        lease.release()


async def test_a_save_below_a_block_that_was_dropped_is_not_cached():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        below = await cache.compute_new(LONG, [0, 1, 2, 4, 5, 6, 7], computed_tokens=12)
        await cache.saves_begun()
        (save,) = cache.device.offloads
        onloading = await cache.begin(A, range(8, 12))
        cache.device.onloads[0].fail_all(block=1)
        await onloading.idle()
        save.complete_all()
        await below.idle()
        assert cache.hit(LONG) == (0, 1)
        assert cache.engine.check_invariants() == []
        assert below.commit(len(LONG)) == 5  # from the dropped block on
        await cache.finish()
        assert cache.hit(LONG) == (0, 6)
        onloading.release()
        below.release()


async def test_a_block_that_an_onload_writes_is_not_read_by_a_save():
    """The server takes a block for cached before it has arrived."""
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        onloading = await cache.begin(A, range(8, 12))
        early = await cache.begin(LONG, [8, 9, 10, *range(12, 16)], computed_tokens=12)
        cache.memory.write(range(12, 15), cache.memory.words(LONG)[3:])
        assert early.commit(len(LONG)) == 0
        await cache.saves_begun()
        assert not cache.device.offloads
        await cache.finish()
        assert cache.hit(LONG) == (0, 6)
        onloading.release()
        early.release()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("extra", [0, 1])
async def test_a_failed_onload_fails_the_leases_that_share_its_blocks(released, extra):
    """Otherwise, bytes that have not arrived would be saved as those of the prefix."""
    async with ExternalCache() as cache:
        lease, copy = await cache.onload(A, range(8, 12))
        tokens = np.concatenate([A[:12], prompt(7, extra)])
        other = await cache.begin(tokens, [8, 9, 10, *range(20, 21 + extra)], computed_tokens=12)
        copy.complete(0)
        if released:
            lease.release()
        copy.fail_all(block=1)
        await lease.idle()
        assert other.commit(len(tokens)) == 0
        assert other.recompute_from() == 4
        assert other.cached_tokens == 4
        cache.compute(other, tokens, first=1)
        await cache.finish()
        lease.release()
        other.release()
        assert await cache.check_hit(tokens, range(12, 17)) == 12 + 4 * extra


@pytest.mark.parametrize("end", ["done", "failed", "cancelled"])
async def test_blocks_computed_behind_an_onload_of_another_lease_are_saved_once_it_has_ended(
    end: str,
):
    """The server may compute behind shared blocks before their bytes are there."""
    async with ExternalCache() as cache:
        for tokens in (A, B, C):
            await cache.store(tokens, range(4))
        ahead = [await cache.begin(B, range(4)), await cache.begin(C, range(4, 8))]
        lease = await cache.begin(A, range(8, 12))  # its onload has not begun
        tokens = np.concatenate([A[:12], prompt(7, 1)])
        other = await cache.begin(tokens, [8, 9, 10, 20, 21], computed_tokens=12)
        words = cache.memory.words(tokens)[3:4]
        cache.memory.write([20], words if end == "done" else words + np.uint64(1))
        assert other.commit(len(tokens)) == 0
        await cache.saves_begun()
        assert not cache.device.offloads
        if end == "failed":
            cache.device.complete_all()
            await run_until_idle(lambda: bool(cache.device.onloads))
            (copy,) = cache.device.onloads
            copy.fail_all(block=1)
        elif end == "cancelled":
            lease.release()
        await cache.finish()
        assert cache.hit(tokens) == (0, {"done": 4, "failed": 1, "cancelled": 3}[end])
        check = await cache.begin(tokens, range(12, 17))
        await cache.finish()
        cache.check(check, tokens)
        for each in (*ahead, lease, other, check):
            each.release()


async def test_a_lease_that_is_released_before_an_onload_of_another_has_ended_saves_nothing():
    """Its batch keeps the lease open, but the server may reuse its ids once it is idle."""
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.begin(A, range(8, 12))
        tokens = np.concatenate([A[:12], prompt(7, 1)])
        other = await cache.begin(tokens, [8, 9, 10, 20, 21], computed_tokens=12)
        with cache.engine.computing([other]):
            cache.memory.write([20], cache.memory.words(tokens)[3:4])
            other.commit(len(tokens))
            other.release()
            assert other.is_idle
            reusing = await cache.begin(B, range(20, 24))
            cache.memory.write([20, 21, 22], cache.memory.words(B))
            await cache.finish()
        await cache.finish()
        assert cache.hit(tokens) == (0, 3)
        lease.release()
        reusing.release()


async def test_a_failed_onload_fails_a_lease_that_has_no_hit():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.begin(A, range(8, 12))
        other = cache.engine.match(A, read=False)
        await other.allocate(13)
        other.assign([8, 9, 10, 20], computed_tokens=12)
        (copy,) = cache.device.onloads
        copy.fail_all(block=2)
        await lease.idle()
        assert other.recompute_from() == 8
        lease.release()
        other.release()


async def test_a_lease_whose_onload_fails_after_its_release_leaves_nothing():
    async with ExternalCache() as cache:
        lease, copy = await cache.onload(A, range(8, 12))
        copy.complete(0)
        lease.release()
        copy.fail_all(block=2)
        await lease.idle()
        assert cache.hit(A) == (0, 2)


async def test_a_failed_save_leaves_its_blocks_uncached_and_ends_the_saves_of_the_lease():
    async with ExternalCache() as cache:
        lease = await cache.write(A, range(4))
        lease.commit(4)
        await cache.saves_begun()
        lease.commit(12)
        await cache.saves_begun()
        first, second = cache.device.offloads
        second.complete_all()
        first.fail_all()
        await lease.idle()
        assert cache.hit(A) == (0, 0)
        assert cache.engine.statistics().attention.host.free == 24
        assert lease.commit(13) == 0
        lease.release()
        await cache.store(A, range(4))


async def test_a_failed_save_of_one_lease_is_tried_by_another():
    async with ExternalCache() as cache:
        first = await cache.compute_new(A, range(4))
        second = await cache.compute_new(A, range(8, 12))
        await cache.saves_begun()
        cache.device.offloads[0].fail_all()
        await first.idle()
        assert second.commit(13) == 3
        await cache.finish()
        assert cache.hit(A) == (0, 3)
        first.release()
        second.release()


async def test_a_block_that_a_store_brings_while_it_is_saved_is_saved_twice_below():
    store = ScriptedStore()
    async with ExternalCache(stores=[store]) as cache:
        lease = await cache.write(A, range(4))
        lease.commit(4)
        await cache.finish()
        lease.release()
        assert len(store.objects) == 1
        assert await cache.engine.evict(1, "host") == 1
        first = await cache.begin(A, range(4))
        for end in (4, 8):  # one save each
            first.commit(end)
            await cache.saves_begun()
        assert await cache.engine.prefetch(A) == Hit(0, 4)
        second = await cache.write(A, range(8, 12))
        for copy in cache.device.onloads:
            copy.complete_all()
        await second.layers.wait_all()
        await run_until_idle(lambda: not second.transfer_ids)
        second.commit(8)
        await cache.saves_begun()
        first_save, *others = cache.device.offloads
        first_save.complete_all()
        await run_until_idle(lambda: cache.engine.statistics().attention.offloaded_blocks == 2)
        assert cache.engine.check_invariants() == []
        for copy in reversed(others):
            copy.complete_all()
        await cache.finish()
        assert cache.hit(A) == (0, 2)
        first.release()
        second.release()
        await cache.check_hit(A, range(12, 16))


async def test_checksums_find_a_changed_host_block():
    async with ExternalCache(verify="checksum") as cache:
        lease, copy = await cache.onload(A, range(8, 12))
        cache.device.arena.blocks[copy.host_ids[1], 5] ^= 1
        copy.complete_all()
        with pytest.raises(TransferError, match="checksum of host block"):
            await lease.layers.wait_all()
        await lease.idle()
        assert lease.recompute_from() == 4
        lease.release()
        assert cache.hit(A) == (0, 1)


async def test_checksums_are_those_of_the_commit_that_is_saved():
    """The server reuses ids: a checksum of an earlier block of an id must not be used."""
    async with ExternalCache(verify="checksum") as cache:
        await cache.store(A, range(4))
        await cache.store(B, range(4))
        for tokens in (A, B):
            lease = await cache.begin(tokens, range(8, 12))
            cache.device.complete_all()
            await lease.layers.wait_all()
            cache.check(lease, tokens)
            lease.release()


async def test_a_released_lease_whose_blocks_find_no_room_in_host_memory_ends():
    async with ExternalCache(host_blocks=3) as cache:
        await cache.store(A, range(4))
        keeper = await cache.granted(A)  # nothing of it can be evicted
        lease = await cache.compute_new(B, range(8, 12))
        lease.release()
        assert not lease.is_idle
        await cache.saves_begun()
        assert not cache.device.copies
        assert lease.is_idle
        assert cache.engine.check_invariants() == []
        keeper.release()


async def test_who_waits_for_blocks_goes_on_when_they_are_saved():
    """The lease that has computed them is not released."""
    async with ExternalCache() as cache:
        lease = await cache.begin(A, range(4))
        other = cache.engine.match(A)
        waiting = asyncio.create_task(other.allocate(13, wait_pending=60))
        await spin(2)
        cache.compute(lease, A)
        await cache.saves_begun()
        assert not waiting.done()
        cache.device.complete_all()
        await waiting
        assert other.cached_tokens == 12
        lease.release()
        other.release()
