"""On a GPU, a step that stays open delays transfers: errors and a warning name the reason."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiokv.errors import AllocateTimeout, UsageError
from aiokv.testing import ManualEvent, running_clock, spin
from tests.harness.cache import Cache, prompt

A, B, C = prompt(1, 2), prompt(2, 5), prompt(3, 2)
LONG_SECONDS = 6.0  # longer than a step may stay open

pytestmark = pytest.mark.asyncio


def on_gpu(**options) -> Cache:
    cache = Cache(device_blocks=6, write_policy="write_back", **options)
    cache.device.computes_in_stream = True
    return cache


async def test_timeout_of_a_wait_for_an_open_step_names_the_step():
    async with on_gpu() as cache:
        await cache.fill(A)  # computed and released in the open step
        lease = cache.engine.match(B)
        with pytest.raises(AllocateTimeout, match=r"1 transfers wait.*step 1.*engine\.step"):
            await lease.allocate(len(B), timeout=0.001)
        assert cache.engine.inspect.dump()["open_step"] == 1
        assert cache.engine.inspect.dump()["statistics"]["worker"]["held"] == 1
        for call in (cache.engine.quiesce, lambda timeout: _update(cache, timeout)):
            with pytest.raises(TimeoutError, match="step 1, which is open"):
                await call(timeout=0.001)
        cache.engine.step()
        await cache.finish()
        assert lease.try_allocate(len(B))
        assert cache.hit(A) == (0, 2)
        lease.release()
        cache.engine.step()


async def _update(cache: Cache, timeout: float) -> None:
    async with cache.engine.updating_weights(timeout):
        raise AssertionError("a transfer was under way")


@pytest.mark.clock
async def test_a_step_that_stays_open_is_logged_once(caplog):
    clock = running_clock()
    async with on_gpu() as cache:
        await cache.fill(A, C)
        with caplog.at_level(logging.WARNING, "aiokv"):
            evicting = [asyncio.create_task(cache.engine.evict(2))]
            await clock.advance(LONG_SECONDS)
            assert cache.engine.statistics().worker.held == 1
            evicting.append(asyncio.create_task(cache.engine.evict(4)))
            await clock.advance(LONG_SECONDS)
        assert cache.engine.statistics().worker.held == 2
        (record,) = [r for r in caplog.records if r.event == "step.left_open"]
        assert (record.step, record.waiting_transfers) == (1, 1)
        cache.engine.step()
        await finished(cache, *evicting)
        assert clock.timers == 0


@pytest.mark.clock
async def test_a_step_that_is_left_open_after_a_warning_of_another_is_logged(caplog):
    clock = running_clock()
    async with on_gpu() as cache:
        with caplog.at_level(logging.WARNING, "aiokv"):
            for tokens in (A, C):
                await cache.fill(tokens)
                evicting = asyncio.create_task(cache.engine.evict(2))
                await clock.advance(LONG_SECONDS)
                cache.engine.step()
                await finished(cache, evicting)
        steps = [r.step for r in caplog.records if r.event == "step.left_open"]
        assert steps == [1, 2]


@pytest.mark.clock
async def test_a_loop_that_closes_its_steps_gets_no_warning(caplog):
    clock = running_clock()
    async with on_gpu() as cache:
        await cache.fill(A)
        assert clock.timers == 0, "no transfer waits"
        waiting = asyncio.create_task(cache.serve(B))
        await spin(3)
        event = ManualEvent()
        cache.engine.step(event)
        await clock.advance(LONG_SECONDS)
        event.complete()
        await finished(cache, waiting)
        waiting.result().release()
        cache.engine.step()
        assert caplog.records == []


async def finished(cache: Cache, *tasks: asyncio.Task) -> None:
    """Complete transfers and let time pass until the tasks are done."""
    while not all(task.done() for task in tasks):
        cache.device.complete_all()
        await running_clock().advance(0.001)


@pytest.mark.parametrize("computes_in_stream", [False, True])
async def test_blocks_of_the_next_step_are_found_at_once_and_saved_when_it_is_closed(
    computes_in_stream,
):
    async with Cache(write_policy="write_through") as cache:
        cache.device.computes_in_stream = computes_in_stream
        lease = cache.engine.match(A)
        assert lease.try_allocate(len(A))
        assert lease.commit(len(A), in_next_step=True) == 2
        assert cache.hit([*A, 1]) == (2, 0)
        cache.engine.step()  # ends before the positions are computed
        await spin(3)
        assert not cache.device.offloads
        cache.engine.step()
        await spin(3)
        (offload,) = cache.device.offloads
        assert len(offload.host_ids) == 2
        await cache.finish()
        lease.release()
        assert await cache.engine.evict(2) == 2
        assert cache.hit([*A, 1]) == (0, 2)


async def test_commit_for_the_next_step_refuses_what_it_cannot_order():
    async with Cache(verify="checksum") as cache:
        lease = await cache.serve(A)
        with pytest.raises(UsageError, match="in_next_step cannot be used with verify='checksum'"):
            lease.commit(len(A), in_next_step=True)
        with pytest.raises(UsageError, match="ready is given"):
            lease.commit(len(A), ManualEvent(), in_next_step=True)
        lease.release()
