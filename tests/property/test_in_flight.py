"""Blocks that a batch in flight reads or writes are not reallocated, even if its lease ends."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig, CacheEngine, CpuDevice
from aiokv.ranks import Rank, RankGroup, RankTimeouts
from aiokv.testing import ManualDevice
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


def config_of(seed: int, rng: random.Random) -> CacheConfig:
    policy = ("none", "write_through", "write_through_selective", "write_back")[seed % 4]
    return CacheConfig(
        block_tokens=BLOCK_TOKENS,
        device_blocks=rng.randint(9, 20),
        host_blocks=0 if policy == "none" else rng.choice((6, 20, 40)),
        write_policy=policy,
        eviction_policy=rng.choice(("lru", "adaptive")),
        reserve_blocks=rng.choice((0, 0, 1)),
        salt_quota_blocks=rng.choice((None, None, 9)),
        low_watermark_blocks=rng.choice((None, 0, 4)),
        min_onload_tokens=rng.choice((0, 0, 8)),
    )


async def simulate(seed: int, device: ManualDevice | CpuDevice) -> World:
    rng = random.Random(seed)
    config = config_of(seed, rng)
    memory = Memory(config.device_blocks, BLOCK_TOKENS)
    in_stream = device.computes_in_stream
    async with CacheEngine(config, memory.regions, device) as engine:
        world = World(
            engine,
            [memory],
            [device] if isinstance(device, ManualDevice) else [],
            rng,
            in_stream=in_stream,
            close_step=engine.step,
            has_events=in_stream,
        )
        await world.run(PASSES)
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
