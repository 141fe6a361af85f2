"""I7: cancellation at every await, and in the pass of a grant, leaks no blocks."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiokv import Hit
from aiokv.testing import spin
from tests.harness.closing import complete_during
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_cancellation_in_the_pass_of_the_grant_returns_the_blocks(cancel_first):
    """In both orders the waiter holds no blocks and the next waiter gets them."""
    async with Served(device_blocks=4) as served:
        holder, first, second = (served.engine.match([i]) for i in range(3))
        await holder.allocate(8)
        tasks = [asyncio.create_task(x.allocate(8)) for x in (first, second)]
        await spin(2)
        if cancel_first:
            tasks[0].cancel()
            holder.release()
        else:
            holder.release()
            tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        await tasks[1]
        assert first.num_tokens == 0
        assert second.num_tokens == 8
        second.release()
        assert first.try_allocate(8)  # it may try again
        first.release()
        assert served.engine.statistics().attention.device.free == 4


async def test_cancelled_grant_cancels_its_onload():
    async with Served(device_blocks=4) as served:
        await served.to_host(A)
        holder, lease = served.engine.match([9]), served.engine.match(A)
        await holder.allocate(8)
        task = asyncio.create_task(lease.allocate(7))
        await spin(2)
        holder.release()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert lease.layers.is_done
        lease.release()
        served.device.complete_all()
        await served.settle()


async def test_cancelled_waiters_of_layers_only_detach():
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as lease:
            await lease.allocate(7)
            task = asyncio.create_task(lease.layers.wait(1))
            await spin(2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            served.device.complete_all()
            await lease.layers.wait_all()
            served.check(lease, A, 6)


@pytest.mark.parametrize("call", ["prefetch", "reset", "drain"])
async def test_cancelled_engine_calls_leave_the_transfer_alone(call):
    async with Served() as served:
        await served.to_host(A)
        lease = served.engine.match(A)
        await lease.allocate(7)
        args = [A] if call == "prefetch" else []
        task = asyncio.create_task(getattr(served.engine, call)(*args))
        await spin(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert served.engine.check_invariants() == []
        served.device.complete_all()
        await lease.layers.wait_all()
        served.check(lease, A, 6)
        lease.release()
        assert served.engine.match(A).hit == (Hit(0, 0) if call == "reset" else Hit(6, 0))


@pytest.mark.parametrize("seed", range(6))
async def test_a_storm_of_cancellations_ends_with_full_pools(seed):
    chance = random.Random(seed)
    async with Served(device_blocks=6, host_blocks=8) as served:

        async def request(tokens: list[int]) -> None:
            async with served.engine.match(tokens) as lease:
                await lease.allocate(len(tokens), priority=chance.randint(0, 1))
                await lease.layers.wait_all()
                served.check(lease, tokens, lease.cached_tokens)
                await spin(chance.randint(0, 2))
                served.compute(lease, tokens, lease.cached_tokens)
                lease.commit(len(tokens))

        tasks: list[asyncio.Task[None]] = []
        for _ in range(120):
            tokens = [chance.randint(0, 1) for _ in range(chance.randint(1, 11))]
            tasks.append(asyncio.create_task(request(tokens)))
            if chance.random() < 0.5:
                chance.choice(tasks).cancel()
            if chance.random() < 0.5 and served.device.copies:
                chance.choice(served.device.copies).complete_all()
            await spin(chance.randint(0, 2))
            assert served.engine.check_invariants() == []
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        while not gathered.done():
            served.device.complete_all()
            await asyncio.sleep(0)
        failures = [e for e in gathered.result() if e and not isinstance(e, asyncio.CancelledError)]
        assert failures == []
        await served.complete_offloads()
        await complete_during(served.engine.evict(99), served.device)
        await served.engine.evict(99, "host")
        statistics = served.engine.statistics()
        assert (
            statistics.attention.device.free,
            statistics.attention.host.free,
            statistics.leases,
        ) == (6, 8, 0)
