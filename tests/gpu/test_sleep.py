"""Sleep and wake-up on a GPU: tensors and pinned memory are freed and reallocated."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import aiokv

from .test_engine import BLOCK, LAYERS, TOKENS, compute, make
from .test_engine_gpu import prompt, read_back
from .test_ordering import new_stream

pytestmark = pytest.mark.asyncio


def new_tensors(device_blocks: int = 32):
    import cupy

    shape = (device_blocks, BLOCK, 2, 64)
    tensors = {
        name: [cupy.full(shape, -1, cupy.float16) for _ in range(LAYERS)] for name in ("k", "v")
    }
    regions = aiokv.Regions(num_layers=LAYERS)
    for name, layers in tensors.items():
        regions.add(name, layers=layers)
    return regions, tensors


async def test_host_blocks_are_onloaded_into_new_tensors_after_device_sleep():
    import cupy

    engine, device, tensors = make(verify="checksum")
    stream = new_stream()
    async with engine:
        await compute(engine, tensors, prompt(), 7, stream)
        pinned = device.wait_pinned() and device.pinned_bytes
        assert engine.health().unpinned_bytes == 0
        pool = cupy.get_default_memory_pool()
        held = sum(tensor.nbytes for layers in tensors.values() for tensor in layers)
        used = pool.used_bytes()
        await engine.sleep(("device",), timeout=10.0)
        tensors.clear()
        gc.collect()
        assert used - pool.used_bytes() >= held, "the tensors are not referenced"
        assert device.pinned_bytes == pinned, "the arena stays pinned"
        regions, tensors = new_tensors()
        await engine.wake_up(regions=regions, timeout=10.0)
        hit = await read_back(engine, tensors, prompt(), 7, stream)
        assert hit.host_tokens == TOKENS
        assert engine.check_invariants() == []


async def test_both_tiers_sleep_and_wake_up_repeatedly():
    engine, device, tensors = make()
    stream = new_stream()
    async with engine:
        for number in range(3):
            await compute(engine, tensors, prompt(number), 9, stream)
            await engine.sleep(timeout=10.0)
            assert device.pinned_bytes == 0
            assert (await engine.match(np.append(prompt(number), np.int32(1)))).hit.total == 0
            regions, tensors = new_tensors()
            await engine.wake_up(regions=regions, timeout=10.0)
        await compute(engine, tensors, prompt(9), 4, stream)
        await engine.evict(32)
        hit = await read_back(engine, tensors, prompt(9), 4, stream)
        assert hit.host_tokens == TOKENS
        await engine.sleep(timeout=10.0)
        with pytest.raises(aiokv.errors.LayoutError, match="31 blocks"):
            await engine.wake_up(regions=new_tensors(31)[0])
        await engine.wake_up(regions=new_tensors()[0])
        assert engine.check_invariants() == []
