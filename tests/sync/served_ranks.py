"""An engine in a thread whose ranks are threads of the same process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv import CacheConfig, Regions
from aiokv.ranks import RankGroup
from aiokv.sync import RankThread, SyncEngine, SyncLease
from aiokv.testing import ManualDevice
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.testing.manual import ManualCopy

LAYERS, BLOCKS, TOKENS = 2, 8, 4
PROMPT = list(range(17))
LONG = PATIENCE_SECONDS


def new_regions() -> Regions:
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=[np.zeros((BLOCKS, 64), np.int8) for _ in range(LAYERS)])
    return regions


def tensors(regions: Regions) -> list[np.ndarray]:
    return [piece.view() for piece in regions.pieces()]


class Device(ManualDevice):
    """A device that passes its copies to the thread of the test, which completes them.

    Attributes:
        taken: gets each copy.
        loop: loop of the rank; set by the first copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: SimpleQueue[ManualCopy] = SimpleQueue()
        self.loop: Any = None

    def copy(self, *args: Any, **kwargs: Any) -> ManualCopy:
        self.loop = asyncio.get_running_loop()
        copy = super().copy(*args, **kwargs)
        self.taken.put(copy)
        return copy


class Served:
    """An engine in a thread, whose ranks are threads of the same process."""

    def __init__(self, path: Path, devices: list[Device | None]) -> None:
        self.devices = devices
        self.ranks = [
            RankThread(path / "ranks", number, new_regions(), device)
            for number, device in enumerate(devices)
        ]
        config = CacheConfig(
            block_tokens=TOKENS, device_blocks=BLOCKS, host_blocks=8, drain_timeout_seconds=0.0
        )
        self.engine = SyncEngine(config, ranks=RankGroup(len(devices), path=path / "ranks"))

    def __enter__(self) -> Self:
        for rank in self.ranks:
            rank.start()
        self.engine.open()
        for rank in self.ranks:
            rank.wait_ready(LONG)
        return self

    def __exit__(self, *exc: object) -> None:
        with ThreadPoolExecutor(1) as threads:
            closed = threads.submit(self.engine.close, 0.0)
            while not closed.done():
                for device in self.devices:
                    if device is not None:
                        device.complete_all()
            closed.result()
        for rank in self.ranks:
            rank.close()

    def step(self) -> None:
        number = self.engine.call(lambda: self.engine.cache.open_step)
        for rank in self.ranks:
            rank.step(number)
        self.engine.step()

    def content(self, rank: int, layer: int, block: int) -> int:
        return 50 * rank + 10 * layer + block

    def fill_host(self) -> None:
        """Compute the prompt, and evict its 4 blocks to host memory."""
        with self.engine.match(PROMPT) as lease:
            lease.allocate(17).result()
            for number, rank in enumerate(self.ranks):
                for layer, tensor in enumerate(tensors(rank.regions)):
                    for position, block in enumerate(lease.block_table):
                        tensor[block] = self.content(number, layer, position)
            lease.commit(17)
        self.step()
        for device in self.devices:
            if device is not None:
                device.taken.get(timeout=LONG).complete_all()
        self.engine.call(self.engine.cache.drain)
        self.engine.call(self.engine.cache.evict, BLOCKS)
        for rank in self.ranks:
            for tensor in tensors(rank.regions):
                tensor[:] = 77

    def load(self) -> SyncLease:
        lease = self.engine.match(PROMPT)
        lease.allocate(17).result()
        assert lease.cached_tokens == 16
        return lease
