"""An engine of small blocks, and whole requests that compute, check and release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.testing import ManualDevice, run_until_idle, spin
from tests.harness.cache import OverBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

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
        """Views of the device tensors, uint64 ``[blocks, words]`` each."""
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
        """The full blocks of ``tokens`` are on the host only."""
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
        """What the device has ended is reported."""
        statistics = self.engine.worker_statistics

        def reported() -> bool:
            submitted = statistics().onload.submitted + statistics().offload.submitted
            return submitted == len(self.device.copies)

        await run_until_idle(reported)
        await spin(2)
        assert self.engine.check_invariants() == []
