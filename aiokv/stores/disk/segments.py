"""Segments: the files that hold the slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.stores.disk.layout import segment_name

if TYPE_CHECKING:
    from aiokv.stores.disk.layout import Header
    from aiokv.stores.disk.volume import Volume


class Segments:
    """Open segment files. Methods block and raise ``OSError``, except for ``fd`` and the sets.

    Attributes:
        slots: slots that exist, from 0 on.
        segment_slots: slots per file.
        dirty: numbers of segments with data that may not be durable.
    """

    def __init__(self, volume: Volume, header: Header) -> None:
        self.slots = 0
        self.segment_slots = header.segment_slots
        self.dirty: set[int] = set()
        self._volume = volume
        self._slot_bytes = header.slot_bytes
        self._fds: list[int] = []
        self._new_names = False

    def open(self, slots: int, *, write: bool) -> None:
        """Open the existing files. Files that should hold ``slots`` slots get their old size again.

        Slots that were cut off are zero bytes, or beyond the end of a file that is not writable.
        """
        names = set(self._volume.names())
        while True:
            number = len(self._fds)
            exists = segment_name(number) in names
            expected = min(self.segment_slots, slots - number * self.segment_slots)
            if not exists and (expected <= 0 or not write):
                return
            fd = self._open(number, write=write)
            size = self._volume.size(fd)
            if write and size < expected * self._slot_bytes:
                self._volume.truncate(fd, expected * self._slot_bytes)
                size = expected * self._slot_bytes
            held = min(size // self._slot_bytes, self.segment_slots)
            if self.slots == number * self.segment_slots:
                self.slots += held
            self.dirty.add(number)

    def extend(self, count: int) -> int:
        """Make up to ``count`` further slots in one file; return how many."""
        number = self.slots // self.segment_slots
        count = min(count, (number + 1) * self.segment_slots - self.slots)
        if number == len(self._fds):
            self._open(number, write=True)
        first = self.slots % self.segment_slots
        self._volume.allocate(self._fds[number], count * self._slot_bytes, first * self._slot_bytes)
        self.dirty.add(number)
        self.slots += count
        return count

    def shrink(self, capacity: int) -> None:
        """Remove slots above the capacity."""
        while len(self._fds) > max(1, -(-capacity // self.segment_slots)):
            self._volume.close(self._fds.pop())
            self._volume.unlink(segment_name(len(self._fds)))
            self.dirty.discard(len(self._fds))
        if self.slots > capacity:
            held = capacity - (len(self._fds) - 1) * self.segment_slots
            self._volume.truncate(self._fds[-1], held * self._slot_bytes)
            self.slots = capacity

    def fd(self, number: int) -> int:
        """Return the descriptor of a segment; -1 when there is no such file."""
        return self._fds[number] if number < len(self._fds) else -1

    def sync_names(self) -> None:
        """Make the names of new files durable."""
        if self._new_names:
            self._volume.sync_directory()
            self._new_names = False

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            self._volume.close(self._fds.pop())

    def _open(self, number: int, *, write: bool) -> int:
        name = segment_name(number)
        fd = self._volume.open(name, write=write, create=write, direct=True)
        self._fds.append(fd)
        self._new_names = True
        return fd
