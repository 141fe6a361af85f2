"""Defects of a prefix tree, its block pools and its scheduling: each is provoked, none occurs."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import (
    AllocateTimeout,
    CapacityError,
    LeaseError,
    RequestTooLarge,
    TransferError,
    UnreleasedLeaseWarning,
    WouldBlock,
)
from aiokv.testing import running_clock, spin
from tests.drill.drill import BLOCK_TOKENS, Drill, prompt

A, B, C = (prompt(seed, 2) for seed in range(1, 4))
LONG = prompt(4, 6)

pytestmark = pytest.mark.asyncio


async def test_eviction_takes_leaves_before_their_prefix():
    """Defect: The root of a path is evicted first: the blocks behind it cannot be found, but still
    occupy the pool.
    """
    async with Drill(host_blocks=0) as drill:
        await drill.fill(LONG)
        for left in reversed(range(6)):
            assert await drill.engine.evict(1) == 1
            assert drill.hit(LONG) == (left, 0)
            assert drill.statistics.attention.device.cached == left


async def test_block_table_of_two_tiers_is_in_prompt_order():
    """Defect: Device blocks and host blocks are listed separately, and the order of the path is
    lost.
    """
    async with Drill(device_blocks=16, host_blocks=16) as drill:
        await drill.to_host(LONG)
        await drill.fill(prompt(4, 3))
        assert drill.hit(LONG) == (3, 3)
        (await drill.serve(LONG)).release()  # compares the bytes in path order
        longer = prompt(4, 8)
        await drill.fill(longer)
        assert drill.hit(longer) == (8, 0), "the new blocks hang behind the last of the old ones"
        for first in range(1, 8):
            assert drill.hit(longer[first * BLOCK_TOKENS :]) == (0, 0), "and nowhere else"


async def test_failed_copy_is_never_served():
    """Defect: Blocks change their tier when a copy is scheduled: a failed copy is served."""
    async with Drill() as drill:
        drill.device.fail("offload", 0, block=1)
        backup = drill.device.hold("offload", 0)
        await drill.fill(A)
        assert await drill.engine.evict(2) == 0, "no host copy is proven"
        assert drill.hit(A) == (2, 0)
        backup.open()
        await drill.engine.drain()
        assert await drill.engine.evict(2) == 2
        assert drill.hit(A) == (0, 1), "the other copy was never there"
        drill.device.fail("onload", 0)
        lease = drill.engine.match(A)
        await lease.allocate(9)
        with pytest.raises(TransferError):
            await lease.layers.wait_all()
        assert lease.cached_tokens == 0
        assert drill.hit(A) == (0, 0)
        lease.release()


async def test_source_of_an_onload_is_not_overwritten():
    """Defect: Host blocks are freed when their onload is scheduled, and the next offload
    overwrites them.
    """
    async with Drill(device_blocks=12, host_blocks=3, write_policy="write_back") as drill:
        await drill.fill(A)
        await drill.engine.evict(2)
        assert drill.hit(A) == (0, 2)
        onload, offloads = drill.device.hold("onload", 0), drill.device.hold("offload")
        loading = asyncio.create_task(drill.serve(A))
        await drill.running("onload")
        await drill.fill(B, C)
        evicting = asyncio.create_task(drill.engine.evict(12))
        await drill.running("offload")
        (reads,), (writes,) = drill.device.onloads, drill.device.offloads
        assert not set(reads.host_ids.tolist()) & set(writes.host_ids.tolist())
        offloads.open()  # the write goes first
        await drill.running("offload", 0)
        onload.open()
        await evicting
        lease = await loading  # compares every byte
        assert lease.cached_tokens == 8
        lease.release()


async def test_source_of_a_backup_is_not_overwritten():
    """Defect: Device blocks are evicted and written again while their backup still reads them."""
    async with Drill(device_blocks=3) as drill:
        backup = drill.device.hold("offload", 0)
        await drill.fill(A)
        writing = asyncio.create_task(drill.serve(B))
        await spin(5)
        assert drill.statistics.waiting == 1, "two of three blocks are being read"
        backup.open()
        (await writing).release()
        await drill.engine.drain()
        assert drill.hit(A) == (0, 2)
        (await drill.serve(A)).release()  # the backup holds A's bytes, not B's


async def test_allocated_blocks_are_matched_only_after_commit():
    """Defect: Blocks are indexed when they are allocated: a request that hits them reads
    uncomputed bytes.
    """
    async with Drill(host_blocks=0) as drill:
        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        assert drill.hit(A) == (0, 0)
        drill.memory.write(lease.block_table[:1], drill.memory.words(A, "", 0)[:1])
        lease.commit(BLOCK_TOKENS + 1)
        assert drill.hit(A) == (1, 0), "as far as it was computed, not as far as it has blocks"
        lease.release()
        assert drill.hit(A) == (1, 0)
        assert drill.statistics.attention.device.free == 7
        (await drill.serve(A)).release()


async def test_write_through_saves_blocks_of_the_first_request():
    """Defect: The first request of a prompt is not backed up; only a second request counts as a
    use.
    """
    async with Drill(write_policy="write_through") as drill:
        lease = drill.engine.match(A)
        await lease.allocate(len(A))
        for block in range(2):  # as each is computed
            words = drill.memory.words(A, "", 0)[block : block + 1]
            drill.memory.write(lease.block_table[block : block + 1], words)
            lease.commit((block + 1) * BLOCK_TOKENS)
            await drill.engine.drain()
            assert drill.statistics.attention.offloaded_blocks == block + 1
        lease.release()


async def test_blocks_in_use_are_backed_up_and_host_copies_are_reclaimed():
    """Defect: Blocks that are always referenced are never backed up, and a full host tier never
    reclaims host copies.
    """
    async with Drill(host_blocks=4, write_policy="nth_use:2", low_watermark_blocks=0) as drill:
        hot = [await drill.serve(A) for _ in range(2)]
        await drill.engine.drain()
        assert drill.statistics.attention.host.cached == 2, "saved while both leases are out"
        others = [await drill.serve(B) for _ in range(2)]
        await drill.engine.drain()
        assert drill.statistics.attention.host.free == 0
        others[0].release()
        await others[1].preempt(swap=True)  # its partial block needs a host block
        assert drill.statistics.reclaimed_host_copies > 0
        for lease in (*hot, others[1]):
            lease.release()
        await drill.nothing_lost()


async def test_onloaded_blocks_can_be_evicted_again():
    """Defect: After an onload, unreferenced blocks are in no list of victims and are lost until a
    reset.
    """
    async with Drill(device_blocks=3) as drill:
        await drill.to_host(A)
        for _ in range(3):
            (await drill.serve(A)).release()
            assert (
                drill.statistics.evictable_blocks == drill.statistics.attention.device.cached == 2
            )
            assert await drill.engine.evict(2) == 2
            assert drill.hit(A) == (0, 2)


async def test_match_refreshes_recency_and_eviction_does_not():
    """Defect: A match does not refresh recency, and the coldest victims become the newest host
    blocks.
    """
    async with Drill(device_blocks=16) as drill:
        await drill.fill(A, B, C)
        drill.engine.match(A).release()
        assert await drill.engine.evict(2) == 2
        await drill.engine.drain()
        assert await drill.engine.evict(4) == 4
        assert await drill.engine.evict(2, "host") == 2
        assert [drill.hit(tokens) for tokens in (A, B, C)] == [(0, 2), (0, 0), (0, 2)]


async def test_errors_leak_no_blocks():
    """Defect: An exception between two steps of an operation leaks blocks, host blocks or refs."""
    async with Drill(device_blocks=6, host_blocks=4) as drill:
        await drill.to_host(A)
        drill.device.reject("onload", 0)
        with pytest.raises(TransferError, match="rejected"):
            await drill.serve(A)
        await drill.to_host(A)
        drill.device.fail("onload", 1)
        with pytest.raises(TransferError, match="failed"):
            await drill.serve(A)
        drill.device.reject("offload", 2)
        await drill.fill(A)
        await drill.engine.drain()
        assert drill.device.running("offload") == []
        holder, lease = await drill.serve(C), drill.engine.match(B)
        for num_tokens, error in ((1000, RequestTooLarge), (-1, LeaseError)):
            with pytest.raises(error):
                await lease.allocate(num_tokens)
        with pytest.raises(AllocateTimeout):
            await lease.allocate(4 * BLOCK_TOKENS, timeout=0.0)
        with pytest.raises(WouldBlock):
            drill.engine.extend([holder], 100)
        with pytest.raises(LeaseError):
            holder.truncate(0)
        holder.release()
        lease.release()
        await drill.nothing_lost()


@pytest.mark.parametrize("shift", [0, 2], ids=["equal_numbers", "unequal_numbers"])
async def test_second_device_copy_is_not_confused_with_a_host_copy(shift: int):
    """Defect: A device id is compared with a host id: equal numbers leak the block."""
    async with Drill() as drill:
        await drill.to_host(A)
        before = [drill.engine.match(prompt(9, 1)) for _ in range(shift)]
        for lease in before:
            await lease.allocate(1)
        lease = drill.engine.match(A, read=False)
        await lease.allocate(len(A))
        assert lease.block_table[:2].tolist() == [shift, shift + 1]
        drill.compute(lease, A, 0)
        for used in (lease, *before):
            used.release()
        s = drill.statistics
        assert s.attention.device.free + s.attention.device.cached == s.attention.device.blocks
        (await drill.serve(A)).release()
        await drill.nothing_lost()


async def test_shrunk_pool_hands_out_no_larger_ids():
    """Defect: Ids in use during a shrink return to the pool later; a double release is only
    logged.
    """
    async with Drill(device_blocks=12, host_blocks=0) as drill:
        low, high = await drill.serve(A), await drill.serve(B)
        with pytest.raises(TimeoutError):
            await drill.engine.resize(4, 0.0)
        assert drill.statistics.attention.device.blocks == 12
        for lease in (low, high, high):
            lease.release()
        await drill.engine.resize(4)
        assert (
            drill.statistics.attention.device.free + drill.statistics.attention.device.cached == 4
        )
        for seed in range(5, 10):
            lease = await drill.serve(prompt(seed, 3))
            assert sorted(lease.block_table) == [0, 1, 2, 3]
            lease.release()


async def test_transfers_from_before_a_reset_touch_no_later_blocks():
    """Defect: Completions of transfers from before a reset change blocks that belong to later
    requests.
    """
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        onload, backup = drill.device.hold("onload", 0), drill.device.hold("offload", 1)
        old = drill.engine.match(A)
        await old.allocate(len(A))
        await drill.fill(C)
        await drill.running("onload")
        await drill.running("offload")
        resetting = asyncio.create_task(drill.engine.reset())
        await spin(5)
        assert not resetting.done()
        old.release()
        new = await drill.serve(B)
        taken = {*drill.device.onloads[0].device_ids, *drill.device.offloads[0].device_ids}
        assert not taken & set(new.block_table), "both copies still own their blocks"
        onload.open()
        backup.open()
        await resetting
        drill.check_all(new, B)
        new.release()
        assert [drill.hit(tokens) for tokens in (A, C)] == [(0, 0), (0, 0)]
        await drill.nothing_lost()


async def test_eviction_time_does_not_grow_with_the_cache():
    """Defect: Each eviction scans all evictable blocks, and each backup scans all candidates."""

    async def seconds_of_100_requests(device_blocks: int) -> float:
        config = CacheConfig(
            block_tokens=1,
            device_blocks=device_blocks,
            host_blocks=500,
            write_policy="nth_use:1",
        )
        best = float("inf")
        async with CacheEngine(config) as engine:
            await requests(engine, 0, device_blocks // 500, 499)
            for first in range(1, 6):
                begin = time.thread_time()
                await requests(engine, first * 100_000_000, 100, 10)
                best = min(best, time.thread_time() - begin)
            assert engine.statistics().attention.device.evicted_blocks > 1000
        return best

    async def requests(engine: CacheEngine, first: int, count: int, num_tokens: int) -> None:
        for i in range(count):
            tokens = np.arange(num_tokens, dtype=np.int32) + first + 1000 * i
            async with engine.match(tokens) as lease:
                await lease.allocate(num_tokens)
                lease.commit(num_tokens)
            await asyncio.sleep(0)

    assert await seconds_of_100_requests(100_000) < 8 * await seconds_of_100_requests(1_000)


async def test_time_per_token_does_not_grow_with_the_prompt():
    """Defect: Each call builds the list of all tokens again, pickles it and hashes it."""

    async def seconds_of_256_tokens(prompt_tokens: int) -> float:
        config = CacheConfig(block_tokens=16, device_blocks=prompt_tokens // 16 + 200)
        best = float("inf")
        tokens = np.arange(prompt_tokens, dtype=np.int32)
        async with CacheEngine(config) as engine, engine.match(tokens) as lease:
            await lease.allocate(prompt_tokens)
            lease.commit(prompt_tokens)
            for _ in range(5):
                begin = time.thread_time()
                for token in range(256):
                    engine.extend([lease], 1)
                    lease.append([token])
                    lease.commit(lease.num_tokens)
                best = min(best, time.thread_time() - begin)
        return best

    assert await seconds_of_256_tokens(400_000) < 8 * await seconds_of_256_tokens(4_000)


async def test_requests_do_not_wait_for_copies_of_others():
    """Defect: One lock is held while a match queries a slow store or a release waits for a swap."""
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        drill.device.hold("onload", None)
        drill.device.hold("offload", None)
        stuck = drill.engine.match(A)
        await stuck.allocate(len(A))
        await drill.running("onload")
        lease = drill.engine.match(B)  # no await from here on: all calls run in this pass
        assert lease.try_allocate(len(B))
        drill.compute(lease, B)
        drill.engine.extend([lease], 4)
        assert drill.hit(B) == (2, 0)
        lease.release()
        stuck.release()
    async with Drill(device_blocks=16, write_policy="write_back") as drill:
        await drill.fill(A)
        await drill.engine.evict(2)
        assert drill.hit(A) == (0, 2)
        drill.device.hold("onload", None)
        stuck = drill.engine.match(A)
        await stuck.allocate(len(A))
        await drill.fill(B)
        assert await drill.engine.evict(2) == 2, "the save of B is over, whatever A waits for"
        assert drill.device.running("onload") == [0]
        stuck.release()


async def test_garbage_collected_lease_frees_its_blocks():
    """Defect: Refs belong to a request object; when the object is dropped, they are never
    released.
    """
    async with Drill(host_blocks=0) as drill:
        await drill.fill(A)
        lease = drill.engine.match(A, owner="req-1")
        await lease.allocate(len(A))
        with pytest.warns(UnreleasedLeaseWarning, match="req-1"):
            del lease
        gc.collect()
        await spin(2)
        assert drill.statistics.leases == 0
        assert await drill.engine.evict(8) == 2


async def test_each_shortage_is_reported_as_documented():
    """Defect: Three related calls report a shortage as None, as [] and as a tuple."""
    async with Drill(device_blocks=4, host_blocks=0) as drill:
        holder = await drill.serve(prompt(5, 3))
        before = drill.statistics
        lease = drill.engine.match(A)
        assert lease.try_allocate(9) is False
        assert await drill.engine.evict(3) == 0
        with pytest.raises(WouldBlock) as would_block:
            drill.engine.extend([holder], 4)
        with pytest.raises(AllocateTimeout) as too_late:
            await lease.allocate(9, timeout=0.0)
        with pytest.raises(RequestTooLarge) as too_large:
            await lease.allocate(17)
        with pytest.raises(WouldBlock) as no_fork:
            holder.fork()
        for caught in (would_block, too_late, too_large, no_fork):
            assert isinstance(caught.value, CapacityError)
            assert str(caught.value)
        lease.release()
        after = drill.statistics
        assert (after.attention.device.free, after.attention.device.leased) == (
            before.attention.device.free,
            before.attention.device.leased,
        )
        holder.release()


@pytest.mark.clock
async def test_capacity_is_granted_in_order_and_only_once():
    """Defect: Two requests are granted the same blocks and one of them fails; there is no waiting
    line.
    """
    clock = running_clock()
    async with Drill(device_blocks=6, host_blocks=0) as drill:
        first = drill.engine.match(prompt(5, 3))
        await first.allocate(13)
        large = drill.engine.match(prompt(6, 4))
        small = drill.engine.match(prompt(7, 0))
        waits = [
            asyncio.create_task(large.allocate(17)),
            asyncio.create_task(small.allocate(1, timeout=60.0)),
        ]
        await clock.advance(59.0)
        assert [task.done() for task in waits] == [False, False], (
            "no request overtakes the large one"
        )
        urgent = asyncio.create_task(drill.engine.match(prompt(8, 0)).allocate(1, priority=-1))
        await clock.advance(0.5)
        assert urgent.done()
        urgent.result().release()
        await clock.advance(1.0)
        assert isinstance(waits[1].exception(), AllocateTimeout)
        first.release()
        await waits[0]
        for lease in (large, small):
            lease.release()
