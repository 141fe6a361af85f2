"""An engine over real bytes, whose KV tells which tokens it was computed from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.testing import ManualDevice, run_until_idle, spin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import Lease

LAYERS = 2
BLOCK_TOKENS = 2


class Served:
    """An engine of 2-token blocks and 2 layers, and a model that writes 8 bytes a block."""

    def __init__(
        self, *, device_blocks: int = 8, host_blocks: int = 16, manual: bool = True, **config: Any
    ) -> None:
        self.kv = [np.zeros((device_blocks, 8), np.int8) for _ in range(LAYERS)]
        regions = Regions(num_layers=LAYERS)
        regions.add("kv", layers=self.kv)
        self.device = ManualDevice() if manual else None
        sizes = {"device_blocks": device_blocks, "host_blocks": host_blocks}
        self.engine = CacheEngine(
            CacheConfig(block_tokens=BLOCK_TOKENS, **sizes, **config), regions, self.device
        )

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.engine.check_invariants() == []
        closing = asyncio.ensure_future(self.engine.__aexit__(*exc))
        while not closing.done():  # backups may start until the last lease is gone
            if self.device is not None:
                self.device.complete_all()
            await asyncio.sleep(0)
        await closing

    @staticmethod
    def content(tokens: Sequence[int], block: int, layer: int) -> np.ndarray:
        """The KV of a block depends on all tokens up to its end."""
        prefix = list(tokens[: (block + 1) * BLOCK_TOKENS])
        seed = [layer, *prefix, len(prefix)]
        return np.random.default_rng(seed).integers(-128, 127, 8).astype(np.int8)

    def compute(self, lease: Lease, tokens: Sequence[int], first: int = 0) -> None:
        """Write the KV of all blocks from position ``first`` on."""
        table = lease.block_table
        for block in range(first // BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS):
            for layer in range(LAYERS):
                self.kv[layer][table[block]] = self.content(tokens, block, layer)

    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """The lease's blocks hold the KV of exactly these tokens."""
        table = lease.block_table
        for block in range(num_tokens // BLOCK_TOKENS):
            for layer in range(LAYERS):
                expected = self.content(tokens, block, layer)
                assert np.array_equal(self.kv[layer][table[block]], expected), (block, layer)

    async def serve(self, tokens: Sequence[int]) -> None:
        """A whole request."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens))
            await lease.layers.wait_all()
            self.check(lease, tokens, lease.cached_tokens)
            self.compute(lease, tokens, lease.cached_tokens)
            lease.commit(len(tokens))

    async def to_host(self, tokens: Sequence[int]) -> None:
        """The full blocks of ``tokens`` are on the host only."""
        await self.serve(tokens)
        await self.complete_offloads()
        await self.engine.evict(len(tokens) // BLOCK_TOKENS)
        for array in self.kv:
            array[:] = 0

    async def complete_offloads(self) -> None:
        assert self.device is not None
        await spin(2)
        for copy in list(self.device.offloads):
            copy.complete_all()
        await self.settle()

    async def settle(self) -> None:
        """What the device has ended is reported."""
        assert self.device is not None
        statistics = self.engine.worker_statistics

        def reported() -> bool:
            submitted = statistics().onload.submitted + statistics().offload.submitted
            return submitted == len(self.device.copies)  # type: ignore[union-attr]

        await run_until_idle(reported)
        await spin(2)
        assert self.engine.check_invariants() == []
