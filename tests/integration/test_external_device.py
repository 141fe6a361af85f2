"""Device blocks of a server: leases name the ids, the engine keeps host memory."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit, LeaseState, Peers
from aiokv.errors import ClosedError, ConfigError, LeaseError, TransferError, UsageError
from aiokv.testing import (
    ManualDevice,
    ManualEvent,
    ScriptedDevice,
    ScriptedStore,
    run_until_idle,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.transitions import TransitionLog, record, replay_transitions
from tests.harness.cache import BLOCK_TOKENS, prompt
from tests.harness.external import ExternalCache

A, B, C = (prompt(seed, 3) for seed in (1, 2, 3))
LONG = np.concatenate([A[:12], prompt(9, 3)])  # begins with the blocks of A

pytestmark = pytest.mark.asyncio


# ---- onload and save


async def test_a_hit_is_copied_into_the_blocks_that_the_server_names():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = cache.engine.match(A)
        assert lease.hit == Hit(0, 12)
        assert lease.try_allocate(13)
        assert (lease.cached_tokens, lease.block_table.tolist()) == (12, [])
        assert not cache.device.copies
        lease.assign([20, 7, 21, 8])
        (copy,) = cache.device.onloads
        assert copy.device_ids.tolist() == [20, 7, 21]
        assert lease.transfer_ids == lease.layers.transfer_ids != ()
        assert not lease.is_idle
        copy.complete_all()
        await lease.layers.wait_all()
        cache.check(lease, A)
        await lease.idle()
        assert lease.transfer_ids == ()
        assert lease.block_table.tolist() == [20, 7, 21, 8]
        assert cache.engine.statistics().attention.onloaded_blocks == 3
        lease.release()


async def test_positions_of_the_servers_own_cache_are_not_copied():
    async with ExternalCache() as cache:
        lease, copy = await cache.onload(A, [0, 1, 9, 10], computed_tokens=8)
        assert copy.device_ids.tolist() == [9]
        await cache.finish()
        cache.check(lease, A)
        other = await cache.begin(A, [0, 1, 9, 11], computed_tokens=12)
        assert not cache.device.copies
        assert other.is_idle
        cache.check(other, A)
        lease.release()
        other.release()


async def test_blocks_of_the_servers_own_cache_are_saved_once_they_are_committed():
    """The host lacks them, for example because it has evicted them."""
    async with ExternalCache() as cache:
        words = cache.memory.words(A)
        cache.memory.write([3, 4, 5], words)
        lease = await cache.begin(A, [3, 4, 5, 6], computed_tokens=12)
        await cache.saves_begun()
        assert not cache.device.copies  # not committed yet
        assert lease.commit(12) == 3
        await cache.finish()
        assert cache.hit(A) == (0, 3)
        assert cache.engine.statistics().computed_tokens == 0
        lease.release()


@pytest.mark.parametrize("computed_tokens", [9, 13])
async def test_the_servers_cache_may_end_inside_the_last_block(computed_tokens: int):
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        ids = [0, 1, 2, 12][: -(-computed_tokens // BLOCK_TOKENS)]
        lease = await cache.granted(A)
        lease.assign(ids, computed_tokens=computed_tokens)
        onloaded = [copy.device_ids.tolist() for copy in cache.device.onloads]
        assert onloaded == ([[2]] if computed_tokens == 9 else [])
        await cache.finish()
        cache.check(lease, A)
        lease.release()


async def test_all_commits_of_a_pass_are_saved_in_one_transfer():
    async with ExternalCache() as cache:
        leases = [await cache.compute_new(A, range(4)), await cache.compute_new(B, range(8, 12))]
        await cache.saves_begun()
        (save,) = cache.device.offloads
        assert save.device_ids.tolist() == [0, 1, 2, 8, 9, 10]
        await cache.finish()
        assert cache.hit(A) == cache.hit(B) == (0, 3)
        for lease in leases:
            lease.release()


async def test_decode_appends_blocks_and_tokens_and_saves_each_full_block():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        generated = np.arange(500, 508, dtype=np.int32)
        tokens = np.concatenate([A, generated])
        lease.append(generated)
        cache.memory.write([3], cache.memory.words(tokens)[3:4])
        assert lease.commit(16) == 1
        lease.assign([15])
        assert lease.num_tokens == 20
        cache.memory.write([15], cache.memory.words(tokens)[4:5])
        assert lease.commit(20) == 1
        lease.release()
        await cache.finish()
        assert cache.hit(tokens) == (0, 5)


async def test_blocks_behind_a_saved_one_stay_pending():
    async with ExternalCache() as cache:
        lease = await cache.begin(A, range(4))
        cache.memory.write([0, 1, 2], cache.memory.words(A))
        for blocks in range(3):
            async with cache.engine.match(A) as waiting:
                assert waiting.hit == Hit(0, blocks * BLOCK_TOKENS)
                assert waiting.pending_tokens == (3 - blocks) * BLOCK_TOKENS
            lease.commit((blocks + 1) * BLOCK_TOKENS)
            await cache.finish()
        lease.release()


async def test_saves_of_consecutive_commits_do_not_wait_for_each_other():
    """A block whose save ends before that of its parent becomes matchable with the parent."""
    async with ExternalCache() as cache:
        lease = await cache.write(A, range(4))
        for end in (4, 8, 12):
            lease.commit(end)
            await cache.saves_begun()
        first, second = cache.device.offloads  # the worker has two in the device at a time
        second.complete_all()
        await run_until_idle(lambda: len(cache.device.offloads) == 2)
        assert cache.hit(A) == (0, 0)
        _, third = cache.device.offloads
        third.complete_all()
        await run_until_idle(lambda: cache.engine.statistics().worker.routes["offload"].done == 2)
        assert cache.hit(A) == (0, 0)
        assert not lease.is_idle
        first.complete_all()
        await lease.idle()
        assert cache.hit(A) == (0, 3)
        lease.release()


async def test_two_leases_save_a_block_once():
    async with ExternalCache() as cache:
        first = await cache.compute_new(A, range(4))
        second = await cache.compute_new(A, range(8, 12))
        assert second.commit(13) == 0
        await cache.saves_begun()
        (save,) = cache.device.offloads
        assert save.device_ids.tolist() == [0, 1, 2]
        assert second.is_idle
        assert not first.is_idle
        await cache.finish()
        third = await cache.compute_new(A, range(16, 20), computed_tokens=12)
        await cache.saves_begun()
        assert not cache.device.copies
        for lease in (first, second, third):
            lease.release()
        assert cache.engine.statistics().attention.host.cached == 3


async def test_a_fork_of_prompts_is_saved_below_a_block_that_is_being_saved():
    async with ExternalCache() as cache:
        first = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        second = await cache.compute_new(LONG, range(8, 15))
        await cache.saves_begun()
        below = cache.device.offloads[1]
        assert below.device_ids.tolist() == [11, 12, 13]
        below.complete_all()
        await second.idle()
        assert cache.hit(LONG) == (0, 0)
        await cache.finish()
        assert cache.hit(LONG) == (0, 6)
        first.release()
        second.release()


async def test_a_lease_that_does_not_write_saves_nothing():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4), write=False)
        assert lease.is_idle
        lease.release()
        assert cache.hit(A) == (0, 0)


@pytest.mark.parametrize("threshold", [1, 2, 3])
async def test_the_selective_policy_saves_blocks_at_their_nth_use(threshold: int):
    async with ExternalCache(
        write_policy="write_through_selective", write_through_threshold=threshold
    ) as cache:
        for use in range(1, 4):
            tokens = A if use < threshold else LONG
            lease = await cache.compute_new(tokens, range(7))
            lease.commit(len(tokens))  # counts no use again
            lease.release()
            await cache.finish()
            if use >= threshold:
                assert cache.hit(LONG) == (0, 3 if threshold > 1 else 6)
                break
            assert cache.hit(A) == (0, 0)


async def test_no_block_is_saved_under_the_policy_none():
    async with ExternalCache(write_policy="none") as cache:
        lease = await cache.compute_new(A, range(4))
        waiting = cache.engine.match(A)
        assert waiting.pending_tokens == 0  # nothing will come
        assert lease.is_idle
        lease.release()
        waiting.release()


async def test_without_host_room_blocks_are_skipped_and_saved_with_a_later_commit():
    async with ExternalCache(host_blocks=3) as cache:
        await cache.store(A, range(4))
        reader = await cache.begin(A, range(4), computed_tokens=12)  # refs: A is not evicted
        lease = await cache.compute_new(B, range(8, 12))
        await cache.saves_begun()
        assert cache.engine.statistics().skipped_backups == 3
        assert lease.is_idle
        reader.release()
        lease.commit(13)
        await cache.finish()
        assert (cache.hit(A), cache.hit(B)) == ((0, 0), (0, 3))
        lease.release()


async def test_the_adaptive_and_the_lru_host_tier_evict_old_prompts():
    for policy in ("lru", "adaptive"):
        async with ExternalCache(host_blocks=6, eviction_policy=policy) as cache:
            for tokens in (A, B, C):
                await cache.store(tokens, range(4))
            assert cache.engine.statistics().attention.host.evicted_blocks == 3
            assert cache.hit(C) == (0, 3)


async def test_kv_events_name_host_memory_only():
    async with ExternalCache() as cache:
        async with cache.engine.kv_events() as events:
            await cache.store(A, range(4))
            stored = []
            async for batch in events:
                stored += [event for event in batch.events if hasattr(event, "medium")]
                if sum(len(event.block_hashes) for event in stored) == 3:
                    break
        assert {event.medium for event in stored} == {"CPU"}


# ---- coalescing


async def test_a_prompt_waits_until_the_blocks_that_it_needs_are_saved():
    async with ExternalCache() as cache:
        owner = await cache.begin(A, range(4))
        waiting = cache.engine.match(A)
        assert waiting.pending_tokens == 12
        task = asyncio.create_task(waiting.allocate(13, wait_pending=60))
        await spin(4)
        cache.compute(owner, A)
        await cache.saves_begun()
        assert not task.done()
        assert cache.engine.match(A).pending_tokens == 12  # until the save has ended
        owner.release()
        await spin(4)
        assert not task.done()  # the save goes on
        cache.device.complete_all()
        await task
        assert waiting.cached_tokens == 12
        waiting.release()


@pytest.mark.parametrize("end", ["release", "preempt", "fail", "reset"])
async def test_the_wait_ends_when_the_blocks_will_not_come(end: str):
    async with ExternalCache() as cache:
        owner = await cache.begin(A, range(4))
        waiting = cache.engine.match(A)
        task = asyncio.create_task(waiting.allocate(13, wait_pending=60))
        await spin(4)
        if end == "fail":
            cache.compute(owner, A)
            await cache.saves_begun()
            cache.device.offloads[0].fail_all()
        elif end == "reset":
            cache.compute(owner, A)
            await cache.engine.reset()
        elif end == "release":
            owner.release()
        else:
            await owner.preempt()
        await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert waiting.cached_tokens == 0
        assert waiting.pending_tokens == 0
        await cache.finish()
        owner.release()
        waiting.release()


# ---- the server's ids


async def test_a_released_lease_is_idle_when_its_saves_have_ended():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        lease.release()
        assert not lease.is_idle  # also before the save has begun
        task = asyncio.create_task(lease.idle())
        cancelled = asyncio.create_task(lease.idle())
        await cache.saves_begun()
        cancelled.cancel()
        await spin(2)
        assert cancelled.cancelled()
        assert not task.done()
        assert cache.engine.statistics().releasing_leases == 1
        cache.device.complete_all()
        await task
        assert lease.is_idle
        assert cache.engine.statistics().releasing_leases == 0


async def test_a_released_lease_is_idle_when_its_onload_has_ended():
    async with ExternalCache() as cache:
        lease, copy = await cache.onload(A, range(8, 12))
        copy.complete(0)
        lease.release()
        await spin(4)
        assert not lease.is_idle
        await cache.finish()
        await lease.idle()


async def test_preempt_gives_the_blocks_up_and_a_later_grant_takes_others():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        await lease.preempt()
        assert not lease.is_idle
        await lease.allocate(13)
        assert lease.cached_tokens == 0
        lease.assign([8, 9, 10, 11])
        assert lease.block_table.tolist() == [8, 9, 10, 11]
        await cache.finish()
        await lease.idle()
        await lease.preempt()
        await lease.allocate(13)
        lease.assign([12, 13, 14, 15])
        await cache.finish()
        cache.check(lease, A)
        lease.release()


async def test_ids_may_be_shared_by_leases_that_read_them():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        leases = [await cache.begin(A, [8, 9, 10, 11])]
        leases.append(await cache.begin(A, [8, 9, 10, 12], computed_tokens=12))
        (_copy,) = cache.device.onloads
        await cache.finish()
        for lease in leases:
            cache.check(lease, A)
            lease.release()


async def test_an_onload_into_blocks_in_use_is_refused():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        saving = await cache.compute_new(B, range(8, 12))
        onloading = await cache.begin(A, range(12, 16))
        lease = await cache.granted(A)
        before = cache.engine.cache_statistics()
        for ids, use in (([0, 9, 2, 3], "a save reads block 9"), ([0, 1, 13, 3], "block 13")):
            with pytest.raises(UsageError, match=use) as error:
                lease.assign(ids)
            assert "idle" in error.value.hint
            assert lease.block_table.tolist() == []
            assert cache.engine.cache_statistics() == before
        with pytest.raises(UsageError, match="an onload in flight writes block 14"):
            lease.assign([0, 1, 2, 14])  # to be computed
        lease.assign([0, 1, 2, 3])
        await cache.finish()
        cache.check(lease, A)
        for each in (saving, onloading, lease):
            each.release()


async def test_a_block_that_is_computed_anew_under_a_save_is_not_cached():
    """The server reused it too early: other bytes must not enter the cache."""
    async with ExternalCache() as cache:
        first = await cache.compute_new(A, range(4))
        await cache.saves_begun()
        first.release()
        second = await cache.begin(B, [8, 1, 9, 10])  # block 1 is being read
        cache.memory.write([8, 1, 9], cache.memory.words(B))
        await cache.finish()
        assert cache.hit(A) == (0, 1)
        third = await cache.compute_new(C, range(12, 16))
        third.release()
        fourth = await cache.begin(LONG, [16, 17, 18, 19, 12, 20, 21])  # its save has not begun
        await cache.finish()
        assert cache.hit(C) == (0, 0)
        for lease in (second, fourth):
            lease.release()


@pytest.mark.parametrize(
    ("ids", "computed", "message"),
    [
        ([0, 1, 2, 24], 0, "block id 24 is out of range; the device has 24 blocks"),
        ([0, -1, 2, 3], 0, "block id -1 is out of range"),
        ([0, 1, 2, 0], 0, "block id 0 is listed twice"),
        ([0, 1], 0, "2 blocks do not cover the 12 cached positions, which need 3"),
        ([0, 1, 2, 3], 5, "computed_tokens is 5; it must be a multiple of block_tokens"),
        ([0, 1, 2, 3], 17, "computed_tokens is 17; it must be between 0 and the 16 positions"),
        ([0, 1, 2, 3], -4, "computed_tokens is -4"),
        ([[0]], 0, "block_ids has 2 dimensions"),
        ([0.5], 0, "block ids must be integers"),
    ],
)
async def test_wrong_ids_are_refused_and_change_nothing(ids, computed, message):
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.granted(A)
        before = cache.engine.statistics()
        with pytest.raises(UsageError, match=message):
            lease.assign(ids, computed_tokens=computed)
        assert cache.engine.statistics() == before
        assert lease.block_table.tolist() == []
        lease.assign([0, 1, 2, 3])
        await cache.finish()
        cache.check(lease, A)
        lease.release()


async def test_assign_needs_a_grant_and_later_calls_only_append():
    async with ExternalCache() as cache:
        lease = cache.engine.match(A)
        with pytest.raises(LeaseError, match="the lease is matched and takes no blocks"):
            lease.assign([0])
        await lease.allocate(13)
        with pytest.raises(LeaseError, match=r"commit: num_tokens is 4; .* 0 allocated"):
            lease.commit(4)
        lease.assign([])
        lease.assign([4, 5])
        with pytest.raises(UsageError, match="only the first call"):
            lease.assign([6], computed_tokens=4)
        with pytest.raises(UsageError, match="the lease has block 5 already"):
            lease.assign([6, 5])
        with pytest.raises(LeaseError, match="commit: num_tokens is 9") as error:
            lease.commit(9)
        assert "assign" in error.value.hint
        lease.assign([6, 7])
        assert lease.block_table.tolist() == [4, 5, 6, 7]
        lease.release()
        with pytest.raises(LeaseError, match="cannot be used any more"):
            lease.assign([8])


async def test_a_hit_that_was_dropped_after_the_grant_is_not_onloaded():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.granted(A)
        await cache.engine.reset()
        with pytest.raises(LeaseError, match="cached positions from 0 on were dropped"):
            lease.assign([0, 1, 2, 3])
        await lease.preempt()
        await lease.allocate(13)
        assert lease.cached_tokens == 0
        lease.assign([0, 1, 2, 3])
        lease.release()


async def test_truncate_gives_back_rejected_positions():
    async with ExternalCache() as cache:
        lease = await cache.write(A, range(4))
        lease.commit(8)
        lease.append([7, 7, 7, 7])
        lease.assign([4])
        for ended in (False, True):
            with pytest.raises(LeaseError, match="of which 8 are shared"):
                lease.truncate(7)
            if not ended:
                await cache.finish()
        lease.truncate(11)
        assert lease.block_table.tolist() == [0, 1, 2]
        assert lease.num_tokens == 12
        lease.append([77])
        tokens = np.append(A[:11], np.int32(77))
        cache.memory.write([2], cache.memory.words(tokens)[2:])
        lease.commit(12)
        lease.release()
        await cache.finish()
        assert cache.hit(np.append(tokens, 0)) == (0, 3)


# ---- failures


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


# ---- stores


async def _on_cpu(cache: ExternalCache, tokens: np.ndarray, ids: list[int], **begin: object) -> int:
    """Serve a prompt with a device that copies by itself; return the cached positions."""
    serving = asyncio.create_task(cache.begin(tokens, ids, **begin))
    await run_until_idle(serving.done)
    lease = await serving
    await run_until_idle(lambda: lease.layers.is_done)
    cache.check(lease, tokens)
    cached = lease.cached_tokens
    cache.compute(lease, tokens)
    lease.release()
    await cache.engine.drain()
    return cached


@pytest.mark.clock
async def test_blocks_reach_the_stores_and_come_back_from_there():
    store = ScriptedStore()
    async with ExternalCache(device=ScriptedDevice(), stores=[store]) as cache:
        assert await _on_cpu(cache, A, [0, 1, 2, 3]) == 0
    assert len(store.objects) == 3
    again = ScriptedStore(objects=store.objects)
    async with ExternalCache(device=ScriptedDevice(), stores=[again]) as cache:
        assert await _on_cpu(cache, A, [8, 9, 10, 11], wait_store=math.inf) == 12
        assert cache.engine.statistics().attention.fetched_blocks == 3
        await cache.engine.evict(3, "host")
        found = asyncio.create_task(cache.engine.prefetch(A))
        await run_until_idle(found.done)
        assert await found == Hit(0, 12)


# ---- what is not offered


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host_blocks": 0}, "host_blocks is 0"),
        ({"state_slots": 4}, "state_slots is 4, and external_device is True"),
        ({"reserve_blocks": 2}, "reserve_blocks is 2"),
        ({"salt_quota_blocks": 2}, "salt_quota_blocks is 2"),
        ({"low_watermark_blocks": 2}, "low_watermark_blocks is 2"),
        ({"write_policy": "write_back"}, "does not see the server's evictions"),
        ({"external_device": "yes"}, "external_device is 'yes'; it must be True or False"),
    ],
)
async def test_options_that_need_a_device_pool_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**{"device_blocks": 8, "host_blocks": 8, "external_device": True, **fields})


async def test_peers_are_refused():
    config = CacheConfig(device_blocks=8, host_blocks=8, external_device=True, model="m")
    with pytest.raises(ConfigError, match=r"peers are given, and CacheConfig.external_device"):
        CacheEngine(config, peers=Peers(listen="127.0.0.1", secret="s" * 32))


async def test_calls_that_need_a_device_pool_are_refused():
    async with ExternalCache() as cache:
        lease = await cache.compute_new(A, range(4))
        await cache.finish()
        engine = cache.engine
        with pytest.raises(UsageError, match="extend: with external_device") as error:
            engine.extend([lease], 1)
        assert "assign" in error.value.hint
        for count in (engine.extendable_blocks, engine.allocatable_blocks):
            with pytest.raises(UsageError, match=f"{count.__name__}.*: with external_device"):
                count()
        with pytest.raises(LeaseError, match="has its blocks already") as error:
            lease.try_allocate(17)
        assert "assign" in error.value.hint
        with pytest.raises(UsageError, match="fork: "):
            lease.fork()
        with pytest.raises(UsageError, match="swap: "):
            await lease.preempt(swap=True)
        with pytest.raises(UsageError, match="resize: "):
            await engine.resize(8)
        with pytest.raises(UsageError, match="evict: "):
            await engine.evict(1)
        with pytest.raises(UsageError, match="pin: "):
            await engine.pin(A)
        assert await engine.prefetch(A) == Hit(0, 12)
        assert not cache.device.copies
        lease.release()


async def test_assign_needs_external_device():
    async with CacheEngine(CacheConfig(device_blocks=8)) as engine:
        lease = engine.match(A)
        await lease.allocate(13)
        with pytest.raises(UsageError, match="external_device is False"):
            lease.assign([0])
        assert lease.is_idle
        await lease.idle()
        lease.release()


# ---- records of what happened


async def test_transitions_can_be_recorded_and_replayed(tmp_path):
    path = tmp_path / "transitions.jsonl"
    cache = ExternalCache()
    with record(cache.engine, path):
        async with cache:
            await cache.store(A, range(4))
            lease = await cache.begin(A, range(8, 12), computed_tokens=4)
            await cache.finish()
            lease.release()
    replay_transitions(TransitionLog.load(path))


async def test_usage_and_statistics_count_host_hits():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.begin(A, range(8, 12))
        await cache.finish()
        usage = lease.usage
        assert (usage.cached_device_tokens, usage.cached_host_tokens) == (0, 12)
        statistics = cache.engine.statistics()
        assert (statistics.hit_host_tokens, statistics.published_blocks) == (12, 3)
        assert (statistics.attention.device.blocks, statistics.attention.device.free) == (24, 0)
        assert statistics.attention.offloaded_blocks == 3
        lease.release()
