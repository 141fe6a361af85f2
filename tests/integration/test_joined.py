"""Transfers that several leases wait for: priority, and the leases that a failure affects."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Lease
from aiokv.errors import TransferError, UsageError
from aiokv.testing import spin
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.testing.manual import ManualStream
from tests.harness.served import Served

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3, 4, 5, 6, 7]


def prompt(number: int) -> list[int]:
    return [100 * number + i for i in range(5)]


async def with_busy_slots(served: Served, prompts: int) -> list[Lease]:
    """Put prompts on the host only; the onloads of the first two take the device's slots."""
    for number in range(prompts):
        await served.to_host(prompt(number))
    busy = [served.engine.match(prompt(number), owner="busy") for number in range(2)]
    for lease in busy:
        await lease.allocate(5)
    assert len(served.device.onloads) == 2
    return busy


@pytest.mark.parametrize("how", ["allocate", "resume"])
async def test_a_request_that_joins_a_prefetch_goes_before_later_requests(how: str) -> None:
    async with Served(device_blocks=16, host_blocks=32) as served:
        engine, device = served.engine, served.device
        busy = await with_busy_slots(served, 5)
        prefetch = asyncio.create_task(engine.prefetch(prompt(2)))
        await spin(2)
        later = [engine.match(prompt(3))]
        await later[0].allocate(5)
        user = engine.match(prompt(2), owner="user")
        if how == "resume":
            await user.preempt()
            await user.resume(5)
        else:
            await user.allocate(5)
        later.append(engine.match(prompt(4)))
        await later[1].allocate(5)
        assert engine.statistics().worker.attention.onload.queued == 3
        device.onloads[0].complete_all()
        await served.settle()
        device.onloads[1].complete_all()
        await served.settle()
        await asyncio.wait_for(user.layers.wait_all(), PATIENCE_SECONDS)
        assert not any(lease.layers.is_done for lease in later)
        device.complete_all()
        await served.settle()
        device.complete_all()
        await prefetch
        for lease in [*busy, user, *later]:
            lease.release()


@pytest.mark.parametrize("block", [1, 2])
async def test_gpu_wait_raises_only_failures_in_front_of_the_end_of_the_lease(block: int) -> None:
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as whole, served.engine.match([1, 2, 3, 4, 9]) as front:
            await whole.allocate(7)
            await front.allocate(5)
            served.device.onloads[0].fail_all(block=block)
            await served.settle()
            batch = served.engine.layers([front])
            for layers in (front.layers, batch):
                for gpu_wait in (
                    partial(layers.gpu_wait, 0, ManualStream()),
                    partial(layers.gpu_wait_all, ManualStream()),
                    layers.raise_for_error,
                ):
                    if block == 2:
                        gpu_wait()  # the first tokens need blocks 0 and 1
                        continue
                    with pytest.raises(TransferError) as caught:
                        gpu_wait()
                    expected = 0 if layers is batch else 2
                    assert caught.value.first_bad_token == expected
            with pytest.raises(TransferError):
                served.engine.layers([front, whole]).gpu_wait_all(ManualStream())
        await served.complete_offloads()


async def test_a_failing_copy_that_still_moves_is_waited_for() -> None:
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            (copy,) = served.device.onloads
            copy.fail(0, block=1)
            stream = ManualStream()
            lease.layers.gpu_wait_all(stream)
            assert stream.waits == [(copy, 0), (copy, 1)]
            with pytest.raises(TransferError):
                lease.layers.raise_for_error()
            copy.complete(1)
            await served.settle()
            with pytest.raises(TransferError) as caught:
                lease.layers.gpu_wait_all(stream)
            assert caught.value.first_bad_token == lease.recompute_from() == 2
        await served.complete_offloads()


async def test_every_wait_for_a_cancelled_transfer_raises() -> None:
    """Waits raise even in the pass of the cancellation, before its report."""
    async with Served(device_blocks=16, host_blocks=32) as served:
        busy = await with_busy_slots(served, 3)
        lease = served.engine.match(prompt(2))
        await lease.allocate(5)
        layers = lease.layers
        (counter,) = layers.counters
        assert counter.pending_layers == [0, 1]
        served.engine.inspect.parts.worker.plans.cancel(counter.transfer_id)
        for reported in (False, True):
            assert counter.is_done is reported
            with pytest.raises(TransferError, match="cancelled"):
                layers.gpu_wait(0, ManualStream())
            with pytest.raises(TransferError, match="cancelled"):
                layers.gpu_wait_all(ManualStream())
            with pytest.raises(TransferError, match="cancelled"):
                layers.raise_for_error()
            for wait in (layers.wait(0), layers.wait_all()):
                if reported:
                    with pytest.raises(TransferError, match="cancelled"):
                        await wait
                else:
                    wait.close()
            await spin(3)
        served.device.complete_all()
        await served.settle()
        for held in [*busy, lease]:
            held.release()


async def test_without_tensors_waiters_resume_after_the_report() -> None:
    config = CacheConfig(device_blocks=16, host_blocks=16, block_tokens=4)
    async with CacheEngine(config) as engine:
        lease = engine.match(np.arange(17))
        await lease.allocate(17)
        lease.commit(17)
        await lease.preempt(swap=True)
        await engine.evict(16)
        await lease.resume(17)
        assert not lease.layers.is_done
        await lease.layers.wait_all()
        lease.fork().release()
        await lease.preempt(swap=True)
        lease.release()


async def test_a_plan_that_the_worker_refuses_is_reported_as_failed() -> None:
    async with Served() as served:
        await served.to_host(A)
        controller = served.engine.inspect.parts.worker.plans
        submit = controller.submit

        def refuse(plan):
            raise UsageError("too many blocks for a message")

        controller.submit = refuse
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            with pytest.raises(TransferError, match="too many blocks"):
                lease.layers.gpu_wait_all(ManualStream())
            with pytest.raises(TransferError, match="too many blocks"):
                await lease.layers.wait_all()
            assert (lease.cached_tokens, lease.recompute_from()) == (0, 0)
            controller.submit = submit
            served.compute(lease, A)
            lease.commit(7)
        await served.complete_offloads()
        assert served.engine.check_invariants() == []


async def test_an_onload_into_blocks_that_are_being_saved_starts_after_the_save() -> None:
    """Two prompts replace each other on the device, and neither loses its bytes."""
    prompts = prompt(1), prompt(2)
    async with Served(device_blocks=3, write_policy="write_back") as served:
        device, saves = served.device, 0
        for round_number in range(3):
            for tokens in prompts:
                lease = served.engine.match(tokens)
                granting = asyncio.create_task(lease.allocate(5))
                await spin(3)
                while not granting.done():
                    saves += len(device.offloads)
                    saved = {i for copy in device.offloads for i in copy.device_ids.tolist()}
                    written = {i for copy in device.onloads for i in copy.device_ids.tolist()}
                    assert not saved & written
                    device.complete_all()
                    await spin(3)
                await granting
                device.complete_all()
                await lease.layers.wait_all()
                assert lease.cached_tokens == (4 if round_number else 0)
                served.check(lease, tokens, lease.cached_tokens)
                served.compute(lease, tokens, lease.cached_tokens)
                lease.commit(5)
                lease.release()
        assert saves
