"""A rank in its own process, driven by the test in place of a model runner.

Its tensors are files that the test maps, too; it does what the lines of a socket say.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import numpy as np

from aiokv import Regions
from aiokv.ranks import Rank
from tests.harness.interrupting import Interrupter, first_of_each

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, LAYERS = 8, 2


def tensors(directory: Path, rank: int, mode: str) -> list[np.ndarray]:
    """Return ``[BLOCKS, 8]`` int8 per layer; mode ``"w+"`` makes new ones."""
    files = [directory / f"rank{rank}-layer{layer}" for layer in range(LAYERS)]
    return [np.memmap(file, np.int8, mode, shape=(BLOCKS, 8)) for file in files]


async def main(path: Path, rank: int) -> None:
    kv = tensors(path.parent, rank, "w+")
    for array in kv:
        array[:] = 99  # no bytes of an earlier process
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=kv)
    async with Rank(path, rank, regions) as worker:
        reader, writer = await asyncio.open_unix_connection(str(path.parent / "runner"))
        writer.write(f"{rank}\n".encode())
        while line := await reader.readline():
            worker.step(int(line))
        await worker.closed()
        writer.close()


async def interrupted(path: Path, rank: int) -> None:
    """Raise KeyboardInterrupt before a guarded line of the first process of rank 1, if asked.

    The file ``interrupt`` has the number of the line, 0 for none; ``lines`` gets the numbers of the
    first execution of each line.
    """
    at = path.parent / "interrupt"
    if not rank or not at.exists():
        await main(path, rank)
        return
    number = int(at.read_text())
    at.unlink()
    with Interrupter(number) as interrupter:
        await main(path, rank)
    lines = first_of_each(interrupter.places)
    (path.parent / "lines").write_text(" ".join(str(line) for line in lines))


async def idle(path: Path, rank: int) -> None:
    """Run until the group closes."""
    async with Rank(path, rank, _regions()) as worker:
        await worker.closed()


async def stuck(path: Path, rank: int) -> None:
    """Block the loop forever, so that it cannot notice the end of its manager."""
    async with Rank(path, rank, _regions()):
        while True:
            signal.pause()


def _regions() -> Regions:
    regions = Regions(num_layers=LAYERS)
    regions.add("kv", layers=[np.zeros((BLOCKS, 8), np.int8) for _ in range(LAYERS)])
    return regions


async def fails(path: Path, rank: int) -> None:
    raise SystemExit(3 if rank else await _forever())


async def _forever() -> int:
    await asyncio.Event().wait()
    return 0
