"""A cache on device blocks that a server owns, whose copies the test completes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.testing import spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv import Lease
    from aiokv.testing.manual import ManualCopy

A, B, C = (prompt(seed, 3) for seed in (1, 2, 3))
LONG = np.concatenate([A[:12], prompt(9, 3)])  # begins with the blocks of A


class ExternalCache(Cache):
    """Cache with blocks of four tokens; the test is the server, and chooses the ids."""

    def __init__(self, *, device_blocks: int = 24, host_blocks: int = 24, **config: Any) -> None:
        super().__init__(
            device_blocks=device_blocks, host_blocks=host_blocks, external_device=True, **config
        )

    async def granted(
        self, tokens: np.ndarray, *, write: bool = True, owner: str = "", **allocate: Any
    ) -> Lease:
        """Return a granted lease, without blocks yet."""
        lease = self.engine.match(tokens, write=write, owner=owner)
        await lease.allocate(len(tokens), **allocate)
        return lease

    async def begin(
        self,
        tokens: np.ndarray,
        ids: Iterable[int],
        *,
        computed_tokens: int = 0,
        write: bool = True,
        owner: str = "",
        **allocate: Any,
    ) -> Lease:
        """Return a granted lease that has these blocks."""
        lease = await self.granted(tokens, write=write, owner=owner, **allocate)
        lease.assign(list(ids), computed_tokens=computed_tokens)
        return lease

    async def write(self, tokens: np.ndarray, ids: Iterable[int]) -> Lease:
        """Return a lease whose full blocks have been written, and none of them committed."""
        lease = await self.begin(tokens, ids)
        words = self.memory.words(tokens)
        self.memory.write(lease.block_table[: len(words)], words)
        return lease

    async def onload(
        self, tokens: np.ndarray, ids: Iterable[int], **begin: Any
    ) -> tuple[Lease, ManualCopy]:
        """Cache a prompt in host memory; return a lease of it, and its onload in flight."""
        await self.store(tokens, range(4))
        lease = await self.begin(tokens, ids, **begin)
        (copy,) = self.device.onloads
        return lease, copy

    async def check_hit(self, tokens: np.ndarray, ids: Iterable[int]) -> int:
        """Onload the cached blocks of a prompt, and compare them; return the cached positions."""
        lease = await self.begin(tokens, ids)
        await self.finish()
        self.check(lease, tokens)
        cached = lease.cached_tokens
        lease.release()
        return cached

    async def compute_new(self, tokens: np.ndarray, ids: Iterable[int], **begin: Any) -> Lease:
        """Return a lease that has computed and committed its prompt."""
        lease = await self.begin(tokens, ids, **begin)
        self.compute(lease, tokens)
        return lease

    async def store(self, tokens: np.ndarray, ids: Iterable[int]) -> None:
        """Cache the full blocks of a prompt in host memory."""
        lease = await self.compute_new(tokens, ids)
        lease.release()
        await self.finish()
        assert self.hit(tokens) == (0, len(tokens) // BLOCK_TOKENS)

    async def saves_begun(self) -> None:
        """Let the saves of this pass of the loop begin."""
        await spin(2)
