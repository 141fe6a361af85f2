"""Every async test runs on asyncio and on uvloop, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import TYPE_CHECKING

import pytest
import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that lists the directory
    return found


def _native_threads() -> set[str]:
    """Names of aiokv's native threads; each carries its number, so that a new one shows."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as comm:
                name = comm.read().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if name.startswith("aiokv"):
            found.add(f"{name} ({task})")
    return found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Threads and descriptors that a test opens, it closes; loops included."""
    threads = set(threading.enumerate())
    native = _native_threads()
    descriptors = _descriptors()
    yield
    gc.collect()
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left: {left}"
    left_native = _native_threads() - native
    assert not left_native, f"native threads left: {left_native}"
    new = {fd: path for fd, path in _descriptors().items() if fd not in descriptors}
    new = {fd: path for fd, path in new.items() if not _of_event_loop(path)}
    assert not new, f"file descriptors left: {new}"


def _of_event_loop(path: str) -> bool:
    # the test's own loop is closed only after the test's fixtures
    return path.startswith(("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "socket:", "pipe:"))
