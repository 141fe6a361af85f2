"""DirectoryQuota: a limit of the bytes of a folder that several processes fill."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from aiokv.stores.directory.files import FileEntry, ObjectFiles

_LOW_MARK: Final = 0.9  # share of the limit that stays after an eviction
_SWEEP_AFTER_SHARE: Final = 1 / 16  # written share of the limit after which a sweep begins
_SWEEP_AFTER_SECONDS: Final = 600.0  # longest pause, because other processes write, too


class DirectoryQuota:
    """Estimate of the bytes of a folder, and eviction of its least recently used files.

    Each process counts its own writes and lists the folder from time to time (a *sweep*), so the
    limit may be exceeded by as much as the others write between two sweeps.

    Args:
        limit: bytes of all files; None for no limit: then the folder is listed once, for
            ``statistics()``.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used_bytes = -1  # unknown before the first sweep
        self.blocks = -1
        self.evicted_blocks = 0
        self._written = 0
        self._swept_at = -float("inf")
        self._lock = threading.Lock()

    def admits(self, num_bytes: int) -> bool:
        """Return True if a file of this size fits within the limit, by the known use."""
        return self.limit is None or self.used_bytes + num_bytes <= self.limit

    def count(self, blocks: int, num_bytes: int) -> None:
        """Count files that this process wrote (positive) or removed (negative)."""
        with self._lock:
            if self.used_bytes >= 0:
                self.used_bytes = max(0, self.used_bytes + num_bytes)
                self.blocks = max(0, self.blocks + blocks)
            self._written += max(0, num_bytes)

    def is_sweep_due(self, num_bytes: int) -> bool:
        """Return True if the folder should be listed before ``num_bytes`` are written."""
        if self.limit is None:
            return self.used_bytes < 0
        return (
            self.used_bytes < 0
            or not self.admits(num_bytes)
            or self._written > self.limit * _SWEEP_AFTER_SHARE
            or time.monotonic() - self._swept_at > _SWEEP_AFTER_SECONDS
        )

    def sweep(self, files: ObjectFiles, num_bytes: int, unwanted: threading.Event) -> None:
        """List the folder; make room for ``num_bytes`` by removing the least recently used files.

        Blocks for as long as listing takes; ends early when ``unwanted`` is set.

        Raises:
            StoreError: the folder cannot be reached.
        """
        self._written = 0
        files.remove_abandoned()
        keys, used_at, sizes = _columns(files.entries(), unwanted)
        used, blocks = int(sizes.sum()), len(sizes)
        self._swept_at = time.monotonic()
        if self.limit is not None and used + num_bytes > self.limit:
            target = min(int(self.limit * _LOW_MARK), self.limit - num_bytes)
            for index in np.argsort(used_at, kind="stable"):
                if used <= target or unwanted.is_set():
                    break
                files.remove(bytes(keys[index]).hex())
                used -= int(sizes[index])
                blocks -= 1
                self.evicted_blocks += 1
        if not unwanted.is_set():
            with self._lock:
                self.used_bytes, self.blocks = used + self._written, blocks


def _columns(
    entries: Iterator[FileEntry], unwanted: threading.Event
) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.int64]]:
    """Return keys, times and sizes of files in arrays: 48 bytes per file."""
    keys, used_at, sizes = bytearray(), [], []
    for entry in entries:
        if unwanted.is_set():
            break
        try:
            key = bytes.fromhex(entry.key)
        except ValueError:
            continue  # a file of another program
        if len(key) == KEY_BYTES:
            keys += key
            used_at.append(entry.used_at)
            sizes.append(entry.num_bytes)
    return (
        np.frombuffer(bytes(keys), np.uint8).reshape(-1, KEY_BYTES),
        np.array(used_at, np.float64),
        np.array(sizes, np.int64),
    )
