"""Every cache shape is offloaded and onloaded layer by layer, byte for byte."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions, num_blocks_for
from aiokv.errors import ConfigError, LayoutError
from aiokv.testing import ManualDevice, ScriptedStore, spin
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEVICE_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM = 12, 4, 3, 8
PROMPT_BLOCKS = 5
PROMPT = np.arange(PROMPT_BLOCKS * BLOCK_TOKENS + 1, dtype=np.int32)


@dataclass
class Shape:
    """Tensors of a cache, and how they are registered.

    Attributes:
        tensors: by region, one a layer that has it; kept to check that they are used in place.
    """

    num_layers: int
    regions: Regions
    tensors: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        *,
        layers: Sequence[int] | None = None,
        blocks: int = DEVICE_BLOCKS,
        **options: Any,
    ) -> None:
        indices = range(self.num_layers) if layers is None else layers
        made = [np.zeros((blocks, *shape), dtype=dtype) for _ in indices]
        self.add_views(name, made, layer_indices=indices, **options)

    def add_views(self, name: str, views: list[np.ndarray], **options: Any) -> None:
        self.tensors[name] = views
        self.regions.add(name, layers=views, **options)


def shape_of(num_layers: int) -> Shape:
    return Shape(num_layers, Regions(num_layers=num_layers))


def gqa() -> Shape:
    shape = shape_of(3)
    shape.add("k", (BLOCK_TOKENS, HEADS, HEAD_DIM), "f2")
    shape.add("v", (BLOCK_TOKENS, HEADS, HEAD_DIM), "f2")
    return shape


def values_narrower_than_keys() -> Shape:
    shape = shape_of(2)
    shape.add("k", (HEADS, BLOCK_TOKENS, 24), "f4")
    shape.add("v", (HEADS, BLOCK_TOKENS, 16), "f2")
    return shape


def interleaved() -> Shape:
    """`[B, K/V, T, H, D]`: blocks of a region have a stride of two blocks."""
    shape = shape_of(2)
    both = [np.zeros((DEVICE_BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD_DIM), "f2") for _ in range(2)]
    shape.add_views("k", [tensor[:, 0] for tensor in both])
    shape.add_views("v", [tensor[:, 1] for tensor in both])
    return shape


def mla() -> Shape:
    """One latent region, no values."""
    shape = shape_of(3)
    shape.add("latent", (BLOCK_TOKENS, 1, 72), "f2")
    return shape


def blockwise_fp8() -> Shape:
    """Bytes, and a float scale for each head and token: other dtype, other bytes a block."""
    shape = shape_of(2)
    for name in ("k", "v"):
        shape.add(name, (HEADS, BLOCK_TOKENS, HEAD_DIM), "u1")
        shape.add(f"{name}_scale", (HEADS, BLOCK_TOKENS), "f4")
    return shape


def int8_with_half_scales() -> Shape:
    shape = shape_of(2)
    for name in ("k", "v"):
        shape.add(name, (HEADS, BLOCK_TOKENS, HEAD_DIM), "i1")
        shape.add(f"{name}_scale", (HEADS, BLOCK_TOKENS), "f2")
    return shape


def mtp() -> Shape:
    """Layers 2 and 3 are the draft's: fewer heads, numbered after the main ones."""
    shape = shape_of(4)
    for name in ("k", "v"):
        shape.add(name, (BLOCK_TOKENS, HEADS, HEAD_DIM), "f2", layers=[0, 1])
        shape.add(f"mtp_{name}", (BLOCK_TOKENS, 1, HEAD_DIM), "f2", layers=[2, 3])
    return shape


def mtp_with_more_blocks() -> Shape:
    """The draft keeps half as many blocks again, of half the size, for itself."""
    shape = shape_of(2)
    shape.add("k", (BLOCK_TOKENS, HEADS, HEAD_DIM), "f2", layers=[0])
    shape.add(
        "mtp_k",
        (BLOCK_TOKENS // 2, HEADS, HEAD_DIM),
        "f2",
        layers=[1],
        blocks=DEVICE_BLOCKS * 3,
        rows_per_block=2,
        more_blocks=True,
    )
    return shape


def sparse_attention_indexer() -> Shape:
    """MLA with an fp8 index key and its scale in every other layer."""
    shape = shape_of(4)
    shape.add("latent", (BLOCK_TOKENS, 72), "f2")
    shape.add("indexer", (BLOCK_TOKENS, 16 + 4), "u1", layers=[1, 3])
    return shape


def one_rank_of_two() -> Shape:
    """`[B, H, T, D]` split by heads: this rank moves the second half of a shared tensor."""
    shape = shape_of(2)
    whole = [np.zeros((DEVICE_BLOCKS, 4, BLOCK_TOKENS, HEAD_DIM), "f2") for _ in range(2)]
    shape.add_views("k", [tensor[:, 2:] for tensor in whole])
    return shape


SHAPES = [
    gqa,
    values_narrower_than_keys,
    interleaved,
    mla,
    blockwise_fp8,
    int8_with_half_scales,
    mtp,
    mtp_with_more_blocks,
    sparse_attention_indexer,
    one_rank_of_two,
]


@pytest.fixture(params=SHAPES, ids=lambda make: make.__name__)
def shape(request: pytest.FixtureRequest) -> Shape:
    make: Callable[[], Shape] = request.param
    return make()


def owners(shape: Shape) -> list[np.ndarray]:
    """Return the tensors behind all views, each once, as bytes ``[blocks, bytes]``."""
    bases = {}
    for views in shape.tensors.values():
        for view in views:
            base = view if view.base is None else view.base
            bases[base.ctypes.data] = base
    return [base.reshape(base.shape[0], -1).view(np.uint8) for base in bases.values()]


def expected_of(shape: Shape, layer: int, table: np.ndarray) -> list[bytes]:
    """Return the bytes of a layer's pieces in the blocks of ``table``."""
    return [piece.view()[table].tobytes() for piece in shape.regions.layer_pieces(layer)]


@pytest.mark.asyncio
async def test_prompt_is_offloaded_and_onloaded_layer_by_layer(shape: Shape) -> None:
    rng = np.random.default_rng(0)
    for tensor in owners(shape):
        tensor[:] = rng.integers(0, 256, tensor.shape, dtype=np.uint8)
    device = ManualDevice()
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, host_blocks=8)
    async with CacheEngine(config, shape.regions, device) as engine:
        async with engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            table = lease.block_table[:PROMPT_BLOCKS]
            expected = [expected_of(shape, layer, table) for layer in range(shape.num_layers)]
            lease.commit(len(PROMPT))
        await spin(2)
        (offload,) = device.offloads
        offload.complete_all()
        await engine.drain()
        assert await engine.evict(PROMPT_BLOCKS) == PROMPT_BLOCKS
        for tensor in owners(shape):
            tensor[:] = 0xA5

        async with engine.match(PROMPT) as lease:
            assert lease.hit == (0, PROMPT_BLOCKS * BLOCK_TOKENS)
            await lease.allocate(len(PROMPT))
            table = lease.block_table[:PROMPT_BLOCKS]
            (onload,) = device.onloads
            for layer in range(shape.num_layers):
                assert expected_of(shape, layer, table) != expected[layer]
                onload.complete(layer)
                await lease.layers.wait(layer)
                assert expected_of(shape, layer, table) == expected[layer]
            await engine.drain()
        moved = engine.statistics().worker.attention.onload.moved_bytes
        assert moved == PROMPT_BLOCKS * shape.regions.block_bytes
        assert engine.check_invariants() == []
    assert_nothing_else_changed(shape, table)


def assert_nothing_else_changed(shape: Shape, table: np.ndarray) -> None:
    """Clear the copied bytes: only filler remains beside, between and behind the blocks."""
    for piece in shape.regions.pieces():
        piece.view()[table] = 0xA5
    for tensor in owners(shape):
        assert (tensor == 0xA5).all()


@pytest.mark.asyncio
async def test_native_threads_move_the_same_bytes(shape: Shape) -> None:
    """The same round trip on the cpu device, with the worker's checksums."""
    rng = np.random.default_rng(1)
    for tensor in owners(shape):
        tensor[:] = rng.integers(0, 256, tensor.shape, dtype=np.uint8)
    config = CacheConfig.for_regions(
        shape.regions,
        host_bytes=8 * shape.regions.payload_bytes,
        block_tokens=BLOCK_TOKENS,
        verify="checksum",
    )
    async with CacheEngine(config, shape.regions) as engine:
        async with engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            table = lease.block_table[:PROMPT_BLOCKS]
            expected = [expected_of(shape, layer, table) for layer in range(shape.num_layers)]
            lease.commit(len(PROMPT))
        await engine.drain()
        assert await engine.evict(PROMPT_BLOCKS) == PROMPT_BLOCKS
        for tensor in owners(shape):
            tensor[:] = 0xA5
        async with engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            table = lease.block_table[:PROMPT_BLOCKS]
            for layer in range(shape.num_layers):
                await lease.layers.wait(layer)
                assert expected_of(shape, layer, table) == expected[layer]
    assert_nothing_else_changed(shape, table)


@pytest.mark.asyncio
async def test_prompt_returns_from_a_store_with_all_regions(shape: Shape) -> None:
    """An object is a whole host block: scales, draft layers and indexer caches are part of it."""
    rng = np.random.default_rng(2)
    for tensor in owners(shape):
        tensor[:] = rng.integers(0, 256, tensor.shape, dtype=np.uint8)
    config = CacheConfig(
        block_tokens=BLOCK_TOKENS, device_blocks=DEVICE_BLOCKS, host_blocks=8, model="tests"
    )
    store = ScriptedStore()
    engine = CacheEngine(config, shape.regions, stores=[store])
    async with engine, engine.match(PROMPT) as lease:
        await lease.allocate(len(PROMPT))
        table = lease.block_table[:PROMPT_BLOCKS]
        expected = [expected_of(shape, layer, table) for layer in range(shape.num_layers)]
        lease.commit(len(PROMPT))
    for tensor in owners(shape):
        tensor[:] = 0xA5
    engine = CacheEngine(config, shape.regions, stores=[store])
    async with engine, engine.match(PROMPT) as lease:
        await lease.allocate(len(PROMPT), wait_store=math.inf)
        await lease.layers.wait_all()
        assert lease.usage.fetched_tokens == PROMPT_BLOCKS * BLOCK_TOKENS
        table = lease.block_table[:PROMPT_BLOCKS]
        for layer in range(shape.num_layers):
            assert expected_of(shape, layer, table) == expected[layer]
    assert_nothing_else_changed(shape, table)


def test_capacity_counts_every_region_and_extra_layer() -> None:
    """Draft layers and scales cost host memory as well."""
    regions = mtp().regions
    main, draft = 2 * BLOCK_TOKENS * HEADS * HEAD_DIM * 2, 2 * BLOCK_TOKENS * HEAD_DIM * 2
    assert regions.block_bytes == 2 * main + 2 * draft
    config = CacheConfig.for_regions(
        regions, device_bytes=7 * regions.block_bytes + 1, host_bytes=20 * regions.payload_bytes
    )
    assert (config.device_blocks, config.host_blocks) == (7, 20)
    assert blockwise_fp8().regions.block_bytes == 2 * 2 * BLOCK_TOKENS * HEADS * (HEAD_DIM + 4)


def test_host_capacity_counts_the_padding_between_the_pieces_of_a_block() -> None:
    """A block of 2 x 37 bytes takes 2 x 64 bytes of host memory."""
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((4, 37), np.uint8) for _ in range(2)])
    assert (regions.block_bytes, regions.payload_bytes) == (74, 128)
    for host_bytes, blocks in ((10 * 128, 10), (10 * 128 - 1, 9), (128, 1)):
        assert CacheConfig.for_regions(regions, host_bytes=host_bytes).host_blocks == blocks
    with pytest.raises(ConfigError, match="host_bytes is 127; it must be at least 128"):
        CacheConfig.for_regions(regions, host_bytes=127)
    config = CacheConfig.for_regions(regions, host_bytes=2 * 4096 - 1, with_stores=True)
    assert config.host_blocks == 1  # with the trailer, and aligned for direct I/O
    with pytest.raises(ConfigError, match="with_stores"):
        CacheConfig.for_regions(regions, host_bytes=4096, with_stores=1)
    arena = HostArena(num_blocks=10, pitch_bytes=regions.payload_bytes)
    assert arena.nbytes >= 10 * 128
    arena.close()


def test_capacity_is_never_more_than_the_tensors_hold() -> None:
    regions = gqa().regions
    config = CacheConfig.for_regions(regions, device_bytes=10**12, block_tokens=BLOCK_TOKENS)
    assert (config.device_blocks, config.host_blocks) == (DEVICE_BLOCKS, 0)
    assert dataclasses.replace(config, host_blocks=3).block_tokens == BLOCK_TOKENS
    assert num_blocks_for(3 * regions.block_bytes, regions.block_bytes) == 3


@pytest.mark.parametrize("field", ["device_bytes", "host_bytes"])
def test_memory_for_less_than_one_block_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 100; it must be at least"):
        CacheConfig.for_regions(gqa().regions, **{field: 100})
    with pytest.raises(ConfigError, match="regions has no tensors"):
        CacheConfig.for_regions(Regions(num_layers=2))


def test_different_block_counts_need_more_blocks() -> None:
    regions = Regions(num_layers=2)
    regions.add("k", layers=[np.zeros((4, 8))], layer_indices=[0])
    with pytest.raises(LayoutError, match="6 blocks; the other tensors have 4"):
        regions.add("mtp", layers=[np.zeros((6, 8))], layer_indices=[1])
    with pytest.raises(LayoutError, match="3 blocks; the other tensors have 4"):
        regions.add("mtp", layers=[np.zeros((3, 8))], layer_indices=[1], more_blocks=True)
    with pytest.raises(LayoutError, match="9 rows are not a multiple of rows_per_block"):
        regions.add("mtp", layers=[np.zeros((9, 8))], layer_indices=[1], rows_per_block=2)
    with pytest.raises(LayoutError, match="must be contiguous"):
        regions.add("mtp", layers=[np.zeros((8, 2, 8))[:, 0]], layer_indices=[1], rows_per_block=2)
    assert regions.names == ("k",)
