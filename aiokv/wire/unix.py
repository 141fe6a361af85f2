"""Unix sockets and their paths; one process at a time owns a path."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PATH_BYTES: Final = 107  # size of sockaddr_un's path without its final zero


class OwnedSocket:
    """A listening socket, and its path while it is the file of this socket.

    Args:
        path: path of the socket.
        backlog: number of connections that may wait to be accepted.

    Attributes:
        listening: non-blocking socket.

    Raises:
        ConfigError: as ``listening_socket``.
    """

    def __init__(self, path: Path, backlog: int) -> None:
        self.listening = listening_socket(path, backlog)
        self._path = path
        self._inode = path.stat().st_ino

    def remove(self) -> None:
        """Remove the path, unless it is another file now. Call before the socket is closed."""
        # No other process takes the path while this socket listens: see `listening_socket`.
        if self._path.exists() and self._path.lstat().st_ino == self._inode:
            self._path.unlink(missing_ok=True)


def listening_socket(path: Path, backlog: int) -> socket.socket:
    """Return a listening socket with a file of mode 0600; one process at a time owns the path.

    Args:
        path: path of the socket.
        backlog: number of connections that may wait to be accepted.

    Raises:
        ConfigError: there is no such directory, or other users may write to it; another process
            listens there, or is about to; or the path is too long, or names another kind of file.
    """
    check_length(path)
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot listen at {path}: {path.parent} does not exist",
            hint="make the directory, with mode 0700, or change the path",
        )
    mode = path.parent.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"cannot listen at {path}: other users may write to {path.parent}",
            hint="use a directory of mode 0700",
        )
    try:
        with claimed(path):
            remove_stale(path)
            return _bind(path, backlog)
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error}") from error


def _bind(path: Path, backlog: int) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(str(path))
        path.chmod(0o600)  # before listen(), so no process has connected
        listening.listen(backlog)
    except BaseException:
        listening.close()
        raise
    listening.setblocking(False)
    return listening


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold the lock that a process needs to check or change the path of a socket.

    The lock is a file beside the socket, which exists only while it is held.

    Raises:
        ConfigError: another process holds the lock.
    """
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _lock(lock)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # remove it before it is unlocked: see _lock
        os.close(descriptor)


def _lock(lock: Path) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(
                f"another process holds the lock {lock} to open or remove a socket"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the process that held the lock has removed the file


def checked_path(path: Any) -> Path:
    """Return ``path`` as the path of a socket.

    Raises:
        ConfigError: it is of the wrong type, or empty.
    """
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"path is {path!r}; it must be the path of a Unix socket")
    return Path(name)


def check_length(path: Path) -> None:
    """Check the length of the path of a Unix socket.

    Raises:
        ConfigError: the path is longer than the kernel accepts.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path} is {num_bytes} bytes long; the path of a Unix socket has at most "
            f"{MAX_PATH_BYTES}",
            hint="pass a shorter path=; where none is passed, set TMPDIR to a shorter directory",
        )


def remove_stale(path: Path) -> None:
    """Remove the socket of a manager that was killed; call it in ``claimed(path)``.

    Raises:
        ConfigError: a process listens there, or the file is not a socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ConfigError(f"cannot listen at {path}: the file is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # do not wait while the backlog is full
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"cannot listen at {path}: another process listens there", hint="choose another path"
    )
