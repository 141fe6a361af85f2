"""Files of a disk store: the header of the journal, and where a slot is.

``lock``
    locked while a process uses the store; contains its process id.
``journal``
    4 KiB of header, then records of 64 bytes (native/include/aiokv/journal_record.hpp).
``segment-00000``, ``segment-00001``, ...
    ``segment_slots`` slots each; a slot is one block, and as long as the distance of host blocks.
``layout-...``
    journal and segments of blocks of another size; see :mod:`aiokv.stores.disk.layouts`.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

LOCK: Final = "lock"
JOURNAL: Final = "journal"
NEW_JOURNAL: Final = "journal.new"
SEGMENT: Final = "segment-"
LAYOUT: Final = "layout-"

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 64

_COPY_BYTES: Final = HEADER_BYTES // 2  # the header is stored twice, in different sectors
_MAGIC: Final = b"aiokv disk store"
_FIELDS: Final = struct.Struct("<16sIIQQQQ")
_CHECKSUM_BYTES: Final = 32

_MIN_SEGMENT_BYTES: Final = 1 << 30
_MAX_SEGMENTS: Final = 64


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first bytes of a journal.

    Attributes:
        slot_bytes: bytes of a slot.
        payload_bytes: bytes of the payload of a block.
        segment_slots: slots per segment file.
        epoch: random number of the file; part of the checksum of each record.
    """

    slot_bytes: int
    payload_bytes: int
    segment_slots: int
    epoch: int

    @classmethod
    def new(cls, slot_bytes: int, payload_bytes: int, capacity_bytes: int) -> Header:
        """Return the header of a new store."""
        segment_bytes = max(_MIN_SEGMENT_BYTES, capacity_bytes // _MAX_SEGMENTS)
        return cls(
            slot_bytes=slot_bytes,
            payload_bytes=payload_bytes,
            segment_slots=max(1, segment_bytes // slot_bytes),
            epoch=secrets.randbits(64),
        )

    def renewed(self) -> Header:
        """Return the header of the next journal of the same store."""
        return msgspec.structs.replace(self, epoch=secrets.randbits(64))

    def encode(self) -> bytes:
        """Return ``HEADER_BYTES`` bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            0,
            self.slot_bytes,
            self.payload_bytes,
            self.segment_slots,
            self.epoch,
        )
        body = fields.ljust(_COPY_BYTES - _CHECKSUM_BYTES, b"\0")
        return (body + hashlib.sha256(body).digest()) * 2


def decode_header(data: bytes) -> Header | None:
    """Return the header at the beginning of a journal; None when both copies are damaged.

    Raises:
        LayoutError: another version of aiokv has written it.
    """
    for begin in (0, _COPY_BYTES):
        copy = data[begin : begin + _COPY_BYTES]
        body, checksum = copy[:-_CHECKSUM_BYTES], copy[-_CHECKSUM_BYTES:]
        if len(copy) < _COPY_BYTES or hashlib.sha256(body).digest() != checksum:
            continue
        magic, version, _, slot_bytes, payload_bytes, segment_slots, epoch = _FIELDS.unpack_from(
            body
        )
        if magic != _MAGIC or version != FORMAT_VERSION:
            raise LayoutError(
                f"the journal has format {version}; this version of aiokv reads {FORMAT_VERSION}",
                hint="use another path, or remove the directory",
            )
        return Header(
            slot_bytes=slot_bytes,
            payload_bytes=payload_bytes,
            segment_slots=segment_slots,
            epoch=epoch,
        )
    return None


def segment_name(number: int) -> str:
    """Return the name of a segment file."""
    return f"{SEGMENT}{number:05d}"


def segment_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the segment files among the names of files, ascending."""
    numbers = [name.removeprefix(SEGMENT) for name in names if name.startswith(SEGMENT)]
    return sorted(int(number) for number in numbers if number.isdecimal())


def record_offset(position: int) -> int:
    """Return where a record is in the journal, in bytes."""
    return HEADER_BYTES + position * RECORD_BYTES
