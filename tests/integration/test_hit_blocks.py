"""``lease.hit_blocks``: the device blocks of a hit at match time, and of the grant."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from aiokv.errors import LeaseError, UsageError
from aiokv.testing import spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

pytestmark = pytest.mark.asyncio


async def test_ids_at_match_time_are_those_of_the_later_grant():
    async with Cache(host_blocks=0) as cache:
        first = await cache.serve(prompt(1, 3))
        table = first.block_table
        lease = cache.engine.match(prompt(1, 3))
        assert lease.hit_blocks.dtype == np.int32
        assert lease.hit_blocks.tolist() == table[:3].tolist()
        assert lease.try_allocate(13)
        assert lease.hit_blocks.tolist() == table[:3].tolist()
        assert lease.block_table[:3].tolist() == table[:3].tolist()
        assert lease.hit.device_tokens == 3 * BLOCK_TOKENS
        lease.release()
        first.release()


async def test_only_blocks_on_the_device_are_listed():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="write_through") as cache:
        await cache.fill(prompt(1, 3))
        await cache.finish()
        await cache.engine.evict(1)
        lease = cache.engine.match(prompt(1, 3))
        assert (lease.hit.device_tokens, lease.hit.host_tokens) == (8, 4)
        assert len(lease.hit_blocks) == 2
        lease.release()
        nothing = cache.engine.match(prompt(2, 1))
        assert nothing.hit_blocks.shape == (0,)
        nothing.release()


async def test_matched_lease_looks_the_prefix_up_again_after_an_eviction():
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        await cache.fill(prompt(1, 3))
        lease = cache.engine.match(prompt(1, 3))
        assert len(lease.hit_blocks) == 3
        assert await cache.engine.evict(2) == 2
        assert len(lease.hit_blocks) == 1, "nothing was pinned"
        assert lease.hit.device_tokens == 4
        other = await cache.serve(prompt(2, 3))
        assert lease.hit_blocks.tolist() == []
        assert lease.hit.total == 0
        other.release()
        lease.release()


async def test_ids_do_not_change_the_order_of_eviction():
    async with Cache(device_blocks=4, host_blocks=0) as cache:
        await cache.fill(prompt(1, 1), prompt(2, 1))
        old, young = cache.engine.match(prompt(1, 1)), cache.engine.match(prompt(2, 1))
        for _ in range(3):
            assert len(old.hit_blocks) == 1
        assert await cache.engine.evict(1) == 1
        assert (len(old.hit_blocks), len(young.hit_blocks)) == (0, 1)
        old.release()
        young.release()


async def test_preempted_lease_matches_again_and_a_swapped_one_has_no_device_blocks():
    async with Cache(device_blocks=4, host_blocks=8, write_policy="none") as cache:
        lease = await cache.serve(prompt(1, 3))
        table = lease.block_table
        await lease.preempt()
        assert lease.hit_blocks.tolist() == table[:3].tolist()
        await lease.resume(13)
        await lease.layers.wait_all()
        cache.compute(lease, prompt(1, 3))
        swapping = asyncio.ensure_future(lease.preempt(swap=True))
        await spin()
        await cache.finish()
        await swapping
        assert lease.hit_blocks.tolist() == []
        lease.release()


async def test_released_leases_and_other_threads_are_refused():
    async with Cache(host_blocks=0) as cache:
        lease = cache.engine.match(prompt(1, 1))
        errors: list[BaseException] = []

        def read() -> None:
            try:
                lease.hit_blocks  # noqa: B018
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert len(errors) == 1
        lease.release()
        with pytest.raises(LeaseError, match="released at"):
            lease.hit_blocks  # noqa: B018
