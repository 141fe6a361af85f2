"""Sender: tickets that this rank sends, and the parcels on their way. No I/O.

::

    plan ─► held (its step is open) ─► ready ─► Want
    Credit ─► outgoing slot ─► copy from the device ─► seal ─► write ─► Proven ─► slot free
         ▲                                                               ├► Wrong
         └──────────────── slot free, next credit ───────────────────────┘
    A receiver of another layout gets a part of the block, cut out of a second slot before the seal.

A parcel takes an outgoing slot only when it has a credit, so a receiver that stalls holds no more
slots than it gave credits. A plan is reported when all its parcels are acknowledged, or when it was
given up; at the earliest when no copy reads its device blocks any more.

Interrupts (Ctrl-C): what ends plans and tickets may be called again. An interrupt may lose an
outgoing slot, until ``reclaim``, but never frees one twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from aiokv.errors import UsageError
from aiokv.peers.messages import (
    MAX_LISTED,
    Again,
    Cancel,
    Credit,
    Done,
    Proven,
    Return,
    SlotCredit,
    Want,
    Wrong,
    block_key,
    parcel_key,
    shown_block,
    split_key,
)
from aiokv.plan import STATE_SEND
from aiokv.stores.base import TRAILER_BYTES
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from collections.abc import Mapping as Dictionary

    from aiokv.peers.messages import Message
    from aiokv.peers.ticket import Ticket
    from aiokv.plan import TransferPlan

C = TypeVar("C", bound="Hashable")  # a connection

MAX_TRIES: Final = 3  # of one parcel
MAX_REASONS: Final = 256  # of tickets that the engine has not closed yet


class Parcel(Generic[C]):
    """A block on its way to one receiver rank.

    Attributes:
        send: its plan.
        block: of the prompt, by ``block_key``.
        way: connection to the receiver.
        key: of its trailer.
        mapping: of blocks of its group to parcels for the receiver.
        num_bytes: payload and trailer.
        slot: its outgoing slot; None before it has one, and after the slot was freed.
        block_slot: slot of the whole block that the parcel is cut out of; None if it is the block.
        credit: landing slot that it is written to.
        busy: a copy, a thread or the transport uses the slot.
        proven: the receiver has acknowledged it.
        dropped: nothing of it is sent any more.
    """

    def __init__(self, send: Send, block: int, way: _Way[C], target: Target[C], key: bytes) -> None:
        self.send = send
        self.block = block
        self.way = way
        self.key = key
        self.mapping = target.mappings[self.group]
        self.num_bytes = target.parcel_bytes(self.group)
        self.slot: int | None = None
        self.block_slot: int | None = None
        self.credit: SlotCredit | None = None
        self.tries = 0
        self.busy = False
        self.proven = False
        self.dropped = False
        self.again = False  # to be written again; its write has not ended
        self.deferred = False  # until an Again, without an outgoing slot

    @property
    def group(self) -> int:
        """Group of the block."""
        return split_key(self.block)[0]


class Mapping(Protocol):
    """Mapping of this rank's blocks to parcels for one receiver; see ``aiokv.peers.layout``."""

    parcel_is_block: bool
    parcel_bytes: int


class Target(NamedTuple, Generic[C]):
    """A receiver rank of a ticket.

    Attributes:
        connection: to the rank.
        mappings: of the blocks of this rank to parcels for the receiver, by group.
    """

    connection: C
    mappings: Sequence[Mapping]

    def parcel_bytes(self, group: int) -> int:
        """Return the bytes of a parcel of a group with its trailer."""
        return max(self.mappings[group].parcel_bytes, TRAILER_BYTES) + TRAILER_BYTES

    @property
    def largest_parcel_bytes(self) -> int:
        """Bytes of the largest parcel of all groups."""
        return max(self.parcel_bytes(group) for group in range(len(self.mappings)))


class Send:
    """A plan in flight that sends blocks of one group, or ranges of their layers.

    Attributes:
        plan: its blocks belong to it until ``SenderPort.sent``.
        positions: index in the plan of each of its blocks, by ``block_key``, in all groups.
        fills: copies that read its device blocks.
        unproven: its blocks that are not acknowledged by all receivers, with the number of them.
        failure: set when it was given up.
    """

    def __init__(self, plan: TransferPlan, groups: Sequence[int]) -> None:
        self.plan = plan
        blocks = plan.target_ids.tolist()
        self.positions = {
            block_key(group, block): i for group in groups for i, block in enumerate(blocks)
        }
        self.device_ids: list[int] = plan.source_ids.tolist()
        self.fills: set[SlotFill] = set()
        self.unproven: dict[int, int] = {}
        self.failure: CopyError | None = None
        self.is_held = True

    @property
    def leading_blocks(self) -> int:
        """Number of leading blocks of the plan that were acknowledged."""
        return min((self.positions[block] for block in self.unproven), default=len(self.device_ids))

    @property
    def at_rest(self) -> bool:
        """True when nothing reads its blocks any more, and nothing will."""
        return not self.fills and (self.failure is not None or not self.unproven)


class SlotFill:
    """A copy from device blocks of a plan to outgoing slots.

    Attributes:
        group: of its blocks.
    """

    def __init__(self, send: Send, group: int, parcels: list[Parcel[Any]]) -> None:
        self.send = send
        self.group = group
        self.parcels = parcels
        self.copy_id = 0  # for the port
        self.is_begun = False  # likewise

    @property
    def device_ids(self) -> list[int]:
        """Device block of each slot."""
        send = self.send
        return [send.device_ids[send.positions[parcel.block]] for parcel in self.parcels]

    @property
    def slots(self) -> list[int]:
        """Outgoing slots that are written."""
        slots = [p.slot if p.block_slot is None else p.block_slot for p in self.parcels]
        return [-1 if slot is None else slot for slot in slots]


class SenderPort(Protocol[C]):
    """Work that the sender starts. Each call returns at once, and none calls back in it."""

    def send(self, connection: C, message: Message) -> None:
        """Send a message, in order; one to a connection that has ended is dropped."""

    def is_open(self, plan: TransferPlan) -> bool:
        """Return True while work that computes the blocks may not have been submitted yet."""

    def fill(self, fill: SlotFill) -> None:
        """Copy device blocks to outgoing slots if ``Sender.admit`` allows it, then call
        ``Sender.filled``."""

    def seal(self, parcels: Sequence[Parcel[C]]) -> None:
        """Cut parcels out of their ``block_slot`` if they have one, write the trailers, then call
        ``Sender.sealed``."""

    def write(self, connection: C, parcels: Sequence[Parcel[C]]) -> None:
        """Write parcels to the slots of their credits, then call ``Sender.written``."""

    def sent(self, send: Send) -> None:
        """Report a plan; nothing reads its blocks. Idempotent."""

    def ended(self, ticket_id: bytes, reason: str) -> None:
        """Tell that a ticket has ended: no plan of it is taken any more. Idempotent."""


class _Way(Generic[C]):
    """A connection to a receiver rank.

    Attributes:
        credits: landing slots that no parcel uses yet.
        waiting: parcels that are ready and have no credit, in order.
        slots: outgoing slots that its parcels have.
        wanted: credits that were asked for and did not come yet.
    """

    def __init__(self, connection: C) -> None:
        self.connection = connection
        self.credits: deque[SlotCredit] = deque()
        self.waiting: deque[Parcel[C]] = deque()
        self.slots = 0
        self.wanted = 0
        self.tickets: set[bytes] = set()


class _Outgoing(Generic[C]):
    """A ticket that receivers have accepted."""

    def __init__(
        self,
        ticket: Ticket,
        deadline: float,
        ways: dict[int, _Way[C]],
        targets: Dictionary[int, Target[C]],
    ) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.ways = ways  # by receiver rank
        self.targets = targets  # likewise
        self.sends: dict[int, Send] = {}
        self.parcels: dict[tuple[C, int], Parcel[C]] = {}  # by connection and block
        self.planned: set[int] = set()  # blocks that a plan has, or had, by `block_key`
        self.cancelled: set[C] = set()  # connections of ranks that have cancelled
        self.closed = ""


class SenderCounts(msgspec.Struct, kw_only=True):
    """Counts of a sender since it was made.

    Attributes:
        tickets: tickets in flight.
        opened: tickets that were accepted.
        expired: tickets that ended at their deadline.
        parcels: parcels that were acknowledged.
        sent_bytes: payload of those parcels.
        retries: parcels that were written again.
        waits: times that a ready parcel had to wait for a credit.
    """

    tickets: int = 0
    opened: int = 0
    expired: int = 0
    parcels: int = 0
    sent_bytes: int = 0
    retries: int = 0
    waits: int = 0


class Sender(Generic[C]):
    """Tickets that one rank sends.

    Args:
        port: does the work.
        num_slots: outgoing slots.
        rank: number of this rank.
        block_tokens: positions per block of this engine.
        groups: returns the groups of the blocks of a plan.
        last_range: group of the last range of layers; None without ranges.
    """

    def __init__(
        self,
        port: SenderPort[C],
        *,
        num_slots: int,
        rank: int,
        block_tokens: int,
        groups: Callable[[TransferPlan], Sequence[int]] = lambda plan: (0,),
        last_range: int | None = None,
    ) -> None:
        self._port = port
        self._groups = groups
        self._last_range = last_range
        self._num_slots = num_slots
        self._rank = rank
        self._block_tokens = block_tokens
        self._free = list(range(num_slots))
        self._ways: dict[C, _Way[C]] = {}
        self._tickets: dict[bytes, _Outgoing[C]] = {}
        self._sends: dict[int, Send] = {}
        self._reasons: dict[
            bytes, str
        ] = {}  # of tickets that have ended by themselves, newest last
        self._counts = SenderCounts()

    # --- tickets and plans ------------------------------------------------------------------------

    def add_ticket(
        self, ticket: Ticket, deadline: float, targets: Dictionary[int, Target[C]]
    ) -> None:
        """Take a ticket that all its receivers have accepted.

        Args:
            ticket: new.
            deadline: by the clock of ``expire``.
            targets: by receiver rank; connections differ. Without any, this rank has nothing that
                the receiver needs, and its blocks count as acknowledged.
        """
        ways = {}
        for rank, target in targets.items():
            connection = target.connection
            way = self._ways.setdefault(connection, _Way(connection))
            way.tickets.add(ticket.ticket_id)
            ways[rank] = way
        self._tickets[ticket.ticket_id] = _Outgoing(ticket, deadline, ways, targets)
        self._counts.opened += 1

    def submit(self, plan: TransferPlan) -> Send:
        """Take a plan that was checked.

        A plan of a ticket that is unknown or closed ends at once. Blocks that the ticket does not
        ask for count as acknowledged.

        Raises:
            UsageError: this rank has no such groups; or the plan has the last range of layers of
                blocks that are being computed, which would be complete at the receiver before they
                are committed. Nothing changed.
        """
        groups = self._groups(plan)
        if plan.mark and (not plan.end_range or self._last_range in groups):
            raise UsageError(
                f"transfer {plan.transfer_id}: the last range of layers is sent when the blocks "
                "are committed"
            )
        send = self._sends[plan.transfer_id] = Send(plan, groups)
        outgoing = self._tickets.get(plan.peer)
        if outgoing is None or outgoing.closed:
            reason = self._reasons.get(plan.peer) if outgoing is None else outgoing.closed
            send.unproven = dict.fromkeys(send.positions, 1)
            self._give_up(send, reason or "the ticket has ended")
            return send
        outgoing.sends[plan.transfer_id] = send
        if outgoing.ways:
            send.unproven = dict.fromkeys(self._wanted(outgoing.ticket, send), len(outgoing.ways))
        if taken := [block for block in send.unproven if block in outgoing.planned]:
            self._give_up(send, f"{shown_block(taken[0])} of the ticket belongs to another plan")
            return send
        outgoing.planned |= send.unproven.keys()
        self._release(outgoing, send)
        self._settle(send)
        return send

    def _wanted(self, ticket: Ticket, send: Send) -> list[int]:
        """Return the blocks of a plan that a ticket asks for."""
        if send.plan.route == STATE_SEND:
            return list(send.positions)
        blocks = range(
            ticket.first_position // self._block_tokens,
            -(-ticket.num_tokens // self._block_tokens),
        )
        return [key for key in send.positions if split_key(key)[1] in blocks]

    def release_held(self) -> None:
        """Send the plans that waited for a step or for layers, as far as these are there."""
        for outgoing in list(self._tickets.values()):
            for send in list(outgoing.sends.values()):
                self._release(outgoing, send)

    def _release(self, outgoing: _Outgoing[C], send: Send) -> None:
        """Announce the parcels of a plan whose work was submitted. Idempotent."""
        if not send.is_held or send.failure is not None or self._port.is_open(send.plan):
            return
        send.is_held = False
        ticket = outgoing.ticket
        for rank, way in outgoing.ways.items():
            new = []
            for block in send.unproven:
                group, index = split_key(block)
                key = parcel_key(
                    ticket.ticket_id, ticket.generation, self._rank, index, rank, group
                )
                parcel = Parcel(send, block, way, outgoing.targets[rank], key)
                outgoing.parcels[way.connection, block] = parcel
                new.append(parcel)
            self._want(way, ticket.ticket_id, new)
            self._pump(way)

    def _want(self, way: _Way[C], ticket_id: bytes, parcels: Sequence[Parcel[C]]) -> None:
        way.waiting.extend(parcels)
        spare = len(way.credits) + way.wanted - (len(way.waiting) - len(parcels))
        missing = len(parcels) - max(spare, 0)
        way.wanted += max(missing, 0)
        self._counts.waits += max(missing, 0)
        while missing > 0:
            count = min(missing, MAX_LISTED)
            self._port.send(way.connection, Want(ticket_id=ticket_id, parcels=count))
            missing -= count

    def cancel(self, transfer_id: int, reason: str) -> bool:
        """Give up a plan; return True if it was in flight. It is reported when it is at rest."""
        send = self._sends.get(transfer_id)
        if send is None:
            return False
        self._give_up(send, reason)
        self._pump_all()
        return True

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket, and give up what was not acknowledged. Idempotent."""
        outgoing = self._tickets.get(ticket_id)
        if outgoing is not None:
            self._end_ticket(outgoing, reason, tell=True)
        self._reasons.pop(ticket_id, None)

    def expire(self, now: float) -> None:
        """End the tickets whose deadline has passed."""
        for outgoing in list(self._tickets.values()):
            if outgoing.deadline <= now:
                self._counts.expired += not outgoing.closed
                self._end_ticket(outgoing, "the deadline of the ticket passed", tell=True)

    def close(self, reason: str) -> None:
        """End all tickets."""
        for ticket_id in list(self._tickets):
            self.close_ticket(ticket_id, reason)

    @property
    def next_deadline(self) -> float | None:
        """Deadline of the ticket that expires first; None without tickets."""
        return min((t.deadline for t in self._tickets.values() if not t.closed), default=None)

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of plans that have not ended."""
        return self._sends.keys()

    @property
    def ticket_ids(self) -> Iterable[bytes]:
        """Tickets that have not ended, or have plans in flight."""
        return self._tickets.keys()

    @property
    def free_slots(self) -> int:
        """Outgoing slots that no parcel has."""
        return len(self._free)

    def counts(self) -> SenderCounts:
        """Return the counts."""
        live = sum(not outgoing.closed for outgoing in self._tickets.values())
        return msgspec.structs.replace(self._counts, tickets=live)

    # --- messages of receivers --------------------------------------------------------------------

    def on_message(self, connection: C, message: Message) -> None:
        """Handle a message of a receiver; those about tickets that have ended are ignored."""
        way = self._ways.get(connection)
        if isinstance(message, Credit):
            if way is None:
                self._port.send(connection, Return(slots=message.slots))
                return
            way.credits.extend(message.slots)
            way.wanted = max(way.wanted - len(message.slots), 0)
            self._pump(way)
        elif isinstance(message, Proven):
            self._on_proven(connection, message)
        elif isinstance(message, Wrong):
            self._on_wrong(connection, message)
        elif isinstance(message, Again):
            self._on_again(connection, message)
        elif isinstance(message, Cancel):
            outgoing = self._tickets.get(message.ticket_id)
            if outgoing is not None and way in outgoing.ways.values():
                self._on_cancel(outgoing, connection, f"the receiver gave up: {message.reason}")

    def _on_cancel(self, outgoing: _Outgoing[C], connection: C, reason: str) -> None:
        """End a ticket that a receiver rank has cancelled.

        All ranks of a receiver cancel, also when all blocks have arrived. Then the
        acknowledgements of other ranks, whose connections are not ordered with this one, may still
        be on their way: each comes before the cancellation of its rank.
        """
        outgoing.cancelled.add(connection)
        unproven = {
            parcel.way.connection for parcel in outgoing.parcels.values() if not parcel.proven
        }
        if not unproven or not unproven.isdisjoint(outgoing.cancelled):
            self._end_ticket(outgoing, reason, tell=len(outgoing.ways) > 1)

    def _on_proven(self, connection: C, message: Proven) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        if outgoing is None:
            return
        sends = set()
        for block in _keys_of(message):
            parcel = outgoing.parcels.get((connection, block))
            if parcel is None or parcel.proven or not parcel.tries:
                continue
            parcel.proven = True
            self._counts.parcels += 1
            self._counts.sent_bytes += parcel.num_bytes - TRAILER_BYTES
            send = parcel.send
            send.unproven[block] -= 1
            if not send.unproven[block]:
                del send.unproven[block]
            sends.add(send)
            self._free_slot(parcel)
        for send in sends:
            self._settle(send)
        self._pump_all()

    def _on_wrong(self, connection: C, message: Wrong) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        if outgoing is None:
            return
        for block in _keys_of(message):
            parcel = outgoing.parcels.get((connection, block))
            if parcel is None or parcel.proven or parcel.dropped or not parcel.tries:
                continue
            if message.is_busy:
                parcel.deferred = True
                self._free_slot(parcel)
                continue
            if parcel.tries >= MAX_TRIES:
                times = f"{parcel.tries} times: {message.reason}"
                reason = f"{shown_block(block)} was refused {times}"
                self._end_ticket(outgoing, reason, tell=True)
                return
            parcel.again = True
            if not parcel.busy:
                self._again(parcel)
        self._pump_all()  # parcels that were deferred have freed their slots

    def _on_again(self, connection: C, message: Again) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        for block in _keys_of(message):
            parcel = None if outgoing is None else outgoing.parcels.get((connection, block))
            if parcel is None or not parcel.deferred or parcel.proven or parcel.dropped:
                continue
            parcel.deferred = False
            parcel.tries -= 1
            parcel.again = True
            if not parcel.busy:
                self._again(parcel)

    def _again(self, parcel: Parcel[C]) -> None:
        """Copy and write a parcel once more, with the next credit.

        It keeps no outgoing slot until then: those before it in line may wait for the slot.
        """
        parcel.again = False
        self._free_slot(parcel)
        self._counts.retries += 1
        self._want(parcel.way, parcel.send.plan.peer, [parcel])
        self._pump(parcel.way)

    def on_closed(self, connection: C, reason: str) -> None:
        """Note the end of a connection: its tickets end."""
        way = self._ways.get(connection)
        if way is None:
            return
        way.credits.clear()
        way.wanted = 0
        for ticket_id in list(way.tickets):
            outgoing = self._tickets[ticket_id]
            text = f"the connection to the receiver ended: {reason}"
            self._end_ticket(outgoing, text, tell=len(outgoing.ways) > 1)
        del self._ways[connection]

    # --- parcels ----------------------------------------------------------------------------------

    def _pump_all(self) -> None:
        for way in list(self._ways.values()):
            self._pump(way)

    def _pump(self, way: _Way[C]) -> None:
        """Begin to send as many parcels as there are credits and outgoing slots."""
        fills: dict[tuple[Send, int], list[Parcel[C]]] = {}
        while self._may_take(way):
            parcel = way.waiting.popleft()
            parcel.credit = way.credits.popleft()
            parcel.tries += 1
            parcel.busy = True
            parcel.slot = self._free.pop()
            if not parcel.mapping.parcel_is_block:
                parcel.block_slot = self._free.pop()
            way.slots += _slots_needed(parcel)
            fills.setdefault((parcel.send, parcel.group), []).append(parcel)
        for (send, group), parcels in fills.items():
            self._port.fill(SlotFill(send, group, parcels))
        self._return_spare(way)

    def _may_take(self, way: _Way[C]) -> bool:
        """Return True if there are a credit and outgoing slots for the next parcel of a way."""
        if not way.credits or not way.waiting:
            return False
        most = max(self._num_slots // 2, 1)  # a receiver that stalls leaves slots for the others
        return len(self._free) >= _slots_needed(way.waiting[0]) and way.slots < most

    def _return_spare(self, way: _Way[C]) -> None:
        """Give back the credits, and the wishes for them, that no parcel waits for."""
        spare = len(way.credits) + way.wanted - len(way.waiting)
        if spare <= 0:
            return
        unwanted = min(spare, way.wanted)
        way.wanted -= unwanted
        slots = [way.credits.pop() for _ in range(spare - unwanted)]
        self._port.send(way.connection, Return(slots=slots, unwanted=unwanted))

    def admit(self, fill: SlotFill) -> bool:
        """Return True if a copy is to be begun; called by the port before it begins. Idempotent.

        The slots of a copy whose plan was given up meanwhile are freed.
        """
        if not fill.parcels:
            return False
        if fill.send.failure is not None and fill not in fill.send.fills:
            self.filled(fill, None)
            return False
        fill.send.fills.add(fill)
        return True

    def filled(self, fill: SlotFill, failure: CopyError | None) -> None:
        """Note the end of a copy from device blocks. Idempotent."""
        send, parcels = fill.send, fill.parcels
        fill.parcels = []
        send.fills.discard(fill)
        if failure is not None:
            self._give_up(send, failure.reason)
        ready = self._continue(parcels)
        if ready:
            self._port.seal(ready)
        self._settle(send)
        self._pump_all()  # a failure, or a dropped parcel, has freed slots

    def sealed(self, parcels: Sequence[Parcel[C]]) -> None:
        """Write parcels whose trailers are there."""
        for parcel in parcels:
            self._free_block_slot(parcel)
        ready: dict[C, list[Parcel[C]]] = {}
        for parcel in self._continue(parcels):
            ready.setdefault(parcel.way.connection, []).append(parcel)
        for connection, its in ready.items():
            self._port.write(connection, its)
        self._pump_all()  # with the slots of whole blocks

    def written(self, parcels: Sequence[Parcel[C]]) -> None:
        """Note that the transport reads the slots of these parcels no more."""
        for parcel in parcels:
            parcel.busy = False
            parcel.credit = None
            if parcel.dropped or parcel.proven:
                self._free_slot(parcel)
            elif parcel.again:
                self._again(parcel)
            elif parcel.deferred:
                self._free_slot(parcel)
        self._pump_all()

    def _continue(self, parcels: Sequence[Parcel[C]]) -> list[Parcel[C]]:
        """Return the parcels that are still to be sent; free the slots of the others."""
        spare: dict[C, list[SlotCredit]] = {}
        ready = []
        for parcel in parcels:
            if not parcel.dropped:
                ready.append(parcel)
                continue
            parcel.busy = False
            credit, parcel.credit = parcel.credit, None
            if credit is not None:
                spare.setdefault(parcel.way.connection, []).append(credit)
            self._free_slot(parcel)
        for connection, slots in spare.items():
            self._port.send(connection, Return(slots=slots))
        if spare:
            self._pump_all()
        return ready

    def _free_slot(self, parcel: Parcel[C]) -> None:
        """Free the outgoing slot of a parcel, unless it is in use. Idempotent."""
        if parcel.busy or parcel.slot is None:
            return
        self._free_block_slot(parcel)
        slot, parcel.slot = parcel.slot, None
        parcel.way.slots -= 1
        self._free.append(slot)

    def _free_block_slot(self, parcel: Parcel[C]) -> None:
        """Free the slot of the block that a parcel was cut out of. Idempotent."""
        if parcel.block_slot is not None:
            slot, parcel.block_slot = parcel.block_slot, None
            parcel.way.slots -= 1
            self._free.append(slot)

    # --- ends -------------------------------------------------------------------------------------

    def _give_up(self, send: Send, reason: str) -> None:
        if send.failure is None and send.unproven:
            send.failure = CopyError(0, reason)
        outgoing = self._tickets.get(send.plan.peer)
        if outgoing is not None and send.failure is not None:
            for way in outgoing.ways.values():
                for block in send.unproven:
                    parcel = outgoing.parcels.get((way.connection, block))
                    if parcel is not None and parcel.send is send:
                        parcel.dropped = True
                        self._free_slot(parcel)
                way.waiting = deque(p for p in way.waiting if not p.dropped)
                self._return_spare(way)
        self._settle(send)

    def _end_ticket(self, outgoing: _Outgoing[C], reason: str, *, tell: bool) -> None:
        """Give up what is left of a ticket; tell the receivers with ``Done`` or ``Cancel``."""
        ticket_id = outgoing.ticket.ticket_id
        if not outgoing.closed:
            outgoing.closed = reason
            is_done = not any(send.unproven for send in outgoing.sends.values())
            end = Done(ticket_id=ticket_id, reason=reason)
            cancel = Cancel(ticket_id=ticket_id, reason=reason)
            for way in outgoing.ways.values() if tell else ():
                self._port.send(way.connection, end if is_done else cancel)
        for send in list(outgoing.sends.values()):
            self._give_up(send, outgoing.closed)
        for way in outgoing.ways.values():
            way.tickets.discard(ticket_id)
        self._port.ended(ticket_id, outgoing.closed)
        self._forget(outgoing)
        self._pump_all()

    def _settle(self, send: Send) -> None:
        """Report a plan that is at rest. Idempotent."""
        transfer_id = send.plan.transfer_id
        if not send.at_rest or self._sends.get(transfer_id) is not send:
            return
        if not send.unproven:
            send.failure = None  # its last parcel was acknowledged after all
        self._port.sent(send)
        outgoing = self._tickets.get(send.plan.peer)
        if outgoing is not None:
            outgoing.sends.pop(transfer_id, None)
            self._forget(outgoing)
        del self._sends[transfer_id]

    def _forget(self, outgoing: _Outgoing[C]) -> None:
        if outgoing.closed and not outgoing.sends:
            ticket_id = outgoing.ticket.ticket_id
            if self._tickets.pop(ticket_id, None) is not None:
                self._reasons[ticket_id] = outgoing.closed
            while len(self._reasons) > MAX_REASONS:
                del self._reasons[next(iter(self._reasons))]

    @property
    def is_quiet(self) -> bool:
        """True without tickets and plans."""
        return not self._tickets and not self._sends

    def reclaim(self) -> None:
        """Free what an interrupt has lost, if no open ticket and no plan is left. Idempotent.

        No parcel is being sealed or written.
        """
        if self._sends or any(not outgoing.closed for outgoing in self._tickets.values()):
            return
        self._tickets.clear()
        if len(self._free) != self._num_slots:
            self._free = list(range(self._num_slots))
        for way in self._ways.values():
            way.waiting.clear()
            way.tickets.clear()
            way.slots = 0
            self._return_spare(way)

    def violations(self) -> list[str]:
        """Return a description of each violated invariant, computed from scratch."""
        problems = []
        if len(set(self._free)) != len(self._free):
            problems.append(f"outgoing slots are free twice: {sorted(self._free)}")
        used = sum(way.slots for way in self._ways.values())
        if self._ways and used + len(self._free) > self._num_slots:
            problems.append(
                f"{used} outgoing slots used and {len(self._free)} free of {self._num_slots}"
            )
        problems += [
            f"{shown_block(way.waiting[0].block)} waits, but has a credit and outgoing slots"
            for way in self._ways.values()
            if self._may_take(way)
        ]
        problems += [
            f"plan {transfer_id} is at rest, but was not reported"
            for transfer_id, send in self._sends.items()
            if send.at_rest
        ]
        return problems


def _slots_needed(parcel: Parcel[Any]) -> int:
    """Return the outgoing slots that a parcel takes with its credit."""
    return 1 if parcel.mapping.parcel_is_block else 2


def _keys_of(message: Proven | Wrong | Again) -> list[int]:
    """Return the blocks of a message, by ``block_key``."""
    return [block_key(message.group, block) for block in message.sender_blocks]
