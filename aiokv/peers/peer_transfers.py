"""PeerTransfers: plans between device blocks and peers, of one worker.

::

    RECEIVE   connection ─► landing slot ─► verify ─► device copy ─► report
    SEND      device copy ─► outgoing slot ─► seal ─► connection ─► acknowledged ─► report

The :class:`Receiver` and the :class:`Sender` decide what to do next; a :class:`ReceiverWork` and a
:class:`SenderWork` do it. This object opens and closes them with the memory of the worker, gives
tickets to them, and keeps the deadlines of tickets. A :class:`PeerPlans` gives them the plans.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base.plan import PEER_ROUTES, group_routes
from aiokv.base.statistics import RankPeerStatistics, ReceiverCounts, SenderCounts
from aiokv.errors import ClosedError, PeerError, UsageError
from aiokv.layout.block_layout import split_layers
from aiokv.layout.mapping import BlockLayout
from aiokv.peers.accepted import AcceptedConnections
from aiokv.peers.device_fragments import DeviceFragmentWork
from aiokv.peers.fragment_work import FragmentWork
from aiokv.peers.mappings import Mappings
from aiokv.peers.messages import MAX_REASON_CHARACTERS
from aiokv.peers.peer_plans import PeerPlans
from aiokv.peers.peer_work import ReceiverWork, SenderWork, SlotWork
from aiokv.peers.receiver import Receiver
from aiokv.peers.ring import LandingRing
from aiokv.peers.sender import Sender
from aiokv.peers.slots import ArenaSlots
from aiokv.peers.ticket import Endpoint, decode, ticket_key
from aiokv.peers.ticket_opener import TicketOpener
from aiokv.peers.transport import PeerMemory
from aiokv.peers.transports import make_transport
from aiokv.peers.wire import listen
from aiokv.worker.layer_marks import LayerMarks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.base.plan import GroupRoute
    from aiokv.layout.regions import Regions
    from aiokv.peers.options import Peers
    from aiokv.peers.peer_work import DeviceCopies
    from aiokv.peers.slot_access import SlotAccess
    from aiokv.peers.transport import Link, Transport
    from aiokv.peers.wire import Connection
    from aiokv.stores.identity import StoreIdentity
    from aiokv.wire.listener import Listener
    from aiokv.worker.device.base import Event
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.plan_table import PlanTable
    from aiokv.worker.poller import EventPoller
    from aiokv.worker.steps import WorkerSteps

LAST_MESSAGES_SECONDS: Final = 0.5  # time to send the last messages when the worker closes
LAST_WRITES_SECONDS: Final = 5.0  # time for threads and writes to end when the worker closes


class PeerTransfers:
    """Peers of one worker: tickets, plans of the peer routes, connections.

    A worker without peers has one, too, which has no routes and does not suspend.

    Args:
        peers: options; None without peers.
        memory: has the peer arena while it is allocated.
        copies: copies between device blocks and slots.
        steps: steps of the model on the device.
        plans: plans of the worker.

    Attributes:
        exist: False without peers.
        routes: routes from and to peers; empty without peers.
        plans: executor of the plans of the routes.
        layout: layout of the blocks of this rank, encoded; empty without peers and before ``open``.
        ticket_key: key of tickets; empty without peers.
    """

    def __init__(
        self,
        peers: Peers | None,
        memory: Callable[[], WorkerMemory],
        copies: DeviceCopies,
        steps: WorkerSteps,
        plans: PlanTable,
    ) -> None:
        self.exist = peers is not None
        self.ticket_key = b"" if peers is None else ticket_key(peers.key)
        self.routes: frozenset[GroupRoute] = (
            group_routes(*PEER_ROUTES) if self.exist else frozenset()
        )
        self._options = peers
        self._memory = memory
        self._copies = copies
        self._steps = steps
        self._poller: EventPoller | None = None
        self._identity: StoreIdentity | None = None
        self._transport: Transport = make_transport(peers)
        self._listener: Listener[Connection] | None = None
        self._accepted = AcceptedConnections(self._transport)
        self._opener: TicketOpener | None = None
        self._receiver: Receiver[Connection] | None = None
        self._sender: Sender[Connection] | None = None
        self.plans = PeerPlans(plans, lambda: self._receiver, lambda: self._sender)
        self._ring: LandingRing[Connection] | None = None
        self.layout = b""
        self._mappings: Mappings | None = None
        self._marks = LayerMarks()
        self._on_ticket_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None
        self._work: SlotAccess | None = None
        self._writes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    # --- memory -----------------------------------------------------------------------------------

    def layer_ranges(self, regions: Regions) -> list[tuple[int, int]]:
        """Return the ranges of layers in which blocks move; empty if they move as a whole only."""
        if self._options is None or self._options.layer_ranges == 1:
            return []
        has_pieces = [bool(regions.layer_pieces(layer)) for layer in range(regions.num_layers)]
        ranges = split_layers(has_pieces, self._options.layer_ranges)
        return ranges if len(ranges) > 1 else []

    def slots(self, regions: Regions) -> tuple[int, int]:
        """Return the slots of the peer arena, and the bytes of each.

        Raises:
            ConfigError: ``ring_bytes`` or ``outgoing_bytes`` is less than a slot.
        """
        slots = ArenaSlots.of(self._checked(), regions)
        return slots.total, slots.slot_bytes

    def _checked(self) -> Peers:
        if self._options is None:
            raise UsageError("the engine has no peers", hint="pass peers=Peers(...) to it")
        return self._options

    # --- opening and closing ----------------------------------------------------------------------

    async def open(
        self,
        identity: StoreIdentity | None,
        poller: EventPoller,
        on_ticket_end: Callable[[bytes, str], None],
    ) -> None:
        """Listen, and prepare the slots; the host memory was allocated before.

        Raises:
            UsageError: ``identity`` is None.
            ConfigError: the address cannot be listened at, or the transport is not available.

        Cancellation: nothing is left behind.
        """
        if not self.exist:
            return
        if identity is None:
            raise UsageError("open: identity is None; peers need it", hint="pass a StoreIdentity")
        options = self._checked()
        self._identity = identity
        self._poller = poller
        self._on_ticket_end = on_ticket_end
        try:
            await self._open_slots()
            if (address := options.listen_address) is not None:
                self._listener = await listen(
                    *address,
                    options.key,
                    self._accepted.add,
                    any_address=options.advertise is not None,
                )
        except BaseException:
            await self.aclose()
            raise

    async def _open_slots(self) -> None:
        """Begin with empty slots: after ``open``, and after a sleep."""
        memory = self._memory()
        regions = memory.regions
        identity = self._identity_now()
        slots = ArenaSlots.of(self._checked(), regions)
        per_slot = slots.blocks_per_slot(identity.block_tokens)
        boundary = slots.first_outgoing * slots.slot_bytes
        num_landing = slots.first_assembly // per_slot
        access, whole = self._open_work(memory)
        landing = msgspec.structs.replace(
            whole,
            num_slots=num_landing,
            slot_bytes=per_slot * slots.slot_bytes,
            view=whole.view and whole.view[: slots.first_assembly * slots.slot_bytes],
        )
        outgoing = msgspec.structs.replace(
            whole,
            address=whole.address + boundary,
            num_slots=slots.outgoing,
            view=whole.view and whole.view[boundary:],
        )
        await self._transport.open(landing, outgoing)
        layout = BlockLayout.of(
            regions,
            identity.block_tokens,
            identity.rank,
            identity.num_ranks,
            windows={name: regions.window_blocks(name) for name in regions.num_window_blocks},
        )
        mappings = self._mappings = Mappings(
            layout,
            slots.outgoing,
            only_equal=self._checked().slots_on_device,
            layer_ranges=self._checked().layer_ranges,
        )
        self.layout = layout.encode()
        parts = SlotWork(
            slots,
            per_slot,
            access,
            mappings,
            self._copies,
            self._steps.clock,
            self.plans,
        )
        if num_landing:
            self._open_receiver(parts, landing, identity)
        self._open_sender(parts, outgoing, identity)

    def _open_receiver(self, parts: SlotWork, landing: PeerMemory, identity: StoreIdentity) -> None:
        mappings = parts.mappings
        work = ReceiverWork(parts, landing)
        self._ring = LandingRing(landing.num_slots)
        self._receiver = Receiver(
            work,
            self._ring,
            rank=identity.rank,
            slot_bytes=landing.slot_bytes,
            source=mappings.source,
            covers=mappings.covers,
            group=mappings.group,
            num_pools=mappings.num_pools,
            num_assembly=parts.arena.assembly,
            transport=self._transport.name,
            metadata=self._accepted.metadata,
            one_sided=self._transport.one_sided,
        )
        work.serve(self._receiver)
        self._accepted.serve(self._receiver, landing)

    def _open_sender(self, parts: SlotWork, outgoing: PeerMemory, identity: StoreIdentity) -> None:
        mappings = parts.mappings
        work = SenderWork(
            parts, outgoing, self._marks, self._writes, self._link, self._on_ticket_end
        )
        self._sender = Sender(
            work,
            num_slots=parts.arena.outgoing,
            rank=identity.rank,
            block_tokens=identity.block_tokens,
            groups=mappings.groups,
            last_range=mappings.last_range,
        )
        work.serve(self._sender)
        self._opener = TicketOpener(
            self._sender,
            self._transport,
            self._checked().key,
            rank=identity.rank,
            block_tokens=identity.block_tokens,
            layout=self.layout,
            layer_ranges=len(mappings.ranges),
        )

    def _link(self, connection: Connection) -> Link | None:
        """Return the link over which fragments are written; None if the connection has ended."""
        return None if self._opener is None else self._opener.link(connection)

    def _open_work(self, memory: WorkerMemory) -> tuple[SlotAccess, PeerMemory]:
        """Return the object that accesses the bytes of the slots, and all slots."""
        poller, slots = self._poller, memory.device_slots
        if poller is None:
            raise ClosedError("the worker is not open")
        if slots is not None:
            self._work = DeviceFragmentWork(slots, poller)
            return self._work, PeerMemory(
                address=slots.address,
                num_slots=slots.num_slots,
                slot_bytes=slots.slot_bytes,
                device=slots.ordinal,
                owner=slots.memory,
            )
        arena = memory.peer_arena
        self._work = self._work or FragmentWork(poller)
        return self._work, PeerMemory(
            address=arena.pointer,
            num_slots=arena.num_blocks,
            slot_bytes=arena.pitch_bytes,
            view=arena.blocks.reshape(-1).data,
        )

    async def sleep(self) -> None:
        """End all tickets and connections until ``wake_up``: the memory will be freed.

        Cancellation: call it again, or ``wake_up``.
        """
        if not self.exist or self._sender is None:
            return
        self._end_tickets("the engine sleeps")
        await self._end_connections("the engine sleeps")
        await self._transport.aclose()
        self._accepted.refuse()
        self._receiver = self._sender = self._ring = self._opener = None

    async def wake_up(self) -> None:
        """Begin with empty slots after ``sleep``, if all memory is allocated again.

        Cancellation: call it again, or ``sleep``.
        """
        if self.exist and self._sender is None and not self._memory().asleep:
            await self._open_slots()

    def give_up(self, reason: str) -> None:
        """End all tickets; their plans end when their device copies have. Idempotent."""
        self._end_tickets(reason)
        if self._opener is not None:
            self._opener.release_ended()

    async def aclose(self) -> None:
        """Close all connections and join the threads; no plan is in flight. Idempotent.

        Cancellation: call it again.
        """
        self._closing = True
        if self._opener is not None:
            self._opener.stop()
        if self._listener is not None:
            await self._listener.aclose()
        self._cancel_timer()
        await self._end_connections("the engine closed")
        await self._transport.aclose()
        if self._work is not None:
            self._work.close()

    def close_without_loop(self) -> None:
        """As ``aclose``, after the loop was closed: nothing is reported."""
        self._closing = True
        if self._work is not None:
            self._work.close()

    def _end_tickets(self, reason: str) -> None:
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close(reason)

    async def _end_connections(self, reason: str) -> None:
        connections = self._all_connections()
        for connection in connections:
            connection.close()
        waiting = [asyncio.ensure_future(connection.closed()) for connection in connections]
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_MESSAGES_SECONDS)
            for waiter in waiting:
                waiter.cancel()
        for connection in connections:
            connection.abort(reason)
        if self._opener is not None:
            await self._opener.aclose()
        if self._writes:
            await asyncio.wait(list(self._writes), timeout=LAST_WRITES_SECONDS)
        await self._accepted.finish(LAST_WRITES_SECONDS)
        if self._work is not None:
            await self._work.finish()
        await asyncio.sleep(0)  # let the handlers record the ends
        await self._accepted.cancel_fences()

    def _all_connections(self) -> list[Connection]:
        """Return the connections that senders have opened, and those that have links."""
        opened = [] if self._opener is None else self._opener.connections
        return [*self._accepted.connections, *opened]

    # --- tickets ----------------------------------------------------------------------------------

    @property
    def endpoints(self) -> list[Endpoint]:
        """Address at which this rank listens; empty when it only sends."""
        if self._listener is None or self._identity is None:
            return []
        host, port = self._checked().advertised(self._listener.address[1])
        return [
            Endpoint(
                host=host,
                port=port,
                rank=self._identity.rank,
                num_ranks=self._identity.num_ranks,
                layout=self.layout,
                transport=self._transport.name,
            )
        ]

    def expect(self, ticket: bytes, seconds: float, open_seconds: float) -> None:
        """Let senders open a ticket of this engine; see :meth:`Tickets.expect`.

        Raises:
            UsageError: the ticket is malformed; or the engine does not listen, or sleeps.
            PeerError: the ticket was made with another secret.
            ClosedError: the worker closes.
        """
        self._check_usable()
        if self._receiver is None:
            raise UsageError(
                "the engine does not listen for peers", hint="set Peers(listen=...), and wake it up"
            )
        now = self._now()
        decoded = decode(ticket, self.ticket_key)
        self._receiver.expect(decoded, now + seconds, now + open_seconds)
        self._arm()

    async def expected(self, ticket_id: bytes, seconds: float) -> None:
        """Return at once: ``expect`` has had its effect."""

    def change_weights(self, version: str) -> None:
        """Open tickets of this version of the weights only; see :meth:`Worker.change_weights`."""
        if self._identity is not None:
            self._identity = msgspec.structs.replace(self._identity, weights_version=version)

    async def open_ticket(self, blob: bytes, layouts: Sequence[bytes] = ()) -> None:
        """Connect to the receivers of a ticket that need blocks of this rank, and let them accept.

        Args:
            blob: the ticket.
            layouts: layouts of all ranks of this engine, by rank; empty for an engine of one rank.

        Raises:
            UsageError: the ticket is malformed, is in use, or the engine has no peers.
            PeerError: the ticket was made with another secret; the receiver cannot be reached, or
                refuses. Nothing is left behind.
            LayoutError: the blocks of the two sides cannot be mapped. Nothing is left behind.
            ClosedError: the worker closes.

        Cancellation: nothing is left behind.
        """
        self._check_usable()
        ticket = decode(blob, self.ticket_key)
        opener, mappings = self._opener, self._mappings
        if opener is None or mappings is None:
            raise UsageError("the engine sleeps", hint="await engine.wake_up() first")
        opener.check_unused(ticket.ticket_id)
        deadline = self._now() + ticket.timeout_seconds
        if ticket.transport != self._transport.name:
            raise PeerError(
                f"the transport of the receiver is {ticket.transport!r}, of this engine "
                f"{self._transport.name!r}",
                hint="set the same Peers(transport=...) on both servers",
            )
        await opener.open(ticket, mappings.receivers(ticket, layouts), deadline)
        self._arm()

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket on both sides of this worker; its plans are given up. Idempotent.

        Args:
            ticket_id: id of the ticket.
            reason: for the other engine.
        """
        reason = reason[:MAX_REASON_CHARACTERS]
        for end in (self._receiver, self._sender):
            if end is not None:
                end.close_ticket(ticket_id, reason)
        if self._opener is not None:
            self._opener.close_ticket(ticket_id)
        self._marks.forget(ticket_id)

    @property
    def layer_ends(self) -> list[int]:
        """End of each range of layers in which blocks are sent; see :attr:`Tickets.layer_ends`."""
        return [] if self._mappings is None else [end for _, end in self._mappings.ranges]

    def layers_done(self, ticket_id: bytes, mark: int, event: Event | None) -> None:
        """Note that work was submitted; see :meth:`Tickets.layers_done`."""
        self._steps.open_poller()
        self._steps.check_event(event)
        if self._sender is not None and ticket_id in self._sender.ticket_ids:
            self._marks.note(ticket_id, mark, event)
            self._sender.release_held()

    # --- plans ------------------------------------------------------------------------------------

    def step_closed(self) -> None:
        """Send the plans that waited for a step."""
        if self._sender is not None:
            self._sender.release_held()

    def statistics(self) -> list[RankPeerStatistics]:
        """Return the use of peers; empty without peers."""
        if not self.exist:
            return []
        ring = self._ring
        return [
            RankPeerStatistics(
                received=ReceiverCounts() if self._receiver is None else self._receiver.counts(),
                sent=SenderCounts() if self._sender is None else self._sender.counts(),
                landing_slots=0 if ring is None else ring.num_slots,
                free_slots=0 if ring is None else ring.free_slots,
                connections=0 if self._opener is None else self._opener.open_connections,
            )
        ]

    def violations(self) -> list[str]:
        """Return a description of each violated invariant."""
        ends = (self._receiver, self._sender)
        return [text for end in ends if end is not None for text in end.violations()]

    # --- deadlines --------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Wait for the next deadline of a ticket."""
        ends = [end.next_deadline for end in (self._receiver, self._sender) if end is not None]
        deadlines = [deadline for deadline in ends if deadline is not None]
        self._cancel_timer()
        if deadlines and not self._closing:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(min(deadlines), self._expire)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        now = self._now()
        for end in (self._receiver, self._sender):
            if end is not None:
                end.expire(now)
        if self._opener is not None:
            self._opener.release_ended()
        self._arm()

    # --- helpers ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._checked()
        if self._closing or self._poller is None:
            raise ClosedError("the worker is closed, or not open")

    def _identity_now(self) -> StoreIdentity:
        if self._identity is None:
            raise ClosedError("the worker is not open")
        return self._identity

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
