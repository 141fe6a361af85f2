"""A device and its tensors belong to one open engine; so does a group of ranks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import UsageError
from aiokv.ranks import Rank, RankGroup
from aiokv.testing import ManualDevice
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.worker.device.base import Device

pytestmark = pytest.mark.asyncio

CONFIG = CacheConfig(device_blocks=4, host_blocks=4, block_tokens=2)


def regions(tensor: np.ndarray | None = None) -> Regions:
    made = Regions(num_layers=1)
    made.add("kv", layers=[np.zeros((4, 8), np.int8) if tensor is None else tensor])
    return made


@pytest.mark.parametrize("new_device", [CpuDevice, ManualDevice])
async def test_a_device_of_an_open_engine_is_refused_until_that_engine_closes(
    new_device: type[Device],
) -> None:
    device = new_device()
    second = CacheEngine(CONFIG, regions(), device)
    async with CacheEngine(CONFIG, regions(), device) as first:
        with pytest.raises(UsageError, match="belongs to another engine that is open"):
            await second.__aenter__()
        lease = await first.match([1, 2, 3]).allocate(3)
        lease.release()
        await first.sleep(["host"])  # its device is detached, and still belongs to the engine
        with pytest.raises(UsageError, match="belongs to another engine that is open"):
            await second.__aenter__()
        await first.wake_up(["host"])
    async with second:
        pass


async def test_a_tensor_of_an_open_engine_is_refused_until_that_engine_closes() -> None:
    tensor = np.zeros((4, 8), np.int8)
    second = CacheEngine(CONFIG, regions(tensor))
    async with CacheEngine(CONFIG, regions(tensor)):
        with pytest.raises(UsageError, match="tensor of region 'kv', layer 0, belongs to another"):
            await second.__aenter__()
    async with second:
        pass


async def test_a_tensor_of_a_sleeping_tier_may_be_used_by_another_engine() -> None:
    tensor = np.zeros((4, 8), np.int8)
    async with CacheEngine(CONFIG, regions(tensor)) as first:
        await first.sleep(["device"])
        async with CacheEngine(CONFIG, regions(tensor)):
            with pytest.raises(UsageError, match="belongs to another"):
                await first.wake_up(["device"], regions=regions(tensor))
        await first.wake_up(["device"], regions=regions(tensor))
        (await first.match([1, 2, 3]).allocate(3)).release()


async def test_interleaved_tensors_may_belong_to_different_engines() -> None:
    """Two tensor-parallel ranks may hold halves of the rows of one array."""
    both = np.zeros((4, 2, 8), np.int8)
    async with CacheEngine(CONFIG, regions(both[:, 0])), CacheEngine(CONFIG, regions(both[:, 1])):
        pass


async def test_engines_without_tensors_do_not_conflict() -> None:
    async with CacheEngine(CONFIG), CacheEngine(CONFIG):
        pass


async def test_failed_entry_releases_the_device() -> None:
    device = ManualDevice()
    attach = device.attach
    device.attach = None  # type: ignore[assignment, method-assign]
    with pytest.raises(TypeError):
        await CacheEngine(CONFIG, regions(), device).__aenter__()
    device.attach = attach  # type: ignore[method-assign]
    async with CacheEngine(CONFIG, regions(), device):
        pass


async def test_a_group_of_ranks_serves_one_engine(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    group = RankGroup(1, path=path)

    async def serve() -> None:
        async with Rank(path, 0, regions()) as rank:
            await rank.closed()

    serving = asyncio.create_task(serve())
    config = CacheConfig(device_blocks=4, host_blocks=4, block_tokens=2)
    async with CacheEngine(config, ranks=group) as engine:
        with pytest.raises(UsageError, match="opened already; it serves one engine"):
            await CacheEngine(config, ranks=group).__aenter__()
        (await engine.match([1, 2, 3]).allocate(3)).release()
    await serving
