"""DiskFiles: the files of a disk store for listing, verification and clean-up."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from aiokv import _native
from aiokv.errors import ConfigError, UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.disk.journal import Journal
from aiokv.stores.disk.layout import (
    HEADER_BYTES,
    JOURNAL,
    LAYOUT,
    LOCK,
    NEW_JOURNAL,
    RECORD_BYTES,
    Header,
    decode_header,
    segment_name,
    segment_numbers,
)
from aiokv.stores.disk.lock import DirectoryLock
from aiokv.stores.disk.recovery import Damage, replay
from aiokv.stores.disk.volume import Volume
from aiokv.stores.inspection import FileGroup, Place, Reading, StoreDirectory, allocated_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

# The records of SlotTable.snapshot: native/include/aiokv/journal_record.hpp.
_RECORD: Final = np.dtype(
    [
        ("checksum", "<u8"),
        ("kind", "<u4"),
        ("slot", "<u4"),
        ("key", "V32"),
        ("seconds", "<u4"),
        ("reserved", "<u4", 3),
    ]
)
assert _RECORD.itemsize == RECORD_BYTES
_ADD: Final = 1

_SNAPSHOT_RECORDS: Final = 65_536
_MAX_SLOTS: Final = 2**31 - 1

_PUNCH_HOLE: Final = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, FALLOC_FL_KEEP_SIZE

_DAMAGE: Final = {
    "damaged_records": "{} damaged records in the journal",
    "outside_records": "{} records of slots that no segment file has",
    "damaged_headers": "the journal is missing or its header is damaged: no block can be found",
}
_NOTES: Final = {
    "torn_records": "{} torn records at the end of the journal, of an interrupted save",
    "unproven_records": "{} blocks that were saved shortly before a power cut, and do not count",
}


class DiskFiles(StoreDirectory):
    """The directory of a disk store, or of one of its layouts.

    Args:
        path: the directory.
        volume: file operations of the directory; tests replace them.
    """

    kind = "disk"

    def __init__(self, path: Path, volume: Volume | None = None) -> None:
        self.path = path
        self._volume = Volume(path) if volume is None else volume

    @staticmethod
    def parts_of(folder: Path) -> list[Path]:
        """Return the directories with blocks of the disk store of a folder; empty without one."""
        names = (LOCK, JOURNAL, segment_name(0), f"*/{LOCK}")  # the last one: only of groups
        if not any(any(folder.glob(name)) for name in names):
            return []
        paths = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        return [
            path
            for path in paths
            if (path / JOURNAL).is_file() or (path / segment_name(0)).is_file()
        ]

    def read(self) -> Reading:
        """Read the journal; see :class:`StoreDirectory`. Blocks are in order of their last use."""
        header, records, damage = self._journal()
        object_bytes = 0 if header is None else header.payload_bytes + TRAILER_BYTES
        segment_slots = 1 if header is None else max(1, header.segment_slots)
        is_stored = records["kind"] == _ADD
        stored = records[is_stored]
        segments, names = records["slot"] // segment_slots, self._volume.names()
        groups = []
        for number in sorted({*segment_numbers(names), *np.unique(segments).tolist()}):
            blocks = int((is_stored & (segments == number)).sum())
            groups.append(
                FileGroup(
                    name=segment_name(number),
                    blocks=blocks,
                    quarantined_blocks=int((~is_stored & (segments == number)).sum()),
                    block_bytes=blocks * object_bytes,
                    disk_bytes=_file_bytes(self._volume, segment_name(number)),
                )
            )

        def place(block: int) -> Place:
            assert header is not None  # without it, there are no blocks
            slot = int(stored["slot"][block])
            number, place = divmod(slot, segment_slots)
            return Place(
                key=stored["key"][block].tobytes(),
                file=segment_name(number),
                num_bytes=object_bytes,
                offset=place * header.slot_bytes,
                slot=slot,
            )

        others = set(names) & {JOURNAL, NEW_JOURNAL, LOCK}
        return Reading(
            keys=np.ascontiguousarray(stored["key"]).view(np.uint8).reshape(-1, KEY_BYTES),
            seconds=stored["seconds"].astype(np.float64),
            order=np.argsort(stored["slot"]),
            groups=groups,
            place=place,
            keep_only=partial(self._keep_only, header, stored),
            disk_bytes=sum(_file_bytes(self._volume, name) for name in others),
            incomplete={NEW_JOURNAL: 0.0} if NEW_JOURNAL in names else {},  # no process owns it
            damage=_described(damage, _DAMAGE),
            notes=_described(damage, _NOTES),
            used_by=self._user(),
            obstacle=""
            if header is not None
            else f"the journal of {self.path} is missing or its header is damaged, so the key of "
            "no block is known",
        )

    def now(self, *, dry_run: bool) -> float:
        """Return the time of this machine, which dates the records."""
        return time.time()

    def _journal(self) -> tuple[Header | None, NDArray[np.void], Damage]:
        """Return the header of the journal, its valid records, and its invalid ones."""
        if JOURNAL in self._volume.names():
            with _opened(self._volume, JOURNAL) as fd:
                header = decode_header(self._volume.read(fd, HEADER_BYTES, 0))
                if header is not None:
                    numbers = segment_numbers(self._volume.names())
                    slots = (max(numbers, default=0) + 1) * header.segment_slots
                    table = _native.SlotTable(min(slots, _MAX_SLOTS))
                    damage, _ = replay(self._volume, fd, header, table)
                    return header, _records(table), damage
        return None, np.empty(0, _RECORD), Damage(damaged_headers=1)

    @property
    def lock_path(self) -> Path:
        """Directory with the lock. All layouts of a store share the lock of the store."""
        return self.path.parent if self.path.name.startswith(LAYOUT) else self.path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory; see :class:`StoreDirectory`."""
        try:
            lock = DirectoryLock(self.lock_path)
        except ConfigError as error:
            raise UsageError(
                error.args[0],
                hint="close that engine first; 'aiokv store ls' works meanwhile",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _user(self) -> int | None:
        """Return the id of the process that has locked the store, without touching the lock."""
        try:
            inode = os.stat(self.lock_path / LOCK).st_ino
            with open("/proc/locks", encoding="ascii") as locks:
                for line in locks:
                    fields = line.split()
                    if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode:
                        return int(fields[4])
        except (OSError, ValueError, IndexError):
            pass  # no lock file, or a system that does not show locks
        return None

    def _keep_only(
        self,
        header: Header | None,
        stored: NDArray[np.void],
        kept: NDArray[np.bool_],
        abandoned: Sequence[str],
    ) -> int:
        """Remove all other blocks; see :class:`Reading`. Quarantined slots can be used again.

        The journal is replaced by one with the remaining blocks only, which is durable before any
        byte is removed. It replaces the incomplete one, too.
        """
        assert header is not None  # see ``obstacle``
        volume, stored = self._volume, stored[kept]
        before = sum(_file_bytes(volume, name) for name in volume.names())
        for number in segment_numbers(volume.names()):  # a record proves that its block is durable
            with _opened(volume, segment_name(number), write=True) as fd:
                volume.sync(fd)
        try:
            with closing(Journal.create(volume, header.renewed())) as journal:
                journal.append(_native.session_record(volume.boot()))
                for begin in range(0, len(stored), _SNAPSHOT_RECORDS):
                    journal.append(stored[begin : begin + _SNAPSHOT_RECORDS].tobytes())
                journal.append(_native.synced_record())
                journal.replace()
                journal.sync()
        except BaseException:
            volume.unlink(NEW_JOURNAL)
            raise
        self._free_slots(header, stored["slot"])
        return before - sum(_file_bytes(volume, name) for name in volume.names())

    def _free_slots(self, header: Header, used: NDArray[np.uint32]) -> None:
        """Give the bytes of all other slots back to the file system."""
        numbers = segment_numbers(self._volume.names())
        for number in reversed(numbers):
            slots = np.sort(used[used // header.segment_slots == number]) % header.segment_slots
            if len(slots) == 0 and number == numbers[-1] and number > 0:
                self._volume.unlink(segment_name(number))
                numbers.pop()
                continue
            with _opened(self._volume, segment_name(number), write=True) as fd:
                ends = slots.astype(np.int64) * header.slot_bytes  # ends of the free slots
                begins = np.concatenate(([0], ends + header.slot_bytes))
                if self._volume.size(fd) > begins[-1]:
                    self._volume.truncate(fd, int(begins[-1]))
                for begin, end in zip(begins.tolist(), ends.tolist(), strict=False):
                    if end > begin:
                        _punch_hole(fd, begin, end - begin)


@contextmanager
def _opened(volume: Volume, name: str, *, write: bool = False) -> Iterator[int]:
    fd = volume.open(name, write=write)
    try:
        yield fd
    finally:
        volume.close(fd)


def _file_bytes(volume: Volume, name: str) -> int:
    try:
        return allocated_bytes(volume.stat(name))
    except FileNotFoundError:  # an engine has removed it meanwhile
        return 0


def _described(damage: Damage, descriptions: Mapping[str, str]) -> list[str]:
    """Return the descriptions of those kinds of damage that there are."""
    counts = msgspec.structs.asdict(damage)
    return [text.format(f"{counts[name]:,}") for name, text in descriptions.items() if counts[name]]


def _records(table: _native.SlotTable) -> NDArray[np.void]:
    pieces = []
    table.begin_snapshot()
    while piece := table.snapshot(_SNAPSHOT_RECORDS):
        pieces.append(piece)
    return np.frombuffer(b"".join(pieces), _RECORD)


def _punch_hole(fd: int, offset: int, num_bytes: int) -> None:
    """Free bytes within a file, where the file system can; the file reads as zeros there."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(fd, _PUNCH_HOLE, offset, num_bytes) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
