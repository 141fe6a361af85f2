"""The processes of a group's ranks: fresh interpreters, not forks, that end with their manager."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def check_entry(entry: str) -> None:
    """Raises:
    ConfigError: it names no function.
    """
    module, _, function = entry.partition(":")
    if not module or not function.isidentifier():
        raise ConfigError(f"entry is {entry!r}; it must be 'module:function'")


class RankProcesses:
    """``python -m aiokv.ranks`` a rank.

    Args:
        entry: checked; an ``async def function(path, rank)`` that enters ``Rank``.
        path: of the manager's socket.
        on_exit: called when one has ended.
    """

    def __init__(self, entry: str, path: Path, on_exit: Callable[[], None]) -> None:
        self._entry = entry
        self._path = path
        self._on_exit = on_exit
        self._running: dict[int, tuple[asyncio.subprocess.Process, asyncio.Task[int]]] = {}

    async def start(self, ranks: Sequence[int]) -> None:
        """Start these anew; what ran in their place is killed first.

        Cancellation: some may have been started.
        """
        for rank in ranks:
            self.kill(rank)
        for rank in ranks:
            if rank in self._running:
                await self._running[rank][1]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "aiokv.ranks"),
                *(self._entry, str(self._path), str(rank), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
            )
            watch = asyncio.create_task(process.wait(), name=f"aiokv rank {rank}")
            watch.add_done_callback(lambda _: self._on_exit())
            self._running[rank] = (process, watch)

    def pids(self) -> list[int]:
        """Of those that run, in the order of the ranks."""
        return [self._running[r][0].pid for r in sorted(self._running) if self.is_alive(r)]

    def is_alive(self, rank: int) -> bool:
        return rank in self._running and self._running[rank][0].returncode is None

    def describe(self, rank: int) -> str:
        """How the process of a rank fares, for messages."""
        if rank not in self._running:
            return "its process was not started"
        process = self._running[rank][0]
        if process.returncode is None:
            return f"process {process.pid} runs"
        if process.returncode < 0:
            return f"process {process.pid} was killed by signal {-process.returncode}"
        return (
            f"process {process.pid} ended with status {process.returncode} (its stderr may say why)"
        )

    def kill(self, rank: int) -> None:
        """SIGKILL; without effect on one that has ended."""
        if self.is_alive(rank):
            self._running[rank][0].kill()

    async def wait(self) -> None:
        """Until all have ended by themselves.

        Cancellation: they go on.
        """
        for _, watch in self._running.values():
            await asyncio.shield(watch)

    async def kill_all(self) -> None:
        """Nothing is left when this returns."""
        for rank in self._running:
            self.kill(rank)
        await self.wait()
        self._running.clear()
