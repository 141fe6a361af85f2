"""What a process has open: compare before and after, to find what was left."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def running_threads() -> set[str]:
    """Python's threads, and aiokv's native ones, which are named after their stream."""
    found = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if name.startswith("aiokv"):
            found.add(f"{name} {task.name}")
    return found


def open_descriptors() -> set[str]:
    """Numbers, and what they refer to. Compare after a first loop: libuv keeps a pipe of its."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the one that listed the directory
    return found
