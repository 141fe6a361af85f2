"""Recovery: the state of a disk store, rebuilt from its files."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from aiokv import _native
from aiokv.base.logs import Log
from aiokv.errors import ConfigError
from aiokv.stores.disk.journal import Journal
from aiokv.stores.disk.layout import (
    HEADER_BYTES,
    JOURNAL,
    NEW_JOURNAL,
    RECORD_BYTES,
    Header,
    decode_header,
    segment_numbers,
)
from aiokv.stores.disk.segments import Segments

if TYPE_CHECKING:
    from aiokv.stores.base import StoreMemory
    from aiokv.stores.disk.volume import Volume

_CHUNK_BYTES: Final = 16384 * RECORD_BYTES

_log: Final = Log(__name__)


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Records of a journal that do not count.

    Attributes:
        damaged_records: invalid records before the last valid one.
        torn_records: invalid records behind it, such as of an interrupted write.
        unproven_records: valid records of blocks whose data a power cut may have lost.
        outside_records: records of slots above the capacity, which became smaller, or of segments
            that were removed.
        damaged_headers: 1 when the header was unreadable: the store begins empty.
    """

    damaged_records: int = 0
    torn_records: int = 0
    unproven_records: int = 0
    outside_records: int = 0
    damaged_headers: int = 0

    @property
    def needs_new_journal(self) -> bool:
        """True if the journal has records that must not be read again."""
        return any(msgspec.structs.astuple(self))


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a store. ``journal`` is None when the directory is not writable."""

    table: _native.SlotTable
    journal: Journal | None
    segments: Segments
    damage: Damage


def recover(volume: Volume, memory: StoreMemory, capacity_bytes: int, *, write: bool) -> Recovered:
    """Read the journal and open the segments; begin a new store if there is none. Blocks.

    Args:
        volume: the directory of the layout of ``memory``.
        memory: host memory.
        capacity_bytes: limit of the blocks.
        write: False to change no file.

    Raises:
        ConfigError: the capacity is less than one slot.
        OSError: the files cannot be read or created.
    """
    capacity = capacity_bytes // memory.pitch_bytes
    if capacity < 1:
        raise ConfigError(
            f"bytes is {capacity_bytes}; one block takes {memory.pitch_bytes} bytes",
            hint="give the disk store room for as many blocks as it should keep",
        )
    table = _native.SlotTable(min(capacity, 2**31 - 1))
    fresh = Header.new(memory.pitch_bytes, memory.payload_bytes, capacity_bytes)
    with ExitStack() as on_error:
        journal, damage = _read_journal(volume, table, fresh, write=write)
        if journal is not None:
            on_error.callback(journal.close)
        segments = Segments(volume, fresh if journal is None else journal.header)
        on_error.callback(segments.close)
        segments.open(table.limit, write=write)
        table.grow(max(0, min(segments.slots, table.capacity) - table.limit))
        on_error.pop_all()
    if not write and journal is not None:
        journal.close()
    return Recovered(
        table=table, journal=journal if write else None, segments=segments, damage=damage
    )


def _read_journal(
    volume: Volume, table: _native.SlotTable, fresh: Header, *, write: bool
) -> tuple[Journal | None, Damage]:
    """Replay the journal; return None for it when there is none and none can be written."""
    damage = Damage()
    names = volume.names()
    if write and NEW_JOURNAL in names:  # a process has ended while it wrote it
        volume.unlink(NEW_JOURNAL)
    if JOURNAL in names:
        fd = volume.open(JOURNAL, write=write)
        try:
            header = decode_header(volume.read(fd, HEADER_BYTES, 0))
            if header is not None:
                damage, end = replay(volume, fd, header, table)
                return Journal.resume(volume, fd, header, end), damage
        except BaseException:
            volume.close(fd)
            raise
        volume.close(fd)
        damage = Damage(damaged_headers=1)
    if not write:
        return None, damage
    journal = Journal.create(volume, fresh)
    try:
        journal.replace()
        journal.sync()
    except BaseException:
        journal.discard()
        raise
    return journal, damage


def replay(volume: Volume, fd: int, header: Header, table: _native.SlotTable) -> tuple[Damage, int]:
    """Apply the records of a journal to a new table; return the damage and the end."""
    numbers = segment_numbers(volume.names())  # the last ones may have been removed
    slots = (numbers[-1] + 1) * header.segment_slots if numbers else table.capacity
    records = _native.JournalReplay(table, header.epoch, volume.boot(), slots)
    offset = HEADER_BYTES
    while chunk := volume.read(fd, _CHUNK_BYTES, offset):
        records.feed(np.frombuffer(chunk, np.uint8))
        offset += len(chunk)
    records.finish()
    damage = Damage(
        damaged_records=records.damaged,
        torn_records=records.torn,
        unproven_records=records.unproven,
        outside_records=records.outside,
    )
    return damage, records.end


def log_damage(volume: Volume, damage: Damage) -> None:
    """Log records that do not count, in one line."""
    if damage.needs_new_journal:
        _log.warning(
            "disk.journal_damaged",
            path=str(volume.path),
            damaged_records=damage.damaged_records,
            torn_records=damage.torn_records,
            unproven_records=damage.unproven_records,
            outside_records=damage.outside_records,
            damaged_headers=damage.damaged_headers,
        )
