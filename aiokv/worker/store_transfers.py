"""StoreTransfers: plans between host blocks and stores. Each is one task, and ends with a report.

The waiters of a fetch are released when its outcome is known, at the latest at the deadlines of the
stores. The report follows when no store accesses the blocks any more (I3).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aiokv.base.plan import FETCH, SAVE, STORE_ROUTES, TransferReport, group_routes
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import Result
from aiokv.stores.guard import CLOSE_SECONDS
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RunningCounts
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.reports import deliver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.base.plan import GroupRoute, TransferPlan
    from aiokv.base.statistics import RouteStatistics
    from aiokv.stores.pools import StorePools
    from aiokv.worker.base import Cancelled


class _StoreTransfer:
    """A plan in flight.

    Attributes:
        began: its task has run.
        accesses: operations that access its host blocks.
        report: set when the outcome is known.
        reported: the scheduler knows the outcome, and gets no report.
    """

    def __init__(self, plan: TransferPlan, counter: LayerDoneCounter, block_bytes: int) -> None:
        self.plan = plan
        self.counter = counter
        self.block_bytes = block_bytes
        self.began = False
        self.moved_blocks = 0
        self.failure: CopyError | None = None
        self.report = TransferReport(
            transfer_id=plan.transfer_id,
            outcome="failed",
            reason="the operation was interrupted",
            results=bytes([Result.FAILED]) * plan.num_blocks if plan.route == SAVE else b"",
        )
        self.reported = False
        self.task: asyncio.Task[None] | None = None
        self.accesses = Accesses()

    @property
    def running(self) -> list[asyncio.Future[Any]]:
        """Its task and its operations, as far as they have not ended."""
        task = [] if self.task is None or self.task.done() else [self.task]
        return [*task, *self.accesses.in_flight]


class StoreTransfers:
    """Plans of the store routes of one worker.

    Args:
        stores: execute the plans.
        on_end: called with the id of each plan after its report.
    """

    def __init__(self, stores: StorePools, on_end: Callable[[int], None]) -> None:
        self._stores = stores
        self._on_end = on_end
        self._on_report: Callable[[TransferReport], None] = lambda report: None
        self._transfers: dict[int, _StoreTransfer] = {}
        self._is_closed = False
        self._counts = {route: RunningCounts() for route in group_routes(*STORE_ROUTES)}

    def open(self, on_report: Callable[[TransferReport], None]) -> None:
        """Report through ``on_report`` from now on."""
        self._on_report = on_report

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of the plans that were not reported yet."""
        return self._transfers.keys()

    def submit(self, plan: TransferPlan, num_bytes: int) -> LayerDoneCounter:
        """Take a plan that was checked; its task runs from the next pass of the loop on."""
        counter = LayerDoneCounter(
            0, transfer_id=plan.transfer_id, direction=plan.direction, num_bytes=num_bytes
        )
        transfer = _StoreTransfer(plan, counter, num_bytes // plan.num_blocks)
        self._transfers[plan.transfer_id] = transfer
        self._counts[plan.group_route].begin(plan.transfer_id)
        transfer.task = asyncio.get_running_loop().create_task(self._execute(transfer))
        transfer.task.add_done_callback(partial(self._task_done, transfer))
        return counter

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.counter

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that no store has yet; see ``Worker.cancel``."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.began or transfer.task is None:
            return "too late"
        transfer.reported = True  # the caller knows that it has ended
        transfer.failure = CopyError(0, "cancelled before it was submitted")
        transfer.report = TransferReport(transfer_id=transfer_id, outcome="cancelled")
        transfer.task.cancel()
        return "at once"

    async def finish(self) -> None:
        """Wait for the plans in flight: their operations end at the deadlines of the stores.

        Operations that do not end within ``CLOSE_SECONDS`` are left to ``StoreSet.aclose``.

        Cancellation: the plans go on.
        """
        running = [future for t in self._transfers.values() for future in t.running]
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)

    async def aclose(self) -> None:
        """Cancel the tasks that are left after the stores were closed, and report their plans.

        Cancellation: call it again.
        """
        self._is_closed = True
        transfers = list(self._transfers.values())
        tasks = [t.task for t in transfers if t.task is not None and not t.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for transfer in transfers:
            self._end(transfer)

    def statistics(self) -> dict[GroupRoute, RouteStatistics]:
        """Return the counts of each route. Any thread."""
        return {route: counts.statistics() for route, counts in self._counts.items()}

    # --- one plan ---------------------------------------------------------------------------

    async def _execute(self, transfer: _StoreTransfer) -> None:
        transfer.began = True
        transfer.counter.note_start()
        if transfer.plan.route == FETCH:
            overdue = await self._fetch(transfer)
        else:
            overdue = await self._save(transfer)
        if overdue:
            await asyncio.wait(overdue)

    async def _fetch(self, transfer: _StoreTransfer) -> tuple[asyncio.Task[Any], ...]:
        plan = transfer.plan
        fetched = await self._stores.fetch(plan, transfer.accesses)
        transfer.moved_blocks = fetched.blocks
        whole = fetched.blocks == plan.num_blocks
        transfer.report = TransferReport(
            transfer_id=plan.transfer_id,
            outcome="done" if whole else "failed",
            first_bad_block=fetched.blocks,
            reason=fetched.reason,
        )
        if not whole:
            transfer.failure = CopyError(fetched.blocks, fetched.reason)
            if fetched.overdue:
                transfer.counter.give_up(transfer.failure)
        return fetched.overdue

    async def _save(self, transfer: _StoreTransfer) -> tuple[asyncio.Task[Any], ...]:
        saved = await self._stores.save(transfer.plan, transfer.accesses)
        transfer.moved_blocks = saved.written_blocks
        transfer.report = TransferReport(
            transfer_id=transfer.plan.transfer_id, outcome="done", results=saved.results
        )
        return saved.overdue

    def _task_done(self, transfer: _StoreTransfer, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "aiokv: a transfer of the stores raised", "exception": error}
            )
        transfer.accesses.cancel()  # a cancelled task leaves them behind
        self._end_when_at_rest(transfer)

    def _end_when_at_rest(self, transfer: _StoreTransfer, *_: object) -> None:
        """Report a plan when nothing accesses its blocks any more (I3), or after ``aclose``."""
        if not self._is_closed and (in_flight := transfer.accesses.in_flight):
            in_flight[0].add_done_callback(partial(self._end_when_at_rest, transfer))
        else:
            self._end(transfer)

    def _end(self, transfer: _StoreTransfer) -> None:
        """Report a plan whose task has ended. Idempotent."""
        plan, report = transfer.plan, transfer.report
        if self._transfers.get(plan.transfer_id) is not transfer:
            return
        if report.outcome == "failed" and transfer.failure is None:
            transfer.failure = CopyError(report.first_bad_block, report.reason)
        transfer.counter.finish(transfer.failure)
        if not transfer.reported:
            deliver(self._on_report, report)
        moved_bytes = transfer.moved_blocks * transfer.block_bytes
        self._on_end(plan.transfer_id)
        del self._transfers[plan.transfer_id]
        self._counts[plan.group_route].end(plan.transfer_id, report.outcome, moved_bytes)
