"""verify="checksum": changed bytes are detected, named in the error, and never served."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Hit
from aiokv.errors import DeviceError, TransferError
from aiokv.testing import ManualDevice, ManualEvent, spin
from tests.harness.cache import Cache, prompt
from tests.harness.served import Served, computed, held, resumed, swapped_out

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3, 4, 5, 6, 7]


def verified(**config) -> Served:
    return Served(verify="checksum", **config)


def corrupt(served: Served, host_id: int, layer: int = 0) -> None:
    piece, _ = served.engine.regions.layer_pieces(layer)
    served.device.arena.blocks[host_id, piece.host_offset_bytes + 3] ^= 0x10


async def onloading(served: Served):
    lease = served.engine.match(A, owner="req-7")
    await lease.allocate(7)
    (copy,) = served.device.onloads
    return lease, copy


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("layer", [0, 1])
async def test_corrupted_host_block_is_named_and_not_served(bad, layer):
    async with verified() as served:
        await served.to_host(A)
        lease, copy = await onloading(served)
        host_id, device_id = copy.host_ids[bad], copy.device_ids[bad]
        corrupt(served, host_id, layer)
        waiting = [asyncio.create_task(lease.layers.wait(i)) for i in (0, 1)]
        copy.complete(1)
        await spin(20)
        assert not any(task.done() for task in waiting)
        copy.complete(0)
        await served.settle()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(error, TransferError) for error in results)
        message = str(results[0])
        assert f"host block {host_id}, onloaded to device block {device_id}" in message
        assert "req-7" in message
        assert lease.recompute_from() == 2 * bad
        assert served.engine.match(A).hit == Hit(2 * bad, 0)
        served.check(lease, A, 2 * bad)
        served.compute(lease, A, 2 * bad)
        lease.commit(7)
        lease.release()
        await served.complete_offloads()
        await served.engine.evict(8)
        lease, copy = await onloading(served)
        copy.complete_all()
        await lease.layers.wait_all()  # the recomputed blocks are right
        served.check(lease, A, 6)
        lease.release()


async def test_intact_blocks_pass_verification():
    async with verified() as served:
        await served.to_host(A)
        for _ in range(2):
            lease, copy = await onloading(served)
            copy.complete_all()
            await lease.layers.wait_all()
            served.check(lease, A, 6)
            lease.release()
            await served.engine.evict(8)


async def test_device_block_changed_after_commit_is_detected():
    async with verified(write_policy="write_back") as served:
        await served.serve(A)
        table = (lease := served.engine.match(A)).try_allocate(7) and lease.block_table
        served.kv[1][table[1]] += 1  # an error in the runner writes into a shared block
        lease.release()
        evicting = asyncio.create_task(served.engine.evict(8))
        await served.complete_offloads()
        await evicting
        lease, copy = await onloading(served)
        copy.complete_all()
        with pytest.raises(TransferError, match="as committed"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 2
        lease.release()


async def test_load_is_done_only_after_its_bytes_were_verified():
    """A worker's thread asks without the loop, and computes with blocks of a load that is done."""
    async with verified() as served:
        await served.to_host(A)
        lease, copy = await onloading(served)
        corrupt(served, copy.host_ids[0])
        copy.complete_all()
        assert all(event.done for event in copy.layer_events)
        assert not lease.layers.is_done  # no pass of the loop has seen the events
        await served.settle()
        assert lease.layers.is_done
        with pytest.raises(TransferError, match="checksum"):
            lease.layers.raise_for_error()
        assert lease.recompute_from() == 0
        lease.release()


async def test_blocks_before_a_failed_copy_are_verified():
    async with verified() as served:
        await served.to_host(A)
        lease, copy = await onloading(served)
        corrupt(served, copy.host_ids[0])
        copy.fail(0, block=2)
        copy.complete(1)
        await served.settle()
        with pytest.raises(TransferError, match="checksum"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 0
        assert served.engine.match(A).hit == Hit(0, 0)
        lease.release()


async def test_a_swapped_table_is_verified_with_its_tail():
    async with verified(write_policy="none") as served:
        lease = await computed(served, A)
        before = held(served, lease)
        await swapped_out(served, lease)
        await served.engine.evict(8)
        await resumed(served, lease, 7)
        lease.layers.raise_for_error()
        assert np.array_equal(held(served, lease), before)
        await swapped_out(served, lease)
        await lease.resume(7)
        (copy,) = served.device.onloads  # only the tail: the rest is still on the device
        corrupt(served, copy.host_ids[-1])
        copy.complete_all()
        await served.settle()
        with pytest.raises(TransferError, match="checksum"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 6
        lease.release()


async def test_reused_block_id_does_not_keep_its_old_checksum():
    async with verified(device_blocks=4, write_policy="none") as served:
        await served.serve([21, 22, 23, 24, 25, 26, 27, 28])
        await served.engine.evict(4)
        lease = await computed(served, A)
        await swapped_out(served, lease)
        await served.engine.evict(4)
        await resumed(served, lease, 7)
        lease.layers.raise_for_error()
        lease.release()


async def test_fork_copies_the_checksums_of_its_blocks():
    async with verified(device_blocks=12) as served:
        for tokens in ([21, 22, 23, 24], [31, 32, 33, 34]):
            await served.serve(tokens)
        await served.complete_offloads()
        await served.engine.evict(12)
        parent = served.engine.match(A[:3])
        await parent.allocate(6)
        served.compute(parent, A[:6])
        parent.commit(6)  # before the tokens are named: one block is shared, two are not
        child = parent.fork()
        child.append(A[3:6])
        assert child.commit(6) == 2
        parent.release()
        child.release()
        await served.complete_offloads()
        await served.engine.evict(12)
        lease, copy = await onloading(served)
        copy.complete_all()
        await lease.layers.wait_all()
        served.check(lease, A, 6)
        lease.release()


async def commit_unnamed(served: Served, *, written: bool):
    """Return a lease that has committed A, of which it knows the first three token ids."""
    lease = served.engine.match(A[:3])
    await lease.allocate(7)
    served.compute(lease, A if written else A[:3])
    lease.commit(7)
    served.engine.step()
    return lease


async def test_blocks_that_are_named_after_their_commit_are_verified():
    """Sampled tokens can reach the host after their KV was computed."""
    async with verified() as served:
        lease = await commit_unnamed(served, written=True)
        lease.append(A[3:])
        assert lease.commit(7) == 2
        lease.release()
        await served.complete_offloads()
        await served.engine.evict(8)
        lease, copy = await onloading(served)
        copy.complete_all()
        await lease.layers.wait_all()
        assert lease.cached_tokens == 6
        served.check(lease, A, 6)
        lease.release()


async def test_blocks_that_are_written_after_their_commit_are_reported():
    """A swap or a fork may have copied them before: the copy has the wrong bytes then."""
    async with verified() as served:
        lease = await commit_unnamed(served, written=False)
        served.compute(lease, A, 2)
        lease.append(A[3:])
        assert lease.commit(7) == 2
        lease.release()
        await served.complete_offloads()
        await served.engine.evict(8)
        lease, copy = await onloading(served)
        copy.complete_all()
        with pytest.raises(TransferError, match="as committed"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 2
        lease.release()


async def test_checksums_are_computed_when_the_step_is_done():
    """KV that is committed in an open step may not be written yet."""
    served = verified(write_policy="none")
    served.device.computes_in_stream = True
    async with served:
        lease = served.engine.match(A)
        await lease.allocate(7)
        lease.commit(7)
        task = asyncio.create_task(lease.preempt(swap=True))
        await spin(3)
        served.compute(lease, A)  # the device computes the step only now
        for array in served.kv:
            array[lease.block_table[-1]] = 5
        event = ManualEvent()
        event.complete()
        served.engine.step(event)
        await served.complete_offloads()
        await task
        await served.engine.evict(8)
        await lease.resume(7)
        served.engine.step()
        await spin(2)
        served.device.complete_all()
        await served.settle()
        lease.layers.raise_for_error()
        served.check(lease, A, 6)
        assert (served.kv[0][lease.block_table[-1]] == 5).all()
        lease.release()


async def test_the_cpu_device_verifies_too():
    async with verified(manual=False) as served:
        await served.serve(A)
        await served.engine.drain()
        await served.engine.evict(8)
        await served.serve(A)
        await served.engine.evict(8)
        lease = await served.engine.match(A).allocate(7)
        async for _ in lease.layers:
            pass
        served.check(lease, A, 6)
        lease.release()


class FailingEvent(ManualEvent):
    def synchronize(self) -> None:
        raise RuntimeError("illegal address")


async def test_step_whose_event_fails_is_closed_by_the_next_step():
    device = ManualDevice()
    device.computes_in_stream = True
    async with Cache(device=device, verify="checksum", write_policy="write_through") as cache:
        lease = await cache.serve(prompt(1, 2))
        with pytest.raises(DeviceError, match="illegal address"):
            cache.engine.step(FailingEvent())
        await spin(2)
        assert not device.copies  # the blocks are not known to be computed
        cache.engine.step()
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 2
        lease.release()
        await cache.engine.evict(8)
        (await cache.engine.match(prompt(1, 2)).allocate(9)).release()
        await cache.finish()
