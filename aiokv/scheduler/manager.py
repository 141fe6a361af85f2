"""CacheManager: every decision of the cache, one synchronous call a state transition.

The hot state is native (``Core``); here are the plans that follow from it. No await, no clock, no
device: decisions depend on the order of calls alone (I9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv._native import Core, Outcome
from aiokv.plan import Priority, TransferPlan

if TYPE_CHECKING:
    from aiokv.config import CacheConfig
    from aiokv.plan import Direction, TransferReport

_OUTCOMES = {
    "done": Outcome.DONE,
    "failed": Outcome.FAILED,
    "cancelled": Outcome.CANCELLED,
}


class CacheManager:
    """Decides for one cache, on whatever ranks its blocks live.

    Attributes:
        core: leases, index and pools; the engine calls its per-lease verbs directly.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.core = Core(
            block_tokens=config.block_tokens,
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            leave_tokens=config.leave_tokens,
            reserve_blocks=config.reserve_blocks,
            write_through=config.host_blocks > 0 and config.write_policy == "write_through",
        )

    def onload_plan(self, transfer_id: int, priority: Priority) -> TransferPlan:
        """The plan of an onload that a grant has started."""
        return self._plan(transfer_id, "onload", priority)

    def backup_plan(self) -> TransferPlan | None:
        """One offload for all that was committed since the last call; None for nothing."""
        transfer_id = self.core.take_backups()
        return self._plan(transfer_id, "offload", Priority.BACKUP) if transfer_id else None

    def complete(self, report: TransferReport) -> None:
        """Commit what a transfer has proven, roll back the rest."""
        self.core.complete(report.transfer_id, _OUTCOMES[report.outcome], report.first_bad_block)

    def _plan(self, transfer_id: int, direction: Direction, priority: Priority) -> TransferPlan:
        device_blocks, host_blocks, after_step = self.core.transfer(transfer_id)
        return TransferPlan(
            transfer_id=transfer_id,
            direction=direction,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            priority=priority,
            after_step=after_step,
        )
