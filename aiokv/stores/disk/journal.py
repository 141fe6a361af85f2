"""Journal: the file that records which key is in which slot."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from aiokv import _native
from aiokv.stores.disk.layout import (
    HEADER_BYTES,
    JOURNAL,
    NEW_JOURNAL,
    RECORD_BYTES,
    record_offset,
)

if TYPE_CHECKING:
    from aiokv.stores.disk.layout import Header
    from aiokv.stores.disk.volume import Volume


class Journal:
    """An append-only file of records. Each method blocks, and raises ``OSError``.

    Attributes:
        header: the header of the file.
        position: number of records, and the position of the next one.
    """

    def __init__(
        self, volume: Volume, fd: int, header: Header, position: int, *, is_cut: bool = False
    ) -> None:
        self.header = header
        self.position = position
        self._volume = volume
        self._fd = fd
        self._cut = is_cut  # True if bytes of a failed append may be behind `position`
        self._renamed = False  # True until the directory is synced

    @classmethod
    def create(cls, volume: Volume, header: Header) -> Journal:
        """Begin a new journal beside the present one; ``replace`` makes it the present one."""
        volume.unlink(NEW_JOURNAL)
        fd = volume.open(NEW_JOURNAL, write=True, create=True)
        try:
            volume.write(fd, header.encode(), 0)
        except BaseException:
            volume.close(fd)
            raise
        return cls(volume, fd, header, 0)

    @classmethod
    def resume(cls, volume: Volume, fd: int, header: Header, position: int) -> Journal:
        """Continue a journal behind its last valid record."""
        return cls(volume, fd, header, position, is_cut=True)

    def append(self, records: bytes) -> None:
        """Write records, which come without checksums.

        After an error none of them counts, unless the process ends before the next call. A journal
        that was deleted takes no records: no later process would find them.
        """
        if self._cut:
            self._volume.truncate(self._fd, record_offset(self.position))
            self._cut = False
        stamped = _native.stamp_records(records, self.header.epoch, self.position)
        try:
            self._volume.write(self._fd, stamped, record_offset(self.position))
            if not self._volume.is_linked(self._fd):
                raise FileNotFoundError(
                    errno.ENOENT,
                    "the journal was deleted while the store was open; restart the process",
                )
        except BaseException:
            self._cut = True
            with contextlib.suppress(OSError):
                self._volume.truncate(self._fd, record_offset(self.position))
                self._cut = False
            raise
        self.position += len(records) // RECORD_BYTES

    def sync(self) -> None:
        """Make all records durable, and the new name of the file after ``replace``."""
        self._volume.sync(self._fd)
        if self._renamed:
            self._volume.sync_directory()
            self._renamed = False

    def replace(self) -> None:
        """Become the journal of the store; the records become durable first."""
        self._volume.sync(self._fd)
        self._volume.rename(NEW_JOURNAL, JOURNAL)
        self._renamed = True

    def discard(self) -> None:
        """Remove a new journal that did not replace the present one."""
        self.close()
        with contextlib.suppress(OSError):
            self._volume.unlink(NEW_JOURNAL)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            self._volume.close(self._fd)
            self._fd = -1

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self.position * RECORD_BYTES
