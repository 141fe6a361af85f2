"""Window blocks in host memory, with ranks: each rank copies its own shard."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions, WindowGroup
from aiokv.errors import RankLost
from aiokv.ranks import Rank, RankGroup
from aiokv.testing import ScriptedStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.asyncio

GROUP = WindowGroup(window_tokens=4, device_blocks=6, step_tokens=2, host_blocks=40)
PROMPTS = [list(range(first, first + 12)) for first in (0, 100, 200, 300)]


def regions_of(window: np.ndarray | None) -> Regions:
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((40, 8), np.int8)], layer_indices=[0])
    if window is not None:
        regions.add_window("local", "local", layers=[window], layer_indices=[1])
    return regions


def ranked(
    path: Path, windows: list[np.ndarray | None], stores: Sequence[ScriptedStore] = ()
) -> tuple[CacheEngine, list[Rank]]:
    group = RankGroup(len(windows), path=path / "ranks", has_stores=bool(stores))
    sizes = {"block_tokens": 2, "device_blocks": 40, "host_blocks": 40}
    config = CacheConfig(**sizes, model="tests", windows={"local": GROUP})
    ranks = [
        Rank(path / "ranks", n, regions_of(window), stores=stores[n : n + 1])
        for n, window in enumerate(windows)
    ]
    return CacheEngine(config, ranks=group), ranks


async def enter(engine: CacheEngine, ranks: list[Rank]) -> None:
    await asyncio.gather(engine.__aenter__(), *(rank.__aenter__() for rank in ranks))


async def leave(engine: CacheEngine, ranks: list[Rank]) -> None:
    async def run_down(rank: Rank) -> None:
        await rank.closed()
        await rank.aclose()

    assert engine.check_invariants() == []
    await asyncio.gather(engine.aclose(), *map(run_down, ranks))


async def serve(
    engine: CacheEngine,
    ranks: list[Rank],
    windows: list[np.ndarray],
    prompt: list[int],
    wait_store: float = 0.0,
) -> int:
    """Serve a prompt and compare the cached window blocks; return the cached tokens."""
    async with engine.match(prompt) as lease:
        await lease.allocate(12, wait_store=wait_store)
        await lease.layers.wait_all()
        cached = lease.cached_tokens
        for block in range(max(cached // 2 - 2, 0), cached // 2):
            for number, window in enumerate(windows):
                found = window[lease.window_table("local")[block]]
                assert (found == (prompt[0] + 2 * block + number) % 100).all()
        for end in range(cached + 2, 13, 2):
            block = end // 2 - 1
            for number, window in enumerate(windows):
                table = lease.window_table("local")
                window[table[block]] = (prompt[0] + 2 * block + number) % 100
            lease.commit(end)
    for rank in ranks:
        rank.step(engine.open_step)
    engine.step()
    await engine.drain()
    return cached


async def test_window_blocks_return_on_every_rank(tmp_path):
    windows = [np.zeros((6, 8), np.int8) for _ in range(2)]
    engine, ranks = ranked(tmp_path, windows)
    await enter(engine, ranks)
    for prompt in PROMPTS:
        assert await serve(engine, ranks, windows, prompt) == 0
    assert await serve(engine, ranks, windows, PROMPTS[0]) == 10
    assert await serve(engine, ranks, windows, PROMPTS[2]) == 10
    statistics = engine.statistics().groups["local"]
    assert statistics.onloaded_blocks == 4
    worker = engine.statistics().worker
    assert worker.groups["local"].onload.moved_bytes == 4 * 8 * 2
    await leave(engine, ranks)


@pytest.mark.parametrize("missing", [False, True])
async def test_window_blocks_return_from_the_stores_of_every_rank(tmp_path, missing):
    """A window block that the store of one rank lacks is missing on all."""
    stores = [ScriptedStore(f"rank {n}") for n in range(2)]
    for run in range(2):
        (path := tmp_path / str(run)).mkdir()
        windows = [np.zeros((6, 8), np.int8) for _ in range(2)]
        engine, ranks = ranked(path, windows, stores)
        await enter(engine, ranks)
        if missing and run:
            stores[1].parts["local"].answer("lookup", results=[1, 1, 1, 1, 0])
        cached = await serve(engine, ranks, windows, PROMPTS[0], math.inf)
        assert cached == (0 if run == 0 else 8 if missing else 10)
        statistics = engine.statistics().groups["local"]
        assert statistics.fetched_blocks == (2 if run else 0)
        await leave(engine, ranks)


async def test_a_rank_without_the_tensors_of_a_group_is_refused(tmp_path):
    engine, ranks = ranked(tmp_path, [None])
    entering = asyncio.create_task(engine.__aenter__())
    with pytest.raises(RankLost, match=r"'local' has device_blocks=6.* of rank 0 hold only 0"):
        await ranks[0].__aenter__()
    entering.cancel()
    await asyncio.gather(entering, return_exceptions=True)
