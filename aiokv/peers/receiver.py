"""Receiver: tickets that this rank receives, and the fragments that arrive for them. No I/O.

::

    expect ─► Open ─► Accepted          a sender has the ticket
              Want ─► Credit            as the landing ring has free slots
              Landed ─► slot ─► verify ─► copy to the device block of a plan ─► slot free
                                 │  └► other layouts: place in assembly slots ─► copy
                                 └► Wrong: the sender may send the fragment again; if there was no
                                    room, after an Again

A plan ends when all its blocks have arrived, or when it is given up: at the deadline of its ticket,
when its sender has disconnected, or when it is cancelled. It is reported after its last copy has
ended, so no byte of it reaches a block that was given to another lease (I11): fragments that arrive
later stay in their landing slots, and are dropped there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from aiokv.base.statistics import ReceiverCounts
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.acceptance import Acceptance
from aiokv.peers.arrivals import Fragment, LandingCopy, Receive, SlotCopies
from aiokv.peers.assembly import AssemblySlots
from aiokv.peers.deferred import DeferredFragments
from aiokv.peers.incoming import IncomingTicket, OpenSender
from aiokv.peers.messages import (
    Accepted,
    Again,
    Cancel,
    Credit,
    Done,
    Landed,
    Open,
    Proven,
    Refused,
    Return,
    Want,
    Wrong,
    block_key,
    by_group,
    fragment_key,
    shown_block,
    split_key,
)
from aiokv.peers.unplanned import UnplannedFragments

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from aiokv.base.plan import TransferPlan
    from aiokv.peers.arrivals import SenderBlocks
    from aiokv.peers.messages import Message
    from aiokv.peers.ring import LandingRing
    from aiokv.peers.ticket import Ticket
    from aiokv.worker.device.base import CopyError

C = TypeVar("C", bound="Hashable")  # a connection
D = TypeVar("D", bound="Hashable", contravariant=True)  # a connection

MAX_WRONG: Final = 3  # wrong fragments of one block; after them, the ticket fails


class ReceiverPort(Protocol[D]):
    """Work that the receiver starts. Each call returns at once, and none calls back in it."""

    def send(self, connection: D, message: Message) -> None:
        """Send a message, in order; one to a connection that has ended is dropped."""

    def verify(self, fragments: Sequence[Fragment]) -> None:
        """Verify fragments, then call ``Receiver.verified`` with the slots of correct bytes."""

    def place(self, fragments: Sequence[Fragment], slots: Sequence[dict[int, int]]) -> None:
        """Place each fragment in assembly slots, by ``block_key`` of the receiver's blocks, then
        call ``Receiver.placed``."""

    def copy(self, copy: LandingCopy) -> None:
        """Copy slots to the device blocks of a plan if ``Receiver.admit`` allows it, then call
        ``Receiver.copied``."""

    def take_back(self, copy: LandingCopy) -> bool:
        """Cancel a copy that waits for its step or for other copies, then call
        ``Receiver.copied``. Return False, without effect, when the device has it. Idempotent."""

    def received(self, receive: Receive) -> None:
        """Report a plan; nothing accesses its blocks. Idempotent."""


Disposal = Literal["land", "discard"]


class Receiver(Generic[C]):
    """Tickets that one rank receives.

    Args:
        port: does the work.
        ring: credits of the landing slots; nothing else uses it.
        rank: number of this rank.
        generation: generation of this opening of the engine.
        slot_bytes: bytes of a landing slot.
        source: returns the source of an ``Open``, or raises ``LayoutError`` if its blocks cannot be
            received.
        covers: returns True when ranks of these layouts together have all heads of this rank.
        group: returns the group of the blocks of a plan.
        num_pools: groups of whole blocks; the groups behind them are ranges of layers.
        num_assembly: assembly slots, in which blocks are put together from fragments of other
            layouts.
        transport: name of the transport.
        metadata: returns what a sender on a connection needs to write into the landing slots.
        one_sided: peers may write granted slots after their connection has ended.
    """

    def __init__(
        self,
        port: ReceiverPort[C],
        ring: LandingRing[C],
        *,
        rank: int,
        slot_bytes: int,
        source: Callable[[Open], SenderBlocks],
        covers: Callable[[list[Any]], bool] = lambda layouts: True,
        group: Callable[[TransferPlan], int] = lambda plan: 0,
        num_pools: int = 1,
        num_assembly: int = 0,
        transport: str = "tcp",
        metadata: Callable[[C], bytes] = lambda connection: b"",
        one_sided: bool = False,
    ) -> None:
        self._port = port
        self._ring = ring
        self._rank = rank
        self._slot_bytes = slot_bytes
        self._acceptance = Acceptance(
            rank=rank,
            transport=transport,
            slot_bytes=slot_bytes,
            num_assembly=num_assembly,
            source=source,
        )
        self._covers = covers
        self._group = group
        self._num_pools = num_pools
        self._assembly = AssemblySlots(num_assembly)
        self._metadata = metadata
        self._one_sided = one_sided
        self._connections: set[C] = set()  # connections that have opened a ticket
        self._tickets: dict[bytes, IncomingTicket[C]] = {}
        self._receives: dict[int, Receive] = {}
        self._unplanned = UnplannedFragments(ring.num_slots)
        self._deferred: DeferredFragments[C] = DeferredFragments(self._assembly)
        self._counts = ReceiverCounts()

    # --- tickets and plans ------------------------------------------------------------------------

    def expect(self, ticket: Ticket, deadline: float, open_by: float = math.inf) -> None:
        """Let senders open a ticket until the deadline, the first one until ``open_by``; a ticket
        that is known is not changed."""
        incoming: IncomingTicket[C] = IncomingTicket(
            ticket, deadline, self._num_pools, self._assembly, open_by
        )
        self._tickets.setdefault(ticket.ticket_id, incoming)

    def submit(self, plan: TransferPlan) -> Receive:
        """Take a RECEIVE plan that was checked.

        A plan of a ticket that is unknown or closed ends at once, without a block.
        """
        receive = self._receives[plan.transfer_id] = Receive(plan, self._group(plan))
        incoming = self._tickets.get(plan.peer)
        if incoming is None or incoming.closed:
            why = "has ended" if incoming is None else f"has ended: {incoming.closed}"
            receive.give_up(f"the ticket {why}")
            self._settle(receive)
            return receive
        incoming.receives[plan.transfer_id] = receive
        if taken := [block for block in receive.positions if block in incoming.planned]:
            self._give_up(receive, f"{shown_block(taken[0])} of the ticket belongs to another plan")
            return receive
        incoming.plan(receive)
        self._take_parked(incoming, receive)
        self._settle(receive)  # a plan of a window may have no block
        self._check_ended(plan.peer)
        self._ask_again()
        return receive

    def _take_parked(self, incoming: IncomingTicket[C], receive: Receive) -> None:
        """Copy the parked fragments of the blocks of a plan."""
        ready = SlotCopies()
        for key in [k for k in incoming.parked if incoming.whole(k) in receive.positions]:
            slot = incoming.parked.pop(key)
            if incoming.arrive(key) is None:
                self._drop(slot)
            else:
                ready.add(receive, key, slot, incoming.num_ranges(split_key(key)[0]))
        self._copy_all(ready)

    def cancel(self, transfer_id: int, reason: str) -> bool:
        """Give up a plan; return True if it was in flight. It is reported when it is at rest."""
        receive = self._receives.get(transfer_id)
        if receive is None:
            return False
        for copy in receive.copies:  # its step may be open for a long time
            copy.is_taken_back = self._port.take_back(copy)
        self._give_up(receive, reason)
        return True

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """Give up the plans of a ticket, and let its senders stop. Idempotent."""
        incoming = self._tickets.get(ticket_id)
        if incoming is not None:
            self._end_ticket(incoming, reason)

    def expire(self, now: float) -> None:
        """End the tickets whose deadline has passed, or that no sender has opened in time."""
        for incoming in list(self._tickets.values()):
            if incoming.ends_at <= now:
                self._counts.expired += not incoming.closed
                reason = "the deadline of the ticket passed"
                if now < incoming.deadline:
                    reason = "no sender has opened the ticket within open_timeout"
                self.close_ticket(incoming.ticket.ticket_id, reason)

    def close(self, reason: str) -> None:
        """End all tickets."""
        for ticket_id in list(self._tickets):
            self.close_ticket(ticket_id, reason)

    @property
    def next_deadline(self) -> float | None:
        """Deadline of the ticket that expires first; None without tickets."""
        return min((t.ends_at for t in self._tickets.values() if not t.closed), default=None)

    @property
    def free_slots(self) -> int:
        """Landing slots without an owner."""
        return self._ring.free_slots

    @property
    def free_assembly_slots(self) -> int:
        """Assembly slots that no block has, and no thread writes."""
        return self._assembly.num_free

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of plans that have not ended."""
        return self._receives.keys()

    def counts(self) -> ReceiverCounts:
        """Return the counts."""
        return msgspec.structs.replace(
            self._counts,
            tickets=sum(not incoming.closed for incoming in self._tickets.values()),
            stale=self._ring.statistics().stale,
        )

    # --- messages of senders ----------------------------------------------------------------------

    def on_message(self, connection: C, message: Message) -> None:
        """Handle a message of a sender, except ``Landed``: see :meth:`begin_fragment`.

        Messages about unknown tickets are ignored: the ticket has ended.
        """
        if isinstance(message, Open):
            self._on_open(connection, message)
        elif isinstance(message, Want):
            self._on_want(connection, message)
        elif isinstance(message, Return):
            for credit in message.slots:
                self._ring.give_back(connection, credit)
            if message.unwanted:
                self._ring.unwant(connection, message.unwanted)
            self._grant()
        elif isinstance(message, Done | Cancel):
            self._on_end(connection, message)

    def _on_open(self, connection: C, message: Open) -> None:
        source = self._acceptance.check(message, self._tickets.get(message.ticket_id))
        if isinstance(source, Refused):
            self._counts.refused += 1
            self._port.send(connection, source)
            return
        incoming = self._tickets[message.ticket_id]
        self._counts.opened += not incoming.sources
        self._connections.add(connection)
        sender = OpenSender(message.sender_rank, connection, source)
        incoming.senders[message.sender_rank] = sender
        incoming.sources[sender.rank] = source
        incoming.is_covered = self._covers([each.layout for each in incoming.sources.values()])
        self._ask_again()
        self._port.send(
            connection,
            Accepted(
                ticket_id=message.ticket_id,
                slot_bytes=self._slot_bytes,
                transport_metadata=self._metadata(connection),
            ),
        )

    def _on_want(self, connection: C, message: Want) -> None:
        # This is done even for an ended ticket: the sender counts its requests for slots per
        # connection, and takes back those that it no longer needs.
        if connection in self._connections:
            self._ring.want(connection, message.fragments)
            self._grant()

    def _on_end(self, connection: C, message: Done | Cancel) -> None:
        """Note that a sender sends nothing more of a ticket."""
        ticket_id = message.ticket_id
        sender = self._sender(connection, ticket_id)
        if sender is None:
            return
        incoming = self._tickets[ticket_id]
        del incoming.senders[sender.rank]
        if isinstance(message, Cancel):
            self._end_ticket(incoming, f"the sender gave up: {message.reason}")
        else:
            incoming.done = message.reason or "it has sent all it had"
            self._check_ended(ticket_id)

    def on_closed(self, connection: C, reason: str) -> bool:
        """Note the end of a connection: its tickets end, and its credits are void.

        Returns:
            True if the sender may still write: call ``fenced`` when it can no more.
        """
        self._connections.discard(connection)
        may_write = bool(self._ring.revoke(connection, may_write=self._one_sided))
        for incoming in list(self._tickets.values()):
            gone = [s.rank for s in incoming.senders.values() if s.connection == connection]
            for rank in gone:
                del incoming.senders[rank]
            if gone:
                self._end_ticket(incoming, f"the connection to the sender ended: {reason}")
        self._grant()
        return may_write

    def fenced(self, connection: C) -> None:
        """Free the slots of a connection that can write no more."""
        self._ring.confirm(connection)
        self._grant()

    # --- fragments --------------------------------------------------------------------------------

    def begin_fragment(self, connection: C, message: Landed) -> Disposal:
        """Return where the bytes of a fragment may go: into its slot, or nowhere."""
        if not self._ring.land(connection, message.credit):
            self._answer_wrong(connection, message, "its credit has ended")
            return "discard"
        return "land"

    def end_fragment(self, connection: C, message: Landed) -> None:
        """Note that the bytes of a fragment are in its slot."""
        self._ring.landed(message.slot)
        self._take(connection, message)
        self._grant()  # the slot may be free again

    def _take(self, connection: C, message: Landed) -> None:
        sender = self._sender(connection, message.ticket_id)
        incoming = self._tickets.get(message.ticket_id)
        if sender is None or incoming is None or incoming.closed:
            self._drop(message.slot)
            return
        source, group = sender.source, message.group
        is_identity = source.is_identity
        block = block_key(group, message.sender_block)
        if not incoming.has(source, group, message.sender_block):
            # The number of stored blocks would have no limit.
            self._drop(message.slot)
            self.close_ticket(
                message.ticket_id, f"{shown_block(block)} of the sender is not in the ticket"
            )
        elif message.fragment_bytes != source.fragment_bytes(group):
            self._reject(incoming, sender, message.slot, block, "its length is wrong")
        elif is_identity and not self._is_useful(incoming, sender.rank, block):
            self._drop(message.slot)
            if incoming.whole(block) in incoming.planned or block in incoming.parked:
                self._answer_wrong(connection, message, "no plan waits for it")
            else:
                self._defer(incoming, sender, block)
        else:
            fragment = self._fragment(incoming, sender, message)
            if fragment.place in incoming.in_hand:
                self._drop(message.slot)
                return
            incoming.in_hand[fragment.place] = fragment
            self._unplanned.note(incoming)
            self._port.verify([fragment])

    def _fragment(
        self, incoming: IncomingTicket[C], sender: OpenSender[C], message: Landed
    ) -> Fragment:
        """Return the fragment that has landed in a slot."""
        source, group = sender.source, message.group
        return Fragment(
            ticket_id=message.ticket_id,
            sender_rank=sender.rank,
            sender_block=message.sender_block,
            group=group,
            slot=message.slot,
            num_bytes=message.fragment_bytes,
            key=fragment_key(
                message.ticket_id,
                incoming.ticket.generation,
                sender.rank,
                message.sender_block,
                self._rank,
                group,
            ),
            mapping=None if source.is_identity else source.mappings[group],
        )

    def _is_useful(self, incoming: IncomingTicket[C], rank: int, block: int) -> bool:
        """Return True for a block without a fragment that a plan waits for, or may wait for."""
        if (rank, block) in incoming.in_hand or block in incoming.parked:
            return False
        if incoming.whole(block) in incoming.planned:
            return incoming.lacks(block)
        return self._unplanned.has_room

    def verified(self, fragments: Sequence[Fragment], are_right: Sequence[bool]) -> None:
        """Take the fragments that are right; the others may be sent again. Idempotent."""
        ready = SlotCopies()
        to_place: list[Fragment] = []
        places: list[dict[int, int]] = []
        proven: dict[tuple[C, bytes], list[int]] = {}
        for fragment, is_right in zip(fragments, are_right, strict=True):
            incoming = self._tickets.get(fragment.ticket_id)
            place = fragment.place
            if incoming is None or incoming.in_hand.get(place) is not fragment:
                continue
            del incoming.in_hand[place]
            block, sender = place[1], incoming.senders.get(fragment.sender_rank)
            if not is_right:
                self._reject(incoming, sender, fragment.slot, block, "its trailer is wrong")
                continue
            if fragment.mapping is not None:
                if targets := incoming.begin_placing(fragment):
                    to_place.append(fragment)
                    places.append(targets)
                else:
                    self._drop(fragment.slot)
                    self._answer_unplaced(incoming, sender, fragment)
                continue
            self._count(fragment)
            if sender is not None and not incoming.closed:
                proven.setdefault((sender.connection, fragment.ticket_id), []).append(block)
            if (receive := incoming.arrive(block)) is not None:
                ready.add(receive, block, fragment.slot, incoming.num_ranges(fragment.group))
            elif incoming.closed or incoming.whole(block) in incoming.planned:
                self._drop(fragment.slot)
            else:
                incoming.parked[block] = fragment.slot
        if to_place:
            self._port.place(to_place, places)
        self._copy_all(ready)
        for (connection, ticket_id), blocks in proven.items():
            self._tell(connection, Proven, ticket_id, blocks)
        for ticket_id in {fragment.ticket_id for fragment in fragments}:
            self._check_ended(ticket_id)
        self._grant()

    # --- fragments of other layouts ---------------------------------------------------------------

    def _answer_unplaced(
        self, incoming: IncomingTicket[C], sender: OpenSender[C] | None, fragment: Fragment
    ) -> None:
        """Answer a fragment that was not placed, or not in all blocks that wait for it."""
        mapping = fragment.mapping
        if sender is None or mapping is None or incoming.closed:
            return
        if incoming.waiting_blocks(mapping, fragment.place) or incoming.may_be_planned(
            mapping, fragment.place[1]
        ):
            self._defer(incoming, sender, fragment.place[1])
        else:
            self._prove(sender, fragment)  # no plan waits for the fragment any more

    def _prove(self, sender: OpenSender[C], fragment: Fragment) -> None:
        self._tell(sender.connection, Proven, fragment.ticket_id, [fragment.place[1]])

    def _tell(
        self,
        connection: C,
        kind: type[Proven | Again],
        ticket_id: bytes,
        sender_blocks: Iterable[int],
    ) -> None:
        for group, blocks in by_group(sender_blocks).items():
            self._port.send(
                connection, kind(ticket_id=ticket_id, sender_blocks=blocks, group=group)
            )

    def _defer(self, incoming: IncomingTicket[C], sender: OpenSender[C], block: int) -> None:
        """Let the sender keep a fragment until there is room for it."""
        self._deferred.add(incoming, (sender.rank, block))
        ticket_id = incoming.ticket.ticket_id
        self._tell_wrong(sender.connection, ticket_id, block, "no room", is_busy=True)

    def _ask_again(self) -> None:
        """Request deferred fragments for which there is room now."""
        for fragment in self._deferred.take():
            self._tell(fragment.sender.connection, Again, fragment.ticket_id, [fragment.block])

    def placed(self, fragments: Sequence[Fragment]) -> None:
        """Note that fragments were placed; copy the blocks that are complete. Idempotent."""
        ready = SlotCopies(is_assembled=True)
        for fragment in fragments:
            incoming = self._tickets.get(fragment.ticket_id)
            assemblies = None if incoming is None else incoming.placing.pop(fragment, None)
            if incoming is None or assemblies is None:
                continue
            self._ring.free(fragment.slot)
            self._count(fragment)
            for block, slot, receive in incoming.place(fragment, assemblies):
                ready.add(receive, block, slot)
            sender = incoming.senders.get(fragment.sender_rank)
            self._answer_unplaced(incoming, sender, fragment)  # more blocks may wait for it
        self._copy_all(ready)
        for ticket_id in {fragment.ticket_id for fragment in fragments}:
            self._check_ended(ticket_id)
        self._ask_again()
        self._grant()

    def _count(self, fragment: Fragment) -> None:
        self._counts.fragments += 1
        self._counts.received_bytes += fragment.num_bytes - TRAILER_BYTES

    def _copy_all(self, copies: SlotCopies) -> None:
        for copy in copies:
            self._port.copy(copy)

    def admit(self, copy: LandingCopy) -> bool:
        """Return True if a copy is to be begun; called by the port before it begins. Idempotent.

        The slots of a copy whose plan was given up meanwhile are freed.
        """
        receive = copy.receive
        if not copy.slots:
            return False
        if receive.failure is not None and copy not in receive.copies:
            self.copied(copy, None)
            return False
        receive.copies.add(copy)
        return True

    def copied(self, copy: LandingCopy, failure: CopyError | None) -> None:
        """Note the end of a copy into device blocks. Idempotent."""
        receive, slots = copy.receive, copy.slots
        copy.slots = []
        for slot in slots:
            if copy.is_assembled:
                self._assembly.free(slot)
            else:
                self._ring.free(slot)
        if copy in receive.copies:
            good = len(copy.blocks) if failure is None else failure.first_bad_block
            receive.note_copied(copy.blocks[:good], copy.num_ranges)
            receive.is_touched = receive.is_touched or not copy.is_taken_back
            receive.copies.discard(copy)
            if failure is not None:
                self._give_up(receive, failure.reason)
        self._settle(receive)
        self._ask_again()
        self._grant()

    # --- ends -------------------------------------------------------------------------------------

    def _give_up(self, receive: Receive, reason: str) -> None:
        receive.give_up(reason)
        incoming = self._tickets.get(receive.plan.peer)
        if incoming is not None:
            incoming.withdraw(receive)
        self._settle(receive)

    def _end_ticket(self, incoming: IncomingTicket[C], reason: str) -> None:
        """Give up the missing blocks of a ticket; drop its other fragments when verified."""
        if not incoming.closed:
            incoming.closed = reason
            for sender in list(incoming.senders.values()):
                cancel = Cancel(ticket_id=incoming.ticket.ticket_id, reason=reason)
                self._port.send(sender.connection, cancel)
        for receive in list(incoming.receives.values()):
            self._give_up(receive, incoming.closed)
        while incoming.parked:
            self._drop(incoming.parked.popitem()[1])
        incoming.deferred.clear()
        self._forget(incoming)
        self._ask_again()
        self._grant()

    def _check_ended(self, ticket_id: bytes) -> None:
        """End a ticket if a sender has sent all blocks and the last fragments were placed."""
        incoming = self._tickets.get(ticket_id)
        if incoming is None:
            return
        # A plan may still ask for blocks that are parked.
        busy = incoming.in_hand or incoming.placing or incoming.parked
        if incoming.done and not busy:
            self._end_ticket(incoming, f"the sender ended: {incoming.done}")
        else:
            self._forget(incoming)

    def _settle(self, receive: Receive) -> None:
        """Report a plan that is at rest. Idempotent."""
        transfer_id = receive.plan.transfer_id
        if not receive.at_rest or self._receives.get(transfer_id) is not receive:
            return
        if not receive.missing:
            receive.failure = None  # its last copy has succeeded meanwhile
        self._port.received(receive)
        incoming = self._tickets.get(receive.plan.peer)
        if incoming is not None:
            incoming.receives.pop(transfer_id, None)
            self._forget(incoming)
        del self._receives[transfer_id]

    def _forget(self, incoming: IncomingTicket[C]) -> None:
        """Forget a ticket that has ended, when it has neither a plan nor a fragment any more."""
        if incoming.closed and not incoming.has_transfers:
            self._tickets.pop(incoming.ticket.ticket_id, None)
            self._unplanned.forget(incoming)

    def _drop(self, slot: int) -> None:
        self._counts.dropped += 1
        self._ring.free(slot)

    def _reject(
        self,
        incoming: IncomingTicket[C],
        sender: OpenSender[C] | None,
        slot: int,
        block: int,
        why: str,
    ) -> None:
        """Drop a wrong fragment; after ``MAX_WRONG`` of one block the ticket ends."""
        self._counts.wrong += 1
        self._ring.free(slot)
        times = incoming.wrong[block] = incoming.wrong.get(block, 0) + 1
        if sender is None or incoming.closed:
            return
        if times >= MAX_WRONG:
            reason = f"{shown_block(block)} arrived wrong {times} times: {why}"
            self.close_ticket(incoming.ticket.ticket_id, reason)
            return
        self._tell_wrong(sender.connection, incoming.ticket.ticket_id, block, why)

    def _answer_wrong(self, connection: C, message: Landed, why: str) -> None:
        if self._sender(connection, message.ticket_id) is not None:
            block = block_key(message.group, message.sender_block)
            self._tell_wrong(connection, message.ticket_id, block, why)

    def _tell_wrong(
        self, connection: C, ticket_id: bytes, block: int, why: str, *, is_busy: bool = False
    ) -> None:
        group, index = split_key(block)
        message = Wrong(
            ticket_id=ticket_id, sender_blocks=[index], reason=why, group=group, is_busy=is_busy
        )
        self._port.send(connection, message)

    def _sender(self, connection: C, ticket_id: bytes) -> OpenSender[C] | None:
        """Return the sender of a ticket on a connection; None if it has not opened the ticket."""
        incoming = self._tickets.get(ticket_id)
        if incoming is None:
            return None
        return next((s for s in incoming.senders.values() if s.connection == connection), None)

    def _grant(self) -> None:
        for connection, slots in self._ring.grant():
            self._port.send(connection, Credit(slots=slots))

    @property
    def is_quiet(self) -> bool:
        """True without tickets and plans."""
        return not self._tickets and not self._receives

    def violations(self) -> list[str]:
        """Return a description of each violated invariant, computed from scratch."""
        problems = self._ring.violations()
        tickets, copies = self._tickets.values(), self._copies_in_flight()
        used = sum(len(t.parked) + len(t.in_hand) + len(t.placing) for t in tickets)
        used += sum(len(copy.slots) for copy in copies if not copy.is_assembled)
        landed = self._ring.statistics().landed
        if landed != used:
            problems.append(f"{landed} slots have fragments, but tickets and copies have {used}")
        assembling = sum(len(copy.slots) for copy in copies if copy.is_assembled)
        assembling += sum(len(incoming.slots_used()) for incoming in tickets)
        problems += self._assembly.violations(assembling)
        problems += self._deferred.violations(tickets)
        problems += self._unplanned.violations(tickets)
        problems += [problem for incoming in tickets for problem in incoming.violations()]
        problems += [
            f"plan {transfer_id} is at rest, but was not reported"
            for transfer_id, receive in self._receives.items()
            if receive.at_rest
        ]
        problems += [
            f"ticket {ticket_id.hex()} has ended, but is kept"
            for ticket_id, incoming in self._tickets.items()
            if incoming.closed and not incoming.has_transfers
        ]
        return problems

    def _copies_in_flight(self) -> list[LandingCopy]:
        return [copy for receive in self._receives.values() for copy in receive.copies]
