"""Retired leases: the server's cache has their blocks, so their copies in host memory go first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import LeaseError, UsageError
from aiokv.testing import ScriptedStore, spin
from tests.harness.cache import Cache, prompt
from tests.harness.external import LONG, A, B, C, ExternalCache

if TYPE_CHECKING:
    from aiokv import Lease

pytestmark = pytest.mark.asyncio

BRANCH = np.concatenate([A[:12], prompt(7, 1)])  # one block behind those of A
OTHER_BRANCH = np.concatenate([A[:12], prompt(8, 1)])


async def hold(cache: ExternalCache, tokens: np.ndarray, first: int, **commit: int):
    """Return a lease that has computed the full blocks of a prompt in blocks from ``first`` on."""
    blocks = len(tokens) // 4
    lease = await cache.write(tokens, range(first, first + blocks))
    lease.commit_blocks([], [], **commit)
    await cache.finish()
    return lease


async def test_copies_of_a_retired_lease_are_evicted_before_older_ones():
    async with ExternalCache(host_blocks=6) as cache:
        await cache.store(A, range(4))
        lease = await hold(cache, B, 4)
        assert lease.retire()
        await cache.store(C, range(8, 12))
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [3, 0, 3]
        lease.release()


async def test_without_retire_the_oldest_copies_are_evicted():
    async with ExternalCache(host_blocks=6) as cache:
        await cache.store(A, range(4))
        await cache.store(B, range(4, 8))
        await cache.store(C, range(8, 12))
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [0, 3, 3]


async def test_nothing_is_evicted_for_copies_of_kept_blocks_and_a_later_commit_copies_them():
    async with ExternalCache(host_blocks=5) as cache:
        await cache.store(A, range(4))
        lease = await hold(cache, B, 4, kept_blocks=3)
        assert [cache.hit(tokens)[1] for tokens in (A, B)] == [3, 2]
        assert lease.commit_blocks([], []) == 1
        await cache.finish()
        assert [cache.hit(tokens)[1] for tokens in (A, B)] == [2, 3]
        lease.release()


async def test_a_retired_lease_copies_again_what_was_evicted():
    async with ExternalCache(host_blocks=6) as cache:
        lease = await hold(cache, B, 4)
        assert lease.retire()
        await cache.store(A, range(4))
        await cache.store(C, range(8, 12))
        assert cache.hit(B) == (0, 0)
        assert lease.commit_blocks([], []) == 3
        lease.release()
        await cache.finish()
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [0, 3, 3]
        assert await cache.check_hit(B, range(12, 16)) == 12


async def test_a_use_by_another_request_ends_the_preference():
    async with ExternalCache(host_blocks=6) as cache:
        lease = await hold(cache, B, 4)
        assert lease.retire()
        await cache.store(A, range(4))
        assert await cache.check_hit(B, range(12, 16)) == 12
        await cache.store(C, range(8, 12))
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [0, 3, 3]
        lease.release()


@pytest.mark.parametrize(("kept", "copied"), [(3, 6), (4, 0)])
async def test_kept_blocks_are_copied_for_at_least_as_many_blocks_behind_them(kept, copied):
    async with ExternalCache(host_blocks=6) as cache:
        lease = await hold(cache, LONG, 4)
        assert lease.retire()
        await cache.store(B, range(12, 16))
        await cache.store(C, range(16, 20))
        assert cache.hit(LONG) == (0, 0)
        assert lease.commit_blocks([], [], kept_blocks=kept) == copied
        await cache.finish()
        assert cache.hit(LONG) == (0, copied)
        lease.release()


async def test_a_small_branch_is_evicted_with_the_blocks_before_it():
    async with ExternalCache(host_blocks=8) as cache:
        await cache.store(BRANCH, range(5))
        await cache.store(B, range(12, 16))
        lease = await hold(cache, OTHER_BRANCH, 5)
        assert lease.retire()
        await cache.store(C, range(16, 20))
        assert [cache.hit(tokens)[1] for tokens in (B, C)] == [3, 3]
        assert cache.hit(BRANCH) == (0, 2)
        lease.release()


async def test_a_larger_branch_keeps_the_blocks_before_it():
    async with ExternalCache(host_blocks=10) as cache:
        await cache.store(B, range(12, 16))
        first = np.concatenate([A[:4], prompt(7, 3)])
        await cache.store(first, range(5))
        lease = await hold(cache, np.concatenate([A[:4], prompt(8, 1)]), 5)
        assert lease.retire()
        await cache.store(C, range(16, 20))
        await cache.store(prompt(4, 1), range(20, 22))
        assert cache.hit(first) == (0, 4)
        assert cache.hit(B) == (0, 2)  # the branch of the retired lease went before
        lease.release()


async def test_a_retired_lease_gives_no_copy_in_use_away():
    async with ExternalCache(host_blocks=6) as cache:
        await cache.store(B, range(12, 16))
        lease = await hold(cache, A, 4)
        user = await cache.granted(A)
        assert lease.retire()
        await cache.store(C, range(16, 20))
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [3, 0, 3]
        lease.release()
        user.release()


async def test_a_lease_that_could_not_copy_blocks_later_is_not_retired():
    async with ExternalCache() as cache:
        onloading, _ = await cache.onload(A, range(4, 8))
        assert not onloading.retire()
        await cache.finish()
        assert onloading.retire()
        assert onloading.block_table.tolist() == [4, 5, 6, 7]
        reading = await cache.begin(B, range(8, 12), write=False)
        assert not reading.retire()
        without_blocks = await cache.granted(C)
        assert not without_blocks.retire()
        for lease in (onloading, reading, without_blocks):
            lease.release()
            with pytest.raises(LeaseError, match="cannot be used"):
                lease.retire()


async def test_retire_needs_external_device():
    async with Cache() as cache:
        lease = cache.engine.match(A)
        with pytest.raises(UsageError, match=r"retire: CacheConfig\.external_device is False"):
            lease.retire()
        lease.release()


async def test_retiring_ends_the_wait_for_an_onload_that_writes_shared_blocks():
    """The server may reuse the blocks of a retired lease: the onload's end must not save them."""
    async with ExternalCache(host_blocks=24) as cache:
        loading, _ = await cache.onload(A, range(4, 8))  # writes blocks 4 to 6
        user = await cache.begin(LONG, [4, 5, 6, 10, 11, 12], computed_tokens=12)
        user.commit_blocks([], [])
        assert user.retire()
        other = await cache.write(C, [10, 11, 12, 13])  # the server has reused blocks
        await cache.finish()
        assert cache.hit(LONG)[1] == 3
        for lease in (user, loading, other):
            lease.release()


# --- with stores ------------------------------------------------------------------------------


async def write_and_retire(cache: ExternalCache, tokens: np.ndarray, first: int) -> Lease:
    """Return a lease that was retired while the save of its last blocks goes on."""
    lease = await cache.write(tokens, range(first, first + len(tokens) // 4))
    lease.commit_blocks([], [])
    assert lease.retire()
    return lease


async def copies_end(cache: ExternalCache) -> None:
    """Complete the copies to host memory, but not what the stores do."""
    await cache.saves_begun()
    for copy in cache.device.offloads:
        copy.complete_all()
    await spin(4)


@pytest.mark.parametrize("stores", [False, True])
async def test_copies_that_end_after_their_lease_was_retired_are_evicted_first(stores):
    async with ExternalCache(host_blocks=6, stores=[ScriptedStore()] * stores) as cache:
        await cache.store(A, range(4))
        lease = await write_and_retire(cache, B, 4)
        await cache.finish()
        await cache.store(C, range(8, 12))
        assert [cache.hit(tokens)[1] for tokens in (A, B, C)] == [3, 0, 3]
        lease.release()


async def test_copies_of_a_retired_lease_are_not_evicted_before_the_stores_have_them():
    store = ScriptedStore()
    async with ExternalCache(host_blocks=9, stores=[store]) as cache:
        await cache.store(A, range(4))
        gate = store.hold("save")
        lease = await write_and_retire(cache, B, 4)
        await copies_end(cache)
        other = await cache.write(LONG, [0, 1, 2, 8, 9, 10])
        other.commit_blocks([], [])
        await copies_end(cache)
        assert [cache.hit(tokens)[1] for tokens in (A, B)] == [3, 3]
        gate.open()
        await cache.finish()
        assert len(store.objects) == 3 + 3 + 3
        await cache.store(C, range(11, 15))
        assert [cache.hit(tokens)[1] for tokens in (LONG, B, C)] == [6, 0, 3]
        for held in (lease, other):
            held.release()


async def test_a_slow_store_keeps_the_copies_of_one_retired_lease():
    store = ScriptedStore()
    prompts = [prompt(seed, 1) for seed in range(6)]
    async with ExternalCache(host_blocks=9, stores=[store]) as cache:
        gate = store.hold("save")
        leases = []
        for number, tokens in enumerate(prompts):
            leases.append(await write_and_retire(cache, tokens, number))
            await copies_end(cache)
        # Four saves are in flight. Of the two that wait, that of the last lease keeps its copy.
        assert await cache.engine.evict(9, "host") == 1
        assert [cache.hit(tokens)[1] for tokens in prompts] == [1, 1, 1, 1, 0, 1]
        gate.open()
        for lease in leases:
            lease.release()


async def test_a_retired_lease_can_be_truncated_while_its_blocks_are_saved():
    """The server reuses its last block: nothing is left of the lease's references."""
    store = ScriptedStore()
    async with ExternalCache(host_blocks=9, stores=[store]) as cache:
        gate = store.hold("save")
        lease = await write_and_retire(cache, B, 4)
        await copies_end(cache)
        lease.truncate(8)
        assert lease.block_table.tolist() == [4, 5]
        gate.open()
        assert lease.commit_blocks([], []) == 0  # host memory still has the others
        await cache.finish()
        assert await cache.engine.evict(9, "host") == 1
        lease.release()


async def test_a_lease_is_released_while_it_waits_to_be_retired():
    store = ScriptedStore()
    async with ExternalCache(host_blocks=9, stores=[store]) as cache:
        gate = store.hold("save")
        lease = await write_and_retire(cache, B, 4)
        lease.release()
        await copies_end(cache)
        assert cache.hit(B) == (0, 3)
        gate.open()
        await cache.finish()
        assert len(store.objects) == 3
        assert await cache.check_hit(B, range(12, 16)) == 12
