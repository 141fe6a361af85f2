"""Messages between an engine and the service that owns the shared memory of its host.

::

    engine                           service
    Hello(sizes, share) ───────────►
          ◄───────────────────────── Welcome, with the descriptor of the memory   or Refuse(why)
                                     (from now on, a filter in the memory spares most lookups of
                                     keys that are not stored)
    Lookup(number, keys) ──────────►
          ◄───────────────────────── Reply(number): a byte per key, 1 if it is stored
    Load(number, keys) ────────────►
          ◄───────────────────────── Reply(number): pinned slots, which the engine copies
    Release(number) ───────────────►
    Save(number, keys) ────────────►
          ◄───────────────────────── Reply(number): reserved slots, which the engine writes
    Publish(number, written) ──────►
          ◄───────────────────────── Reply(number)
    Remove(number, keys) ──────────►
          ◄───────────────────────── Reply(number)

The end of the connection releases the slots of all requests. A process that moves no objects sends
Inspect instead of Hello::

    Inspect ───────────────────────►
          ◄───────────────────────── Report
    Purge(number, label) ──────────►
          ◄───────────────────────── Reply(number, 8 bytes: number of objects)
    Newest(number, size, count) ───►
          ◄───────────────────────── Reply(number): keys

A request that fails because of the store below gets a Reply with its error.
"""

from __future__ import annotations

from typing import Final

import msgspec

from aiokv.wire.messages import Codec, Ping, Pong, encode

PROTOCOL_VERSION: Final = 5
MAX_MESSAGE_BYTES: Final = 16 << 20

PRESENT: Final = -1  # instead of a slot: the key is stored
NO_SLOT: Final = -2  # instead of a slot: the key is missing, or there is no room


class _Message(
    msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True
):
    """Message, encoded as an array that begins with a tag; never pickled."""


class Hello(_Message, frozen=True, tag="hello"):
    """Ask for memory with slots of one size.

    Attributes:
        version: ``PROTOCOL_VERSION``.
        payload_bytes: payload of an object.
        pitch_bytes: distance between slots.
        share: part of the memory that the objects may claim; see ``StoreMemory.quota_share``.
    """

    version: int
    payload_bytes: int
    pitch_bytes: int
    share: float


class Inspect(_Message, frozen=True, tag="inspect"):
    """Ask for a :class:`Report`."""

    version: int


class Welcome(_Message, frozen=True, tag="welcome"):
    """Send the memory, whose descriptor comes with the first byte of this message.

    Attributes:
        num_slots: number of slots.
        num_counters: bytes behind the slots: the filter of all keys of this size.
    """

    num_slots: int
    num_counters: int


class Refuse(_Message, frozen=True, tag="refuse"):
    """Refuse an engine."""

    reason: str


class _Request(_Message, frozen=True):
    number: int
    keys: bytes


class Lookup(_Request, frozen=True, tag="lookup"):
    """Ask which keys are stored."""


class Load(_Request, frozen=True, tag="load"):
    """Pin the slots of keys until ``Release``."""


class Save(_Request, frozen=True, tag="save"):
    """Reserve slots for the keys that are not stored, until ``Publish`` or ``Release``."""


class Remove(_Request, frozen=True, tag="remove"):
    """Remove keys."""


class Purge(_Message, frozen=True, tag="purge"):
    """Remove all keys of all sizes that end with a label."""

    number: int
    label: bytes


class Newest(_Message, frozen=True, tag="newest"):
    """Ask for the keys of one size that were used last, the last one first."""

    number: int
    payload_bytes: int
    pitch_bytes: int
    count: int


class Publish(_Message, frozen=True, tag="publish"):
    """Store the keys of a ``Save``.

    Attributes:
        number: number of the ``Save``.
        written: a byte per reserved slot, 1 if the object was written. The other slots are free.
    """

    number: int
    written: bytes


class Release(_Message, frozen=True, tag="release"):
    """Give back the slots of a request, also if it was not answered yet."""

    number: int


class Reply(_Message, frozen=True, tag="reply"):
    """Answer a request.

    Attributes:
        number: number of the request.
        data: flags or slots (int32) of its keys.
        counts: counts of the slots of this size.
        error: reason of a failure; empty if the request has succeeded.
    """

    number: int
    data: bytes
    counts: Counts
    error: str = ""


class Counts(_Message, frozen=True):
    """Counts of the slots of one size.

    Attributes:
        payload_bytes: payload of an object.
        pitch_bytes: distance between slots.
        engines: attached engines.
        blocks: objects in memory.
        used_bytes: memory that the slots take, free ones included.
        evicted_blocks: objects that made room for others.
        saved_below: objects that were saved to the store below.
        loaded_below: objects that were loaded from the store below.
        dropped_below: objects that were not saved to the store below, because it was too slow.
        labels: objects in memory by label; see ``aiokv.stores.labels``. None in most replies.
    """

    payload_bytes: int = 0
    pitch_bytes: int = 0
    engines: int = 0
    blocks: int = 0
    used_bytes: int = 0
    evicted_blocks: int = 0
    saved_below: int = 0
    loaded_below: int = 0
    dropped_below: int = 0
    labels: dict[str, int] | None = None


class Report(_Message, frozen=True, tag="report"):
    """Counts of the service.

    Attributes:
        capacity_bytes: limit of the memory.
        below: URL of the store below; empty without one.
        sizes: counts per size of slots.
        labels: objects in memory by label; see ``aiokv.stores.labels``.
    """

    capacity_bytes: int
    below: str
    sizes: list[Counts]
    labels: dict[str, int]


FirstMessage = Hello | Inspect
FromEngine = Lookup | Load | Save | Remove | Publish | Release | Purge | Newest | Ping | Pong
FromService = Reply | Report | Ping | Pong
Admission = Welcome | Refuse | Report

FIRST_CODEC: Final[Codec[FirstMessage, FirstMessage]] = Codec(
    encode=encode,
    decode=msgspec.msgpack.Decoder(FirstMessage).decode,
    max_message_bytes=1024,
)
ADMISSION_CODEC: Final[Codec[Admission, Admission]] = Codec(
    encode=encode,
    decode=msgspec.msgpack.Decoder(Admission).decode,
    max_message_bytes=MAX_MESSAGE_BYTES,
)
SERVICE_CODEC: Final[Codec[FromService, FromEngine]] = Codec(
    encode=encode,
    decode=msgspec.msgpack.Decoder(FromEngine).decode,
    max_message_bytes=MAX_MESSAGE_BYTES,
)
ENGINE_CODEC: Final[Codec[FromEngine, FromService]] = Codec(
    encode=encode,
    decode=msgspec.msgpack.Decoder(FromService).decode,
    max_message_bytes=MAX_MESSAGE_BYTES,
)
