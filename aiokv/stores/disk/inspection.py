"""DiskFiles: listing, verification and clean-up of the files of a disk store."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from aiokv import _native
from aiokv.errors import ConfigError, UsageError
from aiokv.stores.base import TRAILER_BYTES
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
from aiokv.stores.inspection import (
    BadBlock,
    Cleaning,
    FileGroup,
    Listing,
    Verification,
    allocated_bytes,
    in_threads,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from aiokv.stores.inspection import Stages

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
_BATCH_SLOTS: Final = 64  # read by one thread at a time
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


class _Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the journal describes.

    Attributes:
        header: header of the journal; None when it is missing or damaged.
        stored: records of the blocks that can be found, least recently used first.
        quarantined: slots that are not used any more.
        damage: records that do not count.
    """

    header: Header | None
    stored: NDArray[np.void]
    quarantined: NDArray[np.uint32]
    damage: Damage

    @property
    def object_bytes(self) -> int:
        """Bytes of a block with its trailer."""
        return 0 if self.header is None else self.header.payload_bytes + TRAILER_BYTES

    def described(self, descriptions: Mapping[str, str]) -> list[str]:
        """Return the descriptions of those kinds of damage that there are."""
        counts = msgspec.structs.asdict(self.damage)
        return [
            text.format(f"{counts[name]:,}") for name, text in descriptions.items() if counts[name]
        ]


class DiskFiles:
    """The directory of a disk store.

    Args:
        path: the directory.
        volume: file operations of the directory; tests replace them.

    Attributes:
        path: as given.
    """

    def __init__(self, path: Path, volume: Volume | None = None) -> None:
        self.path = path
        self._volume = Volume(path) if volume is None else volume

    @staticmethod
    def parts_of(folder: Path) -> list[Path]:
        """Return the directories with blocks of the disk store of a folder; empty without one."""
        names = (LOCK, JOURNAL, segment_name(0))
        if not any((folder / name).is_file() for name in names):
            return []
        paths = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
        return [
            path
            for path in paths
            if (path / JOURNAL).is_file() or (path / segment_name(0)).is_file()
        ]

    def listing(self) -> Listing:
        """Return the content of the store; see :class:`~aiokv.stores.inspection.StoreFiles`.

        While an engine uses the store, this is its state at one moment of the call.
        """
        contents = self._read()
        groups = [self._group(number, contents) for number in self._segment_numbers()]
        names = set(self._volume.names()) & {JOURNAL, NEW_JOURNAL, LOCK}
        others = sum(self._file_bytes(name) for name in names)
        seconds = contents.stored["seconds"]
        return Listing(
            kind="disk",
            path=str(self.path),
            used_by=self._user(),
            blocks=len(contents.stored),
            block_bytes=len(contents.stored) * contents.object_bytes,
            disk_bytes=sum(group.disk_bytes for group in groups) + others,
            quarantined_blocks=len(contents.quarantined),
            incomplete_files=int(NEW_JOURNAL in names),
            oldest_seconds=float(seconds.min()) if len(seconds) else None,
            newest_seconds=float(seconds.max()) if len(seconds) else None,
            damage=contents.described(_DAMAGE),
            notes=contents.described(_NOTES),
            groups=groups,
        )

    def verify(self, stages: Stages, *, threads: int) -> Verification:
        """Read every block; see :class:`~aiokv.stores.inspection.StoreFiles`."""
        with self._locked():
            started = time.perf_counter()
            contents = self._read()
            bad = self._bad_blocks(contents, stages, threads)
        return Verification(
            kind="disk",
            path=str(self.path),
            blocks=len(contents.stored),
            block_bytes=len(contents.stored) * contents.object_bytes,
            seconds=time.perf_counter() - started,
            damage=contents.described(_DAMAGE),
            notes=contents.described(_NOTES),
            bad=bad,
        )

    def clean(
        self,
        stages: Stages,
        *,
        older_than_seconds: float | None,
        verify: bool,
        threads: int,
        dry_run: bool,
    ) -> Cleaning:
        """Clean up; see :class:`~aiokv.stores.inspection.StoreFiles`.

        The journal is replaced by one with the remaining blocks only, which is durable before any
        byte is removed. Quarantined slots can be used again.
        """
        with self._locked():
            contents = self._read()
            if contents.header is None:
                raise UsageError(
                    f"the journal of {self.path} is missing or its header is damaged, so the key "
                    "of no block is known",
                    hint="remove the directory",
                )
            stored = contents.stored
            bad = self._bad_blocks(contents, stages, threads) if verify else []
            is_bad = np.isin(
                stored["slot"], [block.slot for block in bad if block.slot is not None]
            )
            is_old = np.zeros(len(stored), np.bool_)
            if older_than_seconds is not None:
                is_old = stored["seconds"] < time.time() - older_than_seconds
            kept = stored[~is_bad & ~is_old]
            incomplete = int(NEW_JOURNAL in self._volume.names())
            freed = 0 if dry_run else self._keep_only(contents.header, kept)
        return Cleaning(
            kind="disk",
            path=str(self.path),
            old_blocks=int((is_old & ~is_bad).sum()),
            bad_blocks=int(is_bad.sum()),
            quarantined_blocks=len(contents.quarantined),
            incomplete_files=incomplete,
            freed_bytes=freed,
            kept_blocks=len(kept),
        )

    # -- reading -----------------------------------------------------------------------------

    def _read(self) -> _Contents:
        nothing = np.empty(0, _RECORD)
        header, damage = None, Damage(damaged_headers=1)
        if JOURNAL in self._volume.names():
            fd = self._volume.open(JOURNAL, write=False)
            try:
                header = decode_header(self._volume.read(fd, HEADER_BYTES, 0))
                if header is not None:
                    slots = (max(self._segment_numbers(), default=0) + 1) * header.segment_slots
                    table = _native.SlotTable(min(slots, _MAX_SLOTS))
                    damage, _ = replay(self._volume, fd, header, table)
                    nothing = _records(table)
            finally:
                self._volume.close(fd)
        return _Contents(
            header=header,
            stored=nothing[nothing["kind"] == _ADD],
            quarantined=nothing["slot"][nothing["kind"] != _ADD],
            damage=damage,
        )

    def _segment_numbers(self) -> list[int]:
        return segment_numbers(self._volume.names())

    def _group(self, number: int, contents: _Contents) -> FileGroup:
        slots = max(1, contents.header.segment_slots if contents.header else 1)
        blocks = int((contents.stored["slot"] // slots == number).sum())
        return FileGroup(
            name=segment_name(number),
            blocks=blocks,
            quarantined_blocks=int((contents.quarantined // slots == number).sum()),
            block_bytes=blocks * contents.object_bytes,
            disk_bytes=self._file_bytes(segment_name(number)),
        )

    def _file_bytes(self, name: str) -> int:
        try:
            return allocated_bytes(os.stat(self.path / name))
        except FileNotFoundError:  # an engine has removed it meanwhile
            return 0

    def _bad_blocks(self, contents: _Contents, stages: Stages, threads: int) -> list[BadBlock]:
        """Return the blocks whose bytes are wrong, by slot."""
        if contents.header is None:
            return []
        stored = contents.stored[np.argsort(contents.stored["slot"])]
        progress = stages("verify", len(stored))
        batches = [stored[i : i + _BATCH_SLOTS] for i in range(0, len(stored), _BATCH_SLOTS)]
        reader = _SlotReader(self._volume, contents.header)
        bad: list[BadBlock] = []
        with closing(reader), closing(in_threads(reader.bad_blocks, batches, threads)) as results:
            for batch, found in zip(batches, results, strict=True):
                bad += found
                progress(len(batch))
        return bad

    # -- the lock ----------------------------------------------------------------------------

    @property
    def _lock_path(self) -> Path:
        """Directory with the lock: that of the store, for each of its layouts."""
        return self.path.parent if self.path.name.startswith(LAYOUT) else self.path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = DirectoryLock(self._lock_path)
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
            inode = os.stat(self._lock_path / LOCK).st_ino
            with open("/proc/locks", encoding="ascii") as locks:
                for line in locks:
                    fields = line.split()
                    if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode:
                        return int(fields[4])
        except (OSError, ValueError, IndexError):
            pass  # no lock file, or a system that does not show locks
        return None

    # -- cleaning up -------------------------------------------------------------------------

    def _keep_only(self, header: Header, kept: NDArray[np.void]) -> int:
        """Write a journal with these records only, and free all other bytes; return how many."""
        before = sum(self._file_bytes(name) for name in self._volume.names())
        self._sync_segments()
        try:
            with closing(Journal.create(self._volume, header.renewed())) as journal:
                journal.append(_native.session_record(self._volume.boot()))
                for begin in range(0, len(kept), _SNAPSHOT_RECORDS):
                    journal.append(kept[begin : begin + _SNAPSHOT_RECORDS].tobytes())
                journal.append(_native.synced_record())
                journal.replace()
                journal.sync()
        except BaseException:
            self._volume.unlink(NEW_JOURNAL)
            raise
        self._free_slots(header, kept["slot"])
        return before - sum(self._file_bytes(name) for name in self._volume.names())

    def _sync_segments(self) -> None:
        """Make the blocks durable: the new journal says that they are."""
        for number in self._segment_numbers():
            fd = self._volume.open(segment_name(number), write=True)
            try:
                self._volume.sync(fd)
            finally:
                self._volume.close(fd)

    def _free_slots(self, header: Header, used: NDArray[np.uint32]) -> None:
        """Give the bytes of all other slots back to the file system."""
        for number in reversed(self._segment_numbers()):
            slots = np.sort(used[used // header.segment_slots == number]) % header.segment_slots
            if len(slots) == 0 and number == max(self._segment_numbers()) and number > 0:
                self._volume.unlink(segment_name(number))
                continue
            fd = self._volume.open(segment_name(number), write=True)
            try:
                end = (int(slots[-1]) + 1 if len(slots) else 0) * header.slot_bytes
                if self._volume.size(fd) > end:
                    self._volume.truncate(fd, end)
                begins = np.concatenate(([0], slots.astype(np.int64) + 1)) * header.slot_bytes
                ends = slots.astype(np.int64) * header.slot_bytes
                for begin, stop in zip(begins.tolist(), ends.tolist(), strict=False):
                    if stop > begin:
                        _punch_hole(fd, begin, stop - begin)
            finally:
                self._volume.close(fd)


class _SlotReader:
    """Reads slots of the segment files; used by several threads."""

    def __init__(self, volume: Volume, header: Header) -> None:
        self._volume = volume
        self._header = header
        self._object_bytes = header.payload_bytes + TRAILER_BYTES
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}

    def bad_blocks(self, records: NDArray[np.void]) -> list[BadBlock]:
        """Return those blocks whose bytes are wrong."""
        memory = memoryview(bytearray(self._object_bytes))
        bad = []
        for record in records:
            slot, key = int(record["slot"]), record["key"].tobytes()
            number = slot // self._header.segment_slots
            if reason := self._fault(number, slot % self._header.segment_slots, key, memory):
                bad.append(
                    BadBlock(key=key.hex(), file=segment_name(number), slot=slot, reason=reason)
                )
        return bad

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            self._volume.close(self._fds.popitem()[1])

    def _fault(self, number: int, slot: int, key: bytes, memory: memoryview) -> str:
        """Return a description of the fault of a block; empty if it has none."""
        offset = slot * self._header.slot_bytes
        try:
            fd = self._fd(number)
            size = os.preadv(fd, [memory], offset)
            while 0 < size < len(memory) and (
                part := os.preadv(fd, [memory[size:]], offset + size)
            ):
                size += part
            os.posix_fadvise(fd, offset, len(memory), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            return f"the slot cannot be read: {error.strerror}"
        if size < len(memory):
            return "the file ends within the slot"
        if not _native.verify_object(memory, key):
            return "length, key or checksum is wrong"
        return ""

    def _fd(self, number: int) -> int:
        with self._lock:
            if number not in self._fds:
                fd = self._volume.open(segment_name(number), write=False)
                # Read from the medium, not from the page cache.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                self._fds[number] = fd
            return self._fds[number]


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
