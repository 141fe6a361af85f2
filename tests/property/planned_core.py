"""A core with the plans of the transfers that it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.base.plan import FETCH, OFFLOAD, ONLOAD, SAVE, Priority, TransferPlan
from aiokv.scheduler.plans import PlanMaker, new_core

if TYPE_CHECKING:
    from aiokv.base.plan import TransferReport
    from aiokv.config.cache_config import CacheConfig


class PlannedCore:
    """Calls of the core that begin or end transfers, as the scheduler makes them.

    Attributes:
        config: of the cache.
        core: its native state.
    """

    def __init__(self, config: CacheConfig, *, has_stores: bool = False) -> None:
        self.config = config
        self.core = new_core(config, has_stores)
        self._plans = PlanMaker(self.core)

    def onload_plan(self, transfer_id: int) -> TransferPlan:
        """Return the plan of an onload that a grant has begun."""
        return self._plans.copy(transfer_id, ONLOAD, Priority.DEMAND)

    def backup_plans(self) -> list[TransferPlan]:
        """Begin the saves that the write policy wants now, and return the plans."""
        begun = self._plans.take_backups()
        return [self._plans.copy(transfer, OFFLOAD, Priority.BACKUP) for transfer in begun]

    def save_early(self) -> TransferPlan | None:
        """Save the blocks that the write policy has queued, or return None."""
        transfer_id = self.core.take_backups()
        return self._plans.copy(transfer_id, OFFLOAD, Priority.BACKUP) if transfer_id else None

    def make_clean(self, num_blocks: int) -> TransferPlan | None:
        """Save the blocks that must be saved before ``num_blocks`` are evicted, or return None."""
        transfer_id = self.core.take_write_backs(num_blocks)
        return self._plans.copy(transfer_id, OFFLOAD, Priority.BACKUP) if transfer_id else None

    def fetch_plan(self, transfer_id: int) -> TransferPlan:
        """Return the plan of a fetch in flight."""
        return self._plans.store(transfer_id, FETCH, Priority.DEMAND)

    def save_plan(self) -> TransferPlan | None:
        """Begin a save, and return its plan; None when there is nothing to save."""
        transfer_id = self.core.take_saves()
        return self._plans.store(transfer_id, SAVE, Priority.BACKUP) if transfer_id else None

    def complete(self, report: TransferReport) -> None:
        """Account for the end of a transfer."""
        self._plans.complete(report)
