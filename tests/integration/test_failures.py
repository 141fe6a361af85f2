"""Failed copies are never served, and every joined lease learns where to recompute."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import Hit
from aiokv.errors import BrokenEngineError, DeviceError, LeaseError, TransferError
from aiokv.testing import ManualEvent, spin
from aiokv.testing.manual import ManualStream
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


async def test_failed_onload_shortens_the_hit_of_all_joined_leases():
    async with Served() as served:
        await served.to_host(A)
        async with (
            served.engine.match(A) as first,
            served.engine.match(A) as second,
            served.engine.match([1, 2, 9]) as front,
        ):
            for lease, num_tokens in ((first, 7), (second, 7), (front, 3)):
                await lease.allocate(num_tokens)
            table = first.block_table.tolist()
            waits = [asyncio.create_task(x.layers.wait(0)) for x in (first, second, front)]
            (copy,) = served.device.onloads
            copy.fail(1, block=1)
            copy.complete(0)
            await served.settle()
            results = await asyncio.gather(*waits, return_exceptions=True)
            assert [getattr(e, "first_bad_token", None) for e in results] == [2, 2, None]
            assert results[2] is None  # the blocks that it needs have arrived
            assert [x.cached_tokens for x in (first, second, front)] == [2, 2, 2]
            assert first.block_table.tolist() == table
            assert served.engine.match(A).hit == Hit(2, 0)  # never served
            assert first.commit(7) == 0
            assert first.recompute_from() == 2
            assert front.recompute_from() is None
            second.release()
            served.compute(first, A, 2)
            assert first.commit(7) == 2
            served.check(first, A, 6)
            assert served.engine.match(A).hit == Hit(6, 0)
        await served.complete_offloads()


async def test_accepted_failure_is_not_raised_in_later_steps():
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            served.device.onloads[0].fail_all(block=1)
            await served.settle()
            with pytest.raises(TransferError):
                served.engine.layers([lease]).raise_for_error()
            assert lease.recompute_from() == 2
            served.engine.layers([lease]).raise_for_error()
            await lease.layers.wait_all()
            assert lease.layers.transfer_ids == ()
            assert lease.usage.onload_seconds is not None
        await served.complete_offloads()


async def test_a_failed_backup_leaves_the_device_copy():
    async with Served() as served:
        await served.serve(A)
        await spin(2)
        served.device.offloads[0].fail_all(block=1)
        await served.settle()
        assert served.engine.match(A).hit == Hit(6, 0)
        await served.engine.evict(8)
        assert served.engine.match(A).hit == Hit(0, 2)
        assert served.engine.statistics().failed_blocks == 2


async def test_refused_submission_fails_the_transfer():
    async with Served() as served:
        await served.to_host(A)
        served.device.refuse = DeviceError("no more copies")
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            with pytest.raises(TransferError, match="no more copies") as caught:
                await lease.layers.wait_all()
            assert caught.value.first_bad_token == 0
            assert lease.recompute_from() == 0
            assert lease.cached_tokens == 0


async def test_failed_prefetch_raises_and_keeps_the_blocks_before_the_failure():
    async with Served() as served:
        await served.to_host(A)
        task = asyncio.create_task(served.engine.prefetch(A))
        await spin(2)
        served.device.onloads[0].fail_all(block=2)
        with pytest.raises(TransferError):
            await task
        assert served.engine.match(A).hit == Hit(4, 0)
        assert served.engine.statistics().leases == 1


async def test_broken_device_fails_all_waiters():
    served = Served(device_blocks=2)
    served.device.computes_in_stream = True
    async with served:
        holder = served.engine.match([1])
        await holder.allocate(4)
        waiter = served.engine.match([2])
        task = asyncio.create_task(waiter.allocate(1))
        await spin(2)
        event = ManualEvent()
        served.engine.step(event)
        event.query_error = RuntimeError("lost")
        with pytest.raises(BrokenEngineError, match="lost"):
            await task
        with pytest.raises(BrokenEngineError):
            served.engine.match([1])
        holder.release()
        waiter.release()


@pytest.mark.parametrize("how", ["refused", "failed"])
async def test_recompute_from_of_a_failed_transfer_in_flight_raises(how):
    """gpu_wait has raised, so a result without a failure would let the runner use those blocks."""
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as lease:
            if how == "refused":
                served.device.refuse = DeviceError("not today")
            await lease.allocate(7)
            stream = ManualStream()
            if how == "refused":
                with pytest.raises(TransferError):
                    lease.layers.gpu_wait_all(stream)
            else:
                lease.layers.gpu_wait_all(stream)
                served.device.onloads[0].fail(0, block=1)
                with pytest.raises(TransferError):
                    lease.layers.raise_for_error()
            with pytest.raises(LeaseError, match="await layers"):
                lease.recompute_from()
            assert lease.commit(7) == 0
            served.device.complete_all()
            with pytest.raises(TransferError):
                await lease.layers.wait_all()
            assert lease.recompute_from() == (0 if how == "refused" else 2)
            assert lease.recompute_from() is None
            served.compute(lease, A, 0)
            assert lease.commit(7)
        await served.complete_offloads()


@pytest.mark.parametrize("lost", [True, False])
async def test_a_device_that_is_lost_inside_a_transfer_breaks_the_engine(lost: bool):
    """A device error that fails only the transfer does not break the engine."""
    async with Served() as served:
        await served.to_host(A)
        lease = served.engine.match(A)
        await lease.allocate(7)
        if lost:
            served.device.failure = DeviceError("the GPU is gone", cuda_code=719)
        served.device.onloads[0].fail_all(block=1)
        with pytest.raises(TransferError):
            await lease.layers.wait_all()
        if lost:
            with pytest.raises(BrokenEngineError, match="the GPU is gone"):
                served.engine.match([1])
        else:
            served.engine.match([1]).release()
        lease.release()
