"""StoreTransfers: the executor of plans between host blocks and stores. Each plan is one task.

The waiters of a fetch are released when its outcome is known, at the latest at the deadlines of the
stores. The plan ends when no store accesses its blocks any more (I3).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from aiokv.base.plan import FETCH, SAVE
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import Result
from aiokv.stores.guard import CLOSE_SECONDS
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RouteCounts, RouteTable
from aiokv.worker.plan_table import Executor, PlanEntry

if TYPE_CHECKING:
    from aiokv.base.plan import TransferPlan
    from aiokv.stores.pools import StorePools
    from aiokv.worker.base import Cancelled
    from aiokv.worker.checksums import Checksums
    from aiokv.worker.plan_table import PlanTable


class _Work:
    """Work of the stores for a plan.

    Attributes:
        task: executes the plan; None before it was submitted.
        accesses: operations that access its host blocks.
        failure: outcome of the plan; a failure until the stores have answered.
        moved_blocks: likewise, blocks that have moved.
        results: likewise, the results of a save.
    """

    def __init__(self, plan: TransferPlan) -> None:
        self.task: asyncio.Task[None] | None = None
        self.accesses = Accesses()
        self.failure: CopyError | None = CopyError(0, "the operation was interrupted")
        self.moved_blocks = 0
        is_save = plan.route == SAVE
        self.results = bytes([Result.FAILED]) * plan.num_blocks if is_save else b""

    @property
    def running(self) -> list[asyncio.Future[Any]]:
        """Its task and its operations, as far as they have not ended."""
        task = [] if self.task is None or self.task.done() else [self.task]
        return [*task, *self.accesses.in_flight]


_Entry: TypeAlias = PlanEntry[_Work]


class StoreTransfers(Executor[_Work]):
    """Plans of the store routes of one worker.

    Args:
        stores: execute the plans.
        plans: plans of the worker.
        checksums: checksums of the host blocks, which fetches overwrite; None without.
    """

    def __init__(self, stores: StorePools, plans: PlanTable, checksums: Checksums | None) -> None:
        self._stores = stores
        self._plans = plans
        self._checksums = checksums
        self._is_closed = False
        self._counts = RouteTable(RouteCounts)

    @property
    def counts(self) -> RouteTable[RouteCounts]:
        """Counts of each group and route."""
        return self._counts

    def new_work(self, entry: _Entry) -> _Work:
        """Return the work of a plan, without its task."""
        return _Work(entry.plan)

    def submit(self, entry: _Entry) -> None:
        """Take a plan; its task runs from the next pass of the loop on."""
        if self._checksums is not None:
            self._checksums.begin(entry.plan)
        task = entry.work.task = asyncio.get_running_loop().create_task(self._execute(entry))
        task.add_done_callback(partial(self._task_done, entry))

    def cancel(self, entry: _Entry) -> Cancelled:
        """Cancel a plan that no store has yet; see :meth:`Executor.cancel`."""
        if entry.state != "waiting" or entry.work.task is None:
            return "too late"
        entry.work.task.cancel()
        return "at once"

    async def finish(self) -> None:
        """Wait for the plans in flight: their operations end at the deadlines of the stores.

        Operations that do not end within ``CLOSE_SECONDS`` are left to ``StoreSet.aclose``.

        Cancellation: the plans go on.
        """
        running = [future for entry in self._in_flight() for future in entry.work.running]
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)

    async def aclose(self) -> None:
        """Cancel the tasks that are left after the stores were closed, and report their plans.

        Cancellation: call it again.
        """
        self._is_closed = True
        entries = self._in_flight()
        tasks = [task for e in entries if (task := e.work.task) is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for entry in entries:
            self._end_at_rest(entry)

    def _in_flight(self) -> list[_Entry]:
        return [entry for entry in self._plans if entry.executor is self]

    # --- one plan ---------------------------------------------------------------------------

    async def _execute(self, entry: _Entry) -> None:
        self._plans.begin(entry)
        is_fetch = entry.plan.route == FETCH
        overdue = await (self._fetch(entry) if is_fetch else self._save(entry))
        if overdue:
            await asyncio.wait(overdue)

    async def _fetch(self, entry: _Entry) -> tuple[asyncio.Task[Any], ...]:
        work = entry.work
        fetched = await self._stores.fetch(entry.plan, work.accesses)
        work.moved_blocks = fetched.blocks
        work.failure = None
        if fetched.blocks != entry.plan.num_blocks:
            work.failure = CopyError(fetched.blocks, fetched.reason)
            if fetched.overdue:
                entry.counter.give_up(work.failure)
        return fetched.overdue

    async def _save(self, entry: _Entry) -> tuple[asyncio.Task[Any], ...]:
        work = entry.work
        saved = await self._stores.save(entry.plan, work.accesses)
        work.moved_blocks, work.results, work.failure = saved.written_blocks, saved.results, None
        return saved.overdue

    def _task_done(self, entry: _Entry, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "aiokv: a transfer of the stores raised", "exception": error}
            )
        entry.work.accesses.cancel()  # a cancelled task does not end them
        self._end_at_rest(entry)

    def _end_at_rest(self, entry: _Entry, *_: object) -> None:
        """End a plan when nothing accesses its blocks any more (I3), or after ``aclose``."""
        work = entry.work
        if not self._is_closed and (in_flight := work.accesses.in_flight):
            in_flight[0].add_done_callback(partial(self._end_at_rest, entry))
            return
        self._plans.end(entry, work.failure, moved_blocks=work.moved_blocks, results=work.results)
        self._plans.send_report(entry)
