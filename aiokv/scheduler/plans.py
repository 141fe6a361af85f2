"""Plans: transfer plans for the worker, one per transfer that the core has begun."""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING

from aiokv._native import Core, EvictionKind, Outcome, StateRoute
from aiokv._native import WritePolicy as NativePolicy
from aiokv.errors import UsageError
from aiokv.plan import (
    OFFLOAD,
    ONLOAD,
    STATE,
    STATE_OFFLOAD,
    STATE_ONLOAD,
    TransferPlan,
    id_bytes,
)

if TYPE_CHECKING:
    from collections import deque

    from aiokv.config import CacheConfig
    from aiokv.plan import Priority, TransferReport

_POLICIES = {
    "none": NativePolicy.NONE,
    "write_through": NativePolicy.WRITE_THROUGH,
    "write_through_selective": NativePolicy.WRITE_THROUGH_SELECTIVE,
    "write_back": NativePolicy.WRITE_BACK,
}
_EVICTION = {"lru": EvictionKind.LRU, "adaptive": EvictionKind.ADAPTIVE}
_STATE_ROUTES = {
    StateRoute.ON_DEVICE: STATE,
    StateRoute.FROM_HOST: STATE_ONLOAD,
    StateRoute.TO_HOST: STATE_OFFLOAD,
}
_OUTCOMES = {
    "done": Outcome.DONE,
    "failed": Outcome.FAILED,
    "cancelled": Outcome.CANCELLED,
}


def new_core(config: CacheConfig) -> Core:
    """Return the native state of an empty cache."""
    return Core(
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
        host_state_slots=config.host_state_slots,
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


class Plans:
    """Makes the plans of one core's transfers, and reports their ends to the core."""

    def __init__(self, core: Core, *, saves_states: bool = False) -> None:
        self._core = core
        self._saves_states = saves_states

    def onload(self, transfer_id: int, priority: Priority) -> TransferPlan:
        """Return the plan of an onload, or of the move of a state slot, that a grant has begun."""
        if self._core.is_state_move(transfer_id):
            return self._state_move(transfer_id, priority)
        device_blocks, host_blocks, after_step = self._core.transfer(transfer_id)
        return TransferPlan(
            transfer_id=transfer_id,
            route=ONLOAD,
            source_blocks=host_blocks,
            target_blocks=device_blocks,
            priority=priority,
            after_step=after_step,
        )

    def offload(self, transfer_id: int, priority: Priority) -> TransferPlan:
        """Return the plan of a backup of blocks or a snapshot, or of a swap of a table."""
        if self._core.is_state_move(transfer_id):
            return self._state_move(transfer_id, priority)
        device_blocks, host_blocks, after_step = self._core.transfer(transfer_id)
        return TransferPlan(
            transfer_id=transfer_id,
            route=OFFLOAD,
            source_blocks=device_blocks,
            target_blocks=host_blocks,
            priority=priority,
            after_step=after_step,
        )

    def _state_move(self, transfer_id: int, priority: Priority) -> TransferPlan:
        source, target, after_step = self._core.state_move(transfer_id)
        return TransferPlan(
            transfer_id=transfer_id,
            route=_STATE_ROUTES[self._core.state_route(transfer_id)],
            source_blocks=id_bytes([source]),
            target_blocks=id_bytes([target]),
            priority=priority,
            after_step=after_step,
        )

    def take_backups(self, transfer_ids: deque[int]) -> None:
        """Append the ids of the backups that the write policy begins now; 0 for no backup.

        The core begins at most one offload of the queued blocks, one that keeps evictable blocks
        available ahead of demand, and one per snapshot of recurrent state. ``extend`` calls the
        core without Python code in between, where a signal handler could raise and lose the id of a
        transfer that has begun.
        """
        transfer_ids.extend(starmap(self._core.take_backups, ((),)))
        if self._core.wants_write_backs():
            transfer_ids.extend(starmap(self._core.take_write_backs, ((),)))
        if self._saves_states:
            transfer_ids.extend(iter(self._core.take_state_save, 0))

    def complete(self, report: TransferReport) -> None:
        """Commit the verified blocks of a transfer, and roll back its other blocks."""
        self._core.complete(report.transfer_id, _OUTCOMES[report.outcome], report.first_bad_block)

    def is_in_flight(self, transfer_id: int) -> bool:
        """Return True if the transfer has begun and has not been completed."""
        try:
            if self._core.is_state_move(transfer_id):
                self._core.state_move(transfer_id)
            else:
                self._core.transfer(transfer_id)
        except UsageError:
            return False
        return True
