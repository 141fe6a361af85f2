"""I7: an engine still serves after control calls are cancelled in any pass of the loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import RequestTooLarge
from aiokv.testing import ManualEvent, spin
from tests.harness.cache import Cache, prompt

if TYPE_CHECKING:
    import numpy as np

A, B, C, D = (prompt(seed, 2) for seed in range(1, 5))
LARGE = prompt(5, 7)
PASSES = (0, 1, 2, 3, 4, 5, 6, 8, 11)

pytestmark = pytest.mark.asyncio


async def update_weights(cache: Cache) -> None:
    async with cache.engine.updating_weights():
        await spin(2)
        cache.memory.weights += 1


async def wake_up(cache: Cache) -> None:
    await cache.engine.sleep()
    await cache.engine.wake_up(regions=cache.memory.regions)


async def pin(cache: Cache, tokens: np.ndarray) -> None:
    (await cache.engine.pin(tokens)).release()


VERBS = {
    "reset": lambda cache: cache.engine.reset(),
    "evict": lambda cache: cache.engine.evict(12),
    "evict_host": lambda cache: cache.engine.evict(12, "host"),
    "shrink": lambda cache: cache.engine.resize(5),
    "grow": lambda cache: cache.engine.resize(12),
    "drain": lambda cache: cache.engine.drain(),
    "quiesce": lambda cache: cache.engine.quiesce(),
    "sleep": lambda cache: cache.engine.sleep(),
    "sleep_of_the_device": lambda cache: cache.engine.sleep(["device"]),  # saves as much as fits
    "wake_up": wake_up,
    "update_weights": update_weights,
    "prefetch": lambda cache: cache.engine.prefetch(A),
    "pin": lambda cache: pin(cache, A),
}


async def drive(cache: Cache, task: asyncio.Task) -> None:
    """Complete copies and close steps until the task has ended."""
    while not task.done():
        cache.engine.step()
        cache.device.complete_all()
        await spin()
    await task


async def undo(cache: Cache, verb: str) -> None:
    """End the effect of a control call that had completed before its cancellation."""
    if verb == "quiesce" and cache.engine.inspect.dump()["paused"]:
        cache.engine.resume()
    await drive(cache, asyncio.create_task(cache.engine.wake_up(regions=cache.memory.regions)))


async def serve_and_release(cache: Cache, tokens: np.ndarray) -> None:
    (await cache.serve(tokens)).release()


@pytest.mark.parametrize("verb", VERBS)
async def test_a_control_verb_cancelled_in_any_pass_leaves_an_engine_that_serves(verb):
    for passes in PASSES:
        await cancel_after(verb, passes)


async def cancel_after(verb: str, passes: int) -> None:
    """Cancel each control call beside a lease, a running step, copies and a waiting request."""
    cache = Cache(device_blocks=12, host_blocks=12, write_policy="write_back")
    cache.device.computes_in_stream = True
    async with cache:
        if verb == "grow":
            await cache.engine.resize(8)
        await cache.fill(A)
        cache.engine.step()
        if verb in ("prefetch", "pin"):  # requests in line are served first
            await drive(cache, asyncio.create_task(cache.engine.evict(2)))
            assert cache.hit(A) == (0, 2)
        holder = await cache.serve(B)
        event = ManualEvent()
        waits = verb not in ("prefetch", "pin")
        waiting = asyncio.create_task(serve_and_release(cache, LARGE if waits else C))
        await spin(2)
        task = asyncio.create_task(VERBS[verb](cache))
        for count in range(passes):
            await spin(1)
            if count == 2:
                holder.release(after=event)
            if count == 4:
                event.complete()
            ready = [copy for copy in cache.device.copies if copy.after is None or copy.after.done]
            if ready:
                ready[0].complete(ready[0].pending_layers[0])
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None
        assert cache.engine.check_invariants() == []
        event.complete()
        if passes <= 2:
            holder.release(after=event)
        await undo(cache, verb)
        assert not cache.engine.inspect.dump()["paused"]
        if verb == "shrink" and cache.statistics.attention.device.blocks == 5:
            with pytest.raises(RequestTooLarge):
                await waiting
        else:
            await drive(cache, waiting)
        for tokens in (A, C, D):
            await drive(cache, asyncio.create_task(serve_and_release(cache, tokens)))
        await drive(cache, asyncio.create_task(cache.engine.drain()))
        statistics = cache.statistics
        assert (statistics.attention.device.leased, statistics.attention.device.in_flight) == (0, 0)
        cache.engine.step()
