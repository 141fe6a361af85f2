"""Effects of transitions: an error of one of them loses none of the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.engine.transfers import Transfers
from aiokv.errors import AllocateTimeout, TransferError
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.testing import spin
from tests.harness.cache import Cache, prompt
from tests.harness.external import ExternalCache

if TYPE_CHECKING:
    from aiokv import Lease

A, B = prompt(1, 2), prompt(2, 2)

pytestmark = pytest.mark.asyncio


async def test_each_first_assign_of_a_lease_shows_its_own_onload():
    async with ExternalCache() as cache:
        await cache.store(A, range(3))
        lease = await cache.begin(A, [4, 5, 6])
        await cache.finish()
        for ids in ([7, 8, 9], [10, 11, 12]):
            await lease.preempt()
            await lease.allocate(9)
            lease.assign(ids)
            assert not lease.layers.is_done
            assert lease.layers.transfer_ids == lease.transfer_ids
            await cache.finish()
            cache.check(lease, A)
        lease.release()


async def full_device_with_host_copies(cache: Cache) -> Lease:
    """Bring the blocks of A to the host, and return a lease that holds all device blocks."""
    await cache.fill(A)
    await cache.finish()
    await cache.engine.evict(8)
    holder = cache.engine.match(prompt(3, 8)[:-1])
    assert holder.try_allocate(32)
    return holder


async def test_grant_in_the_pass_of_its_deadline_shows_its_layers():
    """The deadline has already cancelled the wait, but the lease is granted."""
    async with Cache(device_blocks=8, write_policy="write_through") as cache:
        holder = await full_device_with_host_copies(cache)
        lease = cache.engine.match(A)
        task = asyncio.create_task(lease.allocate(len(A), timeout=0.0))
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, holder.release)  # in the pass of the deadline, behind it
        await spin(5)
        assert task.result() is lease
        assert not lease.layers.is_done
        cache.device.complete_all()
        await lease.layers.wait_all()
        assert lease.cached_tokens == 8
        cache.check(lease, A)
        lease.release()


async def test_grant_in_the_pass_of_a_cancellation_is_taken_back():
    async with Cache(device_blocks=8, write_policy="write_through") as cache:
        holder = await full_device_with_host_copies(cache)
        lease = cache.engine.match(A)
        task = asyncio.create_task(lease.allocate(len(A)))
        await spin(2)
        task.cancel()
        holder.release()
        await asyncio.wait([task])
        assert task.cancelled()
        assert cache.engine.inspect.parts.scheduler.read.granted_leases == 0
        assert lease.layers.is_done
        lease.release()
        await cache.finish()
        assert cache.statistics.attention.device.in_flight == 0


async def test_applied_effects_are_not_returned_again():
    async with Cache(device_blocks=8, host_blocks=0) as cache:
        lease = await cache.serve(A)
        task = asyncio.create_task(cache.serve(prompt(3, 7)))
        await spin(2)
        lease.release()
        (await task).release()
        other = cache.engine.match(B)
        _, effects = cache.engine.inspect.parts.scheduler.stop_wait_pending(other.id)
        assert effects is NO_EFFECTS
        other.release()


async def test_device_hits_leave_no_effects(monkeypatch):
    """A request whose prompt is on the device costs no object of effects."""
    async with Cache(device_blocks=8, host_blocks=0) as cache:
        await cache.fill(A)
        scheduler = cache.engine.inspect.parts.scheduler
        returned = {}

        def noting(name, transition):
            def call(*args, **kwargs):
                value, effects = transition(*args, **kwargs)
                returned[name] = effects
                return value, effects

            return call

        for name in ("match", "allocate", "commit", "release"):
            monkeypatch.setattr(scheduler, name, noting(name, getattr(scheduler, name)))
        (await cache.serve(A)).release()
        assert set(returned) == {"match", "allocate", "commit", "release"}
        assert all(effects is NO_EFFECTS for effects in returned.values())


async def test_wait_whose_layers_were_not_shown_ends_with_its_deadline():
    """Without its layers, a lease would read blocks before they arrive."""
    async with Cache(device_blocks=8, write_policy="write_through") as cache:
        holder = await full_device_with_host_copies(cache)
        lease = cache.engine.match(A)
        task = asyncio.create_task(lease.allocate(len(A), timeout=0.0))

        def fail(*_: object) -> None:
            raise ValueError("no view")

        def free() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Transfers, "view", fail)
                holder.release()

        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, free)  # in the pass of the deadline, behind it
        with pytest.raises(AllocateTimeout):
            await task
        assert not cache.engine.inspect.parts.scheduler.read.is_granted(lease.id)
        assert lease.layers.is_done
        assert await lease.allocate(len(A)) is lease
        assert not lease.layers.is_done
        cache.device.complete_all()
        await lease.layers.wait_all()
        cache.check(lease, A)
        lease.release()


async def test_plan_that_the_worker_cannot_take_fails_and_blocks_no_later_call(monkeypatch):
    """An effect that raised in every later transition would stop the whole engine."""
    async with Cache(write_policy="write_through") as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.engine.evict(8)

        def broken(plan):
            raise RuntimeError("no room for the plan")

        with monkeypatch.context() as patch:
            patch.setattr(cache.engine.inspect.parts.worker.plans, "submit", broken)
            lease = await cache.engine.match(A).allocate(len(A))
        with pytest.raises(TransferError, match="no room for the plan"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 0
        lease.release()
        (await cache.serve(A)).release()
        await cache.finish()
