"""A manager that is killed: run by a test, which looks whether its ranks outlive it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from aiokv import CacheConfig, CacheEngine
from aiokv.ranks import RankGroup


async def main() -> None:
    directory = Path(sys.argv[1])
    runners = await asyncio.start_unix_server(
        lambda reader, writer: None, str(directory / "runner")
    )
    group = RankGroup(2, path=directory / "ranks", entry="tests.ranks.process_rank:main")
    async with CacheEngine(CacheConfig(device_blocks=8), ranks=group):
        print(*group.pids(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    runners.close()


asyncio.run(main())
