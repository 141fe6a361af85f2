"""Recurrent state on a GPU: slots are copied and zeroed where they are, in order with the steps."""

from __future__ import annotations

import numpy as np
import pytest

import aiokv
from aiokv.errors import UsageError
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

LAYERS, BLOCK, SLOTS = 3, 4, 4
PROMPT = np.arange(11, dtype=np.int32)  # 2 full blocks and a partial one


def make(*, apart: bool = False):
    """One tensor of all layers, or (apart) one a layer."""
    import cupy

    kv = [cupy.zeros((16, BLOCK, 32), cupy.float32) for _ in range(LAYERS)]
    whole = cupy.full((LAYERS, SLOTS, 2, 48), 9, cupy.float32)
    state = [cupy.ascontiguousarray(layer) for layer in whole] if apart else list(whole)
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=kv)
    regions.add_state("ssm", layers=state)
    config = aiokv.CacheConfig(block_tokens=BLOCK, device_blocks=16, state_slots=SLOTS)
    device = CudaDevice(options=CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20))
    return aiokv.CacheEngine(config, regions, device), state


def step(engine, stream) -> None:
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    engine.step(event)


@pytest.mark.asyncio
@pytest.mark.parametrize("apart", [False, True])
async def test_zeros_then_a_snapshot_then_its_copy(apart):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, state = make(apart=apart)
    async with engine:
        lease = engine.match(PROMPT)
        await lease.allocate(11)
        await lease.layers.wait_all()
        slot = lease.state_slot
        assert all((layer[slot].get() == 0).all() for layer in state)
        assert sum((layer.get() == 9).all(axis=(1, 2)).sum() for layer in state) == 3 * LAYERS
        with stream:
            for n, layer in enumerate(state):
                layer[slot] = 5 + n
        lease.commit(8)
        assert lease.snapshot(8, stream)
        with stream:  # the next step starts immediately: the snapshot must be the earlier state
            for layer in state:
                layer[slot] = 77
        lease.commit(11)
        second = engine.match(PROMPT)
        assert second.hit.total == 8
        await second.allocate(11)  # its copy waits for the step
        step(engine, stream)
        for n in range(LAYERS):
            second.layers.gpu_wait(n, stream)
        with stream:
            found = [layer[second.state_slot].copy() for layer in state]
        stream.synchronize()
        assert all((found[n].get() == 5 + n).all() for n in range(LAYERS))
        await second.layers.wait_all()
        lease.release()
        second.release()
        step(engine, stream)
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_snapshot_without_a_stream_is_refused_and_not_hit():
    import cupy

    engine, _ = make()
    async with engine:
        lease = engine.match(PROMPT)
        await lease.allocate(11)
        await lease.layers.wait_all()
        lease.commit(8)
        with pytest.raises(UsageError, match="stream"):
            lease.snapshot(8)
        assert engine.match(PROMPT).hit.total == 0
        stream = cupy.cuda.Stream(non_blocking=True)
        assert lease.snapshot(8, stream)
        lease.release()
        step(engine, stream)


@pytest.mark.asyncio
async def test_forks_copy_the_state():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, state = make()
    async with engine:
        parent = engine.match(PROMPT)
        await parent.allocate(11)
        await parent.layers.wait_all()
        with stream:
            state[1][parent.state_slot] = 3
        parent.commit(11)
        child = parent.fork(stream=stream)
        with stream:
            state[1][parent.state_slot] = 4
        stream.synchronize()
        assert (state[1][child.state_slot].get() == 3).all()
        parent.release()
        child.release()
        step(engine, stream)
