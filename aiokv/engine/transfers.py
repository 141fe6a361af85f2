"""Plans on their way to the worker, and what their reports change."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from aiokv.errors import AiokvError, UsageError
from aiokv.observe.logs import Log
from aiokv.plan import ONLOAD, Priority, TransferReport
from aiokv.worker.device.base import CopyError
from aiokv.worker.interrupts import call_surely
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiokv.plan import TransferPlan
    from aiokv.scheduler.manager import CacheManager
    from aiokv.worker.base import Worker

log = Log(__name__)

KEPT_REPORTS: Final = 256  # ids, to know a report that is sent again after an interrupt


class Transfers:
    """Onloads of granted leases and backups of committed blocks.

    Args:
        on_report: called after a report was processed; blocks may have become free.
        on_submit: called with the step that a submitted transfer waits for, or 0.
        check_wait: called with such a step before a coroutine waits for the layers of an onload;
            raises when that wait would never end.
        soon: calls an idempotent callback in a later pass of the loop; see ``EventPoller.soon``.
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
        soon: Callable[[Callable[[], object]], None],
    ) -> None:
        self._loop = loop
        self._manager = manager
        self._controller = controller
        self._after_report = on_report
        self._on_submit = on_submit
        self._check_wait = check_wait
        self._soon = soon
        self._onloads: dict[int, tuple[TransferPlan, LayerDoneCounter]] = {}
        self._ends: dict[int, list[asyncio.Future[None]]] = {}  # who waits for a report
        self._on_end: dict[int, Callable[[], None]] = {}
        self._has_host = manager.config.host_blocks > 0
        self._backup_scheduled = False
        self._new_backups: deque[int] = deque()  # in the core; not yet submitted
        self._reported: dict[int, None] = {}  # transfers of the newest reports, oldest first
        self.stopped = False  # no new backups: the engine closes, or sleeps

    # --- onload ---------------------------------------------------------------------------------

    def start_onloads(self, lease_id: int, priority: Priority, owner: str) -> LayerView:
        """Submit the onload that a grant has begun; the view covers those it joined as well.

        An onload that it joined, such as a prefetch, becomes as urgent as ``priority``.
        """
        core = self._manager.core
        joined = []
        for transfer_id in core.onloads(lease_id):
            if transfer_id not in self._onloads:
                plan = self._manager.onload_plan(transfer_id, priority)
                self._onloads[transfer_id] = (plan, self._submit(plan))
            elif priority < self._onloads[transfer_id][0].priority:
                self._controller.raise_priority(transfer_id, priority)
            joined.append(self._onloads[transfer_id])
        after_step = max(plan.after_step for plan, _ in joined)
        return LayerView(
            [counter for _, counter in joined],
            owner=owner,
            check_wait=(lambda: self._check_wait(after_step)) if after_step else None,
            locate=self._position_finder(lease_id, [plan for plan, _ in joined]),
        )

    def _position_finder(
        self, lease_id: int, plans: list[TransferPlan]
    ) -> Callable[[int, int], int | None]:
        locate = _position_finder(
            {plan.transfer_id: plan for plan in plans if plan.route == ONLOAD},
            self._manager.core.block_table(lease_id).tolist(),
            self._manager.config.block_tokens,
        )
        if not (self._manager.config.state_slots or self._manager.config.windows):
            return locate
        # State and windows cannot go back to a position: all positions are to be computed again.
        return lambda transfer_id, block: None if locate(transfer_id, block) is None else 0

    def cancel_abandoned(self) -> None:
        """Cancel onloads that no lease needs any more and that have not begun."""
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
            self._soon(self.send_backups)
            self._backup_scheduled = True

    def send_backups(self) -> bool:
        """Returns whether there were any."""
        self._backup_scheduled = False
        if not self._has_host or self.stopped:
            return False
        self._manager.take_backups(self._new_backups)
        sent = False
        while self._new_backups:
            transfer_id = self._new_backups[0]
            if transfer_id:
                plan = self._manager.backup_plan(transfer_id)
                sent = True
                self._new_backups.popleft()
                self._submit(plan)
            else:
                self._new_backups.popleft()
        return sent

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
            on_end: called then, even if no coroutine waits any more.

        Cancellation: the transfer goes on.
        """
        self._submit(plan)
        self._on_end[plan.transfer_id] = on_end
        await self.ended(plan.transfer_id)

    async def ended(self, transfer_id: int) -> None:
        """Wait until the report of a transfer in flight was processed.

        A backup that still waits for the device is submitted before others from now on.

        Cancellation: the transfer goes on.
        """
        self._controller.raise_priority(transfer_id, Priority.DEMAND)
        ended: asyncio.Future[None] = self._loop.create_future()
        self._ends.setdefault(transfer_id, []).append(ended)
        await ended

    def _submit(self, plan: TransferPlan) -> LayerDoneCounter:
        """Give a plan to the worker. One that the worker refuses is reported as failed."""
        try:
            counter = call_surely(
                partial(self._controller.submit, plan),
                self._soon,
                partial(self._submit_again, plan),
            )
        except AiokvError as error:
            return self._refused(plan, CopyError(0, str(error)))
        self._on_submit(plan.after_step)
        return counter

    def _submit_again(self, plan: TransferPlan) -> None:
        """Submit a plan again after an interrupt; the worker may have it already."""
        if self._manager.is_under_way(plan.transfer_id):
            with suppress(UsageError):  # it has the plan
                self._controller.submit(plan)

    def _refused(self, plan: TransferPlan, failure: CopyError) -> LayerDoneCounter:
        counter = LayerDoneCounter(
            self._controller.num_layers,
            transfer_id=plan.transfer_id,
            direction=plan.direction,
        )
        counter.refuse(failure)

        def end() -> None:
            self.on_report(
                TransferReport(
                    transfer_id=plan.transfer_id, outcome="failed", reason=failure.reason
                )
            )
            counter.finish(failure)

        self._soon(end)
        return counter

    # --- reports --------------------------------------------------------------------------------

    def on_report(self, report: TransferReport) -> None:
        """Process the end of a transfer; called again after an interrupt."""
        transfer_id = report.transfer_id
        again = transfer_id in self._reported
        self._reported[transfer_id] = None
        if len(self._reported) > KEPT_REPORTS:
            del self._reported[next(iter(self._reported))]
        self._onloads.pop(transfer_id, None)
        if not again or self._manager.is_under_way(transfer_id):
            self._manager.complete(report)
        on_end = self._on_end.get(transfer_id)
        if on_end is not None:
            on_end()
            del self._on_end[transfer_id]
        for ended in self._ends.get(transfer_id, ()):
            if not ended.done():
                ended.set_result(None)
        self._ends.pop(transfer_id, None)
        if report.outcome == "failed":
            log.warning(
                "transfer.failed",
                transfer_id=transfer_id,
                first_bad_block=report.first_bad_block,
                reason=report.reason,
            )
        self.schedule_backups()  # an onload that ended publishes what was committed behind it
        self._after_report(report)


def _position_finder(
    plans: dict[int, TransferPlan], block_table: list[int], block_tokens: int
) -> Callable[[int, int], int | None]:
    """(transfer, index of a block in its plan) -> first position of that block in the lease.

    None when the lease joined for blocks in front of that one, and does not need it. 0 for a
    transfer that is not among ``plans``: it moves recurrent state.
    """

    def locate(transfer_id: int, block: int) -> int | None:
        if transfer_id not in plans:
            return 0
        device_block = int(plans[transfer_id].target_ids[block])
        if device_block not in block_table:
            return None
        return block_table.index(device_block) * block_tokens

    return locate
