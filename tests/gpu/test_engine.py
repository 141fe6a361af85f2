"""The engine over the cuda device, on both loops: steps, backups, eviction, onload, failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv import _native
from aiokv.errors import TransferError
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

LAYERS, BLOCK, TOKENS = 4, 16, 16 * 12


def make(device_blocks: int = 32, host_blocks: int = 32, **options):
    import cupy

    shape = (device_blocks, BLOCK, 2, 64)
    tensors = {
        name: [cupy.zeros(shape, cupy.float16) for _ in range(LAYERS)] for name in ("k", "v")
    }
    regions = aiokv.Regions(num_layers=LAYERS)
    for name, layers in tensors.items():
        regions.add(name, layers=layers)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK, device_blocks=device_blocks, host_blocks=host_blocks, **options
    )
    device = CudaDevice(options=CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20))
    return aiokv.CacheEngine(config, regions=regions, device=device), device, tensors


def write(tensors, table, seed, stream):
    """Write bytes into block i of the prompt that identify (seed, i, layer, name)."""
    with stream:
        for n, layers in enumerate(tensors.values()):
            for layer, tensor in enumerate(layers):
                for place, block in enumerate(table.tolist()):
                    tensor[block] = seed + place + 100 * layer + 500 * n


def check(tensors, table, seed, count):
    for n, layers in enumerate(tensors.values()):
        for layer, tensor in enumerate(layers):
            found = tensor[table[:count]].get()
            for place in range(count):
                assert (found[place] == seed + place + 100 * layer + 500 * n).all()


async def compute(engine, tensors, tokens, seed, stream):
    import cupy

    lease = await engine.match(tokens)
    await lease.allocate(len(tokens))
    write(tensors, lease.block_table, seed, stream)
    lease.commit(len(tokens))
    lease.release()  # blocks used by the open step can only be saved after it is closed
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    engine.step(event)
    await engine.drain()


@pytest.mark.asyncio
async def test_blocks_are_restored_from_the_host():
    import cupy

    engine, _, tensors = make()
    stream = cupy.cuda.Stream(non_blocking=True)
    tokens = np.arange(TOKENS, dtype=np.int32)
    async with engine:
        await compute(engine, tensors, tokens, 7, stream)
        await engine.evict(32)
        for layers in tensors.values():
            for tensor in layers:
                tensor.fill(0)
        cupy.cuda.Device().synchronize()
        lease = await engine.match(np.append(tokens, np.int32(1)))
        assert lease.hit.host_tokens == TOKENS
        await lease.allocate(TOKENS + 1)
        for layer in range(LAYERS):
            lease.layers.gpu_wait(layer, stream)
        await lease.layers.wait_all()
        check(tensors, lease.block_table, 7, TOKENS // BLOCK)
        lease.release()
        engine.step()


@pytest.mark.asyncio
async def test_a_failure_at_a_late_layer_shortens_the_hit():
    import cupy

    engine, device, tensors = make()
    stream = cupy.cuda.Stream(non_blocking=True)
    tokens = np.arange(TOKENS, dtype=np.int32)
    async with engine:
        await compute(engine, tensors, tokens, 7, stream)
        await engine.evict(32)
        device._engines["attention", "host"].fail_at(_cuda.Direction.ONLOAD, LAYERS - 1, 1)
        lease = await engine.match(np.append(tokens, np.int32(1)))
        await lease.allocate(TOKENS + 1)
        assert lease.cached_tokens == TOKENS
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert caught.value.first_bad_token == 0
        with pytest.raises(TransferError):
            lease.layers.raise_for_error()
        await engine.drain()
        assert lease.recompute_from() == 0
        assert lease.cached_tokens == 0
        lease.release()
        engine.step()
