"""Blocks that a batch in flight reads or writes are not reallocated, even if its lease ends."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig, CacheEngine, CpuDevice
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.testing import ManualDevice, ScriptedStore
from tests.harness.closing import close
from tests.harness.memory import Memory
from tests.property.in_flight_simulation import BLOCK_TOKENS, World

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.testing import ManualEvent

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.filterwarnings("ignore::aiokv.errors.UnreleasedLeaseWarning"),
]

PASSES = 150  # of the loop, with an operation in most of them
UPDATE_SEEDS = 20  # of runs with updates of the weights
UPDATE_PASSES = 12_500 if os.environ.get("AIOKV_DEEP") else 300  # 10**6 steps in all, if deep


def config_of(seed: int, rng: random.Random) -> CacheConfig:
    policy = ("none", "write_through", "nth_use:2", "write_back")[seed % 4]
    return CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=rng.randint(9, 20),
        host_blocks=0 if policy == "none" else rng.choice((6, 20, 40)),
        write_policy=policy,
        eviction_policy=rng.choice(("lru", "adaptive")),
        reserve_blocks=rng.choice((0, 0, 1)),
        salt_quota_blocks=rng.choice((None, None, 9)),
        low_watermark_blocks=rng.choice((None, 0, 4)),
        miss_history_blocks=rng.choice((0, 5, 100)),
        min_onload_tokens=rng.choice((0, 0, 8)),
    )


async def simulate(
    seed: int,
    device: ManualDevice | CpuDevice,
    *,
    passes: int = PASSES,
    updates_often: bool = False,
    has_stores: bool = False,
) -> World:
    rng = random.Random(seed)
    config = config_of(seed, rng)
    memory = Memory(config.device_blocks, BLOCK_TOKENS)
    in_stream = device.computes_in_stream
    stores = [ScriptedStore(capacity_blocks=200)] if has_stores else []
    if has_stores:
        config = dataclasses.replace(
            config, model="tests", host_blocks=20, write_policy="write_through"
        )
    engine = CacheEngine(config, memory.regions, device, stores=stores)
    await engine.__aenter__()
    world = World(
        engine,
        [memory],
        [device] if isinstance(device, ManualDevice) else [],
        rng,
        in_stream=in_stream,
        close_step=engine.step,
        has_events=in_stream,
        updates_often=updates_often,
        has_stores=has_stores,
    )
    error: BaseException | None = None
    try:
        await world.run(passes)
    except BaseException as raised:
        error = raised
        raise
    finally:
        await close(engine, device, error)
    return world


async def simulate_ranks(seed: int, path: Path) -> World:
    rng = random.Random(seed)
    config = config_of(seed, rng)
    memories = [Memory(config.device_blocks, BLOCK_TOKENS, rank=rank) for rank in range(2)]
    devices = [ManualDevice() for _ in memories]
    timeouts = RankTimeouts(heartbeat=1000.0, silence=500.0)
    engine = CacheEngine(config, ranks=RankGroup(2, path=path / "ranks", timeouts=timeouts))
    ranks = [
        Rank(path / "ranks", number, memory.regions, device)
        for number, (memory, device) in enumerate(zip(memories, devices, strict=True))
    ]
    await asyncio.gather(engine.__aenter__(), *(rank.__aenter__() for rank in ranks))

    def close_step(event: ManualEvent) -> None:
        for rank in ranks:
            rank.step(engine.open_step, event)
        engine.step()

    async def leave(rank: Rank) -> None:
        await rank.closed()
        await rank.aclose()

    world = World(
        engine, memories, devices, rng, in_stream=True, close_step=close_step, has_events=False
    )
    await world.run(PASSES)
    await asyncio.gather(engine.aclose(0.0), *map(leave, ranks))
    return world


@pytest.mark.parametrize("seed", range(2))
async def test_threads_compute_late_and_out_of_order(seed):
    world = await simulate(seed, ManualDevice())
    assert world.checked_positions > 50


@pytest.mark.parametrize("seed", range(2))
async def test_threads_compute_late_while_the_cpu_device_copies(seed):
    world = await simulate(seed, CpuDevice())
    assert world.checked_positions > 50


@pytest.mark.parametrize("seed", range(4))
async def test_a_stream_computes_late(seed):
    device = ManualDevice()
    device.computes_in_stream = True
    world = await simulate(seed, device)
    assert world.checked_positions > 50


@pytest.mark.parametrize("seed", range(2))
async def test_the_streams_of_ranks_compute_late(seed, tmp_path):
    world = await simulate_ranks(seed, tmp_path)
    assert world.checked_positions > 50


async def simulate_updates(seed: int, passes: int) -> World:
    device = ManualDevice()
    device.computes_in_stream = seed % 2 == 0
    return await simulate(seed, device, passes=passes, updates_often=True, has_stores=seed % 4 > 1)


@pytest.mark.parametrize("seed", range(UPDATE_SEEDS))
async def test_updates_of_weights_never_show_blocks_of_other_weights(seed):
    world = await simulate_updates(seed, UPDATE_PASSES)
    assert world.updates
    assert world.checked_positions > 50


async def test_walks_with_updates_reach_forks_of_several_versions_and_fetches():
    forks = fetches = 0
    for seed in range(100, 200):
        world = await simulate_updates(seed, 300)
        forks += world.mixed_forks
        fetches += world.engine.statistics().attention.fetched_blocks
        if forks > 5 and fetches:
            break
    assert forks > 5
    assert fetches
