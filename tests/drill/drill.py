"""An engine over real bytes whose copies follow a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.testing import ScriptedDevice, run_until_idle, spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

if TYPE_CHECKING:
    from aiokv import Lease
    from aiokv.worker.device.base import Device

__all__ = ["BLOCK_TOKENS", "Drill", "Shaped", "prompt", "regions_of"]


class Drill(Cache):
    """Engine whose copies complete on their own, except for those scripted in ``drill.device``."""

    device: ScriptedDevice

    def __init__(self, **options: Any) -> None:
        super().__init__(device=ScriptedDevice(), **options)

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self.device.end_script()
        await super().__aexit__(exc_type, exc, traceback)

    async def to_host(self, *prompts: np.ndarray) -> None:
        """Leave the full blocks of the prompts on the host only."""
        await self.fill(*prompts)
        await self.engine.drain()
        await self.engine.evict(self.engine.config.device_blocks)
        assert [self.hit(tokens) for tokens in prompts] == [
            (0, len(tokens) // BLOCK_TOKENS) for tokens in prompts
        ]

    async def running(self, direction: str, copies: int = 1) -> None:
        """Wait until the device has that many unfinished copies."""
        await run_until_idle(lambda: len(self.device.running(direction)) == copies)  # type: ignore[arg-type]

    def check_all(self, lease: Lease, tokens: np.ndarray) -> None:
        """Check that the full blocks of the lease hold the bytes of its prompt."""
        words = self.memory.words(tokens, "", self.memory.weights)
        self.memory.check(lease.block_table[: len(words)], words, lease.owner)

    async def nothing_lost(self) -> None:
        """Check that every block can be allocated again without leases and transfers."""
        await self.engine.drain()
        await spin(3)
        assert self.statistics.leases == 0
        await self.engine.evict(self.engine.config.device_blocks)
        await self.engine.evict(self.engine.config.host_blocks, "host")
        assert self.statistics.attention.device.free == self.statistics.attention.device.blocks
        assert self.statistics.attention.host.free == self.statistics.attention.host.blocks
        assert self.engine.check_invariants() == []


class Shaped:
    """An engine over tensors of any shape, filled with random bytes; eight blocks of one token."""

    BLOCKS = 8

    def __init__(self, regions: Regions, device: Device | None = None, **config: Any) -> None:
        self.regions = regions
        random = np.random.default_rng(1)
        for piece in regions.pieces():
            piece.view()[:] = random.integers(0, 256, piece.view().shape, np.uint8)
        self.engine = CacheEngine(
            CacheConfig(
                block_tokens=1, device_blocks=self.BLOCKS, host_blocks=self.BLOCKS, **config
            ),
            regions,
            device,
        )

    def layer_bytes(self, table: np.ndarray) -> list[list[bytes]]:
        """Return the bytes of the blocks of ``table``, by layer."""
        return [
            [piece.view()[table].tobytes() for piece in self.regions.layer_pieces(layer)]
            for layer in range(self.regions.num_layers)
        ]

    async def to_host(self, tokens: np.ndarray) -> list[list[bytes]]:
        """Commit the bytes of the blocks, keep them on the host only, and return them."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens))
            held = self.layer_bytes(lease.block_table[: len(tokens)])
            lease.commit(len(tokens))
        await self.engine.drain()
        await self.engine.evict(self.BLOCKS)
        for piece in self.regions.pieces():
            piece.view()[:] = 0x5A
        return held


def regions_of(num_layers: int, **shapes: tuple[tuple[int, ...], str, tuple[int, ...]]) -> Regions:
    """Regions of ``name=(shape of a block, dtype, layers that have it)``."""
    regions = Regions(num_layers=num_layers)
    for name, (shape, dtype, layers) in shapes.items():
        tensors = [np.zeros((Shaped.BLOCKS, *shape), dtype) for _ in layers]
        regions.add(name, layers=tensors, layer_indices=layers)
    return regions
