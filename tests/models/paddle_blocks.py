"""Blocks of Paddle tensors through the engine and back, with every byte compared.

Only memory, copies, streams and events of Paddle are used, no kernel: a wheel of Paddle may have no
code for the GPU at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import aiokv
from aiokv.frameworks.paddle import TensorMemory, add_region, import_paddle, recorded_event

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_TOKENS, BLOCKS, LAYERS = 16, 24, 3
SHAPE = [BLOCKS, BLOCK_TOKENS, 2, 32]


def bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, block by block; a copy of Paddle's for one on a GPU."""
    copy = tensor.cpu() if tensor.place.is_gpu_place() else tensor
    return np.asarray(TensorMemory(copy)).view(np.uint8).reshape(BLOCKS, -1).copy()


def fill(tensor: Any, values: NDArray[np.uint8]) -> None:
    """Copy bytes into a tensor, on Paddle's current stream."""
    paddle = import_paddle()
    source = paddle.empty(SHAPE, dtype="bfloat16")
    source = source.cpu() if source.place.is_gpu_place() else source
    np.asarray(TensorMemory(source)).view(np.uint8).reshape(BLOCKS, -1)[:] = values
    tensor.copy_(source, True)


async def assert_blocks_return(place: str) -> None:
    """Commit a prompt, offload and evict its blocks, load them, and compare the bytes.

    Args:
        place: ``"cpu"`` or ``"gpu:0"``. On a GPU, transfers wait for events on Paddle's stream, and
            Paddle's stream waits for the loaded layers.
    """
    paddle = import_paddle()
    paddle.device.set_device(place)
    on_gpu = place != "cpu"
    tensors = [paddle.empty(SHAPE, dtype="bfloat16") for _ in range(LAYERS)]
    assert all(tensor.place.is_gpu_place() is on_gpu for tensor in tensors)
    regions = aiokv.Regions(num_layers=LAYERS)
    add_region(regions, "kv", tensors)
    config = aiokv.CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=BLOCKS,
        host_blocks=BLOCKS,
        write_policy="write_through",
    )
    chance = np.random.default_rng(5)
    size = bytes_of(tensors[0]).shape
    tokens = np.arange(12 * BLOCK_TOKENS, dtype=np.int32)

    def step(engine: aiokv.CacheEngine) -> None:
        engine.step(recorded_event() if on_gpu else None)

    async with aiokv.CacheEngine(config, regions, device="cuda" if on_gpu else "cpu") as engine:
        lease = await engine.match(tokens)
        await lease.allocate(len(tokens))
        written = [chance.integers(0, 256, size, np.uint8) for _ in tensors]
        for tensor, values in zip(tensors, written, strict=True):
            fill(tensor, values)
        expected = [values[lease.block_table] for values in written]
        lease.commit(len(tokens))
        lease.release()
        step(engine)
        await engine.drain()
        await engine.evict(BLOCKS)
        for tensor in tensors:
            fill(tensor, np.zeros(size, np.uint8))
        step(engine)

        lease = await engine.match(np.append(tokens, np.int32(1)))
        assert lease.hit == aiokv.Hit(0, len(tokens))
        await lease.allocate(len(tokens) + 1)
        blocks = lease.block_table[: len(tokens) // BLOCK_TOKENS]
        if not on_gpu:
            await lease.layers.wait_all()
        for layer, tensor in enumerate(tensors):
            if on_gpu:
                lease.layers.gpu_wait(layer, paddle.device.cuda.current_stream())
            assert (bytes_of(tensor)[blocks] == expected[layer]).all(), f"layer {layer}"
        await lease.layers.wait_all()
        lease.release()
        step(engine)
        assert engine.check_invariants() == []
