"""Recurrent state on a GPU: slots are copied and zeroed where they are, in order with the steps."""

from __future__ import annotations

import numpy as np
import pytest

import aiokv
from aiokv.errors import UsageError
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

LAYERS, BLOCK, SLOTS = 3, 4, 4
PROMPT = np.arange(11, dtype=np.int32)  # 2 full blocks and a partial one


def make(*, apart: bool = False, host_state_slots: int = 0):
    """One tensor of all layers, or (apart) one a layer."""
    import cupy

    kv = [cupy.zeros((16, BLOCK, 32), cupy.float32) for _ in range(LAYERS)]
    whole = cupy.full((LAYERS, SLOTS, 2, 48), 9, cupy.float32)
    state = [cupy.ascontiguousarray(layer) for layer in whole] if apart else list(whole)
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=kv)
    regions.add_state("ssm", layers=state)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK,
        device_blocks=16,
        host_blocks=16 if host_state_slots else 0,
        state_slots=SLOTS,
        host_state_slots=host_state_slots,
    )
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


async def serve(engine, state, stream, prompt, value: float) -> tuple[int, list[np.ndarray]]:
    """Serve a prompt; its state becomes ``value`` plus the layer, and is saved after 8 positions.

    Returns:
        The cached tokens, and the state of each layer with which the lease began.
    """
    lease = engine.match(prompt)
    await lease.allocate(11)
    for layer in range(LAYERS):
        lease.layers.gpu_wait(layer, stream)
    with stream:
        found = [layer[lease.state_slot].copy() for layer in state]
        if lease.cached_tokens < 8:
            for n, layer in enumerate(state):
                layer[lease.state_slot] = value + n
    await lease.layers.wait_all()
    cached = lease.cached_tokens
    if cached < 8:
        lease.commit(8)
        assert lease.snapshot(8, stream)
    lease.commit(11)
    step(engine, stream)
    lease.release()
    step(engine, stream)
    await engine.drain()
    stream.synchronize()
    return cached, [layer.get() for layer in found]


@pytest.mark.asyncio
@pytest.mark.parametrize("apart", [False, True])
async def test_snapshots_in_host_memory_are_restored_with_equal_bytes(apart):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, state = make(apart=apart, host_state_slots=8)
    prompts = [PROMPT + 100 * n for n in range(6)]
    async with engine:
        for n, prompt in enumerate(prompts):  # more than the device has slots for
            cached, found = await serve(engine, state, stream, prompt, 10.0 * n + 1)
            assert cached == 0
            assert not any(layer.any() for layer in found)
        statistics = engine.statistics()
        assert statistics.groups["state"].device.evicted_blocks >= 2
        assert statistics.groups["state"].offloaded_blocks == len(prompts)
        for n in (0, 1, 5, 2):
            cached, found = await serve(engine, state, stream, prompts[n], 0.0)
            assert cached == 8
            for layer, bytes_found in enumerate(found):
                assert (bytes_found == 10.0 * n + 1 + layer).all()
        assert engine.statistics().groups["state"].onloaded_blocks >= 2
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_host_snapshots_survive_the_sleep_of_the_device():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, state = make(host_state_slots=4)
    async with engine:
        await serve(engine, state, stream, PROMPT, 5.0)
        regions = engine.inspect.parts.worker.memory.regions
        await engine.sleep(["device"])
        for layer in state:
            layer[:] = 77
        await engine.wake_up(regions=regions)
        cached, found = await serve(engine, state, stream, PROMPT, 0.0)
        assert cached == 8
        assert all((found[n] == 5.0 + n).all() for n in range(LAYERS))
