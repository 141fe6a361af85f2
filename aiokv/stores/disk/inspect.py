"""Reading and cleaning of disk stores by tools. Functions block.

``read_store`` and ``verify_store`` change nothing, and also work beside a process that uses the
store. ``clean_store`` locks it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from aiokv import _native
from aiokv.errors import ConfigError
from aiokv.stores.base import TRAILER_BYTES
from aiokv.stores.disk.journal import Journal
from aiokv.stores.disk.layout import (
    HEADER_BYTES,
    JOURNAL,
    Header,
    decode_header,
    segment_name,
)
from aiokv.stores.disk.lock import DirectoryLock
from aiokv.stores.disk.recovery import Damage, replay
from aiokv.stores.disk.volume import Volume

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

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
_ADD: Final = 1
_BATCH: Final = 16_384


class StoredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block of a disk store.

    Attributes:
        key: 32 bytes.
        slot: number of the slot.
        file: name of the segment file, and ``offset`` the first byte of the slot in it.
        saved_at: Unix time of the save, in seconds.
    """

    key: bytes
    slot: int
    file: str
    offset: int
    saved_at: int


class StoreListing(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a disk store.

    Attributes:
        slot_bytes: bytes per slot.
        payload_bytes: bytes per block that are KV.
        blocks: the blocks; the least recently saved ones first.
        quarantined_slots: slots that are not used because their bytes were wrong.
        journal_bytes: size of the journal.
        damage: records of the journal that do not count.
    """

    slot_bytes: int
    payload_bytes: int
    blocks: tuple[StoredBlock, ...]
    quarantined_slots: int
    journal_bytes: int
    damage: Damage


class Cleaning(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``clean_store``.

    Attributes:
        removed_blocks: blocks that were removed.
        reused_slots: slots that left quarantine.
        journal_bytes: size of the journal before, and ``new_journal_bytes`` after.
    """

    removed_blocks: int
    reused_slots: int
    journal_bytes: int
    new_journal_bytes: int


def read_store(path: str | os.PathLike[str]) -> StoreListing:
    """List the blocks of a store.

    Raises:
        ConfigError: the directory is no disk store, or its header is damaged.
        LayoutError: another version of aiokv has written it.
        OSError: the journal cannot be read.
    """
    with _journal(path, write=False) as (volume, fd, header):
        table = _new_table(volume, header)
        damage, _ = replay(volume, fd, header, table)
        return StoreListing(
            slot_bytes=header.slot_bytes,
            payload_bytes=header.payload_bytes,
            blocks=tuple(_blocks(table, header)),
            quarantined_slots=table.quarantined,
            journal_bytes=volume.size(fd),
            damage=damage,
        )


def verify_store(
    path: str | os.PathLike[str],
    is_right: Callable[[bytes, bytes], bool],
    progress: Callable[[int], None] = lambda blocks: None,
) -> tuple[StoredBlock, ...]:
    """Read all blocks; return those whose bytes are wrong.

    A block that the store replaced meanwhile is not wrong.

    Args:
        path: directory of the store.
        is_right: ``(object, key)`` -> the trailer fits the payload and the key.
        progress: called with the number of blocks after each one.

    Raises:
        ConfigError, LayoutError, OSError: as ``read_store`` does.
    """
    listing = read_store(path)
    volume = Volume(path)
    object_bytes = listing.payload_bytes + TRAILER_BYTES
    wrong = []
    files: dict[str, int] = {}
    try:
        for number, block in enumerate(listing.blocks, 1):
            if block.file not in files:
                files[block.file] = _open_segment(volume, block.file)
            content = _read_object(volume, files[block.file], object_bytes, block.offset)
            if not is_right(content, block.key):
                wrong.append(block)
            progress(number)
    finally:
        for fd in files.values():
            if fd >= 0:
                volume.close(fd)
    if wrong:
        present = {(block.key, block.slot) for block in read_store(path).blocks}
        wrong = [block for block in wrong if (block.key, block.slot) in present]
    return tuple(wrong)


def clean_store(
    path: str | os.PathLike[str],
    *,
    remove: frozenset[bytes] = frozenset(),
    saved_before: int = 0,
    reuse_quarantined: bool = False,
) -> Cleaning:
    """Write a new journal without some blocks, and without records of removed ones.

    Args:
        path: directory of the store.
        remove: keys to remove.
        saved_before: also remove blocks that were saved before this Unix time.
        reuse_quarantined: let slots in quarantine be used again.

    Raises:
        ConfigError: a process uses the store, or as ``read_store`` does.
        LayoutError, OSError: as ``read_store`` does.
    """
    lock = _locked(path)
    try:
        with _journal(path, write=True) as (volume, fd, header):
            table = _new_table(volume, header)
            replay(volume, fd, header, table)
            before = table.stored
            expired = [
                block.key for block in _blocks(table, header) if block.saved_at < saved_before
            ]
            table.remove(b"".join({*expired, *remove}))
            _sync_segments(volume)
            new_bytes = _write_journal(volume, header, table, reuse_quarantined=reuse_quarantined)
            return Cleaning(
                removed_blocks=before - table.stored,
                reused_slots=table.quarantined if reuse_quarantined else 0,
                journal_bytes=volume.size(fd),
                new_journal_bytes=new_bytes,
            )
    finally:
        lock.release()


def _sync_segments(volume: Volume) -> None:
    """Make the data of all segments durable."""
    for name in volume.names():
        if name.startswith("segment-"):
            fd = volume.open(name, write=True)
            try:
                volume.sync(fd)
            finally:
                volume.close(fd)


def _write_journal(
    volume: Volume, header: Header, table: _native.SlotTable, *, reuse_quarantined: bool
) -> int:
    journal = Journal.create(volume, header.renewed())
    try:
        journal.append(_native.session_record(volume.boot()))
        for records in _records(table):
            kept = records[records["kind"] == _ADD] if reuse_quarantined else records
            journal.append(kept.tobytes())
        journal.append(_native.synced_record())
        journal.replace()
        journal.sync()
    except BaseException:
        journal.discard()
        raise
    journal.close()
    return journal.num_bytes


def _records(table: _native.SlotTable) -> Iterator[np.ndarray[tuple[int], np.dtype[np.void]]]:
    table.begin_snapshot()
    while piece := table.snapshot(_BATCH):
        yield np.frombuffer(piece, _RECORD)


def _blocks(table: _native.SlotTable, header: Header) -> Iterator[StoredBlock]:
    for records in _records(table):
        for record in records[records["kind"] == _ADD]:
            segment, slot = divmod(int(record["slot"]), header.segment_slots)
            yield StoredBlock(
                key=record["key"].tobytes(),
                slot=int(record["slot"]),
                file=segment_name(segment),
                offset=slot * header.slot_bytes,
                saved_at=int(record["seconds"]),
            )


def _new_table(volume: Volume, header: Header) -> _native.SlotTable:
    segments = sum(name.startswith("segment-") for name in volume.names())
    return _native.SlotTable(max(1, segments * header.segment_slots))


@contextmanager
def _journal(path: str | os.PathLike[str], *, write: bool) -> Iterator[tuple[Volume, int, Header]]:
    volume = Volume(path)
    try:
        fd = volume.open(JOURNAL, write=write)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{str(path)!r} is no disk store: it has no file 'journal'") from None
    try:
        header = decode_header(volume.read(fd, HEADER_BYTES, 0))
        if header is None:
            raise ConfigError(
                f"the journal of {str(path)!r} has a damaged header",
                hint="an engine that uses the path begins an empty store there",
            )
        yield volume, fd, header
    finally:
        volume.close(fd)


def _locked(path: str | os.PathLike[str]) -> DirectoryLock:
    volume = Volume(path)
    if not volume.path.is_dir():
        raise ConfigError(f"{str(path)!r} is no disk store: there is no such directory")
    return DirectoryLock(volume.path)


def _open_segment(volume: Volume, name: str) -> int:
    try:
        return volume.open(name, write=False)
    except FileNotFoundError:
        return -1


def _read_object(volume: Volume, fd: int, num_bytes: int, offset: int) -> bytes:
    return b"" if fd < 0 else volume.read(fd, num_bytes, offset)
