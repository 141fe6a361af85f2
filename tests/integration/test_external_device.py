"""Device blocks of a server: hits are copied into them, and commits are saved from them."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from aiokv import Hit
from aiokv.errors import UsageError
from aiokv.testing import (
    ScriptedDevice,
    ScriptedStore,
    run_until_idle,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.transitions import TransitionLog, record, replay_transitions
from tests.harness.cache import BLOCK_TOKENS, prompt
from tests.harness.external import LONG, A, B, C, ExternalCache

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


async def test_onloads_with_lower_priority_numbers_are_copied_first():
    prompts = [prompt(seed, 1) for seed in range(4)]
    async with ExternalCache() as cache:
        for tokens in prompts:
            await cache.store(tokens, [0, 1])
        leases = [await cache.granted(tokens) for tokens in prompts]
        for i, (lease, priority) in enumerate(zip(leases, (0, 0, 5, 1), strict=True)):
            lease.assign([2 * i, 2 * i + 1], priority=priority)
        for targets in ([[0], [2]], [[6], [4]]):  # the device has two copies at once
            await run_until_idle(lambda: len(cache.device.onloads) == 2)
            assert [copy.device_ids.tolist() for copy in cache.device.onloads] == targets
            for copy in list(cache.device.onloads):
                copy.complete_all()
        for wrong in (-1, 1.5, None, "high"):
            with pytest.raises(UsageError, match="priority is"):
                leases[0].assign([20], priority=wrong)
        for lease in leases:
            lease.release()


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
        await run_until_idle(lambda: cache.engine.statistics().worker.attention.offload.done == 2)
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
    async with ExternalCache(write_policy=f"nth_use:{threshold}") as cache:
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
