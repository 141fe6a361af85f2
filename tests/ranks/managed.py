"""A manager in its own process, for tests that end it: ``managed.py ENTRY HOW DIRECTORY``.

It prints the pids of its ranks, then waits in the way of ``HOW`` for a signal of the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from aiokv import CacheConfig, CacheEngine
from aiokv.ranks import RankGroup

A = [1, 2, 3, 4, 5, 6, 7]


async def main(entry: str, how: str, directory: Path) -> None:
    runners = await asyncio.start_unix_server(
        lambda reader, writer: None, str(directory / "runner")
    )
    group = RankGroup(2, path=directory / "ranks" if how == "kills_itself" else None, entry=entry)
    async with CacheEngine(CacheConfig(block_tokens=2, device_blocks=8), ranks=group) as engine:
        interrupted = asyncio.Event()
        if how == "finishes":
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        print(*group.pids(), flush=True)
        if how == "kills_itself":
            os.kill(os.getpid(), signal.SIGKILL)
        async with engine.match(A) as lease:
            await lease.allocate(7)
            await interrupted.wait()
            lease.commit(7)
        engine.step()
        print(engine.match(A).hit, group.failure, flush=True)
    runners.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a child of nohup ignores it
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
