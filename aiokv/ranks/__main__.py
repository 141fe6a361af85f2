"""``python -m aiokv.ranks ENTRY SOCKET RANK PARENT``: one rank; started by ``RankProcesses``."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

import uvloop

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    entry, path, rank, parent = sys.argv[1:]
    die_with(int(parent))
    module, _, function = entry.partition(":")
    run = getattr(importlib.import_module(module), function)
    uvloop.run(run(Path(path), int(rank)))
    return 0


def die_with(parent: int) -> None:
    """Be killed when the parent dies, however it does; even with a blocked loop."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("the manager is gone already")


if __name__ == "__main__":
    sys.exit(main())
