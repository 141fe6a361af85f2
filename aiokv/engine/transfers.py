"""Plans on their way to the worker, and what their reports change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.observe.logs import Log
from aiokv.plan import TransferPlan, TransferReport
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.plan import Plan, Priority
    from aiokv.scheduler.manager import CacheManager
    from aiokv.worker.base import Worker
    from aiokv.worker.layers import LayerDoneCounter

log = Log(__name__)


class Transfers:
    """Onloads of granted leases and backups of committed blocks.

    Args:
        on_report: called after a report was taken account of; blocks may have become free.
        on_submit: called with the step that a submitted transfer waits for, or 0.
        check_wait: called with such a step before somebody waits for the layers of an onload; it
            raises when that would never end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        manager: CacheManager,
        controller: Worker,
        *,
        on_report: Callable[[TransferReport], None],
        on_submit: Callable[[int], None],
        check_wait: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._controller = controller
        self._after_report = on_report
        self._on_submit = on_submit
        self._check_wait = check_wait
        self._onloads: dict[int, tuple[Plan, LayerDoneCounter]] = {}
        self._ends: dict[int, list[asyncio.Future[None]]] = {}  # who waits for a report
        self._on_end: dict[int, Callable[[], None]] = {}
        self._has_host = manager.config.host_blocks > 0
        self._backup_scheduled = False
        self.stopped = False  # no new backups: the engine closes, or sleeps

    # --- onload ---------------------------------------------------------------------------------

    def start_onloads(self, lease_id: int, priority: Priority, owner: str) -> LayerView:
        """Submit the onload that a grant has begun; the view covers those it joined as well."""
        core = self._manager.core
        joined = []
        for transfer_id in core.onloads(lease_id):
            if transfer_id not in self._onloads:
                plan = self._manager.onload_plan(transfer_id, priority)
                self._onloads[transfer_id] = (plan, self._submit(plan))
            joined.append(self._onloads[transfer_id])
        after_step = max(plan.after_step for plan, _ in joined)
        return LayerView(
            [counter for _, counter in joined],
            owner=owner,
            check_wait=(lambda: self._check_wait(after_step)) if after_step else None,
            locate=self._position_finder(lease_id, [plan for plan, _ in joined]),
        )

    def _position_finder(
        self, lease_id: int, plans: list[Plan]
    ) -> Callable[[int, int], int | None] | None:
        if self._manager.config.state_slots or self._manager.config.windows:
            return None  # they cannot go on from any position: all is to be computed again
        return _position_finder(
            {plan.transfer_id: plan for plan in plans if isinstance(plan, TransferPlan)},
            self._manager.core.block_table(lease_id).tolist(),
            self._manager.config.block_tokens,
        )

    def cancel_abandoned(self) -> None:
        """Take back onloads that nobody waits for any more and that have not begun."""
        if self._onloads:
            for transfer_id in self._manager.core.take_abandoned():
                cancelled = self._controller.cancel(transfer_id)
                if cancelled == "at once":  # a new match of the same prompt must not join it
                    self._onloads.pop(transfer_id, None)
                    self._manager.complete(
                        TransferReport(transfer_id=transfer_id, outcome="cancelled")
                    )
                elif cancelled == "asked":
                    self._manager.core.mark_cancelling(transfer_id)

    # --- backup ---------------------------------------------------------------------------------

    def schedule_backups(self) -> None:
        """Back up what this pass of the loop commits, together, at its end."""
        if self._has_host and not self._backup_scheduled and not self.stopped:
            self._backup_scheduled = True
            self._loop.call_soon(self.send_backups)

    def send_backups(self) -> bool:
        """Returns whether there were any."""
        self._backup_scheduled = False
        if not self._has_host or self.stopped:
            return False
        plans = self._manager.backup_plans()
        for plan in plans:
            self._submit(plan)
        return bool(plans)

    def make_clean(self, num_blocks: int) -> int:
        """Save what stands in the way of evicting ``num_blocks``.

        Returns:
            The transfer that does; 0 when nothing stands there, or all is being saved already.
        """
        if not self._has_host or self.stopped:
            return 0
        plan = self._manager.make_clean(num_blocks)
        if plan is None:
            return 0
        self._submit(plan)
        return plan.transfer_id

    async def run(self, plan: TransferPlan, on_end: Callable[[], None]) -> None:
        """Submit a plan and wait until its report was taken account of, however it ended.

        Args:
            plan: a new one.
            on_end: called then, even if nobody waits any more.

        Cancellation: the transfer goes on.
        """
        self._submit(plan)
        self._on_end[plan.transfer_id] = on_end
        await self.ended(plan.transfer_id)

    async def ended(self, transfer_id: int) -> None:
        """Wait until the report of a transfer that is under way was taken account of.

        Cancellation: the transfer goes on.
        """
        ended: asyncio.Future[None] = self._loop.create_future()
        self._ends.setdefault(transfer_id, []).append(ended)
        await ended

    def _submit(self, plan: Plan) -> LayerDoneCounter:
        counter = self._controller.submit(plan)
        self._on_submit(plan.after_step)
        return counter

    # --- reports --------------------------------------------------------------------------------

    def on_report(self, report: TransferReport) -> None:
        self._onloads.pop(report.transfer_id, None)
        self._manager.complete(report)
        on_end = self._on_end.pop(report.transfer_id, None)
        if on_end is not None:
            on_end()
        for ended in self._ends.pop(report.transfer_id, ()):
            if not ended.done():
                ended.set_result(None)
        if report.outcome == "failed":
            log.warning(
                "transfer.failed",
                transfer_id=report.transfer_id,
                first_bad_block=report.first_bad_block,
                reason=report.reason,
            )
        self.schedule_backups()  # an onload that ended publishes what was committed behind it
        self._after_report(report)


def _position_finder(
    plans: dict[int, TransferPlan], block_table: list[int], block_tokens: int
) -> Callable[[int, int], int | None]:
    """(transfer, index of a block in its plan) -> first position of that block in the lease.

    None when the lease joined for blocks in front of that one, and does not need it.
    """

    def locate(transfer_id: int, block: int) -> int | None:
        device_block = int(plans[transfer_id].device_ids[block])
        if device_block not in block_table:
            return None
        return block_table.index(device_block) * block_tokens

    return locate
