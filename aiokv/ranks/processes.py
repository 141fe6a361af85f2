"""Processes of a group's ranks: new interpreters, not forks, that end with their manager."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from aiokv.errors import ClosedError, ConfigError, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# `-P` keeps the current folder out of sys.path; the rank then imports what the manager imports.
_BOOT: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from aiokv.ranks.__main__ import main; sys.exit(main())"
)


def check_entry(entry: object) -> None:
    """Check the form of ``entry``.

    Raises:
        ConfigError: ``entry`` is not of the form ``"module:function"``.
    """
    if isinstance(entry, str):
        module, _, function = entry.partition(":")
        if module and function.isidentifier():
            return
    raise ConfigError(f"entry is {entry!r}; it must be 'module:function'")


class RankProcesses:
    """One Python process per rank, which runs ``aiokv.ranks.__main__``.

    A process imports modules from the ``sys.path`` of the manager. It has a process group of its
    own, so that Ctrl-C in the terminal reaches the manager only, which decides when ranks end.

    Args:
        entry: checked; an ``async def function(path, rank)`` that enters ``Rank``.
        on_exit: called in a callback of the loop when a process has ended.

    Attributes:
        closing: no process is started any more.
    """

    def __init__(self, entry: str, on_exit: Callable[[], None]) -> None:
        self._entry = entry
        self._on_exit = on_exit
        self._running: dict[int, _Process] = {}
        self.closing = False

    async def start(self, ranks: Sequence[int], path: Path) -> None:
        """Start the processes of these ranks; kill earlier processes of the ranks first.

        Args:
            ranks: their numbers.
            path: path of the manager's socket.

        Raises:
            RankLost: a process could not be started.
            ClosedError: the group closed meanwhile.

        Cancellation: some processes may have been started; ``pids`` lists them.
        """
        for rank in ranks:
            self.kill(rank)
        for rank in ranks:
            if rank in self._running:
                await self._running[rank].ended.wait()
            if self.closing:
                raise ClosedError("the group of ranks is closing")
            self._running[rank] = self._spawn(rank, path)

    def _spawn(self, rank: int, path: Path) -> _Process:
        arguments = (self._entry, str(path), str(rank), str(os.getpid()))
        search_path = json.dumps([os.fsdecode(os.path.abspath(path)) for path in sys.path])
        try:
            return _Process(
                [sys.executable, "-P", "-c", _BOOT, search_path, *arguments], self._on_exit
            )
        except OSError as error:
            raise RankLost(
                f"rank {rank}: cannot start {sys.executable!r}: {error}", rank=rank
            ) from error

    def pids(self) -> list[int]:
        """Return the ids of the running processes, in the order of the ranks."""
        return [self._running[r].pid for r in sorted(self._running) if self.is_running(r)]

    def is_running(self, rank: int) -> bool:
        """Return True if the process of a rank runs."""
        return rank in self._running and self._running[rank].status is None

    def describe(self, rank: int) -> str:
        """Return the state of the process of a rank, for messages."""
        if rank not in self._running:
            return "its process was not started"
        process = self._running[rank]
        if process.status is None:
            return f"process {process.pid} runs"
        if process.status < 0:
            return f"process {process.pid} was killed by signal {-process.status}"
        return f"process {process.pid} ended with status {process.status} (its stderr may say why)"

    def kill(self, rank: int) -> None:
        """Send SIGKILL to the process of a rank; without effect on one that has ended."""
        if rank in self._running:
            self._running[rank].kill()

    async def wait(self) -> None:
        """Wait until all processes have ended by themselves.

        Cancellation: the processes go on.
        """
        for process in list(self._running.values()):
            await process.ended.wait()

    def terminate(self) -> None:
        """Kill all processes; a later pass of the loop reaps them."""
        self.closing = True
        for process in self._running.values():
            process.kill()

    def reap_all(self) -> None:
        """Kill all processes and reap them. Blocks; call it after the loop was closed."""
        self.terminate()
        for process in self._running.values():
            process.reap()
        self._running.clear()

    async def kill_all(self) -> None:
        """Kill all processes, and wait until they have ended.

        Cancellation: call it again.
        """
        self.terminate()
        await self.wait()
        self._running.clear()


class _Process:
    """A child process, reaped by a callback of the loop: no task and no thread waits for it.

    Attributes:
        ended: set when the process has been reaped.
    """

    def __init__(self, command: Sequence[str], on_exit: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self.ended = asyncio.Event()
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        try:
            self._pidfd = os.pidfd_open(self._child.pid)
        except OSError:
            self._child.kill()
            self._child.wait()
            raise
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def status(self) -> int | None:
        """Exit status, the negative number of a signal, or None while the process runs."""
        return self._child.returncode

    def kill(self) -> None:
        """Send SIGKILL; without effect on a process that has ended."""
        self._child.kill()

    def reap(self) -> None:
        """Block until the process, which was killed, has ended; the loop is closed."""
        self._child.wait()
        if not self.ended.is_set():
            os.close(self._pidfd)

    def _reap(self) -> None:
        if self._child.poll() is None:
            return
        self._loop.remove_reader(self._pidfd)
        # uvloop removes a reader in its next pass. Until then, the descriptor must stay open, so
        # that no other file gets its number.
        self._loop.call_soon(os.close, self._pidfd)
        self.ended.set()
        self._on_exit()
