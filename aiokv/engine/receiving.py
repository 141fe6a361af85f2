"""Receiving: the handle of the blocks that another engine sends to a lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from aiokv.base import checks
from aiokv.base.checks import Unique
from aiokv.engine.observers import outcome_of
from aiokv.engine.ticket_transfers import TicketTransfers, check_not_entered, entered
from aiokv.peers.statistics import ReceivingStatistics

if TYPE_CHECKING:
    from aiokv.engine.lease import Lease
    from aiokv.engine.observers import End
    from aiokv.engine.peers import PeerTickets


class Receiving(Unique):
    """Blocks of a lease that another engine computes and sends; see ``Lease.receive``."""

    def __init__(
        self,
        peer_tickets: PeerTickets,
        lease: Lease,
        num_tokens: int | None,
        timeout: float,
        open_timeout: float,
    ) -> None:
        self._peer_tickets = peer_tickets
        self._lease = lease  # not garbage-collected while this object is in use
        self._asked_tokens = num_tokens
        self._timeout = timeout
        self._open_timeout = open_timeout
        self._transfers: TicketTransfers | None = None
        self._blob = b""
        self._committed = 0  # number of positions that are cached or were received
        self._began = 0.0
        self._first_at: float | None = None
        self._wait_seconds = 0.0

    async def __aenter__(self) -> Self:
        """Make the ticket, and let the blocks be received.

        Raises:
            LeaseError: the lease is not granted, is being received already, has nothing to receive,
                or a batch computes with it. Nothing changed.
            UsageError: the engine has no peers, does not listen, or this object was entered before.
                Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.
            PeerError: a rank refuses the ticket, or did not answer in time.

        Checkpoint: with ranks only, until senders can connect to all of them.

        Cancellation: the receive has ended.
        """
        check_not_entered(self._transfers, self, "lease.receive()")
        peer_tickets = self._peer_tickets
        ticket, blob = peer_tickets.new_ticket(
            self._lease.record, self._asked_tokens, self._timeout
        )
        first_block = ticket.first_position // ticket.block_tokens
        transfers = TicketTransfers(
            peer_tickets, self._lease.record, ticket, first_block, self._advance, receives=True
        )
        self._committed = ticket.first_position
        self._began = peer_tickets.loop.time()
        try:
            await peer_tickets.open_receive(transfers, blob, self._timeout, self._open_timeout)
            peer_tickets.begin_receive(transfers)
        except BaseException:
            transfers.end("the receive could not begin")
            raise
        self._transfers, self._blob = transfers, blob
        transfers.enter()
        return self

    async def __aexit__(self, *exc: object) -> None:
        transfers = self._entered()
        transfers.end("the receive was left before all positions had arrived")
        await transfers.wait_for(lambda: transfers.at_rest)

    @property
    def ticket(self) -> bytes:
        """Ticket for ``engine.send`` of the other engine; put it into the user's request."""
        self._entered()
        return self._blob

    async def wait(self, position: int | None = None) -> int:
        """Wait until positions have arrived, or the receive has ended.

        The receive ends at its deadline at the latest. A failure of the other engine raises
        nothing: the caller computes what is missing. When the receive has ended, no transfer
        writes the blocks of the lease any more: compute from the returned position on. Before that,
        the lease cannot compute.

        Args:
            position: return when all positions before this one have arrived; None for all positions
                of the ticket, which is the end of the receive.

        Returns:
            The first position that is not there; the ``num_tokens`` of the ticket when all have
            arrived, 0 when the lease has given its blocks back, or has failed.

        Raises:
            UsageError: ``position`` is not an integer, or is not within the positions of the
                ticket; the ``async with`` block has not begun; or the call is made in another
                thread.

        Cancellation: nothing changed.
        """
        transfers = self._entered()
        limit = transfers.ticket.num_tokens
        target = limit
        if position is not None:
            target = checks.integer("position", position, minimum=0, maximum=limit)
        began = self._peer_tickets.loop.time()
        outcome: End = "done"
        try:
            await transfers.wait_for(lambda: self._has_arrived(transfers, target))
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            seconds = self._peer_tickets.loop.time() - began
            self._wait_seconds += seconds
            self._peer_tickets.note_wait(transfers, seconds, outcome)
        return self._position

    def cancel(self) -> None:
        """Receive nothing more, e.g. when the other server refuses the request. Idempotent.

        ``wait`` returns when no transfer writes the blocks of the lease any more.

        Raises:
            UsageError: the ``async with`` block has not begun, or the call is made in another
                thread.
        """
        self._entered().cancel("cancel() was called")

    @property
    def received_tokens(self) -> int:
        """Number of positions that have arrived, from the first of the ticket on."""
        transfers = self._entered()
        return max(self._position - transfers.ticket.first_position, 0)

    @property
    def failure(self) -> str | None:
        """Reason why the receive has ended early; None while it runs, and after success."""
        return self._entered().failure

    @property
    def statistics(self) -> ReceivingStatistics:
        """Progress and times so far."""
        transfers = self._entered()
        ticket = transfers.ticket
        now = self._peer_tickets.loop.time() if transfers.ended_at is None else transfers.ended_at
        return ReceivingStatistics(
            wanted_tokens=ticket.num_tokens - ticket.first_position,
            received_tokens=self.received_tokens,
            first_chunk_seconds=None if self._first_at is None else self._first_at - self._began,
            seconds=now - self._began,
            wait_seconds=self._wait_seconds,
        )

    def _has_arrived(self, transfers: TicketTransfers, target: int) -> bool:
        """Return True when ``wait`` need not wait: also not for onloads of positions before."""
        if transfers.ended or transfers.is_loading:
            return transfers.at_rest
        return self._committed >= target

    @property
    def _position(self) -> int:
        transfers = self._entered()
        if self._peer_tickets.is_committed(transfers):  # the end of a receive of state commits
            self._note_committed(transfers, transfers.ticket.num_tokens)
        return min(self._committed, transfers.kept_tokens)

    def _entered(self) -> TicketTransfers:
        return entered(self._transfers, self._peer_tickets, self)

    def _advance(self) -> bool:
        """Commit the positions that have arrived in order; return True when all have arrived."""
        transfers, peer_tickets = self._entered(), self._peer_tickets
        peer_tickets.begin_receive(transfers)
        arrived = min(
            transfers.moved_block * peer_tickets.block_tokens, transfers.ticket.num_tokens
        )
        if arrived > self._committed and peer_tickets.commit_arrived(transfers, arrived):
            self._note_committed(transfers, arrived)
        return self._committed == transfers.ticket.num_tokens

    def _note_committed(self, transfers: TicketTransfers, num_tokens: int) -> None:
        """Note that the first positions are committed. Idempotent."""
        new_tokens, self._committed = num_tokens - self._committed, num_tokens
        if new_tokens:
            self._first_at = self._first_at or self._peer_tickets.loop.time()
            self._peer_tickets.note_received(transfers.record, new_tokens)

    def __repr__(self) -> str:
        if self._transfers is None:
            return "<Receiving, not entered>"
        return f"<Receiving {self._transfers!r}>"
