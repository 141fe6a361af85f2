"""Threads and descriptors of this process: compare before and after, to find leaks."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def running_threads() -> set[str]:
    """Return the threads of Python, and the native threads of aiokv."""
    found = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if name.startswith("aiokv"):
            found.add(f"{name} {task.name}")
    return found


def open_descriptors() -> set[str]:
    """Return open descriptors and their targets.

    Compare after a first loop was closed: libuv keeps a pipe open.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return found
