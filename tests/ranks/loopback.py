"""An engine and its ranks on one loop, over real sockets; every rank has its own KV."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, CacheEngine, Peers, Regions
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.stores import StoreUse
from aiokv.testing import ManualDevice, run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from aiokv import Lease

LAYERS = 2
PATIENT = RankTimeouts(  # only `pass_time` detects slow ranks
    heartbeat=1000.0, silence=500.0, lookup=PATIENCE_SECONDS
)
BLOCK_TOKENS = 2


class Shard:
    """One rank: its tensors, its device and its connection."""

    def __init__(
        self,
        path: Path,
        rank: int,
        device_blocks: int,
        new_device: Callable[[], Any] | None,
        stores: Sequence[Any] = (),
        peers: Peers | None = None,
    ) -> None:
        self.stores = stores
        self.peers = peers
        self.number = rank
        self.path = path
        self.new_device = new_device
        self.device_blocks = device_blocks
        self.fresh()

    def fresh(self) -> None:
        """Make tensors as in a new process, without the old bytes."""
        self.kv = [np.full((self.device_blocks, 8), 99, np.int8) for _ in range(LAYERS)]
        self.regions = Regions(num_layers=LAYERS)
        self.regions.add("kv", layers=self.kv)
        self.device = self.new_device() if self.new_device is not None else None
        self.worker = Rank(
            self.path,
            self.number,
            self.regions,
            self.device,
            stores=[
                StoreUse(store, lookup_deadline_seconds=PATIENCE_SECONDS) for store in self.stores
            ],
            peers=self.peers,
        )

    async def leave(self) -> None:
        """Simulate the end of the process: its copies and its connection end."""
        closing = asyncio.create_task(self.worker.aclose())
        while not closing.done():
            self.complete_all()
            await asyncio.sleep(0)
        await closing

    def complete_all(self) -> None:
        if self.device is not None:
            self.device.complete_all()


class Model:
    """An engine of 2-token blocks and 2 layers, and a model that writes 8 bytes a block and rank.

    Attributes:
        shards: one a rank, whose tensors ``kv`` can be looked at from here.
    """

    engine: CacheEngine
    shards: list[Any]

    @staticmethod
    def content(tokens: Sequence[int], block: int, layer: int, rank: int) -> np.ndarray:
        """Return the KV of a block, which depends on all tokens up to its end and on the rank."""
        prefix = list(tokens[: (block + 1) * BLOCK_TOKENS])
        seed = [rank, layer, *prefix, len(prefix)]
        return np.random.default_rng(seed).integers(-128, 127, 8).astype(np.int8)

    def compute(self, lease: Lease, tokens: Sequence[int], first: int = 0) -> None:
        table = lease.block_table
        for block in range(first // BLOCK_TOKENS, len(tokens) // BLOCK_TOKENS):
            for shard in self.shards:
                for layer in range(LAYERS):
                    shard.kv[layer][table[block]] = self.content(tokens, block, layer, shard.number)

    def check(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Check that the cached tokens of the lease are correct on every rank."""
        table = lease.block_table
        for block in range(lease.cached_tokens // BLOCK_TOKENS):
            for shard in self.shards:
                for layer in range(LAYERS):
                    expected = self.content(tokens, block, layer, shard.number)
                    actual = shard.kv[layer][table[block]]
                    assert np.array_equal(actual, expected), (block, shard.number, layer)

    def step(self) -> None:
        """Finish the open step on every rank."""
        for shard in self.shards:
            shard.worker.step(self.engine.open_step)
        self.engine.step()

    async def serve(self, tokens: Sequence[int], **allocate: Any) -> int:
        """Serve a whole request; return the cached tokens."""
        async with self.engine.match(tokens) as lease:
            await lease.allocate(len(tokens), **allocate)
            await lease.layers.wait_all()
            cached = lease.cached_tokens
            self.check(lease, tokens)
            self.compute(lease, tokens, cached)
            lease.commit(len(tokens))
        self.step()
        return cached

    async def to_host(self, tokens: Sequence[int]) -> None:
        """Leave the full blocks of ``tokens`` on the host only."""
        await self.serve(tokens)
        await self.finish()
        await self.engine.evict(self.engine.config.device_blocks)
        for shard in self.shards:
            for array in shard.kv:
                array[:] = 77

    async def finish(self) -> None:
        """Complete all transfers on all ranks."""
        draining = asyncio.create_task(self.engine.drain())
        while not draining.done():
            for shard in self.shards:
                shard.complete_all()
            await asyncio.sleep(0)
        await draining


class Ranked(Model):
    """Ranks on the loop of the engine."""

    def __init__(
        self,
        path: Path,
        *,
        num_ranks: int = 2,
        device_blocks: int = 8,
        host_blocks: int = 16,
        new_device: Callable[[], Any] | None = ManualDevice,
        timeouts: RankTimeouts | None = None,
        stores: Sequence[Any] = (),
        peers: Peers | None = None,
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.group = RankGroup(
            num_ranks,
            path=path / "ranks",
            timeouts=timeouts or PATIENT,
            has_stores=bool(stores),
            has_peers=peers is not None,
            clock=lambda: self.now,
        )
        self.shards = [
            Shard(path / "ranks", rank, device_blocks, new_device, stores[rank : rank + 1], peers)
            for rank in range(num_ranks)
        ]
        self.engine = CacheEngine(
            CacheConfig(
                block_tokens=BLOCK_TOKENS,
                device_blocks=device_blocks,
                host_blocks=host_blocks,
                **config,
            ),
            ranks=self.group,
        )

    async def __aenter__(self) -> Self:
        await asyncio.gather(
            self.engine.__aenter__(), *(shard.worker.__aenter__() for shard in self.shards)
        )
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await spin(2)  # unreleased leases of read-only tests are collected
        if exc_type is not None:
            for shard in self.shards:
                for store in shard.stores:
                    store.end_script()  # what a failed test has held
        if exc_type is None:
            assert self.engine.check_invariants() == []
            assert self.engine.statistics().leases == 0
        closing = asyncio.create_task(self.engine.aclose(0.0 if exc_type else None))
        leaving = [asyncio.create_task(self._leave(shard)) for shard in self.shards]
        await asyncio.gather(closing, *leaving)
        await spin(2)

    async def _leave(self, shard: Shard) -> None:
        if shard.worker.connected:
            await shard.worker.closed()
            await shard.leave()

    def pass_time(self, seconds: float) -> None:
        """Advance the time, and detect unresponsive and slow ranks."""
        self.now += seconds
        self.group.tick()

    async def wait_for_reports(self) -> None:
        """Wait until all ranks have reported at the present time."""
        ranks = self.group._membership.ranks  # type: ignore[union-attr]
        await run_until_idle(lambda: all(state.progress_at == self.now for state in ranks))

    async def lose(self, rank: int) -> None:
        """Lose a rank, and prepare a replacement that has not connected yet."""
        shard = self.shards[rank]
        state = self.group._membership.ranks[rank]  # type: ignore[union-attr]
        shard.worker._connection.abort("killed")
        await run_until_idle(lambda: self.group.failure is not None and state.connection is None)
        await shard.leave()
        shard.fresh()

    async def restart(self, *ranks: int) -> None:
        """Restart the lost ranks."""
        restarting = asyncio.create_task(self.engine.restart_ranks())
        entering = [asyncio.create_task(self.shards[r].worker.__aenter__()) for r in ranks]
        everything = asyncio.gather(restarting, *entering)
        while not everything.done():
            for shard in self.shards:
                shard.complete_all()
            await asyncio.sleep(0)
        await everything

    async def copies(self, *, onload: bool = True) -> list[Any]:
        """Wait for and return the single copy in the device of each rank."""

        def current() -> list[list[Any]]:
            devices = [shard.device for shard in self.shards if shard.device is not None]
            return [device.onloads if onload else device.offloads for device in devices]

        await run_until_idle(lambda: all(current()))
        return [copies[0] for copies in current()]
