"""PeerTransfers: plans between device blocks and peers, of one worker.

::

    RECEIVE   connection ─► landing slot ─► verify ─► device copy ─► report
    SEND      device copy ─► outgoing slot ─► seal ─► connection ─► acknowledged ─► report

The :class:`Receiver` and the :class:`Sender` decide what to do next; this object does it: messages,
device copies, threads, the deadlines of tickets. A plan is reported exactly once, in a callback of
the loop, when nothing accesses its device blocks any more.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, TypeVar

import msgspec

from aiokv.errors import ClosedError, LayoutError, PeerError, UsageError
from aiokv.observe.logs import Log
from aiokv.peers.connections import Connections
from aiokv.peers.layout import BlockLayout
from aiokv.peers.mappings import Mappings
from aiokv.peers.messages import (
    MAX_REASON_CHARACTERS,
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Landed,
    Open,
    Refused,
)
from aiokv.peers.receiver import Parcel as Received
from aiokv.peers.receiver import Receive, Receiver, ReceiverCounts, SlotCopy
from aiokv.peers.ring import LandingRing
from aiokv.peers.sender import Parcel as Sent
from aiokv.peers.sender import Send, Sender, SenderCounts, SlotFill, Target
from aiokv.peers.slots import ArenaSlots
from aiokv.peers.ticket import Endpoint, Ticket, decode, ticket_key
from aiokv.peers.transport import Outgoing, PeerMemory
from aiokv.peers.transports import make_transport
from aiokv.peers.wire import Connection, listen
from aiokv.plan import PEER_ROUTES, RECEIVE, SEND, TransferReport
from aiokv.worker.device.base import CopyError
from aiokv.worker.interrupts import call_surely
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.parcel_work import ParcelWork
from aiokv.worker.store_transfers import RunningCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from aiokv.peers.messages import Message
    from aiokv.peers.options import Peers
    from aiokv.peers.transport import Link, Transport
    from aiokv.peers.wire import Listener
    from aiokv.plan import Outcome, Route, TransferPlan
    from aiokv.stores.identity import StoreIdentity
    from aiokv.worker.base import Cancelled
    from aiokv.worker.lanes import LaneStatistics
    from aiokv.worker.memory import WorkerMemory
    from aiokv.worker.poller import EventPoller
    from aiokv.worker.regions import Regions

log = Log(__name__)

T = TypeVar("T")

CONNECT_SECONDS: Final = 10.0  # for the replies to Open; less if the ticket has less
SPARE_SECONDS: Final = 1.0
LAST_MESSAGES_SECONDS: Final = 0.5  # for the last messages to be sent, when the worker closes
QUARANTINE_LOG_SECONDS: Final = 10.0  # after which slots in quarantine are logged
LAST_WRITES_SECONDS: Final = 5.0  # for threads and writes to end, when the worker closes


class DeviceCopies(Protocol):
    """Copies between device blocks and slots of the peer arena, for PeerTransfers."""

    def new_copy_id(self) -> int:
        """Return an id that no other copy has."""

    def copy(
        self,
        copy_id: int,
        route: Route,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        after_step: int,
        on_end: Callable[[CopyError | None], None],
    ) -> None:
        """Begin a copy behind a step; without effect while a copy of this id is in flight.

        ``on_end`` is called once, in a callback of the loop, with the failure or None; again when
        an interrupt kept it from returning.
        """

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a copy that the device does not have; its ``on_end`` follows."""

    def is_open(self, step: int) -> bool:
        """Return True while work of the step may not have been submitted yet."""


class RankPeerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the connections to peers since the engine was made.

    Attributes:
        rank: number of the rank; None without ranks.
        received: tickets and parcels that this rank receives.
        sent: tickets and parcels that this rank sends.
        landing_slots: slots of the landing ring, and ``free_slots`` those without an owner.
        free_slots: see ``landing_slots``.
        connections: connections to receivers that are open.
    """

    rank: int | None = None
    received: ReceiverCounts
    sent: SenderCounts
    landing_slots: int
    free_slots: int
    connections: int


class _Transfer:
    """A plan in flight; ``end`` is set when it is at rest."""

    def __init__(self, plan: TransferPlan, counter: LayerDoneCounter, num_bytes: int) -> None:
        self.plan = plan
        self.counter = counter
        self.num_bytes = num_bytes
        self.is_cancelled = False
        self.end: tuple[int, CopyError | None] | None = None  # leading blocks, failure
        self.reported = False


class _ReceiverEnd:
    """Handler of a connection that a sender has opened."""

    def __init__(self, transfers: PeerTransfers, connection: Connection) -> None:
        self._transfers = transfers
        self._connection = connection

    def on_message(self, message: Message) -> None:
        self._transfers.on_sender_message(self._connection, message)

    def place(self, landed: Landed) -> memoryview | None:
        return self._transfers.slot_for(self._connection, landed)

    def on_parcel(self, landed: Landed) -> None:
        self._transfers.on_parcel(self._connection, landed)

    def on_closed(self, reason: str) -> None:
        self._transfers.on_sender_closed(self._connection, reason)


class _SenderEnd:
    """Handler of a connection that this rank has opened."""

    def __init__(self, transfers: PeerTransfers, connection: Connection) -> None:
        self._transfers = transfers
        self._connection = connection

    def on_message(self, message: Message) -> None:
        self._transfers.on_receiver_message(self._connection, message)

    def place(self, landed: Landed) -> memoryview | None:
        return None  # a receiver sends no parcels

    def on_parcel(self, landed: Landed) -> None:
        """Do nothing: ``place`` discards all parcels."""

    def on_closed(self, reason: str) -> None:
        self._transfers.on_receiver_closed(self._connection, reason)


class PeerTransfers:
    """Peers of one worker: tickets, plans of the peer routes, connections.

    A worker without peers has one, too, which has no routes and does not suspend.

    Args:
        peers: options; None without peers.
        memory: has the peer arena while it is allocated.
        copies: copies between device blocks and slots.
        on_end: called with the id of each plan after its report.

    Attributes:
        exist: False without peers.
        routes: routes from and to peers; empty without peers.
        layout: of the blocks of this rank, encoded; empty without peers and before ``open``.
        ticket_key: key of tickets; empty without peers.
    """

    def __init__(
        self,
        peers: Peers | None,
        memory: Callable[[], WorkerMemory],
        copies: DeviceCopies,
        on_end: Callable[[int], None],
    ) -> None:
        self.exist = peers is not None
        self.ticket_key = b"" if peers is None else ticket_key(peers.key)
        self.routes: frozenset[Route] = PEER_ROUTES if self.exist else frozenset()
        self._options = peers
        self._memory = memory
        self._copies = copies
        self._on_end = on_end
        self._on_report: Callable[[TransferReport], None] = lambda report: None
        self._poller: EventPoller | None = None
        self._identity: StoreIdentity | None = None
        self._transport: Transport = make_transport(peers)
        self._listener: Listener | None = None
        self._connections: Connections | None = None
        self._receiver: Receiver[Connection] | None = None
        self._sender: Sender[Connection] | None = None
        self._ring: LandingRing[Connection] | None = None
        self.layout = b""
        self._mappings: Mappings | None = None
        self._slots: ArenaSlots | None = None
        self._blocks_per_slot = 1  # of the landing ring
        self._landing: PeerMemory | None = None
        self._outgoing: PeerMemory | None = None
        self._work: ParcelWork | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # writes and fences in progress
        self._accepted: set[Connection] = set()  # opened by senders
        self._accepting: dict[Connection, list[Message]] = {}  # messages behind the first Open
        self._accept_metadata: dict[Connection, bytes] = {}  # of one-sided transports
        self._fences: set[asyncio.Task[None]] = set()
        self._links: dict[Connection, Link] = {}
        self._linking: dict[Connection, asyncio.Lock] = {}  # held while a link is connected
        self._acquired: dict[bytes, list[tuple[str, int]]] = {}  # endpoints, by ticket
        # Tickets that are being opened; done when they were closed meanwhile.
        self._opening: dict[bytes, asyncio.Future[None]] = {}
        self._replies: dict[tuple[Connection, bytes], asyncio.Future[Accepted]] = {}
        # Number of replies that no caller waits for any more, and that have not come.
        self._late_replies: dict[tuple[Connection, bytes], int] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._counts = {RECEIVE: RunningCounts(), SEND: RunningCounts()}
        self._timers: list[asyncio.TimerHandle] = []
        self._closing = False

    # --- memory -----------------------------------------------------------------------------------

    def slots(self, regions: Regions) -> tuple[int, int]:
        """Return the slots of the peer arena, and the bytes of each.

        Raises:
            ConfigError: ``ring_bytes`` or ``outgoing_bytes`` is less than a slot.
        """
        slots = ArenaSlots.of(self._checked(), regions)
        return slots.total, slots.block_bytes

    def _checked(self) -> Peers:
        if self._options is None:
            raise UsageError("the engine has no peers", hint="pass peers=Peers(...) to it")
        return self._options

    # --- opening and closing ----------------------------------------------------------------------

    async def open(
        self,
        identity: StoreIdentity | None,
        poller: EventPoller,
        on_report: Callable[[TransferReport], None],
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
        self._poller, self._on_report = poller, on_report
        self._work = ParcelWork(poller)
        try:
            await self._open_slots()
            self._connections = Connections(options.key, self._new_sender_end)
            if (address := options.listen_address) is not None:
                self._listener = await listen(
                    *address,
                    options.key,
                    self._on_connection,
                    any_address=options.advertise is not None,
                )
        except BaseException:
            await self.aclose()
            raise

    async def _open_slots(self) -> None:
        """Begin with empty slots: after ``open``, and after a sleep."""
        memory = self._memory()
        arena, regions = memory.peer_arena, memory.regions
        identity = self._identity_now()
        slots = self._slots = ArenaSlots.of(self._checked(), regions)
        per_slot = self._blocks_per_slot = slots.blocks_per_slot(identity.block_tokens)
        view = arena.blocks.reshape(-1).data
        border = slots.first_outgoing * slots.block_bytes
        num_landing = slots.first_assembly // per_slot
        self._landing = PeerMemory(
            address=arena.pointer,
            num_slots=num_landing,
            slot_bytes=per_slot * slots.block_bytes,
            view=view[: slots.first_assembly * slots.block_bytes],
        )
        self._outgoing = PeerMemory(
            address=arena.pointer + border,
            num_slots=slots.outgoing,
            slot_bytes=slots.block_bytes,
            view=view[border:],
        )
        await self._transport.open(self._landing, self._outgoing)
        rank = identity.rank
        layout = BlockLayout.of(regions, identity.block_tokens, rank, identity.num_ranks)
        mappings = self._mappings = Mappings(layout, slots.outgoing)
        self.layout = layout.encode()
        if num_landing:
            self._ring = LandingRing(num_landing)
            self._receiver = Receiver(
                self,
                self._ring,
                rank=rank,
                slot_bytes=self._landing.slot_bytes,
                source=mappings.source,
                covers=mappings.covers,
                num_assembly=slots.assembly,
                transport=self._transport.name,
                metadata=lambda connection: self._accept_metadata.get(connection, b""),
                one_sided=self._transport.one_sided,
            )
        self._sender = Sender(
            self, num_slots=slots.outgoing, rank=rank, block_tokens=identity.block_tokens
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
        self._landing = self._outgoing = None
        self._receiver = self._sender = self._ring = None

    async def wake_up(self) -> None:
        """Begin with empty slots after ``sleep``, if all memory is allocated again.

        Cancellation: call it again, or ``sleep``.
        """
        if self.exist and self._sender is None and not self._memory().asleep:
            self._connections = Connections(self._checked().key, self._new_sender_end)
            await self._open_slots()

    def give_up(self, reason: str) -> None:
        """End all tickets; their plans end when their device copies have. Idempotent."""
        self._end_tickets(reason)
        self._release_ended()

    async def aclose(self) -> None:
        """Close all connections and join the threads; no plan is in flight. Idempotent.

        Cancellation: call it again.
        """
        self._closing = True
        if self._listener is not None:
            await self._listener.aclose()
        self._cancel_timers()
        await self._end_connections("the engine closed")
        await self._transport.aclose()
        if self._work is not None:
            self._work.close()
        self._landing = self._outgoing = None

    def close_without_loop(self) -> None:
        """As ``aclose``, after the loop was closed: nothing is reported."""
        self._closing = True
        if self._work is not None:
            self._work.close()

    def _end_tickets(self, reason: str) -> None:
        for end in (self._receiver, self._sender):
            if end is not None:
                self._surely(partial(end.close, reason))

    async def _end_connections(self, reason: str) -> None:
        connections = [*self._accepted, *self._links]
        for connection in connections:
            connection.close()
        waiting = [asyncio.ensure_future(connection.closed()) for connection in connections]
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_MESSAGES_SECONDS)
            for waiter in waiting:
                waiter.cancel()
        for connection in connections:
            connection.abort(reason)
        if self._connections is not None:
            await self._connections.aclose()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=LAST_WRITES_SECONDS)
        if self._work is not None:
            await self._work.finish()
        await asyncio.sleep(0)  # the handlers have noted the ends
        for fence in self._fences:
            fence.cancel()  # the transport closes what they wait for
        if self._fences:
            await asyncio.wait(list(self._fences))
        self._acquired.clear()

    # --- tickets ----------------------------------------------------------------------------------

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where this rank listens; empty when it only sends."""
        if self._listener is None or self._identity is None:
            return []
        host, port = self._checked().advertised(self._listener.port)
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

    def expect(self, ticket: bytes, seconds: float) -> None:
        """Let senders open a ticket of this engine, for some seconds.

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
        self._receiver.expect(decode(ticket, self.ticket_key), self._now() + seconds)
        self._arm()

    def change_weights(self, version: str) -> None:
        """Open tickets of this version of the weights only; see :meth:`Worker.change_weights`."""
        if self._identity is not None:
            self._identity = msgspec.structs.replace(self._identity, weights_version=version)

    async def open_ticket(self, blob: bytes, layouts: Sequence[bytes] = ()) -> None:
        """Connect to the receivers of a ticket that need blocks of this rank, and let them accept.

        Args:
            blob: the ticket.
            layouts: of all ranks of this engine, by rank; empty for an engine of one rank.

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
        sender, connections, mappings = self._sender, self._connections, self._mappings
        if sender is None or connections is None or mappings is None:
            raise UsageError("the engine sleeps", hint="await engine.wake_up() first")
        if ticket.ticket_id in self._acquired or ticket.ticket_id in self._opening:
            raise UsageError(f"ticket {ticket.ticket_id.hex()} is being sent already")
        deadline = self._now() + ticket.timeout_seconds
        if ticket.transport != self._transport.name:
            raise PeerError(
                f"the transport of the receiver is {ticket.transport!r}, of this engine "
                f"{self._transport.name!r}",
                hint="set the same Peers(transport=...) on both servers",
            )
        receivers = mappings.receivers(ticket, layouts)
        acquired = self._acquired[ticket.ticket_id] = []
        opening = self._opening[ticket.ticket_id] = asyncio.get_running_loop().create_future()
        accepted: dict[int, Target[Connection]] = {}
        try:
            for endpoint, mapping in receivers:
                timeout = min(CONNECT_SECONDS, ticket.timeout_seconds)
                connection = await connections.acquire(
                    endpoint.host, endpoint.port, timeout=timeout
                )
                acquired.append((endpoint.host, endpoint.port))
                self._check_opening(opening)
                target = accepted[endpoint.rank] = Target(connection, mapping)
                await self._ask(target, ticket, endpoint, timeout)
            self._check_usable()
            self._check_opening(opening)
            if any(target.connection.reason for target in accepted.values()):
                raise PeerError("the connection to the receiver ended")
            sender.add_ticket(ticket, deadline, accepted)
        except BaseException:
            for target in accepted.values():
                cancel = Cancel(ticket_id=ticket.ticket_id, reason="the sender gave up")
                target.connection.send(cancel)
            self._release(ticket.ticket_id)
            raise
        finally:
            del self._opening[ticket.ticket_id]
        self._arm()

    @staticmethod
    def _check_opening(opening: asyncio.Future[None]) -> None:
        """Raise ``PeerError`` if the ticket was closed while it is being opened."""
        if opening.done():
            raise PeerError("the ticket was closed while it was opened")

    async def _ask(
        self, target: Target[Connection], ticket: Ticket, endpoint: Endpoint, timeout: float
    ) -> None:
        """Send Open, and wait for the reply."""
        identity, connection = self._identity_now(), target.connection
        reply: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._replies[connection, ticket.ticket_id] = reply
        where = f"{endpoint.host}:{endpoint.port}"
        try:
            connection.send(
                Open(
                    protocol=PROTOCOL_VERSION,
                    ticket_id=ticket.ticket_id,
                    generation=ticket.generation,
                    sender_rank=identity.rank,
                    receiver_rank=endpoint.rank,
                    sender_block_tokens=identity.block_tokens,
                    layout=self.layout,
                    transport=self._transport.name,
                    transport_metadata=self._transport.metadata(),
                )
            )
            async with asyncio.timeout(timeout):
                accepted = await reply
            if accepted.slot_bytes < target.parcel_bytes:
                raise LayoutError(
                    f"the receiver at {where} has slots of {accepted.slot_bytes} bytes; a parcel "
                    f"takes {target.parcel_bytes} bytes"
                )
            await self._connect_link(connection, accepted.transport_metadata)
        except TimeoutError:
            raise PeerError(
                f"the receiver at {where} did not reply within {timeout:.3g} s"
            ) from None
        finally:
            key = (connection, ticket.ticket_id)
            if self._replies.pop(key, None) is not None and not connection.reason:
                self._late_replies[key] = self._late_replies.get(key, 0) + 1

    async def _connect_link(self, connection: Connection, metadata: bytes) -> None:
        """Give a connection its link; tickets that are opened at the same time share it.

        Raises:
            PeerError: the connection has ended, or the transport cannot connect.
        """
        if not connection.reason:
            async with self._linking.setdefault(connection, asyncio.Lock()):
                if connection not in self._links and not connection.reason:
                    link = await self._transport.connect(connection, metadata)
                    if not connection.reason:  # otherwise the link gives itself up
                        self._links[connection] = link
        if connection.reason:
            raise PeerError(f"the connection to the receiver ended: {connection.reason}")

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket on both sides of this worker; its plans are given up. Idempotent.

        Args:
            ticket_id: of the ticket.
            reason: for the other engine.
        """
        reason = reason[:MAX_REASON_CHARACTERS]
        for end in (self._receiver, self._sender):
            if end is not None:
                self._surely(partial(end.close_ticket, ticket_id, reason))
        opening = self._opening.get(ticket_id)
        if opening is None:
            self._release(ticket_id)
        elif not opening.done():
            opening.set_result(None)  # open_ticket releases what it has acquired
            for (_, asked), reply in self._replies.items():
                if asked == ticket_id and not reply.done():
                    reply.set_exception(PeerError("the ticket was closed while it was opened"))
        self._surely(self._reclaim)

    def _release_ended(self) -> None:
        """End the use of connections by tickets that have ended by themselves. Idempotent."""
        live = () if self._sender is None else self._sender.ticket_ids
        for ticket_id in self._acquired.keys() - self._opening.keys() - set(live):
            self._release(ticket_id)

    def _release(self, ticket_id: bytes) -> None:
        for host, port in self._acquired.pop(ticket_id, ()):
            if self._connections is not None:
                self._connections.release(host, port)

    # --- plans ------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of the plans that were not reported yet."""
        return self._transfers.keys()

    def submit(self, plan: TransferPlan, num_bytes: int) -> LayerDoneCounter:
        """Take a plan that was checked."""
        counter = LayerDoneCounter(0, transfer_id=plan.transfer_id, direction=plan.direction)
        transfer = self._transfers[plan.transfer_id] = _Transfer(plan, counter, num_bytes)
        self._counts[plan.route].begin(plan.transfer_id)
        end = self._receiver if plan.route == RECEIVE else self._sender
        if end is None:
            transfer.end = (0, CopyError(0, f"the engine has no route {plan.route} now"))
            self._end_soon(transfer)
        else:
            end.submit(plan)
        return counter

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.counter

    def cancel(self, transfer_id: int) -> Cancelled:
        """Give up a plan: no further byte of it moves, and its report follows."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.end is not None:
            return "too late"
        transfer.is_cancelled = True
        for end in (self._receiver, self._sender):
            if end is not None:
                self._surely(partial(end.cancel, transfer_id, "cancelled"))
        return "asked"

    def step_closed(self) -> None:
        """Send the plans that waited for a step."""
        if self._sender is not None:
            self._surely(self._sender.step_closed)

    def lane_statistics(self) -> dict[Route, LaneStatistics]:
        """Return the counts of each route. Any thread."""
        if not self.exist:
            return {}
        return {route: counts.statistics() for route, counts in self._counts.items()}

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
                connections=0 if self._connections is None else self._connections.open_connections,
            )
        ]

    def violations(self) -> list[str]:
        """Return a description of each violated invariant."""
        ends = (self._receiver, self._sender)
        return [text for end in ends if end is not None for text in end.violations()]

    # --- connections ------------------------------------------------------------------------------

    def _on_connection(self, connection: Connection) -> None:
        self._accepted.add(connection)
        connection.start(_ReceiverEnd(self, connection))

    def _new_sender_end(self, connection: Connection) -> _SenderEnd:
        return _SenderEnd(self, connection)

    def on_sender_message(self, connection: Connection, message: Message) -> None:
        """Take a message of a sender."""
        self._guarded(partial(self._take_of_sender, connection, message))

    def _take_of_sender(self, connection: Connection, message: Message) -> None:
        receiver = self._receiver
        if connection in self._accepting:
            self._accepting[connection].append(message)
        elif isinstance(message, Landed):  # of a one-sided transport
            if self._begin_parcel(connection, message):
                self.on_parcel(connection, message)
        elif receiver is None:
            if isinstance(message, Open):
                refused = Refused(ticket_id=message.ticket_id, kind="ticket", reason="it sleeps")
                connection.send(refused)
        elif self._needs_accept(message, connection):
            self._accepting[connection] = [message]
            self._spawn(self._accept(connection, message))
        else:
            receiver.on_message(connection, message)

    def _needs_accept(self, message: Message, connection: Connection) -> TypeGuard[Open]:
        return (
            self._transport.one_sided
            and isinstance(message, Open)
            and message.transport == self._transport.name
            and connection not in self._accept_metadata
        )

    async def _accept(self, connection: Connection, first: Open) -> None:
        """Prepare the transport for a sender, then handle its messages in order."""
        refusal = ""
        try:
            metadata = await self._transport.accept(connection, first.transport_metadata)
        except PeerError as error:
            metadata, refusal = b"", str(error)[:MAX_REASON_CHARACTERS]
        except Exception as error:
            metadata = b""
            self._abort_for(connection, error)
        finally:
            messages = self._accepting.pop(connection)
        self._accept_metadata[connection] = metadata
        if connection.reason:  # on_sender_closed was called before
            self._end_accepted(connection, may_write=False)
            return
        if refusal:
            refused = Refused(ticket_id=first.ticket_id, kind="ticket", reason=refusal)
            connection.send(refused)
            connection.close()
            return
        try:
            for message in messages:
                self.on_sender_message(connection, message)
        except Exception as error:
            self._abort_for(connection, error)

    def _abort_for(self, connection: Connection, error: Exception) -> None:
        """Cut a connection for an error of this process, and report the error to the loop."""
        connection.abort(f"an internal error: {error!r}")
        asyncio.get_running_loop().call_exception_handler(
            {
                "message": f"aiokv: an error cut the connection to {connection.remote}",
                "exception": error,
            }
        )

    def slot_for(self, connection: Connection, landed: Landed) -> memoryview | None:
        """Return the slot for a parcel, or None to discard it."""
        landing = self._landing
        if landing is None or not self._begin_parcel(connection, landed):
            return None
        return landing.slot(landed.slot, landed.parcel_bytes)

    def _begin_parcel(self, connection: Connection, landed: Landed) -> bool:
        """Return False for a parcel to discard."""
        receiver, landing = self._receiver, self._landing
        if receiver is None or landing is None or landed.parcel_bytes > landing.slot_bytes:
            return False
        return receiver.begin_parcel(connection, landed) == "land"

    def on_parcel(self, connection: Connection, landed: Landed) -> None:
        """Note that a parcel is in its slot."""
        if self._receiver is not None:
            self._guarded(partial(self._receiver.end_parcel, connection, landed))

    def on_sender_closed(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection that a sender had opened."""
        self._surely(partial(self._end_sender, connection, reason))

    def _end_sender(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection that a sender had opened. Idempotent."""
        may_write = self._receiver is not None and self._receiver.on_closed(connection, reason)
        self._accepted.discard(connection)
        if connection in self._accept_metadata:
            self._end_accepted(connection, may_write=may_write)

    def _end_accepted(self, connection: Connection, *, may_write: bool) -> None:
        """Free the slots of a connection that has ended when its sender cannot write any more."""
        del self._accept_metadata[connection]
        fence = asyncio.get_running_loop().create_task(self._fence(connection, may_write))
        self._fences.add(fence)
        fence.add_done_callback(self._fences.discard)

    async def _fence(self, connection: Connection, may_write: bool) -> None:
        receiver = self._receiver
        warning = asyncio.get_running_loop().call_later(
            QUARANTINE_LOG_SECONDS,
            partial(
                log.warning,
                "peer.slots_in_quarantine",
                remote=connection.remote,
                reason="the sender may still write, and has not closed its connection",
            ),
        )
        try:
            await self._transport.fence(connection, may_write=may_write)
        except PeerError as error:
            log.error("peer.slots_left_in_quarantine", remote=connection.remote, reason=str(error))
            return
        finally:
            warning.cancel()
        if receiver is not None and receiver is self._receiver:
            receiver.fenced(connection)

    def on_receiver_message(self, connection: Connection, message: Message) -> None:
        """Take a message of a receiver."""
        if isinstance(message, Accepted | Refused):
            key = (connection, message.ticket_id)
            if late := self._late_replies.pop(key, 0):  # to an Open that was given up
                if late > 1:
                    self._late_replies[key] = late - 1
                return
            reply = self._replies.pop(key, None)
            if reply is None or reply.done():
                return
            if isinstance(message, Accepted):
                reply.set_result(message)
            else:
                error = LayoutError if message.kind == "layout" else PeerError
                reply.set_exception(error(f"the receiver refuses the ticket: {message.reason}"))
        elif self._sender is not None:
            self._guarded(partial(self._sender.on_message, connection, message))

    def on_receiver_closed(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection that this rank had opened."""
        self._surely(partial(self._end_receiver, connection, reason))

    def _end_receiver(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection that this rank had opened. Idempotent."""
        self._links.pop(connection, None)
        self._linking.pop(connection, None)
        for key in [key for key in self._late_replies if key[0] is connection]:
            del self._late_replies[key]
        for (other, _), reply in list(self._replies.items()):
            if other is connection and not reply.done():
                reply.set_exception(PeerError(f"the connection to the receiver ended: {reason}"))
        if self._sender is not None:
            self._sender.on_closed(connection, reason)
        self._release_ended()

    # --- work of the receiver and the sender ------------------------------------------------------

    def send(self, connection: Connection, message: Message) -> None:
        """Send a message."""
        connection.send(message)

    def is_open(self, step: int) -> bool:
        """Return True while work of the step may not have been submitted yet."""
        return self._copies.is_open(step)

    def verify(self, parcels: Sequence[Received]) -> None:
        """Verify parcels, together with the others of this pass of the loop."""
        if self._work is not None and self._landing is not None:
            self._work.verify(self._landing, parcels, self._verified)

    def _verified(self, parcels: list[Received], are_right: list[bool]) -> None:
        if self._receiver is not None:
            self._guarded(partial(self._receiver.verified, parcels, are_right))

    def place(self, parcels: Sequence[Received], slots: Sequence[dict[int, int]]) -> None:
        """Place parcels in assembly slots."""
        memory, arena = self._landing, self._slots
        if self._work is None or memory is None or arena is None:
            return
        first = memory.address + arena.first_assembly * arena.block_bytes
        addresses = [
            {block: first + slot * arena.block_bytes for block, slot in targets.items()}
            for targets in slots
        ]
        self._work.place(memory, parcels, addresses, partial(self._placed, list(parcels)))

    def _placed(self, parcels: list[Received], is_done: bool) -> None:
        if self._receiver is None:
            return
        if not is_done:
            for parcel in parcels:
                self._receiver.close_ticket(parcel.ticket_id, "an internal error")
        self._guarded(partial(self._receiver.placed, parcels))

    def copy(self, copy: SlotCopy) -> None:
        """Copy landing slots or assembly slots to device blocks."""
        self._surely(partial(self._begin_copy, copy))

    def _begin_copy(self, copy: SlotCopy) -> None:
        """Begin a copy, unless it has begun. Idempotent."""
        receiver, arena = self._receiver, self._slots
        if receiver is None or arena is None or copy.is_begun or not receiver.admit(copy):
            return
        first, pitch = 0, self._blocks_per_slot
        if copy.is_assembled:
            first, pitch = arena.first_assembly, 1
        copy.copy_id = copy.copy_id or self._copies.new_copy_id()
        self._copies.copy(
            copy.copy_id,
            RECEIVE,
            [first + slot * pitch for slot in copy.slots],
            copy.device_ids,
            copy.receive.plan.after_step,
            lambda failure: self._guarded(partial(receiver.copied, copy, failure)),
        )
        copy.is_begun = True

    def take_back(self, copy: SlotCopy) -> None:
        """Cancel a copy, unless the device has it. Idempotent."""
        self._copies.cancel(copy.copy_id)

    def fill(self, fill: SlotFill) -> None:
        """Copy device blocks to outgoing slots."""
        self._surely(partial(self._begin_fill, fill))

    def _begin_fill(self, fill: SlotFill) -> None:
        """Begin a copy, unless it has begun. Idempotent."""
        sender, arena = self._sender, self._slots
        if sender is None or arena is None or fill.is_begun or not sender.admit(fill):
            return
        fill.copy_id = fill.copy_id or self._copies.new_copy_id()
        self._copies.copy(
            fill.copy_id,
            SEND,
            fill.device_ids,
            [arena.first_outgoing + slot for slot in fill.slots],
            fill.send.plan.after_step,
            lambda failure: self._guarded(partial(sender.filled, fill, failure)),
        )
        fill.is_begun = True

    def seal(self, parcels: Sequence[Sent[Connection]]) -> None:
        """Cut parcels, and write their trailers."""
        if self._work is not None and self._outgoing is not None:
            self._work.seal(self._outgoing, parcels, self._sealed)

    def _sealed(self, parcels: list[Sent[Connection]], is_done: bool) -> None:
        if self._sender is None:
            return
        if not is_done:
            for parcel in parcels:
                self._sender.close_ticket(parcel.send.plan.peer, "an internal error")
        self._guarded(partial(self._sender.sealed, parcels))

    def write(self, connection: Connection, parcels: Sequence[Sent[Connection]]) -> None:
        """Write parcels to the slots of their credits."""
        batch = [
            Outgoing(
                parcel.slot,
                Landed(
                    ticket_id=parcel.send.plan.peer,
                    sender_block=parcel.block,
                    slot=parcel.credit.slot,
                    slot_generation=parcel.credit.generation,
                    parcel_bytes=parcel.target.parcel_bytes,
                ),
            )
            for parcel in parcels
            if parcel.slot is not None and parcel.credit is not None
        ]
        task = self._spawn(self._write(connection, batch))
        task.add_done_callback(partial(self._written, list(parcels)))

    async def _write(self, connection: Connection, batch: list[Outgoing]) -> None:
        link = self._links.get(connection)
        if link is None:
            return  # the connection has ended
        try:
            await link.write(batch)
        except PeerError as error:
            connection.abort(str(error))
        except Exception as error:
            self._abort_for(connection, error)

    def _written(self, parcels: list[Sent[Connection]], task: asyncio.Future[Any]) -> None:
        if self._sender is not None:
            self._surely(partial(self._sender.written, parcels))

    def received(self, receive: Receive) -> None:
        """Report a RECEIVE plan. Idempotent."""
        self._end(receive.plan.transfer_id, receive.leading_blocks, receive.failure)

    def sent(self, send: Send) -> None:
        """Report a SEND plan. Idempotent."""
        self._end(send.plan.transfer_id, send.leading_blocks, send.failure)

    # --- reports ----------------------------------------------------------------------------------

    def _end(self, transfer_id: int, leading: int, failure: CopyError | None) -> None:
        """Note how a plan has ended. Idempotent; an interrupted call is made again."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return
        if transfer.end is None:
            if failure is not None:
                failure = CopyError(leading, failure.reason)
            transfer.end = (leading, failure)
        self._end_soon(transfer)

    def _end_soon(self, transfer: _Transfer) -> None:
        self._soon(partial(self._finish, transfer))

    def _finish(self, transfer: _Transfer) -> None:
        """Report a plan that is at rest. Idempotent."""
        plan = transfer.plan
        if transfer.end is None or self._transfers.get(plan.transfer_id) is not transfer:
            return
        leading, failure = transfer.end
        outcome: Outcome = "done" if failure is None else "failed"
        if failure is not None and transfer.is_cancelled and not leading:
            outcome = "cancelled"
        transfer.counter.finish(failure)
        if not transfer.reported:
            self._report(
                TransferReport(
                    transfer_id=plan.transfer_id,
                    outcome=outcome,
                    first_bad_block=leading if outcome == "failed" else 0,
                    reason="" if failure is None else failure.reason,
                )
            )
            transfer.reported = True
        self._on_end(plan.transfer_id)
        del self._transfers[plan.transfer_id]
        moved_bytes = transfer.num_bytes // plan.num_blocks * leading
        self._counts[plan.route].end(plan.transfer_id, outcome, moved_bytes)
        self._reclaim()

    def _report(self, report: TransferReport) -> None:
        try:
            self._on_report(report)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": f"aiokv: on_report raised for transfer {report.transfer_id}",
                    "exception": error,
                }
            )

    # --- deadlines --------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Wait for the next deadline of a ticket."""
        ends = [end.next_deadline for end in (self._receiver, self._sender) if end is not None]
        deadlines = [deadline for deadline in ends if deadline is not None]
        self._cancel_timers()
        if deadlines and not self._closing:
            loop = asyncio.get_running_loop()
            # The second one is for an interrupt that hits the first one.
            self._timers = [
                loop.call_at(min(deadlines) + delay, self._on_timer)
                for delay in (0.0, SPARE_SECONDS)
            ]

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _on_timer(self) -> None:
        self._surely(self._expire)

    def _expire(self) -> None:
        now = self._now()
        for end in (self._receiver, self._sender):
            if end is not None:
                end.expire(now)
        self._release_ended()
        self._reclaim()
        self._arm()

    def _reclaim(self) -> None:
        """Free what an interrupt has lost, when nothing is in progress. Idempotent."""
        if self._tasks or self._fences or self._work is None or not self._work.is_idle:
            return
        for end in (self._receiver, self._sender):
            if end is not None:
                end.reclaim()

    # --- helpers ----------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        self._checked()
        if self._closing or self._poller is None:
            raise ClosedError("the worker is closed, or not open")

    def _identity_now(self) -> StoreIdentity:
        if self._identity is None:
            raise ClosedError("the worker is not open")
        return self._identity

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _surely(self, action: Callable[[], object]) -> None:
        """Call ``action()`` now, and again after an interrupt."""
        if self._poller is not None:
            self._poller.surely(partial(self._guarded, action))

    def _guarded(self, action: Callable[[], T]) -> T:
        """Return ``action()``. An interrupt in it ends all connections: it may have lost credits,
        so that later tickets on these connections would wait for ever.
        """
        return call_surely(action, self._soon, self._abort_all)

    def _abort_all(self) -> None:
        """End all connections. Idempotent."""
        for connection in [*self._accepted, *self._links]:
            connection.abort("an interrupt")

    def _soon(self, action: Callable[[], object]) -> None:
        if self._poller is not None and not self._poller.closed:
            self._poller.soon(action)
