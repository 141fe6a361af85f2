"""Sending: the handle of the blocks that a lease sends to another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from aiokv.checks import Unique
from aiokv.engine.flow import Flow, check_not_entered, entered

if TYPE_CHECKING:
    from types import TracebackType

    from aiokv.engine.peers import Exchange
    from aiokv.lease import Lease


class Sending(Unique):
    """Blocks of a lease that another engine receives; see ``CacheEngine.send``."""

    def __init__(self, exchange: Exchange, lease: Lease, blob: bytes) -> None:
        self._exchange = exchange
        self._lease = lease
        self._blob = blob
        self._flow: Flow | None = None
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
        check_not_entered(self._flow, self, "engine.send()")
        exchange = self._exchange
        try:
            ticket = exchange.checked_ticket(self._lease, self._blob)
            first_block = ticket.first_position // exchange.block_tokens
            flow = Flow(exchange, self._lease, ticket, first_block, self._advance, receives=False)
            await exchange.open_send(flow, self._blob)
        except Exception:
            exchange.counts.refused_sends += 1
            raise
        try:
            exchange.begin_send(flow)
        except BaseException:
            flow.end("the send could not begin")
            raise
        self._flow = flow
        flow.enter()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        flow = self._entered()
        if exc_type is not None:
            flow.end(f"the send was left with {exc_type.__name__}")
            return
        try:
            await flow.wait_for(lambda: flow.ended or flow.at_rest)
        except BaseException:
            flow.end("the send was cancelled")
            raise
        flow.proceed()  # an interrupt may have kept the last acknowledgement from being counted
        flow.end("the send was left before all positions were computed")

    def cancel(self) -> None:
        """Send nothing more; the receiving engine computes what is missing. Idempotent.

        Raises:
            UsageError: the ``async with`` block has not begun, or the call is made in another
                thread.
        """
        self._entered().cancel("cancel() was called")

    @property
    def num_tokens(self) -> int:
        """Position after the last that the receiver waits for, where its state is needed."""
        return self._entered().ticket.num_tokens

    @property
    def delivered_tokens(self) -> int:
        """Number of positions that the receiver has acknowledged, from the first on."""
        flow = self._entered()
        ticket = flow.ticket
        delivered = min(flow.moved_block * self._exchange.block_tokens, ticket.num_tokens)
        return max(delivered - ticket.first_position, 0)

    @property
    def failure(self) -> str | None:
        """Reason why the send has ended early; None while it runs, and when all was delivered."""
        return self._entered().failure

    def _entered(self) -> Flow:
        return entered(self._flow, self._exchange, self)

    def _advance(self) -> bool:
        """Send what is computed; return True when all was acknowledged."""
        flow, exchange = self._entered(), self._exchange
        try:
            exchange.begin_send(flow)
        finally:
            exchange.counts.delivered_tokens += self.delivered_tokens - self._counted_tokens
            self._counted_tokens = self.delivered_tokens
        is_last = flow.moved_block * exchange.block_tokens >= flow.ticket.num_tokens
        return is_last and flow.moved_sides.issuperset(exchange.sides)

    def __repr__(self) -> str:
        if self._flow is None:
            return "<Sending, not entered>"
        return f"<Sending {self._flow!r}>"
