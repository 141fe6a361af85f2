"""Windows between engines of several ranks, of different tensor-parallel degrees."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Peers, Regions, WindowGroup
from aiokv.errors import LayoutError
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.pairwise import pairwise

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv import Lease

pytestmark = pytest.mark.asyncio

HEADS, DIM, BLOCKS = 4, 3, 24
GROUP = WindowGroup(window_tokens=7, device_blocks=BLOCKS, step_tokens=4, sink_tokens=3)
PEERS = Peers(
    secret="0123456789abcdef", listen="127.0.0.1", ring_bytes=32 << 10, outgoing_bytes=16 << 10
)
TOKENS = np.arange(41, dtype=np.int32)


def values(region: int, positions: np.ndarray) -> np.ndarray:
    """Return the KV of positions in a region, ``[positions, heads, dim]`` of all ranks."""
    heads, dims = np.arange(HEADS)[:, None], np.arange(DIM)
    return (positions[:, None, None] * 31 + heads * 7 + dims * 3 + region * 101 + 1) % 251


class Server:
    """An engine, and ranks that have an equal share of the heads each.

    Args:
        path: of the sockets.
        num_ranks: tensor-parallel degree.
        block_tokens: positions per block.
        latent: ``"kv"`` or ``"window"``, if it has no heads: all ranks have the same bytes.
    """

    def __init__(self, path: Path, num_ranks: int, block_tokens: int, *, latent: str = "") -> None:
        path.mkdir()
        self.block_tokens = block_tokens
        self.latent = latent
        own = HEADS // num_ranks
        self.shares = [slice(rank * own, (rank + 1) * own) for rank in range(num_ranks)]
        self.kv, self.window = (
            [np.zeros((BLOCKS, block_tokens, *width), np.uint8) for _ in self.shares]
            for width in ((DIM,) if latent == name else (own, DIM) for name in ("kv", "window"))
        )
        config = CacheConfig(
            block_tokens=block_tokens,
            device_blocks=BLOCKS,
            host_blocks=0,
            model="tests",
            windows={"local": GROUP},
        )
        timeouts = RankTimeouts(heartbeat=1000.0, silence=500.0)
        group = RankGroup(num_ranks, path=path / "ranks", timeouts=timeouts, has_peers=True)
        self.engine = CacheEngine(config, ranks=group)
        self.ranks = [
            Rank(path / "ranks", rank, self._regions(rank), peers=PEERS)
            for rank in range(num_ranks)
        ]

    def _regions(self, rank: int) -> Regions:
        regions = Regions(num_layers=2)
        regions.add("kv", layers=[self.kv[rank]], layer_indices=[0], axes=self._axes("kv"))
        axes = self._axes("window")
        regions.add_window("local", "w", layers=[self.window[rank]], layer_indices=[1], axes=axes)
        return regions

    def _axes(self, name: str) -> tuple[str, ...]:
        return ("tokens", "dim") if self.latent == name else ("tokens", "heads", "dim")

    async def __aenter__(self) -> Self:
        ranks = (rank.__aenter__() for rank in self.ranks)
        await asyncio.gather(self.engine.__aenter__(), *ranks)
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        async def leave(rank: Rank) -> None:
            await rank.closed()
            await rank.aclose()

        if exc_type is None:
            assert self.engine.check_invariants() == []
        closing = self.engine.aclose(0.0 if exc_type else None)
        await asyncio.gather(closing, *map(leave, self.ranks))

    def step(self) -> None:
        """Finish the open step on every rank."""
        for rank in self.ranks:
            rank.step(self.engine.open_step)
        self.engine.step()

    def compute(self, lease: Lease, first: int, end: int) -> None:
        """Write positions on all ranks, and commit them."""
        while first < end:
            stop = min(end, first + 4)
            for memory, table, positions, expected in self._places(lease, np.arange(first, stop)):
                blocks = table[positions // self.block_tokens]
                memory[blocks, positions % self.block_tokens] = expected
            lease.commit(stop)
            self.step()
            first = stop

    def check(self, lease: Lease, end: int) -> None:
        """Compare what a position ``end`` attends to."""
        seen = max(end - GROUP.window_tokens + 1, 0)
        for memory, table, positions, expected in self._places(lease, np.arange(end)):
            kept = positions >= 0
            if any(memory is window for window in self.window):
                kept = (positions < GROUP.sink_tokens) | (positions >= seen)
            blocks = table[positions // self.block_tokens]
            assert (blocks[kept] >= 0).all()
            found = memory[blocks[kept], positions[kept] % self.block_tokens]
            assert (found == expected[kept]).all()

    def _places(
        self, lease: Lease, positions: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """Return (tensor, block table, positions, expected) of each rank and region."""
        places = []
        blocks, window = lease.block_table, lease.window_table("local")
        for rank, share in enumerate(self.shares):
            for region, (name, memory, table) in enumerate(
                (("kv", self.kv, blocks), ("window", self.window, window))
            ):
                own = values(region, positions)[:, 0 if self.latent == name else share]
                places.append((memory[rank], table, positions, own))
        return places


@pytest.mark.parametrize(
    ("degrees", "blocks", "latent"),
    pairwise(
        product(
            [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)],
            [(4, 4), (8, 4)],
            ["", "kv", "window"],
        )
    ),
)
async def test_windows_arrive_on_every_rank(tmp_path, degrees, blocks, latent):
    p = Server(tmp_path / "p", degrees[0], blocks[0], latent=latent)
    d = Server(tmp_path / "d", degrees[1], blocks[1], latent=latent)
    async with p, d, d.engine.match(TOKENS) as lease, p.engine.match(TOKENS) as source:
        await lease.allocate(48)
        await source.allocate(41)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            async with p.engine.send(source, receiving.ticket) as sending:
                p.compute(source, 0, 41)
            assert sending.failure is None
            assert await receiving.wait() == 41
        d.check(lease, 41)
        lease.append(np.arange(41, 48, dtype=np.int32))
        d.compute(lease, 41, 48)
        d.check(lease, 48)


async def test_windows_of_other_regions_are_refused(tmp_path):
    p = Server(tmp_path / "p", 2, 4, latent="window")
    d = Server(tmp_path / "d", 1, 4)
    async with p, d, d.engine.match(TOKENS) as lease, p.engine.match(TOKENS) as source:
        await lease.allocate(41)
        await source.allocate(41)
        async with lease.receive(timeout=PATIENCE_SECONDS) as receiving:
            with pytest.raises(LayoutError, match=r"sender.*receiver"):
                await p.engine.send(source, receiving.ticket).__aenter__()
        d.compute(lease, 0, 41)
