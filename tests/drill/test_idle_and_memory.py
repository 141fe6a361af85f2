"""Defects of an idle engine, and of memory that is freed."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import ControlTimeout
from aiokv.testing import running_clock, spin
from tests.drill.drill import Drill, prompt

A, B = (prompt(seed, 2) for seed in range(1, 3))

pytestmark = pytest.mark.asyncio


@pytest.mark.clock
async def test_idle_engine_makes_no_calls():
    """Defect: An idle engine polls its queues every millisecond."""
    clock = running_clock()
    async with Drill() as drill:
        await drill.fill(A)
        await drill.engine.drain()
        await spin(5)
        poller = drill.engine.statistics().poller
        assert (poller.pending, clock.timers) == (0, 0)
        await clock.advance(3600.0)
        assert drill.engine.statistics().poller.queries == poller.queries


async def test_close_frees_all_memory():
    """Defect: Host buffers are never freed, and an ended process keeps tensors allocated."""
    tensor = np.zeros((8, 64), np.uint8)
    gone = weakref.ref(tensor)
    regions = Regions(num_layers=1)
    regions.add("k", layers=[tensor])
    engine = CacheEngine(CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8), regions)
    async with engine:
        async with engine.match(A) as lease:
            await lease.allocate(len(A))
            lease.commit(len(A))
        await engine.drain()
        await engine.evict(8)
        await engine.prefetch(A)
        arena = engine.inspect.parts.worker.memory.arena
    assert arena._map.closed
    del regions, tensor, engine, lease
    await spin(3)
    gc.collect()
    assert gone() is None


@pytest.mark.clock
async def test_sleep_frees_memory_only_after_all_transfers_ended():
    """Defect: Memory is freed while swaps run; a failed release stays half done and is tried
    again.
    """
    clock = running_clock()
    async with Drill() as drill:
        backup = drill.device.hold("offload")
        await drill.fill(A)
        arena = drill.engine.inspect.parts.worker.memory.arena
        sleeping = asyncio.create_task(drill.engine.sleep(timeout=60.0))
        await clock.advance(59.0)
        assert not sleeping.done()
        await clock.advance(2.0)
        assert isinstance(sleeping.exception(), ControlTimeout)
        assert arena.blocks.shape[0] == 8, "the copy still has its memory"
        assert drill.engine.asleep == set()
        (await drill.serve(A)).release()  # all is as before
        backup.open()
        await drill.engine.sleep(timeout=60.0)
        assert arena._map.closed
        await drill.engine.wake_up(regions=drill.memory.regions)
        (await drill.serve(B)).release()
