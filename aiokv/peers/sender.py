"""Sender: tickets that this rank sends, and the fragments on their way. No I/O.

::

    plan ─► held (its step is open) ─► ready ─► Want
    Credit ─► outgoing slot ─► copy from the device ─► seal ─► write ─► Proven ─► slot free
         ▲                                                               ├► Wrong
         └──────────────── slot free, next credit ───────────────────────┘
    A receiver of another layout gets a part of the block, cut out of a second slot before the seal.

A fragment takes an outgoing slot only when it has a credit, so a receiver that stalls holds no more
slots than it gave credits. A plan is reported when all its fragments are acknowledged, or when it
was given up; at the earliest when no copy reads its device blocks any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import msgspec

from aiokv.base.statistics import SenderCounts
from aiokv.errors import UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.peers.departures import Send, SlotFill
from aiokv.peers.messages import (
    MAX_LISTED,
    Again,
    Cancel,
    Credit,
    Done,
    Proven,
    Return,
    Want,
    Wrong,
    block_key,
    shown_block,
)
from aiokv.peers.outgoing import OutgoingTicket
from aiokv.peers.outgoing_slots import OutgoingSlots
from aiokv.peers.send_queue import SendQueue
from aiokv.worker.device.base import CopyError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence
    from collections.abc import Mapping as Dictionary

    from aiokv.base.plan import TransferPlan
    from aiokv.peers.departures import Fragment, ReceiverRank
    from aiokv.peers.messages import Message, SlotCredit
    from aiokv.peers.ticket import Ticket

C = TypeVar("C", bound="Hashable")  # a connection

MAX_TRIES: Final = 3  # attempts per fragment
MAX_REASONS: Final = 256  # reasons kept for tickets that the engine has not closed


class SenderPort(Protocol[C]):
    """Work that the sender starts. Each call returns at once, and none calls back in it."""

    def send(self, connection: C, message: Message) -> None:
        """Send a message, in order. Drop it if the connection has ended."""

    def is_open(self, plan: TransferPlan) -> bool:
        """Return True while work that computes the blocks may not have been submitted yet."""

    def fill(self, fill: SlotFill) -> None:
        """Copy device blocks to outgoing slots if ``Sender.admit`` allows it, then call
        ``Sender.filled``."""

    def seal(self, fragments: Sequence[Fragment[C]]) -> None:
        """Cut fragments out of their ``block_slot`` if they have one, write the trailers, then call
        ``Sender.sealed``."""

    def write(self, connection: C, fragments: Sequence[Fragment[C]]) -> None:
        """Write fragments to the slots of their credits, then call ``Sender.written``."""

    def sent(self, send: Send) -> None:
        """Report a plan; nothing reads its blocks. Idempotent."""

    def ended(self, ticket_id: bytes, reason: str) -> None:
        """Report that a ticket has ended and takes no plan any more. Idempotent."""


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
        self._rank = rank
        self._block_tokens = block_tokens
        self._slots = OutgoingSlots(num_slots)
        self._queues: dict[C, SendQueue[C]] = {}
        self._tickets: dict[bytes, OutgoingTicket[C]] = {}
        self._sends: dict[int, Send] = {}
        # Reasons of tickets that have ended by themselves, newest last.
        self._reasons: dict[bytes, str] = {}
        self._counts = SenderCounts()

    # --- tickets and plans ------------------------------------------------------------------------

    def add_ticket(
        self, ticket: Ticket, deadline: float, targets: Dictionary[int, ReceiverRank[C]]
    ) -> None:
        """Take a ticket that all its receivers have accepted.

        Args:
            ticket: new.
            deadline: by the clock of ``expire``.
            targets: by receiver rank; connections differ. Without any, this rank has nothing that
                the receiver needs, and its blocks count as acknowledged.
        """
        queues = {}
        for rank, target in targets.items():
            connection = target.connection
            queue = self._queues.setdefault(connection, SendQueue(connection))
            queue.tickets.add(ticket.ticket_id)
            queues[rank] = queue
        self._tickets[ticket.ticket_id] = OutgoingTicket(
            ticket, deadline, self._rank, targets, queues
        )
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
        if outgoing.queues:
            blocks = outgoing.wanted(send, self._block_tokens)
            send.unproven = dict.fromkeys(blocks, len(outgoing.queues))
        if taken := [block for block in send.unproven if block in outgoing.planned]:
            self._give_up(send, f"{shown_block(taken[0])} of the ticket belongs to another plan")
            return send
        outgoing.planned |= send.unproven.keys()
        self._release(outgoing, send)
        self._settle(send)
        return send

    def release_held(self) -> None:
        """Send the plans whose step has finished, or whose layers are computed."""
        for outgoing in list(self._tickets.values()):
            for send in list(outgoing.sends.values()):
                self._release(outgoing, send)

    def _release(self, outgoing: OutgoingTicket[C], send: Send) -> None:
        """Announce the fragments of a plan whose work was submitted. Idempotent."""
        if not send.is_held or send.failure is not None or self._port.is_open(send.plan):
            return
        send.is_held = False
        for rank, queue in outgoing.queues.items():
            fragments = outgoing.add_fragments(send, rank)
            self._want(queue, outgoing.ticket.ticket_id, fragments)
            self._pump(queue)

    def _want(
        self, queue: SendQueue[C], ticket_id: bytes, fragments: Sequence[Fragment[C]]
    ) -> None:
        missing = queue.add(fragments)
        self._counts.waits += missing
        while missing > 0:
            count = min(missing, MAX_LISTED)
            self._port.send(queue.connection, Want(ticket_id=ticket_id, fragments=count))
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
        """End a ticket, and give up its unacknowledged fragments. Idempotent."""
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
        """Outgoing slots that no fragment has."""
        return self._slots.num_free

    def counts(self) -> SenderCounts:
        """Return the counts."""
        live = sum(not outgoing.closed for outgoing in self._tickets.values())
        return msgspec.structs.replace(self._counts, tickets=live)

    # --- messages of receivers --------------------------------------------------------------------

    def on_message(self, connection: C, message: Message) -> None:
        """Handle a message of a receiver. Ignore messages about ended tickets."""
        queue = self._queues.get(connection)
        if isinstance(message, Credit):
            if queue is None:
                self._port.send(connection, Return(slots=message.slots))
                return
            queue.add_credits(message.slots)
            self._pump(queue)
        elif isinstance(message, Proven):
            self._on_proven(connection, message)
        elif isinstance(message, Wrong):
            self._on_wrong(connection, message)
        elif isinstance(message, Again):
            self._on_again(connection, message)
        elif isinstance(message, Cancel):
            outgoing = self._tickets.get(message.ticket_id)
            if outgoing is not None and queue in outgoing.queues.values():
                self._on_cancel(outgoing, connection, f"the receiver gave up: {message.reason}")

    def _on_cancel(self, outgoing: OutgoingTicket[C], connection: C, reason: str) -> None:
        """End a ticket that a receiver rank has cancelled.

        All ranks of a receiver cancel, also when all blocks have arrived. Then the
        acknowledgements of other ranks, whose connections are not ordered with this one, may still
        be on their way: each comes before the cancellation of its rank.
        """
        outgoing.cancelled.add(connection)
        if not outgoing.may_be_proven:
            self._end_ticket(outgoing, reason, tell=len(outgoing.queues) > 1)

    def _on_proven(self, connection: C, message: Proven) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        if outgoing is None:
            return
        sends = set()
        for block in _keys_of(message):
            fragment = outgoing.fragments.get((connection, block))
            if fragment is None or fragment.proven or not fragment.tries:
                continue
            fragment.proven = True
            self._counts.fragments += 1
            self._counts.sent_bytes += fragment.num_bytes - TRAILER_BYTES
            send = fragment.send
            send.note_proven(block)
            sends.add(send)
            self._slots.free(fragment)
        for send in sends:
            self._settle(send)
        self._pump_all()

    def _on_wrong(self, connection: C, message: Wrong) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        if outgoing is None:
            return
        for block in _keys_of(message):
            fragment = outgoing.fragments.get((connection, block))
            if fragment is None or fragment.proven or fragment.dropped or not fragment.tries:
                continue
            if message.is_busy:
                fragment.deferred = True
                self._slots.free(fragment)
                continue
            if fragment.tries >= MAX_TRIES:
                times = f"{fragment.tries} times: {message.reason}"
                reason = f"{shown_block(block)} was refused {times}"
                self._end_ticket(outgoing, reason, tell=True)
                return
            fragment.again = True
            if not fragment.busy:
                self._again(fragment)
        self._pump_all()  # the slots of deferred fragments are free now

    def _on_again(self, connection: C, message: Again) -> None:
        outgoing = self._tickets.get(message.ticket_id)
        for block in _keys_of(message):
            fragment = None if outgoing is None else outgoing.fragments.get((connection, block))
            if fragment is None or not fragment.deferred or fragment.proven or fragment.dropped:
                continue
            fragment.deferred = False
            fragment.tries -= 1
            fragment.again = True
            if not fragment.busy:
                self._again(fragment)

    def _again(self, fragment: Fragment[C]) -> None:
        """Copy and write a fragment once more, with the next credit.

        It keeps no outgoing slot until then: those before it in line may wait for the slot.
        """
        fragment.again = False
        self._slots.free(fragment)
        self._counts.retries += 1
        self._want(fragment.queue, fragment.send.plan.peer, [fragment])
        self._pump(fragment.queue)

    def on_closed(self, connection: C, reason: str) -> None:
        """Note the end of a connection: its tickets end."""
        queue = self._queues.get(connection)
        if queue is None:
            return
        queue.disconnect()
        for ticket_id in list(queue.tickets):
            outgoing = self._tickets[ticket_id]
            text = f"the connection to the receiver ended: {reason}"
            self._end_ticket(outgoing, text, tell=len(outgoing.queues) > 1)
        del self._queues[connection]

    # --- fragments --------------------------------------------------------------------------------

    def _pump_all(self) -> None:
        for queue in list(self._queues.values()):
            self._pump(queue)

    def _pump(self, queue: SendQueue[C]) -> None:
        """Begin to send as many fragments as there are credits and outgoing slots."""
        fills: dict[tuple[Send, int], list[Fragment[C]]] = {}
        while self._next(queue) is not None:
            fragment = queue.take()
            fragment.tries += 1
            fragment.busy = True
            self._slots.take(fragment)
            fills.setdefault((fragment.send, fragment.group), []).append(fragment)
        for (send, group), fragments in fills.items():
            self._port.fill(SlotFill(send, group, fragments))
        self._return_spare(queue)

    def _next(self, queue: SendQueue[C]) -> Fragment[C] | None:
        """Return the next fragment of a queue, if there are a credit and outgoing slots for it."""
        fragment = queue.next
        return fragment if fragment is not None and self._slots.has_room(fragment) else None

    def _return_spare(self, queue: SendQueue[C]) -> None:
        if (message := queue.take_spare()) is not None:
            self._port.send(queue.connection, message)

    def admit(self, fill: SlotFill) -> bool:
        """Return True if a copy is to be begun; called by the port before it begins. Idempotent.

        The slots of a copy whose plan was given up meanwhile are freed.
        """
        if not fill.fragments:
            return False
        if fill.send.failure is not None and fill not in fill.send.fills:
            self.filled(fill, None)
            return False
        fill.send.fills.add(fill)
        return True

    def filled(self, fill: SlotFill, failure: CopyError | None) -> None:
        """Note the end of a copy from device blocks. Idempotent."""
        send, fragments = fill.send, fill.fragments
        fill.fragments = []
        send.fills.discard(fill)
        if failure is not None:
            self._give_up(send, failure.reason)
        ready = self._continue(fragments)
        if ready:
            self._port.seal(ready)
        self._settle(send)
        self._pump_all()  # a failed or dropped fragment has freed slots

    def sealed(self, fragments: Sequence[Fragment[C]]) -> None:
        """Write the fragments whose trailers are complete."""
        for fragment in fragments:
            self._slots.free_block(fragment)
        ready: dict[C, list[Fragment[C]]] = {}
        for fragment in self._continue(fragments):
            ready.setdefault(fragment.queue.connection, []).append(fragment)
        for connection, its in ready.items():
            self._port.write(connection, its)
        self._pump_all()  # the slots of whole blocks are free now

    def written(self, fragments: Sequence[Fragment[C]]) -> None:
        """Record that the transport no longer reads the slots of these fragments."""
        for fragment in fragments:
            fragment.busy = False
            fragment.credit = None
            if fragment.dropped or fragment.proven:
                self._slots.free(fragment)
            elif fragment.again:
                self._again(fragment)
            elif fragment.deferred:
                self._slots.free(fragment)
        self._pump_all()

    def _continue(self, fragments: Sequence[Fragment[C]]) -> list[Fragment[C]]:
        """Return the fragments that are still to be sent; free the slots of the others."""
        spare: dict[C, list[SlotCredit]] = {}
        ready = []
        for fragment in fragments:
            if not fragment.dropped:
                ready.append(fragment)
                continue
            fragment.busy = False
            credit, fragment.credit = fragment.credit, None
            if credit is not None:
                spare.setdefault(fragment.queue.connection, []).append(credit)
            self._slots.free(fragment)
        for connection, slots in spare.items():
            self._port.send(connection, Return(slots=slots))
        if spare:
            self._pump_all()
        return ready

    # --- ends -------------------------------------------------------------------------------------

    def _give_up(self, send: Send, reason: str) -> None:
        if send.failure is None and send.unproven:
            send.failure = CopyError(0, reason)
        outgoing = self._tickets.get(send.plan.peer)
        if outgoing is not None and send.failure is not None:
            for queue in outgoing.queues.values():
                for fragment in outgoing.drop(send, queue):
                    self._slots.free(fragment)
                queue.remove_dropped()
                self._return_spare(queue)
        self._settle(send)

    def _end_ticket(self, outgoing: OutgoingTicket[C], reason: str, *, tell: bool) -> None:
        """Give up the rest of a ticket; send ``Done`` or ``Cancel`` to the receivers."""
        ticket_id = outgoing.ticket.ticket_id
        if not outgoing.closed:
            outgoing.closed = reason
            is_done = not any(send.unproven for send in outgoing.sends.values())
            end = Done(ticket_id=ticket_id, reason=reason)
            cancel = Cancel(ticket_id=ticket_id, reason=reason)
            for queue in outgoing.queues.values() if tell else ():
                self._port.send(queue.connection, end if is_done else cancel)
        for send in list(outgoing.sends.values()):
            self._give_up(send, outgoing.closed)
        for queue in outgoing.queues.values():
            queue.tickets.discard(ticket_id)
        self._port.ended(ticket_id, outgoing.closed)
        self._forget(outgoing)
        self._pump_all()

    def _settle(self, send: Send) -> None:
        """Report a plan that is at rest. Idempotent."""
        transfer_id = send.plan.transfer_id
        if not send.at_rest or self._sends.get(transfer_id) is not send:
            return
        if not send.unproven:
            send.failure = None  # its last fragment was acknowledged meanwhile
        self._port.sent(send)
        outgoing = self._tickets.get(send.plan.peer)
        if outgoing is not None:
            outgoing.sends.pop(transfer_id, None)
            self._forget(outgoing)
        del self._sends[transfer_id]

    def _forget(self, outgoing: OutgoingTicket[C]) -> None:
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

    def violations(self) -> list[str]:
        """Return a description of each violated invariant, computed from scratch."""
        queues = self._queues.values()
        problems = self._slots.violations(sum(queue.slots for queue in queues))
        problems += [problem for queue in queues for problem in queue.violations()]
        problems += [
            f"{shown_block(fragment.block)} waits, but has a credit and outgoing slots"
            for queue in queues
            if (fragment := self._next(queue)) is not None
        ]
        problems += [
            f"plan {transfer_id} is at rest, but was not reported"
            for transfer_id, send in self._sends.items()
            if send.at_rest
        ]
        return problems


def _keys_of(message: Proven | Wrong | Again) -> list[int]:
    """Return the blocks of a message, by ``block_key``."""
    return [block_key(message.group, block) for block in message.sender_blocks]
