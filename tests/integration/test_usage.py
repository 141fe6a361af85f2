"""lease.usage: cached tokens by tier, computed blocks, and waiting times."""

from __future__ import annotations

import asyncio
import gc

import pytest

from aiokv.base.usage import Waits
from aiokv.errors import LeaseError, TransferError
from aiokv.testing import spin
from tests.harness.served import BLOCK_TOKENS, Served

PROMPT = [1, 2, 3, 4, 5, 6, 7]  # 3 full blocks and a partial one

pytestmark = pytest.mark.asyncio


async def test_device_hit_reports_no_waiting_time():
    async with Served() as served:
        async with served.engine.match(PROMPT) as lease:
            before = lease.usage
            assert (before.prompt_tokens, before.cached_tokens, before.computed_blocks) == (7, 0, 0)
            await lease.allocate(7)
            served.compute(lease, PROMPT)
            lease.commit(3)
            lease.commit(7)
            assert lease.usage.computed_blocks == 4
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            usage = lease.usage
            assert (usage.cached_device_tokens, usage.cached_host_tokens) == (6, 0)
            assert usage.cached_tokens == lease.cached_tokens == 6
            waits = usage.capacity_wait_seconds, usage.pending_wait_seconds, usage.onload_seconds
            assert waits == (None, None, None)
            kept = [x for x in gc.get_referents(lease) if isinstance(x, Waits)]
            assert kept == [], "nothing is kept for a lease that never waited"
            lease.commit(7)
            assert lease.usage.computed_blocks == 1
        with pytest.raises(LeaseError):
            _ = lease.usage


async def test_an_onload_counts_as_host_and_its_time_ends_with_it():
    async with Served() as served:
        await served.to_host(PROMPT)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            usage = lease.usage
            assert (usage.cached_device_tokens, usage.cached_host_tokens) == (0, 6)
            first, second = lease.usage.onload_seconds, lease.usage.onload_seconds
            assert first is not None
            assert second is not None
            assert 0 <= first < second
            served.device.complete_all()
            await lease.layers.wait_all()
            assert lease.usage.onload_seconds == lease.usage.onload_seconds is not None


async def test_cached_tokens_fall_when_the_onload_fails_and_rise_again_with_the_next_grant():
    async with Served() as served:
        await served.to_host(PROMPT)
        async with served.engine.match(PROMPT) as lease:
            await lease.allocate(7)
            served.device.onloads[0].fail_all(block=1)
            with pytest.raises(TransferError):
                await lease.layers.wait_all()
            await served.settle()
            usage = lease.usage
            assert (usage.cached_device_tokens, usage.cached_host_tokens) == (0, 2)
            ended = usage.onload_seconds
            assert lease.recompute_from() == 2
            served.compute(lease, PROMPT, 2)
            lease.commit(7)
            assert lease.usage.computed_blocks == 3
            await served.complete_offloads()
            await lease.preempt()
            assert lease.usage.cached_tokens == 0
            await lease.resume(7)
            usage = lease.usage
            assert (usage.cached_device_tokens, usage.cached_host_tokens) == (6, 0)
            assert usage.onload_seconds == ended, "the time waited remains"


async def test_resumed_table_counts_as_host_hit_and_generated_tokens_are_not_prompt_tokens():
    async with Served() as served, served.engine.match(PROMPT) as lease:
        await lease.allocate(8)
        served.compute(lease, [*PROMPT, 8])
        lease.append([8])
        lease.commit(8)
        await served.complete_offloads()
        await lease.preempt(swap=True)
        await served.engine.evict(4)
        await lease.resume(8)
        served.device.complete_all()
        await lease.layers.wait_all()
        usage = lease.usage
        assert lease.cached_tokens == 8
        assert (usage.prompt_tokens, usage.cached_tokens) == (7, 7)
        assert (usage.cached_device_tokens, usage.cached_host_tokens) == (0, 7)


async def test_fork_counts_the_blocks_of_its_parent_as_cached():
    async with Served() as served, served.engine.match(PROMPT) as parent:
        await parent.allocate(7)
        served.compute(parent, PROMPT)
        parent.commit(7)
        async with parent.fork() as child:
            usage = child.usage
            assert (usage.prompt_tokens, usage.cached_device_tokens) == (7, 7)
            assert usage.groups == {}, "attention only"
            assert (usage.cached_host_tokens, usage.computed_blocks) == (0, 0)


async def test_capacity_wait_is_counted_even_when_it_times_out():
    async with Served(device_blocks=4) as served:
        holder = served.engine.match(PROMPT)
        await holder.allocate(7)
        async with served.engine.match([9, 9]) as lease:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await lease.allocate(2)
            timed_out = lease.usage.capacity_wait_seconds
            assert timed_out is not None
            assert timed_out > 0  # uvloop ends short timeouts early
            waiting = asyncio.ensure_future(lease.allocate(2))
            await spin(2)
            holder.release()
            await waiting
            total = lease.usage.capacity_wait_seconds
            assert total is not None
            assert total > timed_out


async def test_wait_for_pending_blocks_is_counted_with_their_tokens():
    async with Served() as served:
        owner = served.engine.match(PROMPT)
        await owner.allocate(7)
        lease = served.engine.match(PROMPT)
        waiting = asyncio.ensure_future(lease.allocate(7, wait_pending=60))
        await spin(2)
        served.compute(owner, PROMPT)
        owner.commit(7)
        await waiting
        usage = lease.usage
        assert usage.pending_tokens == 3 * BLOCK_TOKENS
        assert usage.pending_wait_seconds is not None
        assert usage.pending_wait_seconds > 0
        assert (usage.cached_device_tokens, usage.capacity_wait_seconds) == (6, None)
        owner.release()
        lease.release()
