"""Preemption with swap: the table is restored byte for byte, or the lease keeps it (I3, I4, I7)."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Hit
from aiokv.errors import (
    ClosedError,
    DeviceError,
    LeaseError,
    RequestTooLarge,
    TransferError,
    WouldBlock,
)
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.closing import complete_during
from tests.harness.served import Served, begin, computed, held, resumed, swapped_out, wipe

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3, 4, 5, 6, 7]  # three full blocks and a partial one
B = [11, 12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("policy", ["none", "write_through", "write_back"])
@pytest.mark.parametrize("tokens", [A, A[:6], A[:1]])
async def test_resume_restores_the_whole_table(policy, tokens):
    async with Served(write_policy=policy) as served:
        lease = await computed(served, tokens)
        before = held(served, lease)
        await swapped_out(served, lease)
        statistics = served.engine.statistics()
        assert statistics.attention.device.leased == 0
        assert statistics.attention.device.free + statistics.evictable_blocks == 8
        await complete_during(served.engine.evict(8), served.device)
        wipe(served)
        await resumed(served, lease, len(tokens) + 3)
        lease.layers.raise_for_error()
        assert lease.cached_tokens == len(tokens)
        assert np.array_equal(held(served, lease, before.shape[1]), before)
        served.compute(lease, tokens, len(tokens) // 2 * 2)
        lease.release()


async def test_swap_of_backed_up_blocks_moves_the_tail_only():
    async with Served() as served:
        lease = await computed(served, A)
        await served.complete_offloads()
        task = await begin(served, lease.preempt(swap=True))
        (copy,) = served.device.offloads
        assert copy.device_ids.tolist() == lease.block_table[3:].tolist()
        copy.complete_all()
        await task
        await resumed(served, lease, 7)  # the shared blocks are on the device still
        assert lease.hit == Hit(6, 0)
        served.check(lease, A, 6)
        lease.release()


async def test_swap_waits_for_a_backup_of_its_blocks_and_saves_those_that_failed():
    async with Served() as served:
        lease = await computed(served, A)
        await spin(2)
        (backup,) = served.device.offloads
        task = await begin(served, lease.preempt(swap=True))
        assert served.device.offloads == [backup]
        before = held(served, lease)
        backup.fail_all(block=1)
        await served.settle()
        (copy,) = served.device.offloads
        assert len(copy.device_ids) == 3
        copy.complete_all()
        await served.settle()
        await task
        await served.engine.evict(8)
        wipe(served)
        await resumed(served, lease, 7)
        assert np.array_equal(held(served, lease), before)
        lease.release()


async def test_swap_to_a_full_host_changes_nothing():
    async with Served(host_blocks=6, write_policy="none") as served:
        first = await computed(served, A)
        await swapped_out(served, first)
        second = await computed(served, B)
        before = served.engine.inspect.dump()
        with pytest.raises(WouldBlock, match="host"):
            await second.preempt(swap=True)
        after = served.engine.inspect.dump()
        assert after == before
        served.check(second, B, 6)
        await second.preempt()  # without swap it is always freed
        assert served.engine.match(B).hit == Hit(6, 0)
        second.release()
        first.release()


async def test_refused_swap_evicts_no_host_block():
    async with Served(host_blocks=4) as served:
        await served.to_host([21, 22, 23])
        lease = await computed(served, [*A, 8, 9], write=False)
        with pytest.raises(WouldBlock):
            await lease.preempt(swap=True)
        assert served.engine.match([21, 22, 23]).hit == Hit(0, 2)
        lease.truncate(8)
        await swapped_out(served, lease)  # four blocks: it takes the cached one's place
        assert served.engine.match([21, 22, 23]).hit == Hit(0, 0)
        lease.release()


@pytest.mark.parametrize("refused", [False, True])
async def test_a_swap_that_fails_leaves_the_lease_its_blocks(refused):
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        before, table = held(served, lease), lease.block_table.tolist()
        if refused:
            served.device.refuse = DeviceError("no more copies")
        task = await begin(served, lease.preempt(swap=True))
        if not refused:
            served.device.offloads[0].fail_all(block=2)
            await served.settle()
        with pytest.raises(TransferError, match="keeps"):
            await task
        assert lease.block_table.tolist() == table
        assert np.array_equal(held(served, lease), before)
        served.engine.extend([lease], 1)
        lease.append([8])
        served.compute(lease, [*A, 8], 6)
        assert lease.commit(8) == 1
        await swapped_out(served, lease)  # the next try succeeds
        lease.release()


async def test_calls_on_a_lease_are_refused_while_its_table_moves():
    async with Served(write_policy="none") as served:
        lease = served.engine.match(A)
        await lease.allocate(9)
        served.compute(lease, A)
        lease.commit(5)
        task = await begin(served, lease.preempt(swap=True))
        for call in (
            lambda: lease.commit(7),
            lambda: lease.truncate(6),
            lambda: served.engine.extend([lease], 1),
            lease.fork,
        ):
            with pytest.raises(LeaseError):
                call()
        with pytest.raises(LeaseError):
            await lease.preempt(swap=True)
        await served.complete_offloads()
        await task
        for call in (lambda: lease.commit(5), lambda: lease.truncate(5), lease.fork):
            with pytest.raises(LeaseError):
                call()
        with pytest.raises(LeaseError, match="5 computed"):
            await lease.resume(4)
        await resumed(served, lease, 7)
        assert lease.cached_tokens == 5  # uncommitted positions were not copied
        lease.release()


async def test_release_while_the_table_is_swapped_out():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        tail = lease.block_table[3:].tolist()
        task = await begin(served, lease.preempt(swap=True))
        lease.release()
        assert served.engine.check_invariants() == []
        other = served.engine.match(B)
        assert not other.try_allocate(16)  # I3: the copy owns the tail's id until it ends
        assert served.device.offloads[0].device_ids[3:].tolist() == tail
        await served.complete_offloads()
        await task
        assert other.try_allocate(16)
        other.release()
        assert served.engine.statistics().leases == 0


async def test_cancelled_preempt_completes_its_swap_for_all_waiters():
    async with Served(write_policy="none", salt_quota_blocks=4) as served:
        lease = await computed(served, A)
        quiet = asyncio.create_task(served.engine.quiesce(timeout=PATIENCE_SECONDS))
        task = await begin(served, lease.preempt(swap=True))
        waiting = await begin(served, served.engine.match(B).allocate(7))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not quiet.done()
        await served.complete_offloads()
        await quiet
        served.engine.resume()
        async with await waiting as other:  # the quota is free again
            served.compute(other, B)
        await resumed(served, lease, 7)
        assert lease.cached_tokens == 7
        lease.release()


async def test_preempt_without_swap_drops_a_swap_under_way():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        task = await begin(served, lease.preempt(swap=True))
        await lease.preempt()
        await served.complete_offloads()
        await task
        assert served.engine.match(A).hit == Hit(6, 0)
        await resumed(served, lease, 7)
        assert lease.cached_tokens == 6
        lease.release()
        await swapped_out(served, lease := await computed(served, B))
        await lease.preempt()  # drops the host copies
        await served.engine.evict(8)
        await served.engine.evict(16, tier="host")
        assert served.engine.statistics().attention.host.free == 16
        lease.release()


@pytest.mark.parametrize("when", ["moving", "swapped", "resuming"])
@pytest.mark.parametrize("tokens", [A, A[:1]])
async def test_reset_discards_a_swapped_table(when, tokens):
    async with Served(write_policy="none") as served:
        lease = await computed(served, tokens)
        task = await begin(served, lease.preempt(swap=True))
        if when == "moving":
            resetting = await begin(served, served.engine.reset())
            await served.complete_offloads()
            await resetting
        await served.complete_offloads()
        await task
        if when == "swapped":
            await served.engine.reset()
        if when != "resuming":
            assert served.engine.statistics().attention.device.free == 8
            assert served.engine.statistics().attention.host.free == 16
        else:
            await served.engine.evict(8)
        await lease.resume(8)
        if when == "resuming":
            resetting = await begin(served, served.engine.reset())
            served.device.complete_all()
            await resetting
            assert lease.cached_tokens == len(tokens)
        else:
            assert lease.cached_tokens == 0
        lease.append([9] * (8 - len(tokens)))
        served.compute(lease, [*tokens, *[9] * (8 - len(tokens))], lease.cached_tokens)
        published = lease.commit(8)
        assert published == (0 if when == "resuming" else 4)  # no KV from before the reset
        lease.release()


@pytest.mark.parametrize("moving", ["out", "in"])
async def test_close_while_the_table_is_swapped_out(moving):
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        task = await begin(served, lease.preempt(swap=True))
        if moving == "in":
            await served.complete_offloads()
            await task
            await served.engine.evict(8)
            await lease.resume(7)
        closing = await begin(served, served.engine.aclose(0.0))
        assert not closing.done()  # memory is not freed under a copy
        served.device.complete_all()
        await closing
        await task
        with pytest.raises(ClosedError):
            await lease.preempt(swap=True)
        lease.release()


async def test_queued_swaps_fail_when_the_engine_closes():
    async with Served(write_policy="none", device_blocks=12) as served:
        leases = [await computed(served, [i, i, i]) for i in range(1, 4)]
        tasks = [await begin(served, lease.preempt(swap=True)) for lease in leases]
        assert len(served.device.offloads) == 2
        closing = await begin(served, served.engine.aclose(0.0))
        served.device.complete_all()
        await closing
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), type(None), TransferError]
        for lease in leases:
            lease.release()


async def test_resume_joins_the_transfer_of_another_lease():
    async with Served() as served:
        lease = await computed(served, A)
        before = held(served, lease)
        await swapped_out(served, lease)
        await served.engine.evict(8)
        wipe(served)
        other = served.engine.match(A[:5])
        await other.allocate(5)
        await lease.resume(7)
        theirs, ours = served.device.onloads
        assert theirs.device_ids.tolist() == lease.block_table[:2].tolist()
        assert ours.device_ids.tolist() == lease.block_table[2:].tolist()
        other.release()  # submitted: it ends as cached blocks
        waiting = await begin(served, lease.layers.wait_all())
        ours.complete_all()
        await served.settle()
        assert not waiting.done()
        theirs.complete_all()
        await waiting
        assert np.array_equal(held(served, lease), before)
        lease.release()


@pytest.mark.parametrize(("bad", "first_bad"), [(0, 0), (2, 4), (3, 6)])
async def test_failed_resume_reports_the_first_token_to_recompute(bad, first_bad):
    async with Served(write_policy="none") as served:
        tokens = [*A, 8, 9]  # 9 positions, 5 blocks; only A is named: 2 blocks of tail
        lease = served.engine.match(A)
        await lease.allocate(9)
        served.compute(lease, tokens)
        lease.commit(9)
        await swapped_out(served, lease)
        await served.engine.evict(8)
        wipe(served)
        await lease.resume(10)
        (copy,) = served.device.onloads
        copy.fail(1, block=bad)
        copy.complete(0)
        await served.settle()
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert caught.value.first_bad_token == first_bad
        assert lease.cached_tokens == first_bad
        assert lease.recompute_from() == first_bad
        served.check(lease, tokens, first_bad)
        served.compute(lease, tokens, first_bad)
        lease.append([8])
        assert lease.commit(8) == 4 - min(first_bad // 2, 3)
        served.check(lease, tokens, 8)
        assert served.engine.match(tokens).hit == Hit(8, 0)
        lease.release()
        assert served.engine.statistics().attention.host.free == 16 - (
            0 if bad == 0 else min(bad, 3)
        )


async def test_release_while_the_table_is_swapped_in():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        await swapped_out(served, lease)
        await served.engine.evict(8)
        await lease.resume(7)
        (copy,) = served.device.onloads
        lease.release()
        assert served.engine.check_invariants() == []
        assert served.engine.statistics().attention.device.free == 4
        copy.complete_all()
        await served.settle()
        assert served.engine.match(A).hit == Hit(6, 0)
        assert served.engine.statistics().attention.host.free == 13  # the tail's copy was dropped


async def test_a_resume_in_line_can_be_cancelled():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        before = held(served, lease)
        await swapped_out(served, lease)
        async with served.engine.match([9] * 16) as other:
            await other.allocate(16)
            wipe(served)
            task = await begin(served, lease.resume(7))
            assert not lease.try_allocate(7)
            assert lease.pending_tokens == 0
            with pytest.raises(LeaseError, match="waits"):
                await lease.preempt()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await resumed(served, lease, 7)
        assert np.array_equal(held(served, lease), before)
        lease.release()


@pytest.mark.parametrize("on_device", [True, False])
async def test_a_resume_cancelled_in_the_pass_of_its_grant_can_be_repeated(on_device):
    """The cancelled resume had been granted, which once lost the table."""
    num_tokens = 10 if on_device else 16
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        before = held(served, lease)
        await swapped_out(served, lease)
        other, behind = served.engine.match([9] * num_tokens), served.engine.match([8])
        await other.allocate(num_tokens)
        if not on_device:
            wipe(served)
        task = await begin(served, lease.resume(7))
        next_in_line = await begin(served, behind.allocate(7))
        other.release()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await next_in_line
        behind.release()
        await resumed(served, lease, 7)
        assert np.array_equal(held(served, lease), before)
        lease.release()


async def test_a_resume_waits_in_line_and_later_requests_wait_behind_it():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        await swapped_out(served, lease)
        holders = [served.engine.match([9, i]) for i in range(2)]
        for holder in holders:
            await holder.allocate(8)
        small = served.engine.match([8])
        tasks = [await begin(served, c) for c in (lease.resume(16), small.allocate(1))]
        holders[0].release()
        await spin(3)
        assert not any(task.done() for task in tasks), "only the small request fits"
        holders[1].release()
        await tasks[0]
        assert lease.num_tokens == 16
        await served.settle()
        lease.release()
        await tasks[1]
        small.release()


async def test_close_in_the_pass_of_a_grant_grants_nothing():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        await swapped_out(served, lease)
        other = served.engine.match([9] * 16)
        await other.allocate(16)
        task = await begin(served, lease.resume(7))
        closing = asyncio.ensure_future(served.engine.aclose(0.0))
        other.release()  # the resume is granted, and the engine closes in the same pass
        with pytest.raises(ClosedError):
            await task
        assert served.engine.statistics().grants == 2
        await closing
        lease.release()


async def test_held_host_copies_stay_under_pressure():
    async with Served(host_blocks=8) as served:
        lease = await computed(served, A)
        before = held(served, lease)
        await swapped_out(served, lease)
        for i in range(30, 70, 10):  # each evicts and is backed up
            await complete_during(served.serve([i + j for j in range(8)]), served.device)
            await served.complete_offloads()
        await served.engine.evict(8, tier="host")
        await complete_during(served.engine.evict(8), served.device)
        wipe(served)
        assert lease.pending_tokens == 0
        await resumed(served, lease, 7)
        assert lease.cached_tokens == 7
        assert np.array_equal(held(served, lease), before)
        lease.release()
        await complete_during(served.engine.evict(8), served.device)
        assert await served.engine.evict(8, tier="host") > 0


@pytest.mark.parametrize("swap", [True, False])
async def test_lease_that_grew_into_the_reserve_can_be_resumed(swap):
    """The lease is granted when the device is otherwise unused, and cannot grow while it waits."""
    async with Served(write_policy="none", reserve_blocks=2) as served:
        lease = await computed(served, A)
        served.engine.extend([lease], 7)  # 7 of 8 blocks
        if swap:
            await swapped_out(served, lease)
        else:
            await lease.preempt()
        with pytest.raises(RequestTooLarge, match="reserve_blocks keeps 2"):
            await lease.resume(16)
        async with served.engine.match([9] * 4) as other:
            await other.allocate(4)
            assert not lease.try_allocate(14)
        await resumed(served, lease, 14)
        assert len(lease.block_table) == 7
        lease.release()


async def test_new_request_that_needs_the_reserve_is_refused():
    async with Served(write_policy="none", reserve_blocks=2) as served:
        lease = served.engine.match([1] * 14)
        with pytest.raises(RequestTooLarge, match="reserve_blocks keeps 2"):
            await lease.allocate(14)
        lease.release()


async def test_a_swapped_lease_that_is_dropped_frees_its_host_blocks():
    async with Served(write_policy="none") as served:
        lease = await computed(served, A)
        await swapped_out(served, lease)
        await served.engine.evict(8)
        with pytest.warns(ResourceWarning, match="never released"):
            del lease
        await spin(2)
        assert await served.engine.evict(8, tier="host") == 3
        assert served.engine.statistics().attention.host.free == 16


async def test_many_swapped_leases_share_a_prefix():
    """More leases than fit in 8 bits."""
    async with Served(host_blocks=400, write_policy="none", manual=False) as served:
        leases = []
        for i in range(300):
            lease = await computed(served, [1, 2, 3, i])
            await lease.preempt(swap=True)
            leases.append(lease)
        await served.engine.evict(8)
        assert served.engine.check_invariants() == []
        assert await served.engine.evict(400, tier="host") == 0
        for i, lease in enumerate(leases):
            await lease.resume(4)
            await lease.layers.wait_all()
            assert lease.cached_tokens == 4
            served.check(lease, [1, 2, 3, i], 4)
            lease.release()
