"""An engine over real bytes whose copies follow a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.testing import ScriptedDevice, run_until_idle, spin
from tests.integration.kv_cache import BLOCK_TOKENS, Cache, prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from aiokv import Lease

__all__ = ["BLOCK_TOKENS", "Drill", "prompt"]


class Drill(Cache):
    """Copies end by themselves, but for what ``drill.device`` was told."""

    device: ScriptedDevice

    def __init__(self, **options: Any) -> None:
        super().__init__(device=ScriptedDevice(), **options)

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self.device.end_script()
        await super().__aexit__(exc_type, exc, traceback)

    async def to_host(self, *prompts: np.ndarray) -> None:
        """Their full blocks are on the host only."""
        await self.fill(*prompts)
        await self.engine.drain()
        await self.engine.evict(self.engine.config.device_blocks)
        assert [self.hit(tokens) for tokens in prompts] == [
            (0, len(tokens) // BLOCK_TOKENS) for tokens in prompts
        ]

    async def running(self, direction: str, copies: int = 1) -> None:
        """Wait until the device has that many copies which have not ended."""
        await run_until_idle(lambda: len(self.device.running(direction)) == copies)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        await run_until_idle(condition)

    def check_all(self, lease: Lease, tokens: np.ndarray) -> None:
        """The full blocks of the lease hold the bytes of its prompt, whoever wrote them."""
        words = self.memory.words(tokens, "", self.memory.weights)
        self.memory.check(lease.block_table[: len(words)], words, lease.owner)

    async def nothing_lost(self) -> None:
        """Without leases and transfers, every block can be had again."""
        await self.engine.drain()
        await spin(3)
        assert self.statistics.leases == 0
        await self.engine.evict(self.engine.config.device_blocks)
        await self.engine.evict(self.engine.config.host_blocks, "host")
        assert self.statistics.device_free == self.statistics.device_blocks
        assert self.statistics.host_free == self.statistics.host_blocks
        assert self.engine.check_invariants() == []
