"""An engine over real bytes that compares all KV that it reads with the prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine
from aiokv.testing import ManualDevice, spin
from tests.harness.closing import close, complete_during
from tests.harness.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv import Lease, Peers
    from aiokv.worker.device.base import Device
    from tests.harness.external_groups import ExternalGroup

BLOCK_TOKENS = 4


def prompt(seed: int, blocks: int) -> np.ndarray:
    """Return a prompt whose ``blocks`` can all be hit: one more token is always computed."""
    return np.arange(blocks * BLOCK_TOKENS + 1, dtype=np.int32) + 1000 * seed


class OverBytes:
    """An engine over a :class:`Memory`; ``async with`` checks invariants at its end.

    Args:
        device: None for the cpu device.
        stores: stores of the engine, which then has a model.
        peers: how the engine exchanges blocks with others; None without peers.
        groups: groups of a server's blocks beside full attention, by name.
        config: more fields of the configuration.
    """

    def __init__(
        self,
        device: Device | None,
        *,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        stores: Sequence[Any] = (),
        peers: Peers | None = None,
        groups: Mapping[str, ExternalGroup] | None = None,
        **config: Any,
    ) -> None:
        self.groups = groups or {}
        if stores or peers is not None:
            config = {"model": "tests", **config}
        self.memory = Memory(device_blocks, block_tokens)
        self.device: Any = device
        if self.groups:
            config["windows"] = {name: group.config for name, group in self.groups.items()}
        for number, group in enumerate(self.groups.values()):
            group.register(self.memory.regions, number % self.memory.layers)
        sizes = {"device_blocks": device_blocks, "host_blocks": host_blocks}
        self.engine = CacheEngine(
            CacheConfig(block_tokens=block_tokens, **sizes, **config),
            self.memory.regions,
            device,
            stores=stores,
            peers=peers,
        )

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        await close(self.engine, self.device, exc)

    @property
    def statistics(self) -> Any:
        return self.engine.statistics()


class Cache(OverBytes):
    """Cache with blocks of four tokens whose copies the test completes; no lease may remain."""

    def __init__(
        self,
        *,
        device_blocks: int = 8,
        host_blocks: int = 8,
        device: ManualDevice | None = None,
        **config: Any,
    ) -> None:
        super().__init__(
            ManualDevice() if device is None else device,
            block_tokens=BLOCK_TOKENS,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            **config,
        )

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        assert exc is not None or self.engine.statistics().leases == 0
        self.device.refuse = None
        await super().__aexit__(exc_type, exc, traceback)

    # --- requests -------------------------------------------------------------------------------

    async def serve(self, tokens: np.ndarray, **allocate: Any) -> Lease:
        """Return a lease with its prompt: cached blocks are compared, the rest is written."""
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
        """Compare the cached tokens of the lease byte for byte."""
        blocks = lease.cached_tokens // BLOCK_TOKENS
        words = self.memory.words(tokens, "", self.memory.weights)[:blocks]
        self.memory.check(lease.block_table[:blocks], words, lease.owner)

    def compute(self, lease: Lease, tokens: np.ndarray, first: int | None = None) -> None:
        """Write the blocks from ``first`` (the first uncached one) on, and commit them."""
        begin = lease.cached_tokens // BLOCK_TOKENS if first is None else first
        words = self.memory.words(tokens, "", self.memory.weights)
        self.memory.write(lease.block_table[begin : len(words)], words[begin:])
        lease.commit(len(tokens))

    async def fill(self, *prompts: np.ndarray) -> None:
        """Serve and release prompts in sequence; the resulting backups stay in the device."""
        for tokens in prompts:
            (await self.serve(tokens)).release()
        await spin(2)

    async def finish(self) -> None:
        """Complete all transfers, and those that follow from them."""
        await complete_during(self.engine.drain(), self.device)

    def hit(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the numbers of device and host blocks that a match would hit."""
        lease = self.engine.match(tokens)
        hit = lease.hit
        lease.release()
        return hit.device_tokens // BLOCK_TOKENS, hit.host_tokens // BLOCK_TOKENS
