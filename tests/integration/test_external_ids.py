"""Device blocks of a server: the ids that leases name, and calls that need a device pool."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit, Peers
from aiokv.errors import ConfigError, LeaseError, UsageError
from aiokv.testing import (
    spin,
)
from tests.harness.cache import prompt
from tests.harness.external import LONG, A, B, C, ExternalCache

pytestmark = pytest.mark.asyncio


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


@pytest.mark.parametrize("as_array", [False, True])
async def test_commit_blocks_saves_what_append_assign_and_commit_save(as_array: bool):
    grown = np.concatenate([A, prompt(7, 2)])[:20]
    async with ExternalCache() as cache:
        lease = await cache.granted(A)
        words = cache.memory.words(grown)
        cache.memory.write(np.arange(5), words[:5])
        convert = (lambda ids: np.array(ids, np.int64)) if as_array else list
        assert lease.commit_blocks(convert([0, 1]), convert([])) == 2
        assert lease.commit_blocks(convert([2, 3, 4]), convert(grown[len(A) :])) == 3
        assert (lease.num_tokens, lease.block_table.tolist()) == (20, [0, 1, 2, 3, 4])
        assert lease.commit_blocks([], []) == 0
        assert not cache.device.onloads
        await cache.finish()
        lease.release()
        assert cache.hit(grown)[1] == 4  # the last token is always computed
        assert await cache.check_hit(grown, range(8, 13)) == 16


async def test_commit_blocks_has_to_cover_the_hit_and_copies_none_of_it():
    async with ExternalCache() as cache:
        await cache.store(A, range(4))
        lease = await cache.granted(LONG)
        assert lease.cached_tokens == 12
        with pytest.raises(LeaseError, match="2 blocks do not cover the 12 cached positions"):
            lease.commit_blocks([5, 6], [])
        assert lease.block_table.tolist() == []
        assert lease.commit_blocks([5, 6, 7, 8], []) == 1
        assert not cache.device.onloads
        await cache.finish()
        lease.release()


async def test_refused_commit_blocks_changes_nothing():
    async with ExternalCache() as cache:
        lease = await cache.begin(A, [0, 1, 2, 3])
        before = cache.engine.inspect.dump()["statistics"]
        for ids, tokens, error, text in (
            ([99], [1], UsageError, "block id 99 is out of range; the device has 24 blocks"),
            ([3], [1], UsageError, "the lease has block 3 already"),
            ([4], [2**31], UsageError, "token id 2147483648 at position 0 is outside int32"),
            (["a"], [1], UsageError, "block ids must be integers"),
        ):
            with pytest.raises(error, match=text):
                lease.commit_blocks(list(ids), list(tokens))
            assert lease.block_table.tolist() == [0, 1, 2, 3]
            assert cache.engine.inspect.dump()["statistics"] == before
        assert lease.commit_blocks([4], range(7)) == 5  # none of the refused tokens was named
        await cache.finish()
        lease.release()
        with pytest.raises(LeaseError, match="cannot be used any more"):
            lease.commit_blocks([5], [])
    async with CacheEngine(CacheConfig(device_blocks=4, block_tokens=4)) as engine:
        own = engine.match([1, 2, 3])
        await own.allocate(3)
        with pytest.raises(
            UsageError, match=r"commit_blocks: CacheConfig\.external_device is False"
        ):
            own.commit_blocks([0], [])
        own.release()


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
