"""Plans: transfer plans for the worker, one per transfer that the core has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv._native import (
    ATTENTION_GROUP,
    STATE_GROUP,
    Core,
    MoveRoute,
    Outcome,
    StoreConfig,
)
from aiokv._native import SavePolicy as NativePolicy
from aiokv.base.groups import ATTENTION, STATE
from aiokv.base.plan import (
    CLONE,
    FETCH,
    ID_DTYPE,
    OFFLOAD,
    ONLOAD,
    RECEIVE,
    SEND,
    Priority,
    TransferPlan,
    id_bytes,
)
from aiokv.config.cache_config import STORE_POLICIES, WRITE_POLICIES
from aiokv.config.save_policy import SavePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.base.plan import Route, TransferReport
    from aiokv.config.cache_config import CacheConfig, WindowGroup

_POLICIES = {
    "none": NativePolicy.NONE,
    "write_through": NativePolicy.WRITE_THROUGH,
    "nth_use": NativePolicy.NTH_USE,
    "write_back": NativePolicy.WRITE_BACK,
}
_MAX_AHEAD_BLOCKS = 1024  # saved ahead of eviction to the stores: one scan takes 10 us
_MOVE_ROUTES = {
    MoveRoute.ON_DEVICE: CLONE,
    MoveRoute.FROM_HOST: ONLOAD,
    MoveRoute.TO_HOST: OFFLOAD,
}
_OUTCOMES = {
    "done": Outcome.DONE,
    "failed": Outcome.FAILED,
    "cancelled": Outcome.CANCELLED,
}


def new_core(config: CacheConfig, has_stores: bool = False) -> Core:
    """Return the native state of an empty cache."""
    write = SavePolicy.parse("write_policy", config.write_policy, WRITE_POLICIES)
    return Core(
        block_tokens=config.block_tokens,
        device_blocks=config.device_blocks,
        host_blocks=config.host_blocks,
        leave_tokens=config.leave_tokens,
        reserve_blocks=config.reserve_blocks,
        history_blocks=config.miss_history_blocks,
        write_policy=_POLICIES[write.moment],
        write_uses=write.uses,
        low_watermark_blocks=config.watermark_blocks,
        min_onload_blocks=config.min_onload_blocks,
        eviction=config.eviction_policy,
        state_slots=config.state_slots,
        host_state_slots=config.host_state_slots,
        external_device=config.external_device,
        splits_items=config.item_hits == "partial",
        shares=dict(config.salt_shares),
        windows=[
            (
                group.device_blocks,
                group.retained_tokens + 1,
                group.step_tokens or 0,
                group.sink_tokens,
                group.host_blocks,
            )
            for group in config.windows.values()
        ],
        stores=_store_config(config) if has_stores else None,
    )


def _store_config(config: CacheConfig) -> StoreConfig:
    save = SavePolicy.parse("store_policy", config.store_policy, STORE_POLICIES)
    return StoreConfig(
        policy=_POLICIES[save.moment],
        uses=save.uses,
        queue_blocks=config.store_queue_blocks,
        ahead_blocks=min(-(-config.host_blocks // 32), _MAX_AHEAD_BLOCKS),
    )


class PlanMaker:
    """Makes the plans of one core's transfers, and reports their ends to the core."""

    def __init__(
        self,
        core: Core,
        *,
        saves_states: bool = False,
        windows: Mapping[str, WindowGroup] | None = None,
    ) -> None:
        self._core = core
        self._groups = list(windows or ())
        windows_on_host = any(group.host_blocks for group in (windows or {}).values())
        self._saves_groups = saves_states or windows_on_host

    def copy(self, transfer_id: int, route: Route, priority: int) -> TransferPlan:
        """Return the plan of a copy between the tiers, of any group.

        Args:
            transfer_id: the transfer.
            route: ``ONLOAD`` or ``OFFLOAD`` of blocks of full attention; of a transfer of another
                group, the core knows the route.
            priority: priority of the plan.
        """
        core = self._core
        if core.is_move(transfer_id):
            move_route, number, sources, targets, after_step = core.move(transfer_id)
            route, group = _MOVE_ROUTES[move_route], self._group(number)
        else:
            device_blocks, host_blocks, after_step = core.transfer(transfer_id)
            blocks = (host_blocks, device_blocks)
            group, (sources, targets) = ATTENTION, blocks if route == ONLOAD else blocks[::-1]
        return TransferPlan(
            transfer_id=transfer_id,
            route=route,
            group=group,
            source_blocks=sources,
            target_blocks=targets,
            priority=priority,
            after_step=after_step,
        )

    def store(self, transfer_id: int, route: Route, priority: Priority) -> TransferPlan:
        """Return the plan of a fetch or a save; its ids in the stores are indices of the digests.

        Args:
            transfer_id: the transfer.
            route: ``FETCH`` or ``SAVE``.
            priority: priority of the plan.
        """
        group, host_blocks, digests, follows = self._core.store_transfer(transfer_id)
        indices = id_bytes(np.arange(len(host_blocks) // ID_DTYPE.itemsize))
        fetches = route == FETCH
        return TransferPlan(
            transfer_id=transfer_id,
            route=route,
            group=self._group(group),
            source_blocks=indices if fetches else host_blocks,
            target_blocks=host_blocks if fetches else indices,
            priority=priority,
            digests=digests,
            follows=follows,
        )

    def peer(self, transfer_id: int) -> TransferPlan:
        """Return the plan of a transfer from or to a peer, whose ids are indices in the prompt."""
        receives, ticket_id, group, in_prompt, own_ids, after_step, ranges, mark = (
            self._core.peer_transfer(transfer_id)
        )
        return TransferPlan(
            transfer_id=transfer_id,
            route=RECEIVE if receives else SEND,
            source_blocks=in_prompt if receives else own_ids,
            target_blocks=own_ids if receives else in_prompt,
            after_step=after_step,
            group=self._group(group),
            peer=ticket_id,
            first_range=ranges[0],
            end_range=ranges[1],
            mark=mark,
        )

    def _group(self, number: int) -> str:
        """Return the name of a group that has this number in the core."""
        if number == ATTENTION_GROUP:
            return ATTENTION
        return STATE if number == STATE_GROUP else self._groups[number]

    def take_backups(self) -> list[int]:
        """Begin the backups that the write policy wants now, and return their ids.

        The core begins at most one offload of a bounded number of queued blocks, one that keeps
        evictable blocks available ahead of demand, one per snapshot of recurrent state, and one or
        more per window group.
        """
        begun = [self._core.take_backups()]
        if self._core.wants_write_backs():
            begun.append(self._core.take_write_backs())
        if self._saves_groups:
            begun.extend(iter(self._core.take_group_save, 0))
        return [transfer_id for transfer_id in begun if transfer_id]

    def complete(self, report: TransferReport) -> list[int]:
        """Commit the verified blocks of a transfer, and roll back its other blocks.

        Returns:
            The leases that only waited for this transfer, and are released now.
        """
        outcome = _OUTCOMES[report.outcome]
        return self._core.complete(
            report.transfer_id, outcome, report.first_bad_block, report.results
        )
