"""Formats of blocks in host memory: sizes, bytes, refusals, and keys in stores."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit, Regions
from aiokv.base.groups import ATTENTION, STATE, layers_group
from aiokv.errors import ConfigError, LayoutError, TransferError
from aiokv.layout.host_format import (
    DEVICE_BYTES,
    TRAILER_BYTES,
    HostFormat,
    PiecePayload,
    checked_payload,
    pitch_bytes,
)
from aiokv.model.shape import ModelShape
from aiokv.model.sizing import Memory, cache_sizes
from aiokv.stores import DirectoryStore, DiskStore
from aiokv.testing import ManualDevice, run_until_idle
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.host_formats import Framed, Halved, Masked
from tests.harness.windows import Windowed
from tests.peers.engines import Side, two_engines
from tests.peers.engines import prompt as peer_prompt
from tests.unit.model_configs import LLAMA_3_8B

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK_TOKENS, DEVICE_BLOCKS, WIDTH = 4, 12, 24
PROMPT = list(range(5 * BLOCK_TOKENS + 1))


class Model:
    """An engine on the cpu device over two layers of float16 and one of float32, and its bytes."""

    def __init__(self, host_format: HostFormat, *stores: Any, **config: Any) -> None:
        self.tensors = [np.zeros((DEVICE_BLOCKS, WIDTH), dtype) for dtype in ("f2", "f2", "f4")]
        self.regions = Regions(num_layers=3, host_format=host_format)
        self.regions.add("kv", layers=self.tensors)
        fields = {"block_tokens": BLOCK_TOKENS, "host_blocks": 8, "model": "tests", **config}
        self.engine = CacheEngine(
            CacheConfig(device_blocks=DEVICE_BLOCKS, **fields), self.regions, stores=stores
        )

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.aclose()
        assert self.engine.check_invariants() == []

    def held(self, table: np.ndarray) -> list[bytes]:
        """Return the bytes of the blocks of a table, by layer."""
        return [tensor[table].tobytes() for tensor in self.tensors]

    async def to_host(self, seed: int = 1) -> list[bytes]:
        """Compute the prompt, and evict it from the device; return its bytes by layer."""
        rng = np.random.default_rng(seed)
        for tensor in self.tensors:
            tensor[:] = rng.integers(-1000, 1000, tensor.shape)
        async with self.engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            expected = self.held(lease.block_table[:5])
            lease.commit(len(PROMPT))
        await self.engine.drain()
        await self.engine.evict(DEVICE_BLOCKS)
        for tensor in self.tensors:
            tensor[:] = -1
        return expected

    async def served(self, **allocate: Any) -> tuple[int, list[bytes]]:
        """Return the cached tokens of the prompt, and their bytes by layer."""
        async with self.engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT), **allocate)
            await lease.layers.wait_all()
            cached = lease.cached_tokens
            return cached, self.held(lease.block_table[: cached // BLOCK_TOKENS])

    @property
    def host_blocks(self) -> np.ndarray:
        memory = self.engine.inspect.parts.worker.memory  # type: ignore[attr-defined]
        return memory.arena.blocks


EXACT = pytest.mark.parametrize("make", [lambda: Masked(0x5A), Framed], ids=["masked", "framed"])


# --- sizes ----------------------------------------------------------------------------------------


def test_payload_follows_from_the_format_and_the_element_types() -> None:
    piece = WIDTH * 2
    expected = {
        DEVICE_BYTES: ([piece, piece, 2 * piece], 64 + 64 + 128),
        Framed(): ([piece + 4, piece + 4, 2 * piece + 4], 64 + 64 + 128),
        Halved(): ([piece // 2, piece // 2, 2 * piece], 64 + 64 + 128),
    }
    for host_format, (pieces, payload) in expected.items():
        regions = Model(host_format).regions
        assert regions.block_bytes == 4 * piece, "the device has the same blocks"
        assert [piece.payload.num_bytes for piece in regions.pieces()] == pieces
        assert (regions.copied_bytes, regions.payload_bytes) == (sum(pieces), payload)
        assert [piece.host_offset_bytes for piece in regions.pieces()] == [0, 64, 128]
        assert regions.without_tensors().payload_bytes == payload
        assert regions.sent().copied_bytes == regions.sent().block_bytes == 4 * piece


def test_all_groups_have_the_format_except_what_peers_exchange() -> None:
    regions = Regions(num_layers=2, host_format=Framed())
    tensor = np.zeros((4, 10), np.uint8)
    regions.add("kv", layers=[tensor] * 2)
    regions.add_state("state", layers=[tensor, tensor])
    regions.add_window("near", "near", layers=[tensor], layer_indices=[0])
    copied = {ATTENTION: 2 * 14, STATE: 2 * 14, "near": 14, layers_group(0, 1): 14}
    for group, num_bytes in copied.items():
        assert regions.group_blocks(group).copied_bytes == num_bytes
        assert regions.sent().group_blocks(group).copied_bytes == num_bytes * 10 // 14
    assert regions.sent() is regions.sent()
    regions.add("more", layers=[tensor] * 2)
    assert regions.sent().copied_bytes == 40


def test_capacity_from_bytes_counts_payloads() -> None:
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((4, 64), "f2")])
    halved = regions.in_format(Halved())
    assert halved.in_format(DEVICE_BYTES).payload_bytes == regions.payload_bytes == 128
    assert CacheConfig.for_regions(regions, host_bytes=1280).host_blocks == 10
    assert CacheConfig.for_regions(halved, host_bytes=1280).host_blocks == 20
    assert CacheConfig.load(env=False, block=halved, host_bytes=1280).host_blocks == 20
    config = CacheConfig.for_regions(halved, host_bytes=10 * 4096, with_stores=True)
    assert config.host_blocks == 10


def test_sizes_of_a_model_count_payloads() -> None:
    class Half(Halved):
        def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
            assert dtype == "bfloat16"
            return super().payload(num_bytes, "float16")

    shape = ModelShape.from_config(LLAMA_3_8B)
    assert shape.host_bytes_per_block(host_format=Half()) * 2 == shape.host_bytes_per_block()
    memory = Memory(gpu_bytes=80 << 30, host_bytes=64 << 30)
    plain, half = cache_sizes(shape, memory), cache_sizes(shape, memory, host_format=Half())
    assert half.host_block_bytes * 2 == plain.host_block_bytes
    assert half.host_blocks == 2 * plain.host_blocks
    assert (half.block_bytes, half.device_blocks) == (plain.block_bytes, plain.device_blocks)


@pytest.mark.parametrize(
    "payload", [PiecePayload(8), PiecePayload(0, 1, 1), PiecePayload(16, 1), PiecePayload(16, 0, 1)]
)
def test_payload_that_no_copy_can_have_is_refused(payload: PiecePayload) -> None:
    class Wrong(Halved):
        def payload(self, num_bytes: int, dtype: str) -> PiecePayload:
            return payload

    with pytest.raises(LayoutError, match="host format 'halved': 16 bytes of uint8 become"):
        checked_payload(Wrong(), 16, "uint8")


# --- device and host ------------------------------------------------------------------------------


@EXACT
@pytest.mark.asyncio
async def test_host_blocks_have_the_bytes_of_the_format(make: Callable[[], HostFormat]) -> None:
    host_format = make()
    async with Model(host_format, verify="checksum") as model:
        expected = await model.to_host()
        pieces = list(model.regions.pieces())
        assert model.host_blocks.shape[1] == model.regions.payload_bytes
        found = {
            (
                piece.layer,
                model.host_blocks[block, begin : begin + piece.payload.num_bytes].tobytes(),
            )
            for piece in pieces
            for block in range(5)
            for begin in [piece.host_offset_bytes]
        }
        assert found == {
            (layer, encoded(host_format, expected[layer][i * size : (i + 1) * size]))
            for layer, size in enumerate((48, 48, 96))
            for i in range(5)
        }
        assert await model.served() == (20, expected)
        routes = model.engine.statistics().worker.attention
        assert routes.offload.moved_bytes == 5 * model.regions.copied_bytes
        assert routes.onload.moved_bytes == 5 * model.regions.copied_bytes


def encoded(host_format: Any, device: bytes) -> bytes:
    host = np.zeros(host_format.host_bytes(len(device)), np.uint8)
    host_format.write(host, np.frombuffer(device, np.uint8))
    return host.tobytes()


@pytest.mark.asyncio
async def test_format_may_return_other_bytes() -> None:
    async with Model(Halved()) as model:
        expected = await model.to_host()
        cached, found = await model.served()
        assert cached == 20
        assert found[2] == expected[2], "float32 is copied"
        for layer in (0, 1):
            assert found[layer][1::2] == expected[layer][1::2]
            assert set(found[layer][::2]) == {0}


@pytest.mark.asyncio
async def test_refused_block_is_not_saved() -> None:
    host_format = Framed()
    async with Model(host_format) as model:
        host_format.refusals["encode"] = 1
        await model.to_host()
        assert model.engine.match(PROMPT).hit == Hit(0, 0)
        assert await model.served() == (0, [b""] * 3)
        expected = await model.to_host()
        assert await model.served() == (20, expected)


@pytest.mark.asyncio
async def test_refused_block_is_not_served() -> None:
    host_format = Framed()
    async with Model(host_format) as model:
        await model.to_host()
        host_format.refusals["decode"] = 1
        async with model.engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT))
            with pytest.raises(TransferError, match="the host format refused"):
                await lease.layers.wait_all()
            assert lease.recompute_from() == 0
        assert await model.served() == (0, [b""] * 3)


def test_checksums_need_a_format_that_returns_its_bytes() -> None:
    with pytest.raises(ConfigError, match="'halved' does not return the bytes"):
        Model(Halved(), verify="checksum")


@pytest.mark.asyncio
async def test_device_without_copies_of_a_format_refuses_it() -> None:
    model = Model(Framed())
    engine = CacheEngine(
        CacheConfig(block_tokens=4, device_blocks=DEVICE_BLOCKS), model.regions, ManualDevice()
    )
    with pytest.raises(LayoutError, match="host format 'framed'; the manual device"):
        await engine.__aenter__()


@pytest.mark.asyncio
async def test_tensors_of_another_format_do_not_wake_up() -> None:
    async with Model(Framed()) as model:
        expected = await model.to_host()
        await model.engine.sleep(["device"])
        with pytest.raises(LayoutError, match="the host format 'masked 1', not 'framed'"):
            await model.engine.wake_up(regions=model.regions.in_format(Masked(1)))
        await model.engine.wake_up(regions=model.regions)
        assert await model.served() == (20, expected)


# --- stores ---------------------------------------------------------------------------------------


@EXACT
@pytest.mark.parametrize("kind", [DiskStore, DirectoryStore])
@pytest.mark.asyncio
async def test_restart_finds_blocks_of_the_same_format_only(
    make: Callable[[], HostFormat], kind: Callable[..., Any], tmp_path: Path
) -> None:
    """The other mask has objects of the same size, in the same files."""

    def store() -> Any:
        return kind(tmp_path / "kv", bytes="64MiB")

    async with Model(make(), store()) as model:
        expected = await model.to_host()
        assert model.host_blocks.shape[1] == pitch_bytes(256, with_stores=True)
    for other in (DEVICE_BYTES, Masked(0x33)):
        async with Model(other, store()) as model:
            assert await model.served(wait_store=math.inf) == (0, [b""] * 3)
    async with Model(make(), store()) as model:
        assert await model.served(wait_store=math.inf) == (20, expected)
        (statistics,) = model.engine.statistics().stores
        assert statistics.loaded_bytes == 5 * model.regions.payload_bytes


def bytes_by_size(folder: Path) -> dict[int, list[bytes]]:
    files: dict[int, list[bytes]] = defaultdict(list)
    for path in folder.rglob("*"):
        if path.is_file():
            files[path.stat().st_size].append(path.read_bytes())
    return files


@pytest.mark.asyncio
async def test_stored_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    async with Model(Masked(0xFF), DirectoryStore(tmp_path, bytes="64MiB")) as model:
        expected = await model.to_host()
    objects = bytes_by_size(tmp_path)[256 + TRAILER_BYTES]
    inverted = {bytes(0xFF ^ byte for byte in expected[0][i : i + 48]) for i in range(0, 240, 48)}
    assert {found[:48] for found in objects} == inverted


@EXACT
@pytest.mark.asyncio
async def test_windows_are_stored_in_the_format(
    make: Callable[[], HostFormat], tmp_path: Path
) -> None:
    tokens = list(range(21))

    class Formatted(Windowed):
        def new_regions(self) -> Regions:
            return super().new_regions().in_format(host_format)

    def windowed() -> Windowed:
        sizes = {"host_windows": 40, "host_blocks": 60, "device_blocks": 60}
        return Formatted(stores=[DiskStore(tmp_path / "kv", bytes="64MiB")], **sizes)

    host_format = make()
    async with windowed() as model:
        assert await model.serve(tokens[:20]) == 0
    async with windowed() as model:
        assert await model.serve(tokens, wait_store=math.inf) == 20
    host_format = Masked(0x11)
    async with windowed() as model:
        assert await model.serve(tokens, wait_store=math.inf) == 0


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_peers_exchange_the_bytes_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server has a format of its own; the receiver keeps what arrived in its host memory."""
    formats: list[HostFormat] = [Framed(), Masked(0x5A)]
    new_memory = Side.new_memory

    def formatted(side: Side, *args: Any, **sides: Any) -> Any:
        memory = new_memory(side, *args, **sides)
        memory.regions = memory.regions.in_format(formats.pop())
        return memory

    monkeypatch.setattr(Side, "new_memory", formatted)
    tokens = peer_prompt(30)
    async with two_engines() as (sender, receiver), await receiver.granted(tokens) as lease:
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            assert await sender.prefill(tokens, receiving.ticket) == (30, None)
            assert await receiving.wait() == 30
        receiver.check(lease, tokens)
        lease.commit(30)
        lease.release()
        await receiver.engine.drain()
        await receiver.engine.evict(64)
        async with await receiver.granted(tokens) as again:
            await again.layers.wait_all()
            assert again.cached_tokens == 28
            receiver.check(again, tokens)
    await run_until_idle(lambda: True)
