"""Blocks of sliding windows on a GPU: copied to host memory and back, with equal bytes."""

from __future__ import annotations

import numpy as np
import pytest

import aiokv
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

LAYERS, BLOCK, BLOCKS = 3, 4, 8
GROUPS = {"near": 0, "far": 2}  # and the layer of each; layer 1 has full attention
WINDOW_TOKENS = 8  # a hit needs 2 blocks of each group
PROMPT = np.arange(19, dtype=np.int32)  # 4 full blocks and a partial one


def make():
    import cupy

    kv = cupy.zeros((64, BLOCK, 32), cupy.float32)
    windows = {group: cupy.zeros((BLOCKS, BLOCK, 48), cupy.float32) for group in GROUPS}
    engine = aiokv.CacheEngine(
        aiokv.CacheConfig(
            block_tokens=BLOCK,
            device_blocks=64,
            host_blocks=64,
            windows={
                group: aiokv.WindowGroup(
                    window_tokens=WINDOW_TOKENS, device_blocks=BLOCKS, host_blocks=32
                )
                for group in GROUPS
            },
        ),
        regions_of(kv, windows),
        CudaDevice(options=CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20)),
    )
    return engine, kv, windows


def regions_of(kv, windows) -> aiokv.Regions:
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=[kv], layer_indices=[1])
    for group, layer in GROUPS.items():
        regions.add_window(group, group, layers=[windows[group]], layer_indices=[layer])
    return regions


async def serve(engine, windows, stream, tokens, value: float):
    """Serve a request whose window blocks get bytes from ``value``; return what the hit found.

    The result is the cached tokens, and the blocks of the hit's windows as they were on ``stream``.
    """
    import cupy

    found = []
    async with engine.match(tokens) as lease:
        await lease.allocate(len(tokens))
        with engine.computing([lease]), stream:
            for layer in range(LAYERS):
                lease.layers.gpu_wait(layer, stream)
            hit = lease.cached_tokens // BLOCK
            for group in GROUPS:
                ids = lease.window_table(group)
                found += [windows[group][int(ids[i])].copy() for i in range(max(hit - 2, 0), hit)]
                for i in range(hit, len(ids)):
                    windows[group][int(ids[i])] = value + i + 100 * GROUPS[group]
        stream.synchronize()
        await lease.layers.wait_all()
        lease.commit(len(tokens))
        cached = lease.cached_tokens
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    engine.step(event)
    await engine.drain()
    stream.synchronize()
    return cached, [block.get() for block in found]


def check(found, value: float) -> None:
    """The hit ends after 4 blocks, of which each group needs the last two."""
    expected = [value + i + 100 * layer for layer in GROUPS.values() for i in (2, 3)]
    assert len(found) == len(expected)
    for block, content in zip(found, expected, strict=True):
        assert (block == content).all()


@pytest.mark.asyncio
async def test_window_blocks_return_from_host_memory_with_equal_bytes():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, _, windows = make()
    prompts = [PROMPT + 100 * n for n in range(6)]
    async with engine:
        for n, prompt in enumerate(prompts):  # more than the device has blocks for
            cached, _ = await serve(engine, windows, stream, prompt, 1000.0 * n)
            assert cached == 0
        for n in (0, 1, 5, 2):
            cached, found = await serve(engine, windows, stream, prompts[n], 0.0)
            assert cached == 16
            check(found, 1000.0 * n)
        for name in engine.config.windows:
            assert engine.statistics().groups[name].onloaded_blocks >= 4
        assert engine.check_invariants() == []


@pytest.mark.asyncio
async def test_window_blocks_in_host_memory_survive_the_sleep_of_the_device():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    engine, kv, windows = make()
    async with engine:
        await serve(engine, windows, stream, PROMPT, 5.0)
        await engine.sleep(["device"])
        for tensor in (kv, *windows.values()):
            tensor[:] = 77
        await engine.wake_up(regions=regions_of(kv, windows))
        cached, found = await serve(engine, windows, stream, PROMPT, 0.0)
        assert cached == 16
        check(found, 5.0)
