"""A process that saves to a disk store until it is killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aiokv.stores.base import Result
from aiokv.stores.disk import committer
from tests.stores.disk_medium import keys_of, small_blocks, small_store, write_object

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

BATCH = 8
SAVERS = 3


def run(path: str, slots: int, first: int, seed: int, pipe: Connection) -> None:
    """Save, load and remove random blocks; never returns.

    Sends ``("save", numbers)`` after a save, ``("remove", numbers)`` before a removal and
    ``("removed", numbers)`` after it. Numbers rise from ``first``.
    """
    committer.MIN_RECORDS = 200  # so that journals are replaced
    asyncio.run(_use(Path(path), slots, first, random.Random(seed), pipe))


async def _use(path: Path, slots: int, first: int, rng: random.Random, pipe: Connection) -> None:
    blocks = small_blocks(SAVERS * BATCH)
    store = small_store(path, slots=slots, fsync_seconds=rng.choice([0.0, 0.01, 1.0]))
    await store.open(blocks.memory)
    numbers = iter(range(first, first + 10**6))
    saved: list[int] = []
    pipe.send(("open", []))

    async def use(saver: int) -> None:
        while True:
            batch = [next(numbers) for _ in range(rng.randint(1, BATCH))]
            ids = np.arange(len(batch), dtype=np.int32) + saver * BATCH
            for block, number in zip(ids.tolist(), batch, strict=True):
                write_object(blocks, block, keys_of([number]))
            results = await store.save(keys_of(batch), ids)
            stored = np.isin(results, (Result.DONE, Result.PRESENT))
            done = [n for n, is_stored in zip(batch, stored, strict=True) if is_stored]
            pipe.send(("save", done))
            saved.extend(done)
            if rng.random() < 0.3:
                chosen = rng.sample(saved, min(4, len(saved)))
                await store.load(keys_of(chosen), _ids(saver, chosen))
            if rng.random() < 0.2 and saved:
                gone = [saved.pop(rng.randrange(len(saved)))]
                pipe.send(("remove", gone))
                await store.remove(keys_of(gone))
                pipe.send(("removed", gone))

    await asyncio.gather(*(use(saver) for saver in range(SAVERS)))


def _ids(saver: int, chosen: list[int]) -> np.ndarray:
    return np.arange(len(chosen), dtype=np.int32) + saver * BATCH
