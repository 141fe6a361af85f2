"""An engine over real bytes whose copies the test completes; every KV that is read is compared."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.testing import ManualDevice, spin
from bench.soak_load import Memory

if TYPE_CHECKING:
    from aiokv import Lease

BLOCK_TOKENS = 4


def prompt(seed: int, blocks: int) -> np.ndarray:
    """All of its ``blocks`` can be hit: one more token follows, which is always computed."""
    return np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32) + 1000 * seed


class Cache:
    """Blocks of four tokens; ``async with`` checks invariants and conservation at its end."""

    def __init__(
        self,
        *,
        device_blocks: int = 8,
        host_blocks: int = 8,
        device: ManualDevice | None = None,
        **config: Any,
    ) -> None:
        self.memory = Memory(device_blocks, BLOCK_TOKENS)
        self.device = ManualDevice() if device is None else device
        self.engine = CacheEngine(
            CacheConfig(
                block_tokens=BLOCK_TOKENS,
                device_blocks=device_blocks,
                host_blocks=host_blocks,
                **config,
            ),
            self.memory.regions,
            self.device,
        )

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        if exc is None:
            assert self.engine.check_invariants() == []
            assert self.engine.statistics().leases == 0
        self.device.refuse = None
        closing = asyncio.create_task(self.engine.aclose(0.0 if exc else None))
        while not closing.done():
            self.device.complete_all()
            await spin()
        await closing

    # --- requests -------------------------------------------------------------------------------

    async def serve(self, tokens: np.ndarray, **allocate: Any) -> Lease:
        """A lease whose prompt is there: what was cached is compared, the rest is written."""
        lease = self.engine.match(tokens)
        try:
            await lease.allocate(len(tokens), **allocate)
            await lease.layers.wait_all()
            self.check(lease, tokens)
            self.compute(lease, tokens)
        except BaseException:
            lease.release()
            raise
        return lease

    def check(self, lease: Lease, tokens: np.ndarray) -> None:
        """Compare what the lease takes for cached, byte for byte."""
        blocks = lease.cached_tokens // BLOCK_TOKENS
        words = self.memory.words(tokens, "", self.memory.weights)[:blocks]
        self.memory.check(lease.block_table[:blocks], words, lease.owner)

    def compute(self, lease: Lease, tokens: np.ndarray, first: int | None = None) -> None:
        """Write the blocks from ``first`` (what is not cached) on, and commit them."""
        begin = lease.cached_tokens // BLOCK_TOKENS if first is None else first
        words = self.memory.words(tokens, "", self.memory.weights)
        self.memory.write(lease.block_table[begin : len(words)], words[begin:])
        lease.commit(len(tokens))

    async def fill(self, *prompts: np.ndarray) -> None:
        """Serve and release, one after the other; backups that follow stay in the device."""
        for tokens in prompts:
            (await self.serve(tokens)).release()
        await spin(2)

    async def finish(self) -> None:
        """Complete all transfers, and those that follow from them."""
        draining = asyncio.create_task(self.engine.drain())
        while not draining.done():
            self.device.complete_all()
            await spin()
        await draining

    def hit(self, tokens: np.ndarray) -> tuple[int, int]:
        """Device and host blocks that a match would find."""
        lease = self.engine.match(tokens)
        hit = lease.hit
        lease.release()
        return hit.device_tokens // BLOCK_TOKENS, hit.host_tokens // BLOCK_TOKENS

    @property
    def statistics(self) -> Any:
        return self.engine.statistics()
