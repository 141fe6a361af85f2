"""DirectoryLock: one process at a time uses a disk store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError
from aiokv.stores.disk.layout import LOCK

if TYPE_CHECKING:
    from pathlib import Path

_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


class DirectoryLock:
    """The lock of a directory, held until ``release`` or the end of the process.

    A process that was forked from this one does not hold it.

    Args:
        path: the directory.

    Raises:
        ConfigError: another process (the message names its id) or another store of this process
            holds the lock.
        OSError: the lock file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        file = path / LOCK
        writable = True
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            self._fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            writable = False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            hint = (
                "give each engine and each rank its own path, and end the processes of a killed "
                "server that still run"
            )
            if holder == str(os.getpid()):
                hint += (
                    "; this process uses it until aclose() of that engine, on that engine's loop"
                )
            raise ConfigError(
                f"the disk store {str(path)!r} is in use by process {holder}", hint=hint
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        _held.add(self)
        if writable:
            # A full disk has no room for the process id, which is only for messages.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let other processes use the directory. Idempotent."""
        _held.discard(self)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the descriptors that a forked process got; the parent process keeps its locks."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
