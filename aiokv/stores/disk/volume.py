"""Volume: the file operations of a disk store, all in one directory."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from copy import copy
from pathlib import Path
from typing import Final, Self

from aiokv.stores.disk.io import DiskIo

_READ_BYTES: Final = 4096  # unit of reads from a damaged file

_NO_FALLOCATE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Volume:
    """Files of one directory. Each method blocks, and may raise ``OSError``.

    Tests replace a volume to drop, delay and fail operations.

    Args:
        path: the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def below(self, name: str) -> Self:
        """Return a volume for a directory in this one, with the same file operations."""
        below = copy(self)
        below.path = self.path / name
        return below

    def make(self) -> None:
        """Create the directory, if it is missing, for the owner and the group."""
        self.path.mkdir(0o750, parents=True, exist_ok=True)

    def is_writable(self) -> bool:
        """Return True if files can be created."""
        return os.access(self.path, os.W_OK)

    def boot(self) -> bytes:
        """Return 32 bytes that differ after each boot of the machine."""
        try:
            text = Path("/proc/sys/kernel/random/boot_id").read_text()
        except OSError:
            return secrets.token_bytes(32)  # no other process may appear to be of the same boot
        return text.strip().replace("-", "").encode().ljust(32, b"\0")[:32]

    def names(self) -> list[str]:
        """Return the names of the files, sorted."""
        return sorted(os.listdir(self.path))

    def open(self, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """Open a file; ``direct`` bypasses the page cache where the file system can."""
        flags = os.O_CLOEXEC | (os.O_RDWR if write else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT
        try:
            return os.open(self.path / name, flags | (os.O_DIRECT if direct else 0), 0o640)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            return os.open(self.path / name, flags, 0o640)

    def close(self, fd: int) -> None:
        """Close a file."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the size of a file in bytes."""
        return os.fstat(fd).st_size

    def stat(self, name: str) -> os.stat_result:
        """Return the status of a file."""
        return os.stat(self.path / name)

    def is_linked(self, fd: int) -> bool:
        """Return True if an open file still has a name."""
        return os.fstat(fd).st_nlink > 0

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """Read up to the end of the file; bytes that the medium cannot read are zero."""
        try:
            return _read(fd, num_bytes, offset)
        except OSError:
            return b"".join(
                _read_or_zeros(fd, min(_READ_BYTES, offset + num_bytes - at), at)
                for at in range(offset, offset + num_bytes, _READ_BYTES)
            )

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Write all bytes; after an error, a part may have been written."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int) -> None:
        """Write the data of a file to the medium."""
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set the size of a file."""
        os.ftruncate(fd, num_bytes)

    def allocate(self, fd: int, num_bytes: int, offset: int) -> None:
        """Extend the file and reserve its space, if the file system supports it."""
        try:
            os.posix_fallocate(fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(fd, max(self.size(fd), offset + num_bytes))

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing another one."""
        os.rename(self.path / old, self.path / new)

    def unlink(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def sync_directory(self) -> None:
        """Write created and renamed names to the medium."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self) -> int:
        """Return the bytes that the file system has left for this user."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def open_io(self) -> DiskIo:
        """Return the I/O of blocks, on the running loop."""
        return DiskIo()


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    pieces = []
    while num_bytes > 0 and (piece := os.pread(fd, num_bytes, offset)):
        pieces.append(piece)
        num_bytes, offset = num_bytes - len(piece), offset + len(piece)
    return b"".join(pieces)


def _read_or_zeros(fd: int, num_bytes: int, offset: int) -> bytes:
    try:
        return _read(fd, num_bytes, offset)
    except OSError:
        return bytes(num_bytes)
