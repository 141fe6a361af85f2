"""A rank of the tests: the engine's thread starts it as a process."""

from __future__ import annotations

import numpy as np

from aiokv import Regions
from aiokv.ranks import Rank


async def rank_main(path: str, rank: int) -> None:
    regions = Regions(num_layers=2)
    regions.add("kv", layers=[np.zeros((8, 64), np.int8) for _ in range(2)])
    async with Rank(path, rank, regions) as worker:
        await worker.closed()
