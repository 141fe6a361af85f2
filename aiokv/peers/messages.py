"""Messages on the control connection of a sending and a receiving rank: msgspec structs as
MessagePack, never pickle.

::

    sender (prefill)                     receiver (decode)
    Open ───────────────────────────────►                        one per ticket
         ◄─────────────────────────────── Accepted, or Refused
    Want(2 fragments are ready) ────────►
         ◄─────────────────────────────── Credit(slots 5 and 9)
    Landed(block 0, slot 5) + fragment ─►                         verified, copied, slot freed
    Landed(block 1, slot 9) + fragment ─►
         ◄─────────────────────────────── Proven(blocks 0 and 1), or Wrong(block 1)
         ◄─────────────────────────────── Again(block 1), after a Wrong for want of room
    Return(slots), unused credits ──────►                         after a Cancel
    Done ───────────────────────────────►                         all fragments were acknowledged
    Cancel ◄────────────────────────────► Cancel                  from either side, at any time
    Ping, Pong ◄────────────────────────► Ping, Pong              handled by the Connection

Slots belong to the connection, not to a ticket: the sender uses a credit for any fragment that is
ready. With a one-sided transport the bytes of a fragment are in its slot before ``Landed`` is sent;
with ``tcp`` they follow the frame of ``Landed``.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.wire.messages import Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PROTOCOL_VERSION: Final = 1
ID_BYTES: Final = 16  # length of ticket ids and generations
MAX_LAYOUT_BYTES: Final = 64 << 10
MAX_METADATA_BYTES: Final = 64 << 10
MAX_REASON_CHARACTERS: Final = 1024
MAX_FRAGMENT_BYTES: Final = 1 << 30
MAX_LISTED: Final = 8192  # blocks or slots in one message

Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 16)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]  # number of a block or a slot
Group = Annotated[int, Meta(ge=0, lt=1 << 8)]
Generation = Annotated[int, Meta(ge=1, lt=1 << 62)]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]
Metadata = Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]
Blocks = Annotated[list[Index], Meta(min_length=1, max_length=MAX_LISTED)]
_KEY: Final = struct.Struct(f"<{ID_BYTES}s{ID_BYTES}sIIII")


_BLOCK_BITS: Final = 31


def block_key(group: int, block: int) -> int:
    """Return a number that names a block among those of all groups."""
    return group << _BLOCK_BITS | block


def split_key(key: int) -> tuple[int, int]:
    """Return the group and the block of a ``block_key``."""
    return key >> _BLOCK_BITS, key & (1 << _BLOCK_BITS) - 1


def shown_block(key: int) -> str:
    """Return the name of a block of any group in a message."""
    group, block = split_key(key)
    return f"block {block} of group {group}" if group else f"block {block}"


def by_group(keys: Iterable[int]) -> dict[int, list[int]]:
    """Return the blocks of each group, in order, for messages that list blocks of one group."""
    groups: dict[int, list[int]] = {}
    for key in keys:
        group, block = split_key(key)
        groups.setdefault(group, []).append(block)
    return groups


def bytes_with_trailer(payload_bytes: int) -> int:
    """Return the bytes of a fragment; the payload of a short one is padded."""
    return max(payload_bytes, TRAILER_BYTES) + TRAILER_BYTES


class SlotCredit(NamedTuple):
    """Permission to write one fragment into a landing slot.

    Attributes:
        slot: index in the landing ring of the receiver.
        generation: generation of the slot; a fragment of an earlier generation is discarded.
    """

    slot: Index
    generation: Generation


Slots = Annotated[list[SlotCredit], Meta(min_length=1, max_length=MAX_LISTED)]


class _Message(
    msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True
):
    """Positional on the wire, behind a tag that names the message."""


class Open(_Message, frozen=True, tag="open"):
    """Ask to send the blocks of a ticket; the first message about it.

    Attributes:
        protocol: ``PROTOCOL_VERSION`` of the sender.
        ticket_id: id of the ticket.
        generation: generation of the receiving engine, from the ticket.
        sender_rank: rank of the sender, on this connection.
        receiver_rank: rank that the sender means to reach.
        sender_block_tokens: positions per block of the sender.
        layout: ``BlockLayout.encode()`` of the sender's rank.
        transport: name of the transport of the fragments.
        transport_metadata: ``Transport.metadata()`` of the sender.
        layer_ranges: ranges of layers in which the sender may send blocks; 0 for whole blocks only.
    """

    protocol: int
    ticket_id: Id
    generation: Id
    sender_rank: Rank
    receiver_rank: Rank
    sender_block_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    layout: Annotated[bytes, Meta(max_length=MAX_LAYOUT_BYTES)]
    transport: Annotated[str, Meta(max_length=32)]
    transport_metadata: Metadata = b""
    layer_ranges: Group = 0


class Accepted(_Message, frozen=True, tag="accepted"):
    """Reply to ``Open``: fragments may be announced with ``Want``.

    Attributes:
        slot_bytes: bytes of a landing slot; a fragment with its trailer must fit.
        transport_metadata: ``Transport.metadata()`` of the receiver.
    """

    ticket_id: Id
    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_FRAGMENT_BYTES)]
    transport_metadata: Metadata = b""


class Refused(_Message, frozen=True, tag="refused"):
    """Reply to ``Open``: nothing of this ticket is accepted on this connection.

    Attributes:
        kind: ``"layout"`` when the blocks of the two sides cannot be mapped; ``"ticket"`` for an
            unknown or expired ticket, another generation, rank, protocol or transport.
        reason: text for the error of the sending side.
    """

    ticket_id: Id
    kind: Literal["layout", "ticket"]
    reason: Reason


class Want(_Message, frozen=True, tag="want"):
    """Announce fragments that can be written at once, and ask for a slot for each.

    Attributes:
        fragments: number of fragments that became ready since the last ``Want`` of the ticket.
    """

    ticket_id: Id
    fragments: Annotated[int, Meta(ge=1, le=MAX_LISTED)]


class Credit(_Message, frozen=True, tag="credit"):
    """Landing slots that the sender may write one fragment into, each."""

    slots: Slots


class Return(_Message, frozen=True, tag="return"):
    """Unused credits, and the number of fragments for which the sender needs no slot any more.

    No write of the sender into these slots is, or will be, in progress.

    Attributes:
        slots: credits that go back; may be empty.
        unwanted: fragments of earlier ``Want`` that need no credit any more.
    """

    slots: Annotated[list[SlotCredit], Meta(max_length=MAX_LISTED)] = []
    unwanted: Annotated[int, Meta(ge=0, le=1 << 31)] = 0


class Landed(_Message, frozen=True, tag="landed"):
    """A fragment is in its slot (one-sided transports), or follows this frame (``tcp``).

    Attributes:
        sender_block: index of the block in the prompt, in blocks of the sender.
        slot: landing slot, from a ``Credit``.
        slot_generation: generation of that credit.
        fragment_bytes: payload and trailer.
        group: 0 for the blocks of the prompt; then those of recurrent state and of the window
            groups, in the order of ``BlockLayout.pools``. A state has one block, 0. The groups
            behind them are ranges of layers of the blocks of the prompt: such a block has arrived
            when its whole fragment, or those of all ranges, have arrived.
    """

    ticket_id: Id
    sender_block: Index
    slot: Index
    slot_generation: Generation
    fragment_bytes: Annotated[int, Meta(gt=TRAILER_BYTES, le=MAX_FRAGMENT_BYTES)]
    group: Group = 0

    @property
    def credit(self) -> SlotCredit:
        """The credit that the fragment uses."""
        return SlotCredit(self.slot, self.slot_generation)


class Proven(_Message, frozen=True, tag="proven"):
    """The fragments of these blocks arrived, and their trailers are right."""

    ticket_id: Id
    sender_blocks: Blocks
    group: Group = 0


class Wrong(_Message, frozen=True, tag="wrong"):
    """The fragments of these blocks were dropped: a wrong length, key or checksum, or no room.

    Attributes:
        is_busy: they may be right, but the receiver had no room for their blocks; the sender sends
            them again after an ``Again``.
    """

    ticket_id: Id
    sender_blocks: Blocks
    reason: Reason
    group: Group = 0
    is_busy: bool = False


class Again(_Message, frozen=True, tag="again"):
    """The receiver has room for fragments that it had answered with ``Wrong(is_busy=True)``."""

    ticket_id: Id
    sender_blocks: Blocks
    group: Group = 0


class Cancel(_Message, frozen=True, tag="cancel"):
    """The ticket was given up: no fragment of it is sent, or accepted, any more."""

    ticket_id: Id
    reason: Reason


class Done(_Message, frozen=True, tag="done"):
    """All fragments that were sent of the ticket were acknowledged; nothing of it follows."""

    ticket_id: Id
    reason: Reason = ""


Message = (
    Open
    | Accepted
    | Refused
    | Want
    | Credit
    | Return
    | Landed
    | Proven
    | Wrong
    | Again
    | Cancel
    | Done
    | Ping
    | Pong
)

decode: Final[Callable[[bytes | memoryview], Message]] = msgspec.msgpack.Decoder(Message).decode


def fragment_key(
    ticket_id: bytes,
    generation: bytes,
    sender_rank: int,
    sender_block: int,
    receiver_rank: int,
    group: int = 0,
) -> bytes:
    """Return the key of a fragment's trailer, 32 bytes.

    A fragment of another ticket, generation, pair of ranks or place has another key, and never
    verifies.
    """
    place = _KEY.pack(ticket_id, generation, sender_rank, sender_block, receiver_rank, group)
    return hashlib.sha256(b"aiokv fragment 1" + place).digest()
