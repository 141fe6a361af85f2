"""CacheManager: every decision of the cache, one synchronous call a state transition.

The hot state is native (``Core``); here are the plans that follow from it. No await, no clock, no
device: decisions depend on the order of calls alone (I9).
"""

from __future__ import annotations

from collections import deque
from itertools import starmap
from typing import TYPE_CHECKING

from aiokv._native import Core, EvictionKind, Outcome
from aiokv._native import WritePolicy as NativePolicy
from aiokv.errors import UsageError
from aiokv.plan import Plan, Priority, StatePlan, TransferPlan

if TYPE_CHECKING:
    from aiokv.config import CacheConfig
    from aiokv.plan import Direction, TransferReport

_POLICIES = {
    "none": NativePolicy.NONE,
    "write_through": NativePolicy.WRITE_THROUGH,
    "write_through_selective": NativePolicy.WRITE_THROUGH_SELECTIVE,
    "write_back": NativePolicy.WRITE_BACK,
}
_EVICTION = {"lru": EvictionKind.LRU, "adaptive": EvictionKind.ADAPTIVE}
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
        self._windows = {group: index for index, group in enumerate(config.windows)}
        self.core = Core(
            block_tokens=config.block_tokens,
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            leave_tokens=config.leave_tokens,
            reserve_blocks=config.reserve_blocks,
            write_policy=_POLICIES[config.write_policy if config.host_blocks else "none"],
            write_through_threshold=config.write_through_threshold,
            low_watermark_blocks=config.watermark_blocks,
            min_onload_blocks=config.min_onload_blocks,
            eviction=_EVICTION[config.eviction_policy],
            state_slots=config.state_slots,
            windows=[
                (
                    group.device_blocks,
                    group.window_tokens,
                    group.step_tokens or 0,
                    group.sink_tokens,
                )
                for group in config.windows.values()
            ],
        )

    def window_index(self, group: str | None) -> int:
        """What the core calls a window group; -1 for all other layers.

        Raises:
            UsageError: there is no such group.
        """
        if group is None:
            return -1
        if group not in self._windows:
            raise UsageError(f"no window group {group!r} among {list(self._windows)}")
        return self._windows[group]

    def onload_plan(self, transfer_id: int, priority: Priority) -> Plan:
        """The plan of an onload, or of a state slot, that a grant has started."""
        if self.core.is_state_move(transfer_id):
            return self._state_plan(transfer_id, priority)
        return self._plan(transfer_id, "onload", priority)

    def take_backups(self, transfer_ids: deque[int]) -> None:
        """Append what the write policy wants saved now: at most one offload for what was queued,
        and one that keeps eviction ahead of demand; 0 for none.

        ``extend`` calls the core without Python code in between, where the handler of a signal
        could raise and lose the id of a transfer that has begun.
        """
        transfer_ids.extend(starmap(self.core.take_backups, ((),)))
        if self.core.wants_write_backs():
            transfer_ids.extend(starmap(self.core.take_write_backs, ((),)))

    def backup_plans(self) -> list[TransferPlan]:
        """The plans of what ``take_backups`` appends."""
        transfer_ids: deque[int] = deque()
        self.take_backups(transfer_ids)
        return [self.backup_plan(transfer_id) for transfer_id in transfer_ids if transfer_id]

    def backup_plan(self, transfer_id: int) -> TransferPlan:
        """The plan of an offload that ``take_backups`` has begun."""
        return self._plan(transfer_id, "offload", Priority.BACKUP)

    def make_clean(self, num_blocks: int) -> TransferPlan | None:
        """Save what stands in the way of evicting ``num_blocks``; None when nothing does."""
        transfer_id = self.core.take_write_backs(num_blocks)
        return self.backup_plan(transfer_id) if transfer_id else None

    def swap_plan(self, transfer_id: int) -> TransferPlan:
        """The offload of a preempted lease's table; a request may wait for its blocks."""
        return self._plan(transfer_id, "offload", Priority.DEMAND)

    def describe(self, lease_id: int) -> dict[str, object]:
        """Return what one lease holds, as plain values."""
        core = self.core
        device_blocks, host_blocks = core.hit(lease_id)
        return {
            "granted": core.is_granted(lease_id),
            "swapped": core.is_swapped(lease_id),
            "num_tokens": core.num_tokens(lease_id),
            "computed_tokens": core.computed_tokens(lease_id),
            "hit_blocks": {"device": device_blocks, "host": host_blocks},
            "block_table": core.block_table(lease_id).tolist(),
            "onloads": core.onloads(lease_id),
            "state_slot": core.state_slot(lease_id),
        }

    def complete(self, report: TransferReport) -> None:
        """Commit what a transfer has proven, roll back the rest."""
        self.core.complete(report.transfer_id, _OUTCOMES[report.outcome], report.first_bad_block)

    def is_under_way(self, transfer_id: int) -> bool:
        """Return whether the transfer has begun, and no report of it has come."""
        try:
            if self.core.is_state_move(transfer_id):
                self.core.state_move(transfer_id)
            else:
                self.core.transfer(transfer_id)
        except UsageError:
            return False
        return True

    def _state_plan(self, transfer_id: int, priority: Priority) -> StatePlan:
        source, target, after_step = self.core.state_move(transfer_id)
        return StatePlan(
            transfer_id=transfer_id,
            source_slots=_id_bytes(source),
            target_slots=_id_bytes(target),
            priority=priority,
            after_step=after_step,
        )

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


def _id_bytes(slot: int) -> bytes:
    """One id as plans have them."""
    return slot.to_bytes(4, "little", signed=True)
