"""Sending: the handle of the blocks that a lease sends to another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from aiokv.base.checks import Unique
from aiokv.engine.progress import SendProgress
from aiokv.engine.ticket_transfers import TicketTransfers, check_not_entered, entered

if TYPE_CHECKING:
    from types import TracebackType

    from aiokv.engine.lease import Lease
    from aiokv.engine.peers import PeerTickets
    from aiokv.worker.device.base import Event


class Sending(Unique):
    """Blocks of a lease that another engine receives; see ``CacheEngine.send``."""

    def __init__(self, peer_tickets: PeerTickets, lease: Lease, blob: bytes) -> None:
        self._peer_tickets = peer_tickets
        self._lease = lease  # not garbage-collected while this object is in use
        self._blob = blob
        self._transfers: TicketTransfers | None = None
        self._progress = SendProgress(0)
        self._counted_tokens = 0  # in PeerCounts.delivered_tokens

    async def __aenter__(self) -> Self:
        """Check the ticket, and connect to the engine that made it.

        Raises:
            UsageError: the ticket is malformed, is for another prompt, or is being sent already; or
                the engine has no peers. Nothing changed.
            LeaseError: the lease is not granted, or belongs to another engine; or it has recurrent
                state or windows, and has computed positions behind those of the ticket. Nothing
                changed.
            LayoutError: the blocks of the two engines cannot be mapped. Nothing changed.
            PeerError: the other engine has another model, version of the weights or transport,
                cannot be reached, or refuses the ticket. Nothing changed.
            ClosedError: the engine is closed or closing.
            BrokenEngineError: the device failed, or a rank was lost.

        Cancellation: nothing is left behind.
        """
        check_not_entered(self._transfers, self, "engine.send()")
        peer_tickets = self._peer_tickets
        try:
            ticket = peer_tickets.checked_ticket(self._lease.record, self._blob)
            first_block = ticket.first_position // peer_tickets.block_tokens
            self._progress = peer_tickets.new_progress(first_block)
            transfers = TicketTransfers(
                peer_tickets, self._lease.record, ticket, first_block, self._advance, receives=False
            )
            await peer_tickets.open_send(transfers, self._blob)
        except Exception:
            peer_tickets.counts.refused_sends += 1
            raise
        try:
            peer_tickets.begin_send(transfers, self._progress)
        except BaseException:
            transfers.end("the send could not begin")
            raise
        self._transfers = transfers
        transfers.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        transfers = self._entered()
        if exc_type is not None:
            transfers.end(f"the send was left with {exc_type.__name__}")
            return
        try:
            await transfers.wait_for(lambda: transfers.ended or transfers.at_rest)
        except BaseException:
            transfers.end("the send was cancelled")
            raise
        transfers.end("the send was left before all positions were computed")

    def layers_done(self, num_tokens: int, num_layers: int, event: Event | None = None) -> bytes:
        """Send layers of positions that are not committed yet, while the model computes the others.

        ::

            for layer, event in forward(chunk):  # records an event behind each layer
                sending.layers_done(chunk.stop, layer + 1, event)
            lease.commit(chunk.stop)

        The full blocks of these positions move in ``Peers.layer_ranges`` parts; a call that
        completes none has no effect. The last part is sent by ``lease.commit``: the receiver uses
        no block whose positions are not committed here. If they never are, because the lease is
        released, preempted or truncated, or the send ends, the receiver drops what it has got.

        Args:
            num_tokens: first position whose layers are not computed.
            num_layers: the first layers of the model are computed for all positions before
                ``num_tokens``. Their bytes in the blocks must not change any more.
            event: recorded after the work, as for ``CacheEngine.step``; None when it has
                finished. Events of later calls are recorded later on the same stream. With ranks
                it is None: see below.

        Returns:
            A name of this point in the work. With ranks, pass it to ``Rank.layers_done`` on each
            rank, or the layers are sent when the rank closes the step.

        Raises:
            UsageError: ``num_layers`` is not between 0 and the layers of the model, or
                ``num_tokens`` is negative; the device cannot wait for such an event; the
                ``async with`` block has not begun; or the call is made in another thread.
            LeaseError: the lease has fewer positions, or was released. Nothing changed.
        """
        transfers = self._entered()
        return self._peer_tickets.note_layers(
            transfers, self._progress, num_tokens, num_layers, event
        )

    def cancel(self) -> None:
        """Stop sending. The receiving engine computes the missing positions. Idempotent.

        Raises:
            UsageError: the ``async with`` block has not begun, or the call is made in another
                thread.
        """
        self._entered().cancel("cancel() was called")

    async def ended(self) -> str | None:
        """Wait until all positions of the ticket were delivered, or the send has ended early.

        Returns:
            ``failure``: why it has ended early; None when all was delivered.

        Raises:
            UsageError: the ``async with`` block has not begun, or the call is made in another
                thread.

        Cancellation: nothing changed.
        """
        transfers = self._entered()
        await transfers.wait_for(lambda: transfers.ended)
        return transfers.failure

    @property
    def num_tokens(self) -> int:
        """Position after the last that the receiver waits for, where its state is needed."""
        return self._entered().ticket.num_tokens

    @property
    def delivered_tokens(self) -> int:
        """Number of positions that the receiver has acknowledged, from the first on."""
        transfers = self._entered()
        ticket = transfers.ticket
        delivered = min(transfers.moved_block * self._peer_tickets.block_tokens, ticket.num_tokens)
        return max(delivered - ticket.first_position, 0)

    @property
    def delivered_blocks(self) -> float:
        """Number of blocks that the receiver has acknowledged.

        Layers of a block that were sent before the others count as a part of the block.
        """
        return self._entered().moved_blocks

    @property
    def failure(self) -> str | None:
        """Reason why the send has ended early; None while it runs, and when all was delivered."""
        return self._entered().failure

    def _entered(self) -> TicketTransfers:
        return entered(self._transfers, self._peer_tickets, self)

    def _advance(self) -> bool:
        """Send the computed positions. Return True if all positions were acknowledged."""
        transfers, peer_tickets = self._entered(), self._peer_tickets
        try:
            peer_tickets.begin_send(transfers, self._progress)
        finally:
            peer_tickets.counts.delivered_tokens += self.delivered_tokens - self._counted_tokens
            self._counted_tokens = self.delivered_tokens
        is_last = transfers.moved_block * peer_tickets.block_tokens >= transfers.ticket.num_tokens
        return is_last and transfers.moved_groups.issuperset(peer_tickets.groups)

    def __repr__(self) -> str:
        if self._transfers is None:
            return "<Sending, not entered>"
        return f"<Sending {self._transfers!r}>"
