"""Process of one rank, started by ``RankProcesses``: arguments ENTRY SOCKET RANK PARENT."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from aiokv.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Run the entry of the rank; return the exit status."""
    entry, path, rank, parent = sys.argv[1:]
    end_with_parent(int(parent))
    run = find(entry)
    try:
        uvloop.run(run(Path(path), int(rank)))
    except RankLost as lost:  # the group ended or refused the rank: no traceback is needed
        sys.exit(f"aiokv: {lost}")
    except KeyboardInterrupt:  # Ctrl-C in a terminal is for the manager alone
        return 128 + signal.SIGINT
    return 0


def find(entry: str) -> Callable[[Path, int], Coroutine[Any, Any, None]]:
    """Return the function that ``RankGroup(entry=...)`` names.

    Raises:
        SystemExit: there is no such function, or it is not ``async``.
    """
    module, _, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module imports a missing module
        sys.exit(f"aiokv: entry {entry!r}: no module {error.name!r} in {sys.path}")
    if not inspect.iscoroutinefunction(function):
        sys.exit(f"aiokv: entry {entry!r}: {module} has no `async def {name}(path, rank)`")
    return function


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent ends, even while the loop is blocked."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the manager has ended already")


if __name__ == "__main__":
    sys.exit(main())
