"""On a GPU, a step that nobody closes holds transfers up: who waits for them is told why."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aiokv.errors import AllocateTimeout
from aiokv.testing import ManualEvent, spin
from tests.harness.cache import Cache, prompt

A, B = prompt(1, 2), prompt(2, 5)

pytestmark = pytest.mark.asyncio


def on_gpu(**options) -> Cache:
    cache = Cache(device_blocks=6, write_policy="write_back", **options)
    cache.device.computes_in_stream = True
    return cache


async def test_who_waits_for_blocks_of_an_open_step_is_told():
    async with on_gpu() as cache:
        await cache.fill(A)  # computed and released in the open step
        lease = cache.engine.match(B)
        with pytest.raises(AllocateTimeout, match=r"1 transfers wait.*step 1.*engine\.step"):
            await lease.allocate(len(B), timeout=0.001)
        assert cache.engine.dump()["open_step"] == 1
        assert cache.engine.dump()["worker"]["held"] == 1
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


async def test_a_step_that_stays_open_is_logged_once(caplog):
    async with on_gpu() as cache:
        await cache.fill(A)
        waiting = asyncio.create_task(cache.serve(B))
        await spin(3)
        watch = cache.engine._open_step
        assert watch._timer is not None
        with caplog.at_level(logging.WARNING, "aiokv"):
            watch.look()
            watch.note(1)
            watch.look()
        (record,) = [r for r in caplog.records if r.event == "step.left_open"]
        assert (record.step, record.waiting_transfers) == (1, 1)
        cache.engine.step()
        cache.device.complete_all()
        (await waiting).release()
        cache.engine.step()


async def test_a_loop_that_closes_its_steps_hears_nothing(caplog):
    async with on_gpu() as cache:
        watch = cache.engine._open_step
        await cache.fill(A)
        assert watch._timer is None, "nothing waits"
        waiting = asyncio.create_task(cache.serve(B))
        await spin(3)
        event = ManualEvent()
        cache.engine.step(event)
        watch.look()
        assert watch._timer is None
        event.complete()
        while not waiting.done():
            cache.device.complete_all()
            await spin(1)
        (await waiting).release()
        cache.engine.step()
        assert caplog.records == []
