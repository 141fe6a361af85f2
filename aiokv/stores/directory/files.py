"""ObjectFiles: objects as files of one folder. All methods block, and may run in any thread."""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aiokv.errors import StoreError
from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

_OBJECT: Final = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
INCOMING: Final = "incoming"  # files that are being written
IDENTITY: Final = "aiokv-store"  # a file with a random name of the folder
_IDENTITY_BYTES: Final = 64  # longest name
_UNREACHABLE: Final = frozenset(
    {errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EIO}
)
_STALE: Final = frozenset({errno.ESTALE, errno.ENOTCONN, errno.ENOENT})
_NO_ROOM: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
)
_TOUCH_AFTER_SECONDS: Final = 3_600.0  # a younger file is not touched by loads
_ABANDONED_AFTER_SECONDS: Final = 3_600.0


class NoRoom(Exception):
    """The folder takes no more files; the cause is the ``OSError``."""


class FileEntry(NamedTuple):
    """One object of the folder: key in hexadecimal, time of last use and bytes."""

    key: str
    used_at: float
    num_bytes: int


def is_object(folder: str, name: str) -> bool:
    """Return True if a file in one of the folders has the name of an object."""
    return name.startswith(folder) and _OBJECT.fullmatch(name) is not None


class ObjectFiles:
    """Files of objects: ``ab/abcdef...``, named by their keys in hexadecimal.

    A file appears under its name when it is complete, by a rename from ``incoming/``. The folder
    is addressed by a descriptor: after an unmount, no file is written below the mount point.

    Args:
        path: folder; its parent must exist.
        object_bytes: length of each file.
        fsync: write a file, and its name, through to the medium before it counts as saved.
    """

    def __init__(self, path: str, object_bytes: int, *, fsync: bool) -> None:
        self._path = path
        self._object_bytes = object_bytes
        self._fsync = fsync
        self._lock = threading.Lock()
        self._root = -1
        self._device = -1
        self._identity = b""
        self._prefix = secrets.token_hex(8)  # start of this process's file names in `incoming/`
        self._numbers = itertools.count()
        self._server_time = 0.0  # time of the file system's clock at the last write

    def open(self) -> None:
        """Open the folder, and create it when it is absent.

        A shared file system that does not answer is not an error.

        Raises:
            StoreError: the path is not a folder, or cannot be created or entered.
        """
        try:
            with suppress(FileExistsError):
                os.mkdir(self._path, 0o770)
            self._enter()
        except OSError as error:
            if error.errno in _UNREACHABLE:
                return  # the next operation tries again
            raise StoreError(
                f"directory {self._path!r} cannot be used: {error.strerror}",
                hint="create its parent folder, or mount the file system, and check the rights",
            ) from error

    def close(self) -> None:
        """Close the folder. Idempotent."""
        with self._lock:
            if self._root >= 0:
                os.close(self._root)
                self._root = -1

    def size(self, key: str) -> int:
        """Return the bytes of an object's file; -1 when there is none.

        Raises:
            StoreError: the folder cannot be reached.
        """

        def ask(root: int) -> int:
            try:
                return os.stat(_name(key), dir_fd=root).st_size
            except FileNotFoundError:
                return -1

        return self._on_folder(ask)

    def read(self, key: str, view: memoryview) -> int:
        """Read an object into memory; return the bytes of its file, -1 when there is none.

        Raises:
            StoreError: the folder cannot be reached, or the file cannot be read.
        """

        def ask(root: int) -> int:
            try:
                file = os.open(_name(key), os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
            except FileNotFoundError:
                return -1
            try:
                return self._read(file, view)
            except OSError as error:
                if error.errno == errno.ESTALE:  # another machine has removed it meanwhile
                    return -1
                raise
            finally:
                os.close(file)

        return self._on_folder(ask)

    def _read(self, file: int, view: memoryview) -> int:
        status = os.fstat(file)
        position = os.preadv(file, [view], 0)
        while position < len(view):
            count = os.preadv(file, [view[position:]], position)
            if count == 0:
                return position
            position += count
        if time.time() - status.st_mtime > _TOUCH_AFTER_SECONDS:
            with suppress(OSError):  # a file system that is read-only keeps the old time
                os.utime(file)
        return status.st_size

    def write(self, key: str, view: memoryview) -> None:
        """Write an object's file beside the others and rename it to its name.

        Raises:
            NoRoom: the file system is full, over quota or read-only, or the process may not write.
            StoreError: the folder cannot be reached.
        """

        def ask(root: int) -> None:
            name = f"{INCOMING}/{self._prefix}-{next(self._numbers)}"
            try:
                file = _in_folder(INCOMING, root, lambda: _create(name, root))
                try:
                    self._write(file, view)
                finally:
                    os.close(file)
                self._publish(name, _name(key), root)
            except OSError as error:
                with suppress(OSError):
                    os.unlink(name, dir_fd=root)
                if error.errno in _NO_ROOM:
                    raise NoRoom from error
                raise

        self._on_folder(ask)

    def _write(self, file: int, view: memoryview) -> None:
        position = os.pwritev(file, [view], 0)
        while position < len(view):
            position += os.pwritev(file, [view[position:]], position)
        if self._fsync:
            os.fdatasync(file)
        self._server_time = os.fstat(file).st_mtime

    def _publish(self, incoming: str, name: str, root: int) -> None:
        folder = name[:2]
        _in_folder(
            folder, root, lambda: os.rename(incoming, name, src_dir_fd=root, dst_dir_fd=root)
        )
        if self._fsync:
            directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def remove(self, key: str) -> None:
        """Remove an object's file, if there is one.

        Raises:
            StoreError: the folder cannot be reached, or the file cannot be removed.
        """

        def ask(root: int) -> None:
            with suppress(FileNotFoundError):
                os.unlink(_name(key), dir_fd=root)

        self._on_folder(ask)

    def read_identity(self) -> None:
        """Read the file that each folder has from the medium, not from the page cache.

        Raises:
            StoreError: the folder cannot be reached, or the file cannot be read.
        """

        def ask(root: int) -> None:
            os.stat(".", dir_fd=root)
            with suppress(FileNotFoundError):  # a folder that is read-only may have none
                file = os.open(IDENTITY, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.preadv(file, [bytearray(_IDENTITY_BYTES)], 0)
                finally:
                    os.close(file)

        self._on_folder(ask)

    def entries(self) -> Iterator[FileEntry]:
        """List the objects of the folder. Objects added or removed meanwhile may be missing.

        Raises:
            StoreError: the folder cannot be reached.
        """
        for number in range(256):
            yield from self.listed(f"{number:02x}")

    def remove_abandoned(self) -> int:
        """Remove incomplete files of processes that were killed; return their number.

        Files that are younger than an hour, by the clock of the file system, are kept.

        Raises:
            StoreError: the folder cannot be reached.
        """
        oldest = self._server_time - _ABANDONED_AFTER_SECONDS
        names = [entry.key for entry in self.listed(INCOMING) if entry.used_at < oldest]

        def ask(root: int) -> None:
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(f"{INCOMING}/{name}", dir_fd=root)

        self._on_folder(ask)
        return len(names)

    def listed(self, folder: str) -> list[FileEntry]:
        """List the files of one of the folders; see ``entries``."""

        def ask(root: int) -> list[FileEntry]:
            try:
                directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
            except FileNotFoundError:
                return []
            found = []
            try:
                with os.scandir(directory) as files:
                    for file in files:
                        with suppress(FileNotFoundError):
                            status = file.stat(follow_symlinks=False)
                            if stat.S_ISREG(status.st_mode):
                                found.append(FileEntry(file.name, status.st_mtime, status.st_size))
            finally:
                os.close(directory)
            return found

        return self._on_folder(ask)

    def _on_folder(self, ask: Callable[[int], _T]) -> _T:
        """Run an operation on the folder; enter the folder again when it was mounted again."""
        root = self._root
        try:
            return ask(root if root >= 0 else self._reenter(root))
        except OSError as error:
            if error.errno not in _STALE:
                raise StoreError(f"directory {self._path!r}: {error.strerror}") from error
        try:
            return ask(self._reenter(root))
        except OSError as error:
            raise StoreError(f"directory {self._path!r}: {error.strerror}") from error

    def _reenter(self, seen: int) -> int:
        """Open the folder again, unless another thread has done so since ``seen``."""
        with self._lock:
            if self._root == seen or self._root < 0:
                self._enter()
            return self._root

    def _enter(self) -> None:
        root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            device = os.fstat(root).st_dev
            identity = _identity_of(root, create=self._root < 0)
            known = self._device in (-1, device) or (identity and identity == self._identity)
            if not known:
                raise StoreError(
                    f"directory {self._path!r} is another folder than before",
                    hint="mount the shared file system again",
                )
        except BaseException:
            os.close(root)
            raise
        self._device, self._identity = device, identity
        if self._root >= 0:
            # Threads may still use the old descriptor, so the new folder takes its number.
            os.dup2(root, self._root, inheritable=False)
            os.close(root)
        else:
            self._root = root


def _name(key: str) -> str:
    return f"{key[:2]}/{key}"


def _create(name: str, root: int) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660, dir_fd=root)


def _in_folder(folder: str, root: int, action: Callable[[], _T]) -> _T:
    """Run an action that needs a folder; create the folder when it is absent."""
    try:
        return action()
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(folder, 0o770, dir_fd=root)
        return action()


def _identity_of(root: int, *, create: bool) -> bytes:
    """Return the random name of a folder; empty when it has none and cannot be given one."""
    with suppress(OSError):
        file = os.open(IDENTITY, os.O_RDONLY | os.O_CLOEXEC, dir_fd=root)
        try:
            return os.read(file, _IDENTITY_BYTES)
        finally:
            os.close(file)
    if not create:
        return b""
    with suppress(OSError):
        file = _create(IDENTITY, root)
        try:
            identity = secrets.token_hex(16).encode()
            os.write(file, identity)
            return identity
        finally:
            os.close(file)
    return b""
