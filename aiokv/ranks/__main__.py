"""One rank as a process, ``ENTRY SOCKET RANK PARENT``; started by ``RankProcesses``."""

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
    entry, path, rank, parent = sys.argv[1:]
    die_with(int(parent))
    run = find(entry)
    try:
        uvloop.run(run(Path(path), int(rank)))
    except RankLost as lost:  # the group's end, or its refusal: no fault in the code here
        sys.exit(f"aiokv: {lost}")
    except KeyboardInterrupt:  # sent to this process: the terminal's goes to the manager only
        return 128 + signal.SIGINT
    return 0


def find(entry: str) -> Callable[[Path, int], Coroutine[Any, Any, None]]:
    """What ``RankGroup(entry=...)`` names.

    Raises:
        SystemExit: there is no such function, or it is not ``async``.
    """
    module, _, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that the user's lacks
        sys.exit(f"aiokv: entry {entry!r}: no module {error.name!r} in {sys.path}")
    if not inspect.iscoroutinefunction(function):
        sys.exit(f"aiokv: entry {entry!r}: {module} has no `async def {name}(path, rank)`")
    return function


def die_with(parent: int) -> None:
    """Be killed when the parent dies, however it does; even with a blocked loop."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the manager is gone already")


if __name__ == "__main__":
    sys.exit(main())
