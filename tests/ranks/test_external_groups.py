"""Groups of a server's blocks, on several ranks: each copies its own shard, with the same ids."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Self

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions, WindowGroup
from aiokv.ranks import Rank, RankGroup
from aiokv.testing import ScriptedStore

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.asyncio

BLOCKS = 40
GROUPS = {
    "local": WindowGroup(window_tokens=4, device_blocks=BLOCKS, host_blocks=20),
    "mamba": WindowGroup(retention="last", device_blocks=BLOCKS, host_blocks=20),
}
NEEDED = {"local": [3, 4], "mamba": [4]}  # blocks of a hit of five blocks
PROMPT = list(range(11))


class Server:
    """An engine, and two ranks on its loop; a block of each group has eight bytes per rank."""

    def __init__(self, path: Path, stores: list[ScriptedStore]) -> None:
        self.tensors: list[dict[str, NDArray[np.int8]]] = []
        self.ranks = []
        for number in range(2):
            tensors = {name: np.zeros((BLOCKS, 8), np.int8) for name in ("kv", *GROUPS)}
            regions = Regions(num_layers=3)
            regions.add("kv", layers=[tensors["kv"]], layer_indices=[0])
            for layer, name in enumerate(GROUPS, 1):
                regions.add_window(name, name, layers=[tensors[name]], layer_indices=[layer])
            self.tensors.append(tensors)
            own = stores[number : number + 1]
            self.ranks.append(Rank(path / "ranks", number, regions, stores=own))
        config = CacheConfig(
            block_tokens=2,
            device_blocks=BLOCKS,
            host_blocks=20,
            external_device=True,
            model="tests",
            windows=GROUPS,
        )
        group = RankGroup(2, path=path / "ranks", has_stores=bool(stores))
        self.engine = CacheEngine(config, ranks=group)

    async def __aenter__(self) -> Self:
        await asyncio.gather(self.engine.__aenter__(), *(r.__aenter__() for r in self.ranks))
        return self

    async def __aexit__(self, *exc: object) -> None:
        async def run_down(rank: Rank) -> None:
            await rank.closed()
            await rank.aclose()

        assert self.engine.check_invariants() == []
        await asyncio.gather(self.engine.aclose(), *map(run_down, self.ranks))

    def rows(self, first: int, blocks: dict[str, list[int]]) -> dict[str, list[int]]:
        return {
            name: [first + 6 * number + i if i in blocks[name] else -1 for i in range(6)]
            for number, name in enumerate(GROUPS, 1)
        }

    async def serve(self, first: int, wait_store: float = 0.0) -> int:
        """Serve the prompt with the ids from ``first`` on; return the cached tokens."""
        async with self.engine.match(PROMPT) as lease:
            await lease.allocate(len(PROMPT), wait_store=wait_store)
            hit = lease.cached_tokens // 2
            rows = self.rows(first, NEEDED if hit else {"local": [*range(5)], "mamba": [2, 4]})
            assert hit in (0, 5)
            lease.assign(range(first, first + 6), groups=rows)
            await lease.layers.wait_all()
            for name, row in {"kv": [*range(first, first + 6)], **rows}.items():
                for block, block_id in enumerate(row[:5]):
                    for rank, tensors in enumerate(self.tensors):
                        value = len(name) + 10 * block + rank
                        if block_id >= 0 and hit:
                            assert (tensors[name][block_id] == value).all()
                        elif block_id >= 0:
                            tensors[name][block_id] = value
            lease.commit(len(PROMPT))
        for rank in self.ranks:
            rank.step(self.engine.open_step)
        self.engine.step()
        await self.engine.drain()
        return hit


@pytest.mark.parametrize("stored", [False, True])
async def test_every_rank_copies_its_part_of_each_group(tmp_path, stored):
    stores = [ScriptedStore(f"rank {n}") for n in range(2)] if stored else []
    async with Server(tmp_path, stores) as server:
        assert await server.serve(0) == 0
        assert await server.serve(18) == 5
        groups = server.engine.statistics().groups
        assert {name: groups[name].onloaded_blocks for name in GROUPS} == {"local": 2, "mamba": 1}
    if stored:
        (tmp_path / "restarted").mkdir()
        async with Server(tmp_path / "restarted", stores) as server:
            assert await server.serve(18, math.inf) == 5
