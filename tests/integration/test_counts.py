"""Counts of pools and tree in small caches, as in the tests of other cache managers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from aiokv import CacheConfig, CacheEngine, Hit
from aiokv.errors import RequestTooLarge, UsageError, WouldBlock
from aiokv.testing import spin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import Lease
    from aiokv.statistics import Statistics

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]


class Books(CacheEngine):
    """Engine without tensors, blocks of one token: ``hold([1, 2])`` is a path of two blocks."""

    def __init__(self, device_blocks: int = 100, host_blocks: int = 0, **config: Any) -> None:
        super().__init__(
            CacheConfig(
                block_tokens=1, device_blocks=device_blocks, host_blocks=host_blocks, **config
            )
        )

    def hold(self, path: Sequence[int]) -> Lease:
        """Return a lease that has computed the whole path."""
        lease = self.match(path)
        assert lease.try_allocate(len(path))
        lease.commit(len(path))
        return lease

    def insert(self, *paths: Sequence[int]) -> None:
        for path in paths:
            self.hold(path).release()

    def found(self, path: Sequence[int]) -> int:
        """Return the number of blocks of the path that a match hits, the last one included."""
        lease = self.match([*path, -1])
        total = lease.hit.total
        lease.release()
        return total

    @property
    def evictable(self) -> int:
        return self.statistics().evictable_blocks

    @property
    def cached(self) -> int:
        return self.statistics().attention.device.cached


async def test_a_new_cache_is_empty():
    async with Books(host_blocks=50) as engine:
        s = engine.statistics()
        assert (
            s.attention.device.free,
            s.attention.host.free,
            s.attention.device.cached,
            s.leases,
        ) == (100, 50, 0, 0)
        assert engine.found([1]) == 0
        with pytest.raises(UsageError):
            engine.match([])


async def test_each_block_can_be_allocated_exactly_once():
    """All blocks can be allocated, no more, and all are freed afterwards."""
    async with Books() as engine:
        five = engine.match(range(5))
        assert five.try_allocate(5)
        assert engine.statistics().attention.device.free == 95
        rest = engine.match([900])
        assert not rest.try_allocate(96)
        assert engine.statistics().attention.device.free == 95, "no part of it was taken"
        assert rest.try_allocate(95)
        assert sorted([*five.block_table, *rest.block_table]) == list(range(100))
        more = engine.match([901])
        with pytest.raises(RequestTooLarge, match="101"):
            more.try_allocate(101)
        for lease in (five, rest, more):
            lease.release()
        assert engine.statistics().attention.device.free == 100


@pytest.mark.parametrize("nothing", [0, -1])
async def test_allocation_of_zero_positions_is_refused(nothing):
    """The refusal changes nothing."""
    async with Books() as engine:
        lease = engine.match([1])
        with pytest.raises(UsageError):
            await lease.allocate(nothing)
        assert engine.statistics().attention.device.free == 100
        lease.release()


async def test_paths_share_their_common_prefix():
    async with Books() as engine:
        engine.insert([1, 2])
        engine.insert([1, 3])
        assert engine.cached == 3
        engine.insert([1, 2])
        assert engine.cached == 3
        engine.insert([1, 2, 3])
        assert [engine.found(path) for path in ([1, 2, 3], [1, 2, 9], [9], [1, 2, 3, 4, 5])] == [
            3,
            2,
            0,
            3,
        ]


async def test_second_copy_of_a_block_is_freed():
    """Ids (0, 1) remain; the duplicate ids of the second lease are freed."""
    async with Books() as engine:
        first, second = engine.match([1, 2]), engine.match([1, 2])
        assert first.try_allocate(2)
        assert second.try_allocate(2)
        first.commit(2)
        second.commit(2)
        assert (first.block_table.tolist(), second.block_table.tolist()) == ([0, 1], [2, 3])
        first.release()
        second.release()
        assert (engine.cached, engine.statistics().attention.device.free) == (2, 98)
        third = engine.hold([1, 2, 3])
        assert third.block_table.tolist()[:2] == [0, 1]
        third.release()


async def test_blocks_are_evictable_after_release_of_their_last_lease():
    async with Books() as engine:
        a, b = engine.hold([1, 2]), engine.hold([1, 3])
        assert engine.evictable == 0
        a.release()
        assert engine.evictable == 1
        b.release()
        assert engine.evictable == 3
        again = [engine.hold([1, 2]) for _ in range(5)]
        assert engine.evictable == 1
        for lease in again:
            lease.release()
            lease.release()
        assert engine.evictable == 3
        assert engine.check_invariants() == []


async def test_deep_chains_and_many_branches_are_found():
    async with Books(device_blocks=300) as engine:
        chain = list(range(1000, 1020))
        engine.insert(chain)
        assert engine.found(chain) == 20
        branches = [engine.hold([7, branch]) for branch in range(100)]
        assert (engine.cached, engine.evictable) == (121, 20)
        for lease in branches[:50]:
            lease.release()
        assert engine.evictable == 70, "their common block is held by the other 50"
        for lease in branches[50:]:
            lease.release()
        assert engine.evictable == 121


async def test_eviction_takes_evictable_blocks_only():
    """No block of a lease is evicted; evicting 0 blocks evicts none."""
    async with Books(host_blocks=8) as engine:
        engine.insert([1, 2, 3])
        lease = engine.hold([4, 5])
        await engine.drain()
        assert await engine.evict(0) == 0
        assert await engine.evict(1) == 1
        assert (engine.cached, engine.statistics().attention.host.cached) == (4, 5)
        assert await engine.evict(50) == 2
        assert await engine.evict(50) == 0
        assert await engine.evict(50, "host") == 3, "the other two are on the device as well"
        assert engine.found([1, 2, 3]) == 0
        with pytest.raises(UsageError):
            await engine.evict(-1)
        lease.release()


async def test_eviction_without_a_host_tier_drops_blocks():
    async with Books() as engine:
        engine.insert([1, 2, 3])
        assert await engine.evict(2) == 2
        assert (engine.found([1, 2, 3]), engine.cached) == (1, 1)
        assert engine.statistics().dropped_blocks == 2


async def test_repeated_offload_and_onload_lose_no_block():
    """Every match reports the right tier, and no block is lost."""
    async with Books(device_blocks=8, host_blocks=8) as engine:
        engine.insert([1, 2, 3])
        await engine.drain()
        for _ in range(4):
            assert await engine.evict(3) == 3
            lease = engine.match([1, 2, 3, 4])
            assert lease.hit == Hit(0, 3)
            await lease.allocate(4)
            await lease.layers.wait_all()
            lease.release()
            await engine.drain()
            assert engine.match([1, 2, 3, 4]).hit == Hit(3, 0)
            assert (engine.evictable, engine.statistics().attention.host.cached) == (3, 3)
        await spin(2)


async def test_hit_tokens_are_counted_once_and_by_tier():
    """Per lease and in total; a match that is not granted counts nothing."""
    engine = CacheEngine(CacheConfig(block_tokens=4, device_blocks=20, host_blocks=20))
    async with engine:
        tokens = list(range(20))
        async with engine.match(tokens) as lease:
            await lease.allocate(20)
            lease.commit(20)
        await engine.drain()
        assert await engine.evict(2) == 2
        totals = (0, 0, 20)
        for device, host in ((12, 4), (16, 0)):
            async with engine.match(tokens) as lease:
                assert lease.hit == Hit(device, host)
                statistics = engine.statistics()
                assert _hit_counts(statistics) == totals
                await lease.allocate(20)
                await lease.layers.wait_all()
                usage = lease.usage
                assert (usage.cached_device_tokens, usage.cached_host_tokens) == (device, host)
            await engine.drain()
            totals = (totals[0] + device, totals[1] + host, totals[2] + 20)
            assert _hit_counts(engine.statistics()) == totals
        assert totals == (28, 4, 60)
        assert engine.statistics().hit_tokens == 32


def _hit_counts(statistics: Statistics) -> tuple[int, int, int]:
    return statistics.hit_device_tokens, statistics.hit_host_tokens, statistics.prompt_tokens


async def test_oldest_path_is_evicted_first():
    """A match refreshes the recency of its path."""
    async with Books() as engine:
        engine.insert([1], [2], [3])
        assert engine.found([1]) == 1
        assert await engine.evict(2) == 2
        assert [engine.found([path]) for path in (1, 2, 3)] == [1, 0, 0]


async def test_reset_clears_the_index():
    async with Books(host_blocks=8) as engine:
        nodes = engine.statistics().nodes
        engine.insert([1, 2], [1, 3])
        await engine.drain()
        assert engine.statistics().nodes == nodes + 3
        await engine.reset()
        s = engine.statistics()
        assert (s.attention.device.free, s.attention.host.free, s.nodes) == (100, 8, nodes)
        assert engine.found([1, 2]) == 0


async def test_counts_are_exact_from_match_to_release():
    async with Books() as engine:
        engine.insert([1, 2, 3])
        s = engine.statistics()
        assert (s.attention.device.free, s.attention.device.cached, s.evictable_blocks) == (
            97,
            3,
            3,
        )
        second = engine.match([1, 2, 9])
        assert second.hit.device_tokens == 2
        assert second.try_allocate(3)
        assert engine.statistics().attention.device.free == 96, "two are shared, one is new"
        second.commit(3)
        second.release()
        assert engine.cached == 4


async def test_allocation_on_a_full_device_evicts():
    """Ten requests of ten blocks, and one more."""
    async with Books() as engine:
        engine.insert(*(range(100 * i, 100 * i + 10) for i in range(10)))
        s = engine.statistics()
        assert (s.attention.device.free, s.evictable_blocks) == (0, 100)
        engine.insert([5000, 5001, 5002])
        assert engine.found([5000, 5001, 5002]) == 3
        assert engine.cached == 100


async def test_without_caching_all_blocks_are_freed():
    """The cache is neither read nor written."""
    async with Books() as engine:
        for _ in range(2):
            lease = engine.match([1, 2, 3], read=False, write=False)
            assert lease.hit.total == 0
            assert lease.try_allocate(3)
            assert lease.commit(3) == 0
            lease.release()
        assert engine.statistics().attention.device.free == 100


async def test_host_blocks_run_out_without_loss():
    """A table that does not fit in host memory stays on the device."""
    async with Books(host_blocks=3, write_policy="none") as engine:
        lease = engine.hold([1, 2, 3, 4])
        with pytest.raises(WouldBlock):
            await lease.preempt(swap=True)
        assert lease.block_table.tolist() == [0, 1, 2, 3]
        assert engine.statistics().attention.host.free == 3
        lease.release()
        small = engine.hold([7, 8])
        await small.preempt(swap=True)
        assert engine.statistics().attention.host.free == 1
        await small.resume(3)
        await small.layers.wait_all()
        small.release()
        await engine.drain()


async def test_each_block_is_backed_up_once():
    """A backup is issued once, and none is issued without blocks."""
    async with Books(host_blocks=50) as engine:
        await engine.drain()
        assert engine.statistics().worker.attention.offload.done == 0
        engine.insert([1, 2], [1, 3])
        await engine.drain()
        first = engine.statistics().attention.offloaded_blocks
        engine.insert([1, 2], [1, 3])
        await engine.drain()
        assert (first, engine.statistics().attention.offloaded_blocks) == (3, 3)
    async with Books(host_blocks=0) as engine:
        engine.insert([1, 2])
        await engine.drain()
        assert engine.statistics().worker.attention.offload.done == 0


async def test_generated_tokens_complete_blocks_one_by_one():
    """Only full blocks are indexed, and earlier ones do not change."""
    engine = CacheEngine(CacheConfig(block_tokens=4, device_blocks=20))
    async with engine:
        lease = engine.match([1, 2, 3, 4, 5, 6, 7])
        await lease.allocate(7)
        assert lease.commit(7) == 1
        for token, published in ((8, 1), (9, 0), (10, 0), (11, 0), (12, 1)):
            engine.extend([lease], 1)
            lease.append([token])
            assert lease.commit(lease.num_tokens) == published
        lease.release()
        assert engine.match(range(1, 14)).hit.device_tokens == 12
        for num_tokens, blocks in ((1, 1), (7, 2), (8, 2), (9, 3)):
            other = engine.match([99])
            assert other.try_allocate(num_tokens)
            assert len(other.block_table) == blocks
            other.release()
        await spin(2)


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("is_fork", [False, True], ids=["one_path", "forks"])
async def test_block_that_differs_in_any_one_token_is_not_hit(block_tokens: int, is_fork: bool):
    """Every token of every block is compared, the first and the last of a block too."""
    config = CacheConfig(block_tokens=block_tokens, device_blocks=20 * block_tokens)
    async with CacheEngine(config) as engine:
        tokens = list(range(100, 100 + 3 * block_tokens))
        _compute(engine, tokens)
        for position in range(len(tokens)):
            for token in (tokens[position] + 1, -1, 2**31 - 1):
                other = [*tokens[:position], token, *tokens[position + 1 :]]
                lease = engine.match([*other, 7])
                same_blocks = position // block_tokens
                assert lease.hit.device_tokens == same_blocks * block_tokens, (position, token)
                lease.release()
                if is_fork and token == -1 and position % block_tokens == block_tokens - 1:
                    _compute(engine, other)
        assert engine.match([*tokens, 7]).hit.device_tokens == len(tokens)


@pytest.mark.parametrize("leave_tokens", [1, 2, 5])
async def test_the_last_tokens_of_a_prompt_are_computed_even_if_all_are_cached(leave_tokens: int):
    """(n - leave_tokens) // block_tokens blocks are hit, for each length n."""
    config = CacheConfig(block_tokens=4, device_blocks=40, leave_tokens=leave_tokens)
    async with CacheEngine(config) as engine:
        tokens = list(range(24))
        _compute(engine, tokens)
        for length in range(1, 25):
            expected = max(length - leave_tokens, 0) // 4 * 4
            async with engine.match(tokens[:length]) as lease:
                assert lease.hit.device_tokens == expected, length
                await lease.allocate(length)
                assert lease.cached_tokens == expected, length
        assert engine.match([*tokens, 1]).hit.device_tokens == (25 - leave_tokens) // 4 * 4


def _compute(engine: CacheEngine, tokens: Sequence[int]) -> None:
    lease = engine.match(tokens)
    assert lease.try_allocate(len(tokens))
    lease.commit(len(tokens))
    lease.release()


async def test_tasks_never_share_an_id():
    """Many tasks allocate and release; every id has one owner, and all are freed."""
    async with Books(device_blocks=12) as engine:
        held: set[int] = set()

        async def client(seed: int) -> None:
            for turn in range(20):
                lease = engine.match([seed, turn], write=False)
                await lease.allocate(1 + (seed + turn) % 4)
                mine = set(lease.block_table.tolist())
                assert not mine & held
                held.update(mine)
                await asyncio.sleep(0)
                held.difference_update(mine)
                lease.release()

        await asyncio.gather(*(client(seed) for seed in range(16)))
        assert engine.statistics().attention.device.free == 12
