"""TicketOpener: lets the receivers of a rank's tickets accept them.

::

    ticket ─► connection per receiver rank ─► Open ─► Accepted ─► link of the transport ─► Sender

Connections are kept for later tickets; each has one link.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiokv.errors import ClosedError, LayoutError, PeerError, UsageError
from aiokv.peers.connections import Connections
from aiokv.peers.departures import ReceiverRank
from aiokv.peers.messages import PROTOCOL_VERSION, Accepted, Cancel, Open, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.layout.mapping import BlockMapping
    from aiokv.peers.messages import Landed, Message
    from aiokv.peers.sender import Sender
    from aiokv.peers.ticket import Endpoint, Ticket
    from aiokv.peers.transport import Link, Transport
    from aiokv.peers.wire import Connection

CONNECT_SECONDS: Final = 10.0  # limit for the replies to Open, unless the ticket has less


class _SenderEnd:
    """Handler of a connection that this rank has opened."""

    def __init__(self, opener: TicketOpener, connection: Connection) -> None:
        self._opener = opener
        self._connection = connection

    def on_message(self, message: Message) -> None:
        self._opener.on_message(self._connection, message)

    def place(self, landed: Landed) -> memoryview | None:
        return None  # a receiver sends no fragments

    def on_fragment(self, landed: Landed) -> None:
        """Do nothing: ``place`` discards all fragments."""

    def on_closed(self, reason: str) -> None:
        self._opener.on_closed(self._connection, reason)


class _Opening:
    """A ticket that is being opened.

    Attributes:
        asked: connections on which receivers were asked to accept it.
        end: why it has ended meanwhile; empty while it has not.
    """

    def __init__(self) -> None:
        self.asked: set[Connection] = set()
        self.end = ""

    def check(self) -> None:
        """Check that the ticket has not ended.

        Raises:
            PeerError: it has.
        """
        if self.end:
            raise PeerError(self.end)


class TicketOpener:
    """Connections to receivers, and the tickets that receivers are asked to accept.

    Args:
        sender: gets the tickets that all their receivers have accepted, and the other messages.
        transport: an open transport.
        secret: secret of the connections.
        rank: number of this rank.
        block_tokens: positions per block of this engine.
        layout: layout of the blocks of this rank, encoded.
        layer_ranges: ranges of layers in which blocks may be sent; 0 for whole blocks only.
    """

    def __init__(
        self,
        sender: Sender[Connection],
        transport: Transport,
        secret: bytes,
        *,
        rank: int,
        block_tokens: int,
        layout: bytes,
        layer_ranges: int = 0,
    ) -> None:
        self._layer_ranges = layer_ranges
        self._sender = sender
        self._transport = transport
        self._rank = rank
        self._block_tokens = block_tokens
        self._layout = layout
        self._connections = Connections(secret, partial(_SenderEnd, self))
        self._links: dict[Connection, Link] = {}
        self._linking: dict[Connection, asyncio.Lock] = {}  # held while a link is connected
        self._acquired: dict[bytes, list[tuple[str, int]]] = {}  # endpoints, by ticket
        self._opening: dict[bytes, _Opening] = {}
        self._replies: dict[tuple[Connection, bytes], asyncio.Future[Accepted]] = {}
        # Number of replies that have not arrived and that no caller waits for any more.
        self._late_replies: dict[tuple[Connection, bytes], int] = {}
        self._is_stopped = False

    @property
    def connections(self) -> list[Connection]:
        """Connections that have links."""
        return list(self._links)

    @property
    def open_connections(self) -> int:
        """Number of connections that are open."""
        return self._connections.open_connections

    def link(self, connection: Connection) -> Link | None:
        """Return the link of a connection; None when the connection has ended."""
        return self._links.get(connection)

    # --- tickets ----------------------------------------------------------------------------------

    async def open(
        self,
        ticket: Ticket,
        receivers: Sequence[tuple[Endpoint, Sequence[BlockMapping]]],
        deadline: float,
    ) -> None:
        """Connect to the receivers of a ticket, let them accept it, and give it to the sender.

        Args:
            ticket: ticket of another engine.
            receivers: the receiver ranks that need blocks of this rank, and the mapping of each
                group.
            deadline: deadline of the ticket, by the clock of the loop.

        Raises:
            UsageError: the ticket is in use. Nothing changed.
            PeerError: a receiver cannot be reached, refuses, or gives the ticket up; or the ticket
                was closed meanwhile. Nothing is left behind.
            LayoutError: a receiver cannot map the blocks. Nothing is left behind.
            ClosedError: ``stop`` was called. Nothing is left behind.

        Cancellation: nothing is left behind.
        """
        self.check_unused(ticket.ticket_id)
        acquired = self._acquired[ticket.ticket_id] = []
        opening = self._opening[ticket.ticket_id] = _Opening()
        accepted: dict[int, ReceiverRank[Connection]] = {}
        try:
            for endpoint, mappings in receivers:
                timeout = min(CONNECT_SECONDS, ticket.timeout_seconds)
                connection = await self._connections.acquire(
                    endpoint.host, endpoint.port, timeout=timeout
                )
                acquired.append((endpoint.host, endpoint.port))
                opening.check()
                opening.asked.add(connection)
                target = accepted[endpoint.rank] = ReceiverRank(connection, mappings)
                await self._ask(target, ticket, endpoint, timeout)
            if self._is_stopped:
                raise ClosedError("the worker is closed")
            opening.check()
            if any(target.connection.reason for target in accepted.values()):
                raise PeerError("the connection to the receiver ended")
            self._sender.add_ticket(ticket, deadline, accepted)
        except BaseException:
            for target in accepted.values():
                cancel = Cancel(ticket_id=ticket.ticket_id, reason="the sender gave up")
                target.connection.send(cancel)
            self._release(ticket.ticket_id)
            raise
        finally:
            del self._opening[ticket.ticket_id]

    def check_unused(self, ticket_id: bytes) -> None:
        """Check that a ticket is neither sent nor being opened.

        Raises:
            UsageError: it is.
        """
        if ticket_id in self._acquired or ticket_id in self._opening:
            raise UsageError(f"ticket {ticket_id.hex()} is being sent already")

    async def _ask(
        self, target: ReceiverRank[Connection], ticket: Ticket, endpoint: Endpoint, timeout: float
    ) -> None:
        """Send Open, and wait for the reply."""
        connection = target.connection
        reply: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._replies[connection, ticket.ticket_id] = reply
        where = f"{endpoint.host}:{endpoint.port}"
        try:
            connection.send(
                Open(
                    protocol=PROTOCOL_VERSION,
                    ticket_id=ticket.ticket_id,
                    generation=ticket.generation,
                    sender_rank=self._rank,
                    receiver_rank=endpoint.rank,
                    sender_block_tokens=self._block_tokens,
                    layout=self._layout,
                    transport=self._transport.name,
                    transport_metadata=self._transport.metadata(),
                    layer_ranges=self._layer_ranges,
                )
            )
            async with asyncio.timeout(timeout):
                accepted = await reply
            if accepted.slot_bytes < target.largest_fragment_bytes:
                raise LayoutError(
                    f"the receiver at {where} has slots of {accepted.slot_bytes} bytes; a fragment "
                    f"takes {target.largest_fragment_bytes} bytes"
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
                    if not connection.reason:  # else the link ends by itself
                        self._links[connection] = link
        if connection.reason:
            raise PeerError(f"the connection to the receiver ended: {connection.reason}")

    def close_ticket(self, ticket_id: bytes) -> None:
        """End the use of connections by a ticket; ``open`` raises if it runs. Idempotent."""
        if ticket_id in self._opening:
            self._end_opening(ticket_id, "the ticket was closed while it was opened")
        else:
            self._release(ticket_id)

    def _end_opening(self, ticket_id: bytes, reason: str) -> None:
        """Let ``open`` raise, which releases what it has acquired. Idempotent."""
        opening = self._opening[ticket_id]
        opening.end = opening.end or reason
        for (_, asked), reply in self._replies.items():
            if asked == ticket_id and not reply.done():
                reply.set_exception(PeerError(opening.end))

    def release_ended(self) -> None:
        """Release the connections of tickets that ended before they were closed. Idempotent."""
        live = self._sender.ticket_ids
        for ticket_id in self._acquired.keys() - self._opening.keys() - set(live):
            self._release(ticket_id)

    def _release(self, ticket_id: bytes) -> None:
        for host, port in self._acquired.pop(ticket_id, ()):
            self._connections.release(host, port)

    # --- connections ------------------------------------------------------------------------------

    def on_message(self, connection: Connection, message: Message) -> None:
        """Take a message of a receiver."""
        if isinstance(message, Accepted | Refused):
            self._take_reply(connection, message)
            return
        if isinstance(message, Cancel) and message.ticket_id in self._opening:
            # The message may directly follow Accepted, when the sender does not have the ticket
            # yet.
            if connection in self._opening[message.ticket_id].asked:
                self._end_opening(message.ticket_id, f"the receiver gave up: {message.reason}")
            return
        self._sender.on_message(connection, message)

    def _take_reply(self, connection: Connection, message: Accepted | Refused) -> None:
        key = (connection, message.ticket_id)
        if late := self._late_replies.pop(key, 0):  # a reply to an Open that was given up
            if late > 1:
                self._late_replies[key] = late - 1
            return
        reply: asyncio.Future[Any] | None = self._replies.pop(key, None)
        if reply is None or reply.done():
            return
        if isinstance(message, Accepted):
            reply.set_result(message)
        else:
            error = LayoutError if message.kind == "layout" else PeerError
            reply.set_exception(error(f"the receiver refuses the ticket: {message.reason}"))

    def on_closed(self, connection: Connection, reason: str) -> None:
        """Note the end of a connection."""
        self._links.pop(connection, None)
        self._linking.pop(connection, None)
        for key in [key for key in self._late_replies if key[0] is connection]:
            del self._late_replies[key]
        for (other, _), reply in list(self._replies.items()):
            if other is connection and not reply.done():
                reply.set_exception(PeerError(f"the connection to the receiver ended: {reason}"))
        self._sender.on_closed(connection, reason)
        self.release_ended()

    def stop(self) -> None:
        """Open no further ticket. Idempotent."""
        self._is_stopped = True

    async def aclose(self) -> None:
        """End all connections. Idempotent.

        Cancellation: call it again.
        """
        self.stop()
        await self._connections.aclose()
