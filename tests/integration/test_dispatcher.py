"""Effects of transitions: an exception between two of them loses none of the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv import LeaseState
from aiokv.engine.transfers import Transfers
from aiokv.errors import AllocateTimeout, TransferError
from aiokv.scheduler.effects import NO_EFFECTS
from aiokv.scheduler.scheduler import CacheScheduler
from aiokv.testing import ManualDevice, ManualEvent, run_until_idle, spin
from tests.harness.cache import Cache, prompt
from tests.harness.foreign import ForeignCache

if TYPE_CHECKING:
    from aiokv import Lease

A, B = prompt(1, 2), prompt(2, 2)

pytestmark = pytest.mark.asyncio


class Interrupts:
    """Patch that raises KeyboardInterrupt in the first calls of a method, before or after it."""

    def __init__(self, method, *, count: int = 1, after: bool = False) -> None:
        self.method = method
        self.left = count
        self.after = after

    def __get__(self, owner, cls=None):
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        interrupted = self.left > 0
        self.left -= interrupted
        if interrupted and not self.after:
            raise KeyboardInterrupt
        value = self.method(*args, **kwargs)
        if interrupted:
            raise KeyboardInterrupt
        return value


@pytest.mark.parametrize("after", [False, True])
async def test_plan_whose_submission_is_interrupted_is_submitted_once(monkeypatch, after):
    async with Cache(write_policy="write_through") as cache:
        lease = await cache.serve(A)
        submit = Interrupts(cache.engine.worker.submit, after=after)
        monkeypatch.setattr(cache.engine.worker, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            await cache.engine.drain()
        assert submit.left == 0
        await cache.finish()
        lease.release()
        statistics = cache.statistics
        assert (statistics.attention.device.in_flight, statistics.attention.host.in_flight) == (
            0,
            0,
        )
        assert statistics.attention.offloaded_blocks == 2
        await cache.engine.evict(8)
        assert cache.hit(A) == (0, 2)


@pytest.mark.parametrize("after", [False, True])
async def test_lease_whose_assign_is_interrupted_is_not_granted(monkeypatch, after):
    """Its layers are not known: the caller would read blocks that have not arrived."""
    async with ForeignCache() as cache:
        await cache.store(A, range(3))
        lease = cache.engine.match(A)
        await lease.allocate(9)
        submit = Interrupts(cache.engine.worker.submit, after=after)
        monkeypatch.setattr(cache.engine.worker, "submit", submit)
        with pytest.raises(KeyboardInterrupt):
            lease.assign([4, 5, 6])
        assert submit.left == 0
        assert lease.state is LeaseState.MATCHED
        await cache.finish()
        assert lease.is_idle
        await lease.allocate(9)
        lease.assign([7, 8, 9])
        assert not lease.layers.is_done
        await cache.finish()
        cache.check(lease, A)
        lease.release()


async def test_each_first_assign_of_a_lease_shows_its_own_onload():
    async with ForeignCache() as cache:
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


async def test_interrupt_in_front_of_a_submission_does_not_lose_the_plan(monkeypatch):
    async with Cache(write_policy="write_through") as cache:
        lease = await cache.serve(A)
        interrupts = Interrupts(Transfers.submit)
        monkeypatch.setattr(Transfers, "submit", interrupts)
        with pytest.raises(KeyboardInterrupt):
            await cache.engine.drain()
        assert interrupts.left == 0
        await cache.finish()
        lease.release()
        statistics = cache.statistics
        assert (statistics.attention.device.in_flight, statistics.attention.host.in_flight) == (
            0,
            0,
        )
        assert statistics.attention.offloaded_blocks == 2


async def test_interrupt_between_two_grants_grants_both():
    """The next transition of any kind grants the second lease."""
    async with Cache(device_blocks=8, write_policy="write_through") as cache:
        await cache.fill(A, B)
        await cache.finish()
        await cache.engine.evict(8)
        holder = cache.engine.match(prompt(3, 8)[:-1])
        assert holder.try_allocate(32)
        leases = [cache.engine.match(tokens) for tokens in (A, B)]
        tasks = [asyncio.create_task(lease.allocate(len(A))) for lease in leases]
        await spin(2)
        assert cache.statistics.waiting == 2
        submit = Interrupts(cache.engine.worker.submit)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache.engine.worker, "submit", submit)
            with pytest.raises(KeyboardInterrupt):
                holder.release()
        assert submit.left == 0
        other = cache.engine.match(prompt(4, 1))
        other.release()
        await run_until_idle(lambda: all(task.done() for task in tasks))
        cache.device.complete_all()
        for lease, tokens in zip(leases, (A, B), strict=True):
            await lease.layers.wait_all()
            assert lease.cached_tokens == 8
            cache.check(lease, tokens)
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
        assert cache.engine.scheduler.read.granted_leases == 0
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
        _, effects = cache.engine.scheduler.stop_wait_pending(other.id)
        assert effects is NO_EFFECTS
        other.release()


async def test_device_hits_leave_no_effects(monkeypatch):
    """A request whose prompt is on the device costs no object of effects."""
    async with Cache(device_blocks=8, host_blocks=0) as cache:
        await cache.fill(A)
        scheduler = cache.engine.scheduler
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

        def free() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Transfers, "view", Interrupts(Transfers.view))
                with pytest.raises(KeyboardInterrupt):
                    holder.release()

        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, free)  # in the pass of the deadline, behind it
        with pytest.raises(AllocateTimeout):
            await task
        assert not cache.engine.scheduler.read.is_granted(lease.id)
        assert lease.layers.is_done
        assert await lease.allocate(len(A)) is lease
        assert not lease.layers.is_done
        cache.device.complete_all()
        await lease.layers.wait_all()
        cache.check(lease, A)
        lease.release()


@pytest.mark.parametrize("after", [False, True])
async def test_interrupt_after_a_cancellation_does_not_lose_the_answer(monkeypatch, after):
    """Without the worker's answer, the blocks of the transfer would never be free again."""
    prompts = [prompt(seed, 2) for seed in (1, 2, 3)]
    async with Cache(device_blocks=16, write_policy="write_through") as cache:
        await cache.fill(*prompts)
        await cache.finish()
        await cache.engine.evict(16)
        *others, lease = [cache.engine.match(tokens) for tokens in prompts]
        for each in (*others, lease):
            assert each.try_allocate(9)
        complete = Interrupts(CacheScheduler.complete, after=after)
        with monkeypatch.context() as patch:
            patch.setattr(CacheScheduler, "complete", complete)
            with pytest.raises(KeyboardInterrupt):
                lease.release()  # the device has no room for a third onload: it is cancelled
        assert complete.left == 0
        await spin(2)
        assert cache.statistics.attention.device.in_flight == 4
        lease = await cache.engine.match(prompts[2]).allocate(9)
        await cache.finish()
        await lease.layers.wait_all()
        cache.check(lease, prompts[2])
        for each in (*others, lease):
            each.release()


@pytest.mark.parametrize("after", [False, True])
async def test_interrupt_while_a_step_is_closed_does_not_stop_later_steps(monkeypatch, after):
    """Blocks that are committed after the interrupt wait for the event of a later step."""
    device = ManualDevice()
    device.computes_in_stream = True
    async with Cache(device=device, write_policy="write_through") as cache:
        first = await cache.serve(A)
        close = Interrupts(CacheScheduler.close_step, after=after)
        monkeypatch.setattr(CacheScheduler, "close_step", close)
        with pytest.raises(KeyboardInterrupt):
            cache.engine.step()
        second = await cache.serve(B)
        event = ManualEvent()
        cache.engine.step(event)
        await spin(3)
        assert all(copy.after is event for copy in device.copies)
        event.complete()
        await cache.finish()
        assert cache.statistics.attention.offloaded_blocks == 4
        first.release()
        second.release()


async def test_plan_that_the_worker_cannot_take_fails_and_blocks_no_later_call(monkeypatch):
    """An effect that raised in every later transition would stop the whole engine."""
    async with Cache(write_policy="write_through") as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.engine.evict(8)

        def broken(plan):
            raise MemoryError("no memory for the plan")

        with monkeypatch.context() as patch:
            patch.setattr(cache.engine.worker, "submit", broken)
            lease = await cache.engine.match(A).allocate(len(A))
        with pytest.raises(TransferError, match="no memory for the plan"):
            await lease.layers.wait_all()
        assert lease.recompute_from() == 0
        lease.release()
        (await cache.serve(A)).release()
        await cache.finish()
