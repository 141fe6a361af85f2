"""Work of the receiver and the sender of one worker: messages, slots, device copies.

The receiver and the sender decide. Their ReceiverWork and SenderWork are made with the slots, and
used until the worker sleeps or closes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiokv.errors import PeerError
from aiokv.peers.accepted import abort_for
from aiokv.peers.messages import Landed, split_key
from aiokv.peers.transport import Outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.base.plan import Route, TransferPlan
    from aiokv.peers.arrivals import Fragment as Received
    from aiokv.peers.arrivals import LandingCopy, Receive
    from aiokv.peers.departures import Fragment as Sent
    from aiokv.peers.departures import Send, SlotFill
    from aiokv.peers.mappings import Mappings
    from aiokv.peers.messages import Message
    from aiokv.peers.peer_plans import PeerPlans
    from aiokv.peers.receiver import Receiver
    from aiokv.peers.sender import Sender
    from aiokv.peers.slot_access import SlotAccess
    from aiokv.peers.slots import ArenaSlots
    from aiokv.peers.transport import Link, PeerMemory
    from aiokv.peers.wire import Connection
    from aiokv.worker.base import Cancelled
    from aiokv.worker.device.base import CopyError, Event
    from aiokv.worker.layer_marks import LayerMarks
    from aiokv.worker.steps import WorkerStepClock


class DeviceCopies(Protocol):
    """Copies between device blocks and slots of the peer arena, for PeerTransfers."""

    def copy(
        self,
        route: Route,
        group: str,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        after: int | Event | None,
        on_end: Callable[[CopyError | None], None],
        keys: bytes = b"",
    ) -> int:
        """Begin a copy behind a step or an event, and return its id.

        With ``keys``, 32 bytes per slot in the memory of the device, ``SEND`` seals the slots, and
        ``RECEIVE`` fails for those that have other trailers.

        ``on_end`` is called once, in a callback of the loop, with the failure or None.
        """

    def cancel_copy(self, copy_id: int) -> Cancelled:
        """Cancel a copy that the device does not have; its ``on_end`` follows."""


class SlotWork(NamedTuple):
    """Parts of a worker that do the work in its slots.

    Attributes:
        arena: places of the slots in the peer arena.
        blocks_per_slot: blocks of the arena that a landing slot takes.
        access: accesses the bytes in the slots.
        mappings: mappings of the blocks of this rank.
        copies: copies between device blocks and slots.
        clock: numbers of the steps on the device.
        plans: table of the plans, which reports their ends.
    """

    arena: ArenaSlots
    blocks_per_slot: int
    access: SlotAccess
    mappings: Mappings
    copies: DeviceCopies
    clock: WorkerStepClock
    plans: PeerPlans


class ReceiverWork:
    """Work of the receiver; a ``ReceiverPort``.

    Args:
        parts: parts of the worker.
        landing: landing slots.
    """

    _receiver: Receiver[Connection]

    def __init__(self, parts: SlotWork, landing: PeerMemory) -> None:
        self._parts = parts
        self._landing = landing

    def serve(self, receiver: Receiver[Connection]) -> None:
        """Work for this receiver, before it is used."""
        self._receiver = receiver

    def send(self, connection: Connection, message: Message) -> None:
        """Send a message."""
        connection.send(message)

    def verify(self, fragments: Sequence[Received]) -> None:
        """Verify fragments, together with the others of this pass of the loop."""
        self._parts.access.verify(self._landing, fragments, self._verified)

    def _verified(self, fragments: list[Received], are_right: list[bool]) -> None:
        self._receiver.verified(fragments, are_right)

    def place(self, fragments: Sequence[Received], slots: Sequence[dict[int, int]]) -> None:
        """Place fragments in assembly slots."""
        memory, arena = self._landing, self._parts.arena
        first = memory.address + arena.first_assembly * arena.slot_bytes
        addresses = [
            {split_key(key)[1]: first + slot * arena.slot_bytes for key, slot in targets.items()}
            for targets in slots
        ]
        then = partial(self._placed, list(fragments))
        self._parts.access.place(memory, fragments, addresses, then)

    def _placed(self, fragments: list[Received], is_done: bool) -> None:
        if not is_done:
            for fragment in fragments:
                self._receiver.close_ticket(fragment.ticket_id, "an internal error")
        self._receiver.placed(fragments)

    def copy(self, copy: LandingCopy) -> None:
        """Copy landing slots or assembly slots to device blocks."""
        receiver, parts = self._receiver, self._parts
        if not receiver.admit(copy):
            return
        first, pitch = 0, parts.blocks_per_slot
        if copy.is_assembled:
            first, pitch = parts.arena.first_assembly, 1
        plan = copy.receive.plan
        copy.copy_id = parts.copies.copy(
            plan.route,
            parts.mappings.device_group(plan, copy.group),
            [first + slot * pitch for slot in copy.slots],
            copy.device_ids,
            plan.after_step,
            partial(receiver.copied, copy),
            parts.access.landing_keys(copy.slots),
        )
        parts.plans.begin(plan.transfer_id)

    def take_back(self, copy: LandingCopy) -> bool:
        """Cancel a copy, and return True, unless the device has it. Idempotent."""
        return self._parts.copies.cancel_copy(copy.copy_id) == "at once"

    def received(self, receive: Receive) -> None:
        """Report a RECEIVE plan. Idempotent."""
        self._parts.plans.end(
            receive.plan.transfer_id,
            receive.leading_blocks,
            receive.failure,
            is_touched=receive.is_touched,
        )


class SenderWork:
    """Work of the sender; a ``SenderPort``.

    Args:
        parts: parts of the worker.
        outgoing: outgoing slots.
        marks: layers of blocks that are being computed.
        writes: tasks that write fragments; those in progress are in it.
        link: returns the link over which a connection's fragments are written; None if it has
        ended. on_ticket_end: gets the id of each ticket that has ended, and the reason.
    """

    _sender: Sender[Connection]

    def __init__(
        self,
        parts: SlotWork,
        outgoing: PeerMemory,
        marks: LayerMarks,
        writes: set[asyncio.Task[None]],
        link: Callable[[Connection], Link | None],
        on_ticket_end: Callable[[bytes, str], None],
    ) -> None:
        self._parts = parts
        self._outgoing = outgoing
        self._marks = marks
        self._writes = writes
        self._link = link
        self._on_ticket_end = on_ticket_end

    def serve(self, sender: Sender[Connection]) -> None:
        """Work for this sender, before it is used."""
        self._sender = sender

    def send(self, connection: Connection, message: Message) -> None:
        """Send a message."""
        connection.send(message)

    def is_open(self, plan: TransferPlan) -> bool:
        """Return True while work that computes the blocks may not have been submitted yet."""
        is_open = self._parts.clock.is_open(plan.after_step)
        return is_open and not self._marks.has(plan.peer, plan.mark)

    def fill(self, fill: SlotFill) -> None:
        """Copy device blocks to outgoing slots."""
        sender, parts = self._sender, self._parts
        if not sender.admit(fill):
            return
        plan = fill.send.plan
        is_noted = self._marks.has(plan.peer, plan.mark)
        fill.copy_id = parts.copies.copy(
            plan.route,
            parts.mappings.device_group(plan, fill.group),
            fill.device_ids,
            [parts.arena.first_outgoing + slot for slot in fill.slots],
            self._marks.event(plan.peer, plan.mark) if is_noted else plan.after_step,
            partial(sender.filled, fill),
            parts.access.outgoing_keys(fill.fragments),
        )
        parts.plans.begin(plan.transfer_id)

    def seal(self, fragments: Sequence[Sent[Connection]]) -> None:
        """Cut fragments, and write their trailers."""
        self._parts.access.seal(self._outgoing, fragments, self._sealed)

    def _sealed(self, fragments: list[Sent[Connection]], is_done: bool) -> None:
        if not is_done:
            for fragment in fragments:
                self._sender.close_ticket(fragment.send.plan.peer, "an internal error")
        self._sender.sealed(fragments)

    def write(self, connection: Connection, fragments: Sequence[Sent[Connection]]) -> None:
        """Write fragments to the slots of their credits."""
        batch = [
            Outgoing(
                fragment.slot,
                Landed(
                    ticket_id=fragment.send.plan.peer,
                    sender_block=split_key(fragment.block)[1],
                    slot=fragment.credit.slot,
                    slot_generation=fragment.credit.generation,
                    fragment_bytes=fragment.num_bytes,
                    group=fragment.group,
                ),
            )
            for fragment in fragments
            if fragment.slot is not None and fragment.credit is not None
        ]
        task = asyncio.get_running_loop().create_task(self._write(connection, batch))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        task.add_done_callback(partial(self._written, list(fragments)))

    async def _write(self, connection: Connection, batch: list[Outgoing]) -> None:
        link = self._link(connection)
        if link is None:
            return  # the connection has ended
        try:
            await link.write(batch)
        except PeerError as error:
            connection.abort(str(error))
        except Exception as error:
            abort_for(connection, error)

    def _written(self, fragments: list[Sent[Connection]], task: asyncio.Future[Any]) -> None:
        self._sender.written(fragments)

    def sent(self, send: Send) -> None:
        """Report a SEND plan. Idempotent."""
        self._parts.plans.end(send.plan.transfer_id, send.leading_blocks, send.failure)

    def ended(self, ticket_id: bytes, reason: str) -> None:
        """Report the end of a sent ticket. Idempotent."""
        self._parts.access.soon(partial(self._on_ticket_end, ticket_id, reason))
