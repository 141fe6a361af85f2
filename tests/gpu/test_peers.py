"""Blocks of two engines on a GPU that move between them over TCP, in order with the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

LAYERS, BLOCK, HEADS, DIM = 3, 4, 2, 32
PROMPT = np.arange(42, dtype=np.int32)  # 10 full blocks and a partial one
SECRET = "0123456789abcdef"


def make(
    *, block_tokens: int = BLOCK, seed: int = 1, layer_ranges: int = 1
) -> tuple[aiokv.CacheEngine, list[Any]]:
    """Return an engine and its tensors, one a layer, of random bytes."""
    import cupy

    random = np.random.default_rng(seed)
    num_blocks = 128 // block_tokens
    shape = (num_blocks, block_tokens, HEADS, DIM)
    kv = [cupy.asarray(random.standard_normal(shape, np.float32)) for _ in range(LAYERS)]
    regions = aiokv.Regions(num_layers=LAYERS)
    regions.add("kv", layers=kv, axes=("tokens", "heads", "dim"))
    config = aiokv.CacheConfig(
        block_tokens=block_tokens,
        device_blocks=num_blocks,
        host_blocks=0,
        model="m",
        weights_version="1",
    )
    slot_bytes = regions.payload_bytes + 64
    peers = aiokv.Peers(
        secret=SECRET,
        listen="127.0.0.1",
        ring_bytes=24 * slot_bytes,
        outgoing_bytes=4 * slot_bytes,
        chunk_blocks=2,
        layer_ranges=layer_ranges,
    )
    device = CudaDevice(options=CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20))
    return aiokv.CacheEngine(config, regions, device, peers=peers), kv


def step(engine, stream) -> None:
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    engine.step(event)


def rows(kv, lease, num_tokens: int, block_tokens: int) -> np.ndarray:
    """Return the rows of the first positions of a lease, ``[LAYERS, num_tokens, HEADS, DIM]``."""
    import cupy

    table = cupy.asarray(lease.block_table)
    return np.stack([layer[table].reshape(-1, HEADS, DIM)[:num_tokens].get() for layer in kv])


async def exchange(p, sent, d, kept, *, sender_tokens: int, receiver_tokens: int) -> None:
    """Compute a prompt on one engine, block by block, and check the bytes on the other."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    random = np.random.default_rng(7)
    prompt = cupy.asarray(random.standard_normal((LAYERS, len(PROMPT), HEADS, DIM), np.float32))
    async with d.match(PROMPT) as receiving, p.match(PROMPT) as sending:
        await receiving.allocate(len(PROMPT))
        await sending.allocate(len(PROMPT))
        async with receiving.receive(timeout=30.0) as arriving:
            async with p.send(sending, arriving.ticket) as delivering:
                for end in (17, 30, len(PROMPT)):
                    with stream:
                        for position in range(end):
                            block, row = divmod(position, sender_tokens)
                            for layer in range(LAYERS):
                                target = sent[layer][sending.block_table[block]]
                                target[row] = prompt[layer, position]
                    sending.commit(end)
                    step(p, stream)  # the copies to the slots wait for this event
            assert delivering.failure is None
            assert await arriving.wait() == len(PROMPT)
        found = rows(kept, receiving, len(PROMPT), receiver_tokens)
        assert (found == prompt.get()).all()
    step(p, stream)
    step(d, stream)
    assert p.check_invariants() == d.check_invariants() == []


@pytest.mark.asyncio
@pytest.mark.parametrize(("sender_tokens", "receiver_tokens"), [(4, 4), (4, 8), (8, 4)])
@pytest.mark.parametrize("layer_ranges", [2, 3])
async def test_layers_on_the_gpu_arrive_behind_their_events(
    sender_tokens, receiver_tokens, layer_ranges
):
    """The stream computes slowly: a copy that did not wait for its event would read old bytes."""
    import cupy

    (p, sent), (d, kept) = (
        make(block_tokens=sender_tokens, layer_ranges=layer_ranges),
        make(block_tokens=receiver_tokens, seed=2, layer_ranges=layer_ranges),
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    random = np.random.default_rng(7)
    prompt = cupy.asarray(random.standard_normal((LAYERS, len(PROMPT), HEADS, DIM), np.float32))
    delay = cupy.ones((4096, 4096), cupy.float32)
    async with p, d, d.match(PROMPT) as receiving, p.match(PROMPT) as source:
        await receiving.allocate(len(PROMPT))
        await source.allocate(len(PROMPT))
        async with receiving.receive(timeout=30.0) as arriving:
            async with p.send(source, arriving.ticket) as sending:
                first = 0
                for end in (17, 30, len(PROMPT)):
                    for layer in range(LAYERS):
                        with stream:
                            delay @ delay
                            for position in range(first, end):
                                block, row = divmod(position, sender_tokens)
                                target = sent[layer][source.block_table[block]]
                                target[row] = prompt[layer, position]
                        event = cupy.cuda.Event(disable_timing=True)
                        event.record(stream)
                        sending.layers_done(end, layer + 1, event)
                    source.commit(end)
                    step(p, stream)
                    first = end
            assert sending.failure is None
            assert await arriving.wait() == len(PROMPT)
        found = rows(kept, receiving, len(PROMPT), receiver_tokens)
        assert (found == prompt.get()).all()
        statistics = d.inspect.parts.worker.inspect().peers[0].received
        assert statistics.wrong == statistics.stale == 0
        assert statistics.fragments > len(PROMPT) // sender_tokens + 1, "no block came in layers"
        step(p, stream)
        step(d, stream)


@pytest.mark.asyncio
@pytest.mark.parametrize(("sender_tokens", "receiver_tokens"), [(4, 4), (4, 8), (8, 4)])
async def test_blocks_on_the_gpu_arrive_with_equal_bytes(sender_tokens, receiver_tokens):
    (p, sent), (d, kept) = (
        make(block_tokens=sender_tokens),
        make(block_tokens=receiver_tokens, seed=2),
    )
    async with p, d:
        await exchange(
            p, sent, d, kept, sender_tokens=sender_tokens, receiver_tokens=receiver_tokens
        )
        statistics = d.inspect.parts.worker.inspect().peers[0]
        assert statistics.received.wrong == statistics.received.stale == 0


@pytest.mark.asyncio
async def test_blocks_arrive_after_the_sleep_of_the_device():
    (p, sent), (d, kept) = make(), make(seed=2)
    async with p, d:
        regions = d.regions
        await d.sleep(["device", "host"])
        await d.wake_up(regions=regions)
        await exchange(p, sent, d, kept, sender_tokens=BLOCK, receiver_tokens=BLOCK)


@pytest.mark.asyncio
async def test_cancelled_receive_leaves_blocks_of_others_alone():
    """I11: another lease takes the blocks at once, while fragments are still on their way."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    (p, _), (d, kept) = make(), make(seed=2)
    async with p, d:
        async with p.match(PROMPT) as sending:
            await sending.allocate(len(PROMPT))
            receiving = d.match(PROMPT)
            await receiving.allocate(len(PROMPT))
            arriving = receiving.receive(timeout=30.0)
            await arriving.__aenter__()
            async with p.send(sending, arriving.ticket):
                sending.commit(len(PROMPT))
                step(p, stream)
                receiving.release()
                await arriving.__aexit__(None, None, None)
                async with d.match(PROMPT + 1000) as other:
                    await other.allocate(d.config.device_blocks * BLOCK)
                    with stream:
                        for layer in kept:
                            layer[:] = 5
                    stream.synchronize()
            await p.drain()
            await d.drain()
            assert all((layer.get() == 5).all() for layer in kept)
        step(p, stream)
        step(d, stream)
