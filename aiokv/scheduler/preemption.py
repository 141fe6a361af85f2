"""Preemption: takes the blocks of granted leases back, and keeps the leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.plan import OFFLOAD, Priority

if TYPE_CHECKING:
    from aiokv._native import Core
    from aiokv.config.cache_config import CacheConfig
    from aiokv.scheduler.clock import StepClock
    from aiokv.scheduler.effects import Outbox
    from aiokv.scheduler.owners import Owners
    from aiokv.scheduler.pending import PendingBlocks
    from aiokv.scheduler.plans import PlanMaker
    from aiokv.scheduler.quota import SaltQuota


class Preemption:
    """Takes blocks back: without a copy, by a swap to host memory, and after the loss of a rank.

    Args:
        config: sizes and rules of the cache.
        core: state of the leases.
        plans: plans of the swaps.
        outbox: effects of the current transition.
        clock: numbers of the steps.
        owners: names of all existing leases.
        quota: blocks per salt.
        pending: leases that wait for blocks of other leases.
        lost: leases whose blocks were lost with a rank, and the reason; entries are added here.

    Attributes:
        lost_rank: describes the lost rank, until the ranks are restarted; empty for none.
        preemptions: block tables that were given up.
        swaps: block tables whose move to host memory was begun.
        lost_leases: block tables that were lost with a rank.
    """

    def __init__(
        self,
        config: CacheConfig,
        core: Core,
        plans: PlanMaker,
        outbox: Outbox,
        clock: StepClock,
        *,
        owners: Owners,
        quota: SaltQuota,
        pending: PendingBlocks,
        lost: dict[int, str],
    ) -> None:
        self._core = core
        self._plans = plans
        self._outbox = outbox
        self._clock = clock
        self._owners = owners
        self._quota = quota
        self._pending = pending
        self._lost = lost
        self._records_checksums = config.verify == "checksum"
        self._block_tokens = config.block_tokens
        self._swaps: dict[int, int] = {}  # transfer -> lease whose table it moves to host memory
        self.lost_rank = ""
        self.preemptions = self.swaps = self.lost_leases = 0

    def retract(self, lease_id: int) -> None:
        """Undo a grant; a new lease without a handle keeps the blocks of batches in flight.

        Raises:
            LeaseError: the lease holds no blocks and no swapped table.
        """
        if transfer_id := self._core.swap_transfer(lease_id):
            self._swaps.pop(transfer_id, None)  # its end does not concern the lease any more
        keeper = self._core.retract(lease_id, self._clock.open)
        if keeper:
            self._owners[keeper] = self._owners[lease_id]
            self._quota.hand_over(lease_id, keeper)
        self._pending.withdrawn(lease_id)

    def preempt(self, lease_id: int) -> None:
        """Take back the blocks of a lease, or the table that an earlier swap has moved.

        Raises:
            LeaseError: as ``retract``.
        """
        self.retract(lease_id)
        self.preemptions += 1
        self._note_preempted(lease_id)

    def _note_preempted(self, lease_id: int) -> None:
        if lease_id not in self._owners or self._core.is_granted(lease_id):
            return  # the lease was released meanwhile, or keeps its blocks
        self._quota.give_back(lease_id)
        self._pending.withdrawn(lease_id)

    # --- swaps ----------------------------------------------------------------------------------

    def swap_out(self, lease_id: int) -> int | None:
        """Begin to move the table of a lease to host memory.

        Returns:
            The transfer; 0 when there is nothing to move; None when the lease keeps its blocks.

        Raises:
            LeaseError: the lease is not granted, or its onloads are in flight.
        """
        if not self._core.swap_out(lease_id, self._clock.open):
            return None
        self.swaps += 1
        transfer_id = self._core.swap_transfer(lease_id)
        if not transfer_id:
            self._note_preempted(lease_id)
            return 0
        if self._records_checksums:
            self._record_partial_block(lease_id)
        self._swaps[transfer_id] = lease_id
        self._outbox.effects.submit.append(self._plans.copy(transfer_id, OFFLOAD, Priority.DEMAND))
        return transfer_id

    def _record_partial_block(self, lease_id: int) -> None:
        """Record the checksum of the last block: commit has recorded those of the full blocks."""
        full_blocks, more_tokens = divmod(self._core.computed_tokens(lease_id), self._block_tokens)
        if more_tokens:
            table = self._core.block_table(lease_id)
            self._outbox.effects.computed.append(table[full_blocks : full_blocks + 1])

    def ended(self, transfer_id: int) -> None:
        """Record the end of a transfer: the lease of a swap is preempted now. Idempotent."""
        if transfer_id in self._swaps:
            self._note_preempted(self._swaps[transfer_id])
            del self._swaps[transfer_id]
        if self.lost_rank:
            self.take_all()  # includes a table that was being moved when the rank was lost

    # --- loss of a rank -------------------------------------------------------------------------

    def take_all(self) -> None:
        """Take the blocks of all leases, as ``preempt`` does, except tables being moved."""
        core = self._core
        for lease_id in list(self._owners):
            if core.is_released(lease_id) or core.swap_transfer(lease_id):
                continue
            if core.is_granted(lease_id) or core.is_swapped(lease_id):
                self.retract(lease_id)
                self._quota.give_back(lease_id)
                self._lost[lease_id] = self.lost_rank
                self.lost_leases += 1
