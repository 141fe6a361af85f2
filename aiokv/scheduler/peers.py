"""Peers: transfers between the blocks of leases and other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv._native import ATTENTION_GROUP
from aiokv.base.groups import ATTENTION
from aiokv.errors import UsageError
from aiokv.scheduler.effects import Moved
from aiokv.scheduler.groups import block_groups
from aiokv.scheduler.guarded import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv._native import Core
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.clock import StepClock
    from aiokv.scheduler.effects import Done, Effects, Outbox
    from aiokv.scheduler.guarded import TransitionErrors
    from aiokv.scheduler.owners import Owners
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.plans import PlanMaker
    from aiokv.scheduler.saver import Saver


class ReceivesAndSends:
    """Begins the receives and sends of one cache, cancels them, and reports their ends.

    The methods of the first section are transitions of the scheduler.

    Args:
        config: sizes and rules of the cache.
        core: state of the leases.
        plans: plans of the transfers.
        outbox: effects of the current transition.
        clock: numbers of the steps.
        errors: notes the exceptions of transitions.
        owners: names of all existing leases.
        pending: leases that wait for blocks of other leases.
        saver: saves received blocks to host memory.
        settle: ends a transition that may have freed blocks, and returns the effects.

    Attributes:
        has_begun: True after the first transfer has begun.
    """

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        plans: PlanMaker,
        outbox: Outbox,
        clock: StepClock,
        *,
        errors: TransitionErrors,
        owners: Owners,
        pending: PendingBlocks,
        saver: Saver,
        settle: Callable[[], Effects],
    ) -> None:
        self.errors = errors
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._clock = clock
        self._owners = owners
        self._pending = pending
        self._saver = saver
        self._settle = settle
        self._groups = block_groups(config)
        self._records_checksums = config.verify == "checksum"
        self._block_tokens = config.block_tokens
        self.has_begun = False

    # --- transitions ----------------------------------------------------------------------------

    @guarded
    def receive(
        self,
        lease_id: int,
        ticket_id: bytes,
        num_tokens: int,
        group: str = ATTENTION,
        first_block: int = 0,
    ) -> tuple[int, Effects]:
        """Begin to receive the blocks of a group that are needed after ``num_tokens`` positions.

        Of ``"attention"``, these are the blocks from ``first_block`` on. The lease may be released,
        preempted or truncated meanwhile: its blocks are freed when the transfer has ended. Until
        then, the lease can neither be swapped nor compute. ``commit_received`` publishes the
        blocks.

        Of a window group, these are the blocks of its window and of its sink. All window tables of
        the lease are those behind ``num_tokens`` from now on. So the lease can neither compute nor
        be truncated or swapped before all groups have arrived and ``commit_received``, or the end
        of the receive of the state, has committed these positions. When a transfer ends without all
        its blocks, the lease fails as after a failed onload: it must be preempted.

        Of ``"state"``, it is the slot of the recurrent state. The end of the transfer commits the
        positions, as ``commit_received`` does for models without state. When it fails, the state of
        the lease is lost: the lease fails as after a failed onload. When it is cancelled, the lease
        still has the state that it had before, unless it has received windows: then it fails, too.
        Until the transfer has ended, the lease cannot compute, commit, grow a snapshot or a fork,
        be truncated or swapped.

        Args:
            lease_id: a granted lease whose onloads have ended, and with which no batch computes.
            ticket_id: 16 bytes.
            num_tokens: of ``"attention"``, the last block is that of position ``num_tokens - 1``.
                Of the other groups, all positions before ``num_tokens`` are computed or received,
                and not all are computed; the same number for all groups.
            group: ``"attention"``, ``"state"``, or a name in ``CacheConfig.windows``.
            first_block: of ``"attention"``, index in the table; the block has no computed position.

        Returns:
            The transfer. An entry of ``Effects.moved`` names it when it has ended, with 1 block for
            the state, unless the lease was released or preempted.

        Raises:
            LeaseError: the lease is not in the state above, the blocks are computed, shared or
                being received, or the cache was reset after the grant.
            UsageError: the table does not have these blocks, the model has no such group, or
                ``ticket_id`` is not 16 bytes.
        """
        begin, step = self._core.receive, self._clock.open
        number = self._number(group)
        return self._begin(begin, lease_id, ticket_id, num_tokens, number, first_block, step)

    @guarded
    def send(
        self,
        lease_id: int,
        ticket_id: bytes,
        num_tokens: int,
        group: str = ATTENTION,
        first_block: int = 0,
        first_range: int = 0,
        end_range: int = 0,
        mark: int = 0,
    ) -> tuple[int, Effects]:
        """Begin to send the blocks of a group that are needed after ``num_tokens`` positions.

        Of ``"attention"``, these are the blocks from ``first_block`` on, or ranges of their layers.
        The lease may compute, be released, preempted or truncated meanwhile: the blocks are freed
        when the transfer has ended. Until then, the lease cannot be swapped. With a ``mark``, the
        lease may still be computing the blocks; the last range of layers must be sent without one,
        so that the receiver completes no block before its positions are committed here.

        Of the other groups: until the transfer has ended, the lease cannot compute, commit or be
        swapped.

        Args:
            lease_id: a granted lease whose onloads have ended; for other groups than
                ``"attention"``, no batch computes with it.
            ticket_id: 16 bytes.
            num_tokens: of ``"attention"``, the last block is that of position ``num_tokens - 1``;
                it may be computed in part. Of the other groups, the number of computed positions.
            group: ``"attention"``, ``"state"``, or a name in ``CacheConfig.windows``.
            first_block: of ``"attention"``, index in the table.
            first_range: likewise, the first range of layers, as the worker numbers them.
            end_range: likewise, the end of the ranges; 0 to send each block as a whole.
            mark: see ``TransferPlan.mark``; 0 when the blocks are computed.

        Returns:
            The transfer; ``Effects.moved`` as for ``receive``.

        Raises:
            LeaseError: the lease is not in the state above, the blocks are not computed, or with a
                mark, they are being received; or the cache was reset after the grant.
            UsageError: the table does not have these blocks, the model has no such group, a mark
                has no range of layers, or ``ticket_id`` is not 16 bytes.
        """
        part = num_tokens, self._number(group), first_block, first_range, end_range, mark
        return self._begin(self._core.send, lease_id, ticket_id, *part, self._clock.open)

    @guarded
    def end(self, lease_id: int, ticket_id: bytes) -> Done:
        """Cancel the transfers of a ticket that are in flight. Idempotent.

        A lease that has received windows of the ticket, or receives them, and has not committed the
        positions before them, fails as after a failed onload: it must be preempted.

        ``Effects.moved`` still names each transfer when it has ended. The release and the
        preemption of a lease, and ``reset``, cancel the transfers, too.
        """
        if lease_id in self._owners:
            self._core.end_ticket(lease_id, ticket_id)
        return None, self._settle()

    @guarded
    def commit_received(self, lease_id: int, num_tokens: int) -> tuple[int, Effects]:
        """Index the full blocks of the first ``num_tokens`` positions, which were received.

        The positions count as computed from now on, but belong to no step.

        Returns:
            The number of blocks that became shareable.

        Raises:
            LeaseError: a position is neither computed nor received, the windows behind
                ``num_tokens`` were not received, the model has recurrent state, or
                ``num_tokens`` exceeds the positions of the lease.
        """
        core = self._core
        first = core.computed_tokens(lease_id) // self._block_tokens
        published = core.commit_received(lease_id, num_tokens)
        self._note_received(lease_id, first)
        if published:
            self._saver.want()
        return published, self._settle()

    # --- parts of transitions -------------------------------------------------------------------

    def cancel_abandoned(self) -> None:
        """Cancel the transfers that no caller waits for any more."""
        if abandoned := self._core.take_abandoned_peer_transfers():
            self._outbox.effects.cancel.extend(abandoned)

    def note_ends(self) -> None:
        """Report the transfers that have ended since the last call, and their commits."""
        ends = self._core.take_peer_ends()
        for transfer_id, lease_id, blocks, _ in ends:
            self._outbox.effects.moved.append(Moved(transfer_id, lease_id, blocks))
        for _, lease_id, _, commits in ends:
            if commits:
                self._note_received(lease_id, 0)

    def _note_received(self, lease_id: int, first_block: int) -> None:
        """Note that received positions from ``first_block`` on count as computed."""
        core = self._core
        if self._records_checksums:
            end_block = core.computed_tokens(lease_id) // self._block_tokens
            received = core.block_table(lease_id)[first_block:end_block]
            self._outbox.effects.computed.append(received)
        self._pending.advanced(lease_id)

    def _number(self, group: str) -> int:
        """Return the number of a group in the core."""
        if group == ATTENTION:
            return ATTENTION_GROUP
        if group not in self._groups:
            known = [ATTENTION, *self._groups]
            raise UsageError(f"group is {group!r}; it must be one of {known}")
        return self._groups[group].number

    def _begin(self, begin: Callable[..., int], *args: int | bytes) -> tuple[int, Effects]:
        transfer_id = begin(*args)
        self.has_begun = True
        self._outbox.effects.submit.append(self._plans.peer(transfer_id))
        return transfer_id, self._outbox.pending
