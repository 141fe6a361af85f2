"""Tensors that CuPy creates for a layout, in an engine."""

from __future__ import annotations

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import ConfigError
from aiokv.model.shape import LayerShape
from aiokv.model.tensors import create_tensors

LAYER = LayerShape(kv_heads=2, key_elements=64, value_elements=64)


@pytest.mark.timeout(120)
@pytest.mark.asyncio
@pytest.mark.parametrize("kv_dtype", ["auto", "block_wise_fp8", "int4_zp"])
async def test_an_engine_restores_created_tensors(kv_dtype: str) -> None:
    import cupy

    created = create_tensors(
        [LAYER] * 2, 8, library="cupy", device="cuda:0", block_tokens=4, kv_dtype=kv_dtype
    )
    tensors = [tensor for layer in created.layers for tensor in layer.values()]
    config = CacheConfig(block_tokens=4, device_blocks=8, host_blocks=8)
    async with CacheEngine(config, created.regions, device="cuda:0") as engine:
        for expected in (0, 16):
            async with engine.match(range(17)) as lease:
                await lease.allocate(17)
                await lease.layers.wait_all()
                assert lease.cached_tokens == expected
                for tensor in tensors:
                    for position, block in enumerate(lease.block_table[:4].tolist()):
                        if expected:
                            assert (tensor[block].view(cupy.uint8) == position + 1).all()
                        tensor[block].view(cupy.uint8)[...] = position + 1
                cupy.cuda.Device().synchronize()
                lease.commit(17)
            engine.step()
            await engine.drain()
            await engine.evict(8)
            for tensor in tensors:
                tensor[...] = 0
            cupy.cuda.Device().synchronize()


def test_cupy_creates_tensors_on_gpus_only() -> None:
    with pytest.raises(ConfigError, match="cuda:N"):
        create_tensors([LAYER], 2, library="cupy", device="cpu")
