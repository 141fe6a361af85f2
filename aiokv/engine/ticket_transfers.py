"""Transfers of one ticket, on the side that receives or on the side that sends."""

from __future__ import annotations

from contextvars import copy_context
from typing import TYPE_CHECKING, Final

from aiokv.base import checks
from aiokv.errors import AiokvError, UsageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.engine.lease_record import LeaseRecord
    from aiokv.engine.peers import PeerTickets
    from aiokv.peers.ticket import Ticket
    from aiokv.scheduler.effects import Effects

MAX_IN_FLIGHT: Final = 64  # transfers per ticket, so that a long prompt does not block the loop
MAX_EARLY: Final = 32  # transfers in flight of positions that may stay uncommitted


class _Part:
    """A transfer of consecutive blocks, or of some of their layers.

    Attributes:
        first_block: first block of the lease.
        num_blocks: number of blocks.
        share: share of the layers of each block that moves.
        is_last: True if the last layer of the blocks moves.
        is_early: True if positions of the blocks may not be committed yet.
        moved: leading blocks that have moved; None until the transfer has ended.
    """

    __slots__ = ("first_block", "is_early", "is_last", "moved", "num_blocks", "share")

    def __init__(
        self, first_block: int, num_blocks: int, share: float, *, is_last: bool, is_early: bool
    ) -> None:
        self.share = share
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.is_last = is_last
        self.is_early = is_early
        self.moved: int | None = None


class TicketTransfers:
    """Transfers of one ticket between a lease of this engine and another engine.

    Args:
        peer_tickets: the tickets of the engine.
        record: the lease.
        ticket: the ticket.
        first_block: first block of the lease to move.
        advance: begins the transfers that can begin, and takes those that have ended; returns True
            when all positions of the ticket have moved.
        receives: True on the side that receives.

    Attributes:
        record: the lease.
        lease_id: id of the lease, also after its release.
        ticket: the ticket.
        receives: True on the side that receives.
        moved_block: end of the blocks that have moved without a gap from ``first_block`` on.
        moved_blocks: number of blocks that have moved; a part of a block's layers counts as that
            part of a block.
        moved_groups: groups, other than ``"attention"``, whose blocks have moved.
        kept_tokens: positions that the lease still has.
        is_loading: True while the ticket waits for onloads of its lease.
        is_computing: True while the ticket waits for batches that compute with its lease.
        is_broken: True if a transfer has ended without moving all of its blocks.
        reason: why that transfer has ended.
        ended_at: time of the loop at which the ticket has ended; None before.
        failure: why the ticket has ended early; None if it has not.
        is_cancelled: True if the application has cancelled the ticket.
        context: context variables of the task that has begun the ticket.
    """

    def __init__(
        self,
        peer_tickets: PeerTickets,
        record: LeaseRecord,
        ticket: Ticket,
        first_block: int,
        advance: Callable[[], bool],
        *,
        receives: bool,
    ) -> None:
        self._peer_tickets = peer_tickets
        self._timer: asyncio.TimerHandle | None = None
        # By transfer, oldest first; ends are processed in this order.
        self._parts: dict[int, _Part] = {}
        self._groups: dict[int, tuple[str, int]] = {}  # group and blocks of the transfers in flight
        self._begun_groups: set[str] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._next_block = first_block
        self._advance = advance
        self._is_entered = False
        self._ticket_end = ""  # why the worker has ended the ticket
        self.record = record
        self.lease_id = record.id
        self.ticket = ticket
        self.receives = receives
        self.moved_block = first_block
        self.moved_blocks = 0.0
        self.moved_groups: set[str] = set()
        self.kept_tokens = checks.MAX_INT32
        self.is_loading = False
        self.is_computing = False
        self.is_broken = False
        self.reason = ""
        self.ended_at: float | None = None
        self.failure: str | None = None
        self.is_cancelled = False
        self.context = copy_context()

    @property
    def ended(self) -> bool:
        """True if no further transfer begins."""
        return self.ended_at is not None

    @property
    def at_rest(self) -> bool:
        """True if no transfer is in flight, nor an onload or a batch that the ticket waits for."""
        return not self.is_loading and not self.is_computing and not self._has_transfers

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight."""
        return len(self._groups) + sum(part.moved is None for part in self._parts.values())

    @property
    def _has_transfers(self) -> bool:
        """True while a transfer is in flight."""
        return bool(self._parts or self._groups)

    @property
    def transfer_ids(self) -> list[int]:
        """Transfers of other groups in flight, and those of blocks that have not ended in
        order."""
        return [*self._parts, *self._groups]

    def enter(self) -> None:
        """Let ``proceed`` advance: the handle of the ticket was entered."""
        self._is_entered = True

    def proceed(self) -> None:
        """Advance, and end with the last position, or with the first transfer that has failed.

        Called when a transfer has ended, when positions were committed, and when onloads of the
        lease, or batches that compute with it, have ended.
        """
        if not self._is_entered or self.ended:
            return
        is_complete = False
        try:
            is_complete = self._advance()
        except AiokvError as error:
            self.end(str(error))
        if self.is_broken:
            self.end(self.reason or "a transfer was cancelled")
        elif is_complete:
            self.end()
        elif self._ticket_end and not self._has_transfers:
            self.end(self._ticket_end)

    def note_ticket_end(self, reason: str) -> None:
        """End when no transfer is in flight: none can succeed any more. Idempotent."""
        self._ticket_end = self._ticket_end or reason
        if not self._has_transfers:
            self.proceed()

    def cancel(self, reason: str) -> None:
        """End the ticket for the application; the log has no warning of it."""
        self.is_cancelled = self.is_cancelled or not self.ended
        self.end(reason)

    def end_in(self, seconds: float) -> None:
        """End the ticket after ``seconds``, by the loop's clock."""
        reason = f"the deadline of {seconds:.4g} s passed"
        self._timer = self._peer_tickets.loop.call_later(seconds, self.end, reason)

    def begin(
        self,
        transition: Callable[..., tuple[int, Effects]],
        end_block: int,
        chunk_blocks: int,
    ) -> None:
        """Begin transfers of the blocks that have none yet, up to ``end_block``.

        At most ``MAX_IN_FLIGHT`` are in flight: call again when one of them has ended.

        Raises:
            AiokvError: the scheduler refuses a transfer; those before it have begun.
        """
        while self._next_block < end_block and self.may_begin():
            num_blocks = min(chunk_blocks, end_block - self._next_block)
            self.begin_part(transition, self._next_block, num_blocks)
            self._next_block += num_blocks

    def may_begin(self, *, is_early: bool = False) -> bool:
        """Return True while a further transfer of blocks may begin.

        Early ones may wait for others: until the receiver has committed the blocks before them.
        """
        if self.ended or self.in_flight >= MAX_IN_FLIGHT:
            return False
        early = sum(part.is_early and part.moved is None for part in self._parts.values())
        return not is_early or early < MAX_EARLY

    def begin_part(
        self,
        transition: Callable[..., tuple[int, Effects]],
        first_block: int,
        num_blocks: int,
        *,
        share: float = 1.0,
        is_last: bool = True,
        is_early: bool = False,
    ) -> None:
        """Begin a transfer of blocks.

        Args:
            transition: scheduler method; gets lease, ticket, end of the positions, and first block.
            first_block: first block of the lease.
            num_blocks: number of blocks.
            share: share of the layers of each block that moves.
            is_last: the blocks have moved when this transfer, and those before it, have ended;
                otherwise it moves some of their layers only.
            is_early: the positions of the blocks may not be committed yet.

        Raises:
            AiokvError: the scheduler refuses the transfer.
        """
        end_token = (first_block + num_blocks) * self._peer_tickets.block_tokens
        transfer_id, effects = transition(
            self.lease_id, self.ticket.ticket_id, end_token, first_block=first_block
        )
        self._parts[transfer_id] = _Part(
            first_block, num_blocks, share, is_last=is_last, is_early=is_early
        )
        self._peer_tickets.submit(self, transfer_id, effects)

    def has_begun(self, group: str) -> bool:
        """Return True if the transfer of a group has begun."""
        return group in self._begun_groups

    def begin_group(
        self,
        transition: Callable[[int, bytes, int, str], tuple[int, Effects]],
        group: str,
        num_tokens: int,
    ) -> None:
        """Begin the transfer of a group other than ``"attention"``, unless it has begun.

        Args:
            transition: scheduler method; gets lease, ticket, number of positions and group.
            group: name of the group.
            num_tokens: positions that the blocks of the group stand for.

        Raises:
            AiokvError: the scheduler refuses it.
        """
        if self.ended or self.has_begun(group):
            return
        transfer_id, effects = transition(self.lease_id, self.ticket.ticket_id, num_tokens, group)
        num_blocks = sum(
            plan.num_blocks for plan in effects.submit if plan.transfer_id == transfer_id
        )
        self._begun_groups.add(group)
        self._groups[transfer_id] = group, num_blocks
        self._peer_tickets.submit(self, transfer_id, effects)

    def moved(self, transfer_id: int, blocks: int, reason: str) -> None:
        """Record the end of a transfer. Its first ``blocks`` blocks have moved. Idempotent.

        Blocks behind the first that has not moved do not count.
        """
        if transfer_id in self._groups:
            group, num_blocks = self._groups[transfer_id]
            if blocks == num_blocks:
                self.moved_groups.add(group)
            else:
                self.is_broken = True
                self.reason = self.reason or reason
            del self._groups[transfer_id]
            return
        if (ended := self._parts.get(transfer_id)) is not None:
            if ended.moved is None:
                self.moved_blocks += blocks * ended.share
            ended.moved = blocks
            if blocks < ended.num_blocks:
                self.reason = self.reason or reason
        for first, part in list(self._parts.items()):
            if part.moved is None:
                return
            if not self.is_broken:
                self.is_broken = part.moved < part.num_blocks
                if part.is_last:
                    self.moved_block = part.first_block + part.moved
            del self._parts[first]

    def end(self, failure: str | None = None) -> None:
        """Begin no further transfer, and cancel those in flight. Idempotent.

        The first reason is kept.
        """
        if self.ended:
            return
        self.failure = failure
        self.ended_at = self._peer_tickets.loop.time()
        if self._timer is not None:
            self._timer.cancel()
        self._peer_tickets.end(self)

    def forget(self) -> None:
        """Forget the transfers in flight, whose ends are not reported: the lease has no blocks."""
        self.is_loading = self.is_computing = False
        self._parts.clear()
        self._groups.clear()

    def wake(self) -> None:
        """Let the waiting coroutines test their conditions."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on this ticket.

        Cancellation: nothing changed.
        """
        while not condition():
            waiter: asyncio.Future[None] = self._peer_tickets.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)

    def __repr__(self) -> str:
        ticket = self.ticket
        state = "in flight"
        if self.ended:
            state = "complete" if self.failure is None else f"ended: {self.failure}"
        return (
            f"positions {ticket.first_position} to {ticket.num_tokens}, ticket "
            f"{ticket.ticket_id.hex()[:8]}, {state}"
        )


def entered(
    transfers: TicketTransfers | None, peer_tickets: PeerTickets, handle: object
) -> TicketTransfers:
    """Return the transfers of a handle whose ``async with`` block has begun.

    Raises:
        UsageError: it has not begun, or the call is made in another thread.
    """
    peer_tickets.check_thread()
    if transfers is None:
        raise UsageError(f"{handle!r} can only be used inside its `async with` block")
    return transfers


def check_not_entered(transfers: TicketTransfers | None, handle: object, call: str) -> None:
    """Check that the ``async with`` block of a handle has not begun.

    Args:
        transfers: transfers of the handle; None before it is entered.
        handle: named in the error.
        call: name of the call that returns a new handle.

    Raises:
        UsageError: it has begun.
    """
    if transfers is not None:
        raise UsageError(
            f"{handle!r} was entered already; it can be entered once", hint=f"call {call} again"
        )
