"""An engine of small blocks, and whole requests that compute, check and release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.testing import ManualDevice, run_until_idle, spin
from tests.harness.cache import OverBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv import Lease

BLOCK_TOKENS = 2


class Served(OverBytes):
    """Blocks of two tokens.

    Args:
        manual: the test completes the copies; else the cpu device does.
        config: more fields of the configuration.
    """

    def __init__(
        self, *, device_blocks: int = 8, host_blocks: int = 16, manual: bool = True, **config: Any
    ) -> None:
        super().__init__(
            ManualDevice() if manual else None,
            block_tokens=BLOCK_TOKENS,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            **config,
        )

    @property
    def kv(self) -> list[np.ndarray]:
        """Return views of the device tensors, uint64 ``[blocks, words]`` each."""
        return [tensor.reshape(len(tensor), -1) for tensor in self.memory.tensors]

    def compute(self, lease: Lease, tokens: Sequence[int], first: int = 0) -> None:
        """Write the KV of all full blocks from position ``first`` on."""
        words, begin = self.memory.words(tokens), first // BLOCK_TOKENS
        self.memory.write(lease.block_table[begin : len(words)], words[begin:])

    def check(self, lease: Lease, tokens: Sequence[int], num_tokens: int) -> None:
        """Check that the lease's blocks hold the KV of exactly these tokens."""
        words = self.memory.words(tokens[:num_tokens])
        self.memory.check(lease.block_table[: len(words)], words, lease.owner)

    async def serve(self, tokens: Sequence[int]) -> None:
        """Serve a whole request."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens))
            await lease.layers.wait_all()
            self.check(lease, tokens, lease.cached_tokens)
            self.compute(lease, tokens, lease.cached_tokens)
            lease.commit(len(tokens))

    async def to_host(self, tokens: Sequence[int]) -> None:
        """Leave the full blocks of ``tokens`` on the host only."""
        await self.serve(tokens)
        await self.complete_offloads()
        await self.engine.evict(len(tokens) // BLOCK_TOKENS)
        for array in self.kv:
            array[:] = 0

    async def complete_offloads(self) -> None:
        await spin(2)
        for copy in list(self.device.offloads):
            copy.complete_all()
        await self.settle()

    async def settle(self) -> None:
        """Let the engine process all transfers that the device has ended."""

        def reported() -> bool:
            routes = self.engine.statistics().worker.attention
            submitted = routes.onload.submitted + routes.offload.submitted
            return submitted == len(self.device.copies)

        await run_until_idle(reported)
        await spin(2)
        assert self.engine.check_invariants() == []


def held(served: Served, lease, num_blocks: int | None = None) -> np.ndarray:
    """Return the bytes of the lease's first blocks, ``[layer, block, byte]``."""
    return np.stack([array[lease.block_table[:num_blocks]] for array in served.kv])


async def computed(served: Served, tokens, **options):
    """Return a lease whose positions are all computed and committed, partial block included."""
    lease = served.engine.match(tokens, **options)
    await lease.allocate(len(tokens))
    await lease.layers.wait_all()
    served.compute(lease, tokens, lease.cached_tokens)
    if len(tokens) % 2:
        for layer, array in enumerate(served.kv):
            array[lease.block_table[-1]] = layer * 16 + np.arange(array.shape[1]) + tokens[-1]
    lease.commit(len(tokens))
    return lease


async def begin(served: Served, coroutine) -> asyncio.Task:
    task = asyncio.ensure_future(coroutine)
    await spin(3)
    return task


async def swapped_out(served: Served, lease) -> None:
    task = await begin(served, lease.preempt(swap=True))
    while not task.done():
        await served.complete_offloads()
    await task


async def resumed(served: Served, lease, num_tokens: int) -> None:
    await lease.resume(num_tokens)
    served.device.complete_all()
    await served.settle()


def wipe(served: Served) -> None:
    """Overwrite all device blocks."""
    for array in served.kv:
        array[:] = 99
