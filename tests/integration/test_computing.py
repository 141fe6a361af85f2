"""Compute in flight: blocks that a batch may still read or write are not reallocated."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from aiokv.errors import (
    BrokenEngineError,
    ClosedError,
    DeviceError,
    LeaseError,
    UnreleasedLeaseWarning,
    UsageError,
)
from aiokv.testing import ManualDevice, ManualEvent, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from aiokv.worker.poller import EventPoller
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

pytestmark = pytest.mark.asyncio

A, B = prompt(1, 3), prompt(2, 3)  # three blocks and a token each: four blocks


def in_stream() -> ManualDevice:
    device = ManualDevice()
    device.computes_in_stream = True
    return device


async def granted(cache: Cache, tokens: np.ndarray):
    lease = cache.engine.match(tokens, owner="request")
    assert lease.try_allocate(len(tokens))
    await lease.layers.wait_all()
    return lease


class Runner:
    """Model in a thread that writes into its blocks when the test allows it."""

    def __init__(self, cache: Cache, table: np.ndarray) -> None:
        self.cache = cache
        self.table = table
        self.may_write = threading.Event()

    def __call__(self) -> str:
        assert self.may_write.wait(PATIENCE_SECONDS)
        for array in self.cache.memory.tensors:
            array[self.table] = 99
        return "written"


async def test_a_cancelled_request_keeps_its_blocks_while_its_thread_writes():
    async with Cache(device_blocks=4) as cache:
        await cache.fill(B)
        await cache.finish()
        await cache.engine.evict(4)
        runners = []

        async def request() -> None:
            async with cache.engine.match(A) as lease:
                await lease.allocate(len(A))
                runners.append(Runner(cache, lease.block_table))
                with cache.engine.computing([lease]) as batch:
                    await batch.run(runners[0])

        client = asyncio.create_task(request())
        await spin(3)
        for _ in range(3):  # anyio cancels repeatedly
            client.cancel()
            await spin()
        assert client.cancelled()
        statistics = cache.statistics
        assert (statistics.leases, statistics.releasing_leases) == (0, 1)
        assert statistics.attention.device.free == 0
        assert cache.engine.check_invariants() == []
        waiting = asyncio.create_task(cache.serve(B))
        await spin(3)
        assert not waiting.done()
        runners[0].may_write.set()
        while cache.statistics.releasing_leases:
            await spin()
        while not waiting.done():
            cache.device.complete_all()
            await spin()
        (await waiting).release()  # the onloaded bytes equal the computed ones


async def test_run_returns_the_result_and_raises_the_error_of_its_function():
    async with Cache() as cache:
        lease = await granted(cache, A)
        with cache.engine.computing([lease]) as batch, ThreadPoolExecutor(1) as pool:
            assert await batch.run(divmod, 7, 2) == (3, 1)
            assert await batch.run(divmod, 7, 2, executor=pool) == (3, 1)
            with pytest.raises(ZeroDivisionError):
                await batch.run(divmod, 7, 0)
            assert not batch.done
        assert batch.done
        lease.release()
        assert cache.statistics.attention.device.free == 8


@pytest.mark.parametrize("how", ["release", "preempt", "truncate", "collect"])
async def test_blocks_that_a_lease_returns_during_a_batch_are_free_after_its_end(how, recwarn):
    async with Cache() as cache:
        lease = await granted(cache, A)
        table = lease.block_table.tolist()
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
        if how == "release":
            lease.release()
        elif how == "preempt":
            await lease.preempt()
        elif how == "truncate":
            lease.truncate(1)
        else:
            del lease
            gc.collect()
            await spin(2)
            assert recwarn.pop(UnreleasedLeaseWarning)
        assert cache.engine.check_invariants() == []
        other = cache.engine.match(B)
        assert not other.try_allocate(5 * BLOCK_TOKENS)
        assert other.try_allocate(4 * BLOCK_TOKENS)
        assert not set(other.block_table) & set(table)
        other.release()
        assert not batch.done
        work.set_result(None)
        await spin(2)
        assert batch.done
        assert cache.statistics.attention.device.free == (7 if how == "truncate" else 8)
        if how in ("preempt", "truncate"):
            lease.release()
        assert cache.statistics.releasing_leases == 0


async def test_kept_future_of_an_ended_batch_keeps_no_lease(recwarn):
    work: ThreadFuture[None] = ThreadFuture()  # of a pool, kept by the user

    async def request() -> None:
        lease = cache.engine.match(A)
        await lease.allocate(len(A))
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
            await asyncio.Event().wait()

    async with Cache() as cache:
        task = asyncio.create_task(request())
        await spin(2)
        task.cancel()
        await asyncio.wait([task])
        del task
        work.set_result(None)
        await spin(2)
        gc.collect()
        await spin(2)
        assert recwarn.pop(UnreleasedLeaseWarning)
        assert cache.statistics.leases == 0


async def test_a_preempted_lease_is_resumed_beside_the_batch_that_keeps_its_blocks():
    async with Cache() as cache:
        lease = await granted(cache, A)
        first = set(lease.block_table.tolist())
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
        await lease.preempt()
        await lease.resume(len(A))
        assert not first & set(lease.block_table.tolist())
        with cache.engine.computing([lease]):
            cache.compute(lease, A)
        work.set_result(None)
        await spin(2)
        cache.check(lease, A)
        assert cache.statistics.attention.device.free == 4
        lease.release()


async def test_a_lease_in_two_batches_waits_for_both_in_any_order():
    for order in ((0, 1), (1, 0)):
        async with Cache() as cache:
            lease, other = await granted(cache, A), await granted(cache, B)
            work: list[ThreadFuture[None]] = [ThreadFuture(), ThreadFuture()]
            for i, leases in enumerate(([lease, other], [lease])):
                with cache.engine.computing(leases) as batch:
                    batch.ends_with(work[i])
            lease.release()
            other.release()
            work[order[0]].set_result(None)
            await spin(2)
            assert cache.statistics.releasing_leases == (1 if order[0] == 0 else 2)
            work[order[1]].set_result(None)
            await spin(2)
            assert cache.statistics.attention.device.free == 8


async def test_a_shared_prefix_stays_while_one_of_its_batches_reads_it():
    async with Cache(device_blocks=5, host_blocks=0) as cache:
        (await cache.serve(A)).release()
        reader = await granted(cache, A)
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([reader]) as batch:
            batch.ends_with(work)
        reader.release()
        assert await cache.engine.evict(5) == 0
        assert cache.hit(A) == (3, 0)
        work.set_result(None)
        await spin(2)
        assert await cache.engine.evict(5) == 3


async def test_a_released_lease_publishes_what_it_committed():
    async with Cache(host_blocks=8) as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.engine.evict(8)
        longer = np.concatenate([A, B])
        lease = cache.engine.match(longer)
        assert lease.try_allocate(len(longer))
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
            cache.compute(lease, longer)
        lease.release()
        cache.device.complete_all()  # the onload that the batch reads continues
        await spin(3)
        assert cache.hit(longer)[0] == 6
        work.set_result(None)
        await spin(2)


async def test_an_event_ends_a_batch():
    async with Cache(device=in_stream()) as cache:
        lease = await granted(cache, A)
        event = ManualEvent()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(event)
        lease.release()
        assert cache.statistics.attention.device.free == 4
        event.complete()
        while not batch.done:
            await spin()
        assert cache.statistics.attention.device.free == 8
        assert cache.statistics.attention.device.leased == 0


async def test_batch_without_event_on_a_stream_ends_with_the_open_step():
    async with Cache(device_blocks=4, device=in_stream()) as cache:
        await cache.fill(B)
        cache.engine.step()
        await cache.finish()
        await cache.engine.evict(4)
        lease = await granted(cache, A)
        cache.engine.step()  # the kernels of the batch are launched after this
        with cache.engine.computing([lease]):
            pass
        lease.release()
        other = cache.engine.match(B)
        assert other.try_allocate(len(B))
        assert other.cached_tokens == 0  # no copy may target blocks that the stream writes
        other.release()
        event = ManualEvent()
        cache.engine.step(event)
        other = cache.engine.match(B)
        assert other.try_allocate(len(B))
        assert other.cached_tokens == 12
        assert len(cache.device.onloads) == 1
        assert cache.device.onloads[0].after is event
        event.complete()
        cache.device.complete_all()
        await other.layers.wait_all()
        cache.check(other, B)
        other.release()
        cache.engine.step()


@pytest.mark.parametrize("named", [True, False])
async def test_hit_excludes_layers_behind_the_step_that_the_waiter_must_close(named):
    """The device holds one of two prompts that are served alternately, each in its own step."""
    async with Cache(device_blocks=4, device=in_stream()) as cache:
        for n in range(6):
            tokens = (A, B)[n % 2]
            async with cache.engine.match(tokens) as lease:
                await lease.allocate(len(tokens), timeout=PATIENCE_SECONDS)
                while not lease.layers.is_done:
                    waiting = asyncio.create_task(lease.layers.wait_all())
                    await spin()
                    cache.device.complete_all()
                    await waiting
                cache.check(lease, tokens)
                if named:
                    with cache.engine.computing([lease]):
                        cache.compute(lease, tokens)
                else:
                    cache.compute(lease, tokens)
                if n > 2 and named:
                    assert lease.hit.host_tokens >= 8
                cache.engine.step()
            await cache.finish()


async def resumed_behind_the_open_step(cache: Cache):
    """Return a lease whose table is swapped in to blocks that the open step uses."""
    lease = await granted(cache, A)
    cache.compute(lease, A)
    event = ManualEvent()
    cache.engine.step(event)
    event.complete()
    await spin(2)
    moving = asyncio.create_task(lease.preempt(swap=True))
    await cache.finish()
    await moving
    await cache.engine.evict(8)
    for tokens in (prompt(5, 7), prompt(6, 7)):  # all blocks are used by the open step
        async with cache.engine.match(tokens) as other:
            await other.allocate(len(tokens))
            cache.compute(other, tokens)
        await cache.engine.evict(8)
    return await lease.resume(len(A))


async def test_wait_for_layers_behind_the_own_open_step_raises_and_names_it():
    async with Cache(device=in_stream(), host_blocks=8) as cache:
        lease = await resumed_behind_the_open_step(cache)
        step = cache.engine.open_step
        with pytest.raises(UsageError, match=f"end of step {step}"):
            await lease.layers.wait_all()
        with pytest.raises(UsageError, match=f"end of step {step}"):
            await cache.engine.layers([lease]).wait_all()
        with pytest.raises(UsageError, match=f"end of step {step}"):
            async for _ in lease.layers:
                pass
        elsewhere = asyncio.create_task(lease.layers.wait_all())  # another task may wait
        await spin(2)
        assert not elsewhere.done()
        cache.engine.step()
        cache.device.complete_all()
        await elsewhere
        cache.check(lease, A)
        lease.release()
        cache.engine.step()
        await cache.finish()


async def test_task_that_closed_the_last_step_may_wait_for_a_step_of_another_task():
    async with Cache(device=in_stream(), host_blocks=8) as cache:
        may_close = asyncio.Event()

        async def close_two() -> None:
            cache.engine.step()
            await may_close.wait()
            cache.engine.step()

        elsewhere = asyncio.create_task(close_two())
        await spin()
        lease = await resumed_behind_the_open_step(cache)  # closes the last step
        may_close.set()
        waiting = lease.layers.wait_all()
        asyncio.get_running_loop().call_soon(complete_soon, cache, elsewhere)
        await waiting
        cache.check(lease, A)
        lease.release()
        cache.engine.step()
        await cache.finish()


def complete_soon(cache: Cache, closing: asyncio.Task[None]) -> None:
    """Complete all copies after the task has closed its step."""
    if closing.done():
        cache.device.complete_all()
    else:
        asyncio.get_running_loop().call_soon(complete_soon, cache, closing)


async def test_fork_in_a_batch_keeps_the_shared_blocks():
    async with Cache() as cache:
        parent = await cache.serve(A)
        child = parent.fork()
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([parent, child]) as batch:
            batch.ends_with(work)
        child_table = child.block_table.tolist()
        parent.release()
        child.release()
        assert cache.statistics.attention.device.free == 3
        assert len(set(child_table)) == 4
        work.set_result(None)
        await spin(2)
        assert (
            cache.statistics.attention.device.free + cache.statistics.attention.device.cached == 8
        )


async def test_a_swap_waits_for_the_batches_of_its_lease():
    async with Cache() as cache:
        lease = await cache.serve(A)
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
            with pytest.raises(LeaseError, match="cannot be swapped inside the `with` block"):
                await lease.preempt(swap=True)
        swapping = asyncio.create_task(lease.preempt(swap=True))
        await spin(3)
        assert not swapping.done()
        swapping.cancel()
        await asyncio.wait([swapping])
        assert lease.num_tokens == len(A)
        swapping = asyncio.create_task(lease.preempt(swap=True))
        await spin(2)
        work.set_result(None)
        while not swapping.done():
            await spin(2)
            cache.device.complete_all()
        await swapping
        lease.release()


async def test_closing_waits_for_a_batch_and_names_its_lease(caplog):
    cache = Cache()
    await cache.engine.__aenter__()
    lease = await granted(cache, A)
    work: ThreadFuture[None] = ThreadFuture()
    with cache.engine.computing([lease]) as batch:
        batch.ends_with(work)
    lease.release()
    closing = asyncio.create_task(cache.engine.aclose(30))
    await spin(3)
    assert not closing.done()
    work.set_result(None)
    await closing
    assert batch.done

    cache = Cache()
    await cache.engine.__aenter__()
    lease = await granted(cache, A)
    work = ThreadFuture()
    with cache.engine.computing([lease]) as batch:
        batch.ends_with(work)
    lease.release()
    await cache.engine.aclose(0.0)
    assert caplog.records[-1].owners == ["request"]
    work.set_result(None)  # long after the engine
    await spin(2)
    assert batch.done


async def test_quiesce_waits_for_a_batch():
    async with Cache() as cache:
        lease = await granted(cache, A)
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
        lease.release()
        quiet = asyncio.create_task(cache.engine.quiesce())
        await spin(3)
        assert not quiet.done()
        work.set_result(None)
        await quiet
        cache.engine.resume()


async def test_a_quota_counts_blocks_that_batches_keep():
    async with Cache(salt_quota_blocks=4) as cache:
        lease = await granted(cache, A)
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
        await lease.preempt()
        assert not lease.try_allocate(len(A))
        work.set_result(None)
        await spin(2)
        assert lease.try_allocate(len(A))
        lease.release()


async def test_misuse_is_refused_and_changes_nothing():
    async with Cache() as cache, Cache() as other:
        lease, external = await granted(cache, A), await granted(other, A)
        matched = cache.engine.match(B)
        for leases in ([lease, lease], [lease, matched], [lease, external]):
            with pytest.raises(LeaseError), cache.engine.computing(leases):
                pass
        batch = cache.engine.computing([lease])
        with pytest.raises(UsageError, match="inside its `with` block"):
            batch.ends_with(ThreadFuture())
        with batch:
            with pytest.raises(UsageError, match="once"):
                batch.__enter__()
            for work in (None, asyncio.get_running_loop().create_future(), "event", 5):
                with pytest.raises(UsageError):
                    batch.ends_with(work)
        with pytest.raises(UsageError, match="inside its `with` block"):
            await batch.run(int)
        with pytest.raises(UsageError, match="once"):
            batch.__enter__()
        assert batch.done
        assert cache.engine.check_invariants() == []
        for each in (lease, external, matched):
            each.release()
        with pytest.raises(LeaseError), cache.engine.computing([lease]):
            pass
        assert cache.statistics.attention.device.free == 8


async def test_an_exception_in_the_block_ends_the_batch():
    async with Cache() as cache:
        lease = await granted(cache, A)
        with pytest.raises(ZeroDivisionError), cache.engine.computing([lease]) as batch:
            raise ZeroDivisionError
        assert batch.done
        lease.release()
        assert cache.statistics.attention.device.free == 8


async def test_a_new_match_does_not_join_a_cancelled_onload():
    """The host copies remain, and the second request gets its own transfer."""
    async with Cache(device_blocks=12, host_blocks=12) as cache:
        prompts = [prompt(seed, 3) for seed in range(3)]
        await cache.fill(*prompts)
        await cache.finish()
        await cache.engine.evict(12)
        others = [cache.engine.match(tokens) for tokens in prompts[:2]]
        for lease, tokens in zip(others, prompts[:2], strict=True):
            assert lease.try_allocate(len(tokens))  # they take both of the device's slots
        gone = cache.engine.match(prompts[2])
        assert gone.try_allocate(len(prompts[2]))
        layers = gone.layers
        gone.release()
        again = cache.engine.match(prompts[2])
        assert again.try_allocate(len(prompts[2]))
        assert again.cached_tokens == 12
        assert again.layers.transfer_ids != layers.transfer_ids
        assert cache.engine.check_invariants() == []
        for lease in (*others, again):
            waiting = asyncio.create_task(lease.layers.wait_all())
            while not waiting.done():
                await spin()
                cache.device.complete_all()
            await waiting
        cache.check(again, prompts[2])
        assert cache.statistics.failed_blocks == 0
        for lease in (*others, again):
            lease.release()


async def test_a_preemption_that_waits_for_a_batch_ends_when_the_engine_closes():
    cache = Cache()
    await cache.engine.__aenter__()
    lease = await granted(cache, A)
    work: ThreadFuture[None] = ThreadFuture()
    with cache.engine.computing([lease]) as batch:
        batch.ends_with(work)
    swapping = asyncio.create_task(lease.preempt(swap=True))
    await spin(2)
    await cache.engine.aclose(0.0)
    await spin(2)
    assert swapping.done()
    with pytest.raises(ClosedError, match="batch was in flight"):
        await swapping
    lease.release()
    work.set_result(None)
    await spin(2)
    assert batch.done


async def test_a_grant_that_is_cancelled_while_a_batch_computes_with_it_keeps_its_blocks():
    async with Cache(device_blocks=4) as cache:
        holder = await granted(cache, B)
        lease = cache.engine.match(A, owner="request")
        allocating = asyncio.create_task(lease.allocate(len(A)))
        await spin()
        holder.release()  # grants the lease; its task has not run yet
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(work)
        allocating.cancel()
        await asyncio.wait([allocating])
        assert cache.engine.check_invariants() == []
        assert cache.statistics.attention.device.free == 0
        assert cache.engine.inspect.dump()["leases"][-1]["owner"] == "request"
        work.set_result(None)
        await spin(2)
        assert cache.statistics.attention.device.free == 4
        lease.release()


async def test_an_event_given_to_release_covers_the_blocks_of_a_lease_that_a_batch_had_named():
    async with Cache(device_blocks=4, device=in_stream()) as cache:
        await cache.fill(B)
        cache.engine.step()
        await cache.finish()
        await cache.engine.evict(4)
        lease = await granted(cache, A)
        with cache.engine.computing([lease]):
            pass
        cache.engine.step()
        event = ManualEvent()  # behind more work, which belongs to no batch
        lease.release(after=event)
        other = cache.engine.match(B)
        assert other.try_allocate(len(B))
        assert cache.device.onloads[0].after is event
        event.complete()
        cache.device.complete_all()
        await other.layers.wait_all()
        cache.check(other, B)
        other.release()
        cache.engine.step()


async def test_event_announced_twice_does_not_end_its_batch_early(monkeypatch):
    """The poller repeats a callback that an interrupt has ended."""
    async with Cache(device=in_stream()) as cache:
        lease = await granted(cache, A)
        announce = []
        monkeypatch.setattr(
            EventPoller, "watch", lambda _, event, key, callback: announce.append(callback)
        )
        work: ThreadFuture[None] = ThreadFuture()
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(ManualEvent())
            batch.ends_with(work)
        monkeypatch.undo()
        lease.release()
        for _ in range(2):
            announce[0](None)
        assert not batch.done
        assert cache.statistics.attention.device.free == 4
        work.set_result(None)
        await spin(2)
        assert batch.done
        assert cache.statistics.attention.device.free == 8


class LostEvent(ManualEvent):
    """Event whose query fails, as on a broken device."""

    @property
    def done(self) -> bool:
        raise DeviceError("the device is lost")


async def test_failed_event_query_breaks_the_engine():
    async with Cache(device=in_stream()) as cache:
        lease = await granted(cache, A)
        with cache.engine.computing([lease]) as batch:
            batch.ends_with(LostEvent())
        lease.release()
        while not batch.done:
            await spin()
        with pytest.raises(BrokenEngineError, match="the device is lost"):
            cache.engine.match(B)
