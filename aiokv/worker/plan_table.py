"""PlanTable: the plans of a worker from their submission to their reports.

::

    submit ─► waiting ─► begun ─► ended ─► report
                │ cancel "at once"  ▲
                └───────────────────┘ without a report

An :class:`Executor` moves the bytes of the plans of its routes. It tells the table when a plan has
begun and when it has ended; the table keeps the counters of layers, answers questions about plans,
and makes the only report of each plan.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from aiokv.base.plan import TransferReport
from aiokv.errors import UsageError
from aiokv.worker.device.base import CopyError
from aiokv.worker.layers import LayerDoneCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.base.plan import TransferPlan
    from aiokv.worker.base import Cancelled
    from aiokv.worker.lanes import RouteTable
    from aiokv.worker.poller import EventPoller

W = TypeVar("W")  # state that an executor keeps for a plan

CANCELLED: Final = CopyError(0, "cancelled before it was submitted")


class PlanEntry(Generic[W]):
    """A plan in flight.

    Attributes:
        plan: the plan, as submitted.
        num_bytes: number of bytes that it moves.
        executor: executor of its route.
        on_end: gets the failure, or None, in place of the report of a copy that is part of a plan;
            None for a plan of the scheduler.
        counts: counts of its group and route.
        counter: layers of it that have arrived.
        priority: priority of the plan, or a more urgent one that was requested later.
        state: ``"waiting"`` until the executor has begun; ``"ended"`` until it is reported.
        failure: reason of the failure; None while it goes on, and when all blocks have moved.
        moved_bytes: known when it has ended.
        report: set when it has ended.
        work: state that the executor keeps for it.
    """

    __slots__ = (
        "counter",
        "counts",
        "executor",
        "failure",
        "moved_bytes",
        "num_bytes",
        "on_end",
        "plan",
        "priority",
        "report",
        "state",
        "work",
    )

    def __init__(
        self,
        plan: TransferPlan,
        executor: Executor[W],
        counter: LayerDoneCounter,
        on_end: Callable[[CopyError | None], None] | None,
    ) -> None:
        self.plan = plan
        self.num_bytes = counter.num_bytes
        self.executor = executor
        self.counts = executor.counts.of(plan)
        self.on_end = on_end
        self.counter = counter
        self.priority = plan.priority
        self.state: Literal["waiting", "begun", "ended"] = "waiting"
        self.failure: CopyError | None = None
        self.moved_bytes = 0
        self.report: TransferReport | None = None
        self.work = executor.new_work(self)


class Executor(ABC, Generic[W]):
    """Executes the plans of some routes.

    An executor calls ``PlanTable.begin`` when the bytes of a plan begin to move, and
    ``PlanTable.end`` when nothing accesses its blocks any more.
    """

    @property
    @abstractmethod
    def counts(self) -> RouteTable[Any]:
        """Counts of each group and route."""

    @property
    def num_layers(self) -> int:
        """Layers that a plan announces; 0 when only its end is announced."""
        return 0

    @abstractmethod
    def new_work(self, entry: PlanEntry[W]) -> W:
        """Return the ``work`` of a new plan, whose other attributes are set. Changes nothing."""

    @abstractmethod
    def submit(self, entry: PlanEntry[W]) -> None:
        """Take a plan that was checked. No report is sent within the call."""

    @abstractmethod
    def cancel(self, entry: PlanEntry[W]) -> Cancelled:
        """Cancel a plan that has not ended; see :meth:`Plans.cancel`.

        After ``"at once"``, the executor does not access the blocks of the plan, and forgets it.
        """

    def raise_priority(self, entry: PlanEntry[W]) -> None:
        """Reorder a plan whose ``priority`` was raised; plans of most executors do not wait."""

    def expedite(self, entry: PlanEntry[W]) -> bool:
        """Begin a plan before its turn; return False when that is impossible now."""
        return False


class PlanTable:
    """Plans of one worker; see :class:`aiokv.worker.base.Plans`. Used on one loop.

    Args:
        check: returns the executor of a plan, and the bytes that the plan moves. Raises for a plan
            that the worker cannot take.
        num_layers: returns the layers of the model, as they are known now.

    Attributes:
        is_given_up: True after ``give_up`` was called.
    """

    def __init__(
        self,
        check: Callable[[TransferPlan], tuple[Executor[Any], int]],
        num_layers: Callable[[], int],
    ) -> None:
        self._check = check
        self._num_layers = num_layers
        self._entries: dict[int, PlanEntry[Any]] = {}
        self._poller: EventPoller | None = None
        self._on_report: Callable[[TransferReport], None] = lambda report: None
        self._num_refused = 0  # refused plans that were not reported yet
        self._drained: list[asyncio.Future[None]] = []
        self.is_given_up = False

    def open(self, poller: EventPoller, on_report: Callable[[TransferReport], None]) -> None:
        """Take plans from now on.

        Args:
            poller: calls callbacks on the loop.
            on_report: see :meth:`Worker.open`.
        """
        self._poller, self._on_report = poller, on_report

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[PlanEntry[Any]]:
        """Return the plans in flight, oldest first; plans may end meanwhile."""
        return iter(list(self._entries.values()))

    # --- for the engine -----------------------------------------------------------------------

    def take(self, plan: TransferPlan) -> LayerDoneCounter:
        """Submit a plan, or report it as failed; see :meth:`Plans.take`."""
        try:
            return self.submit(plan)
        except MemoryError:  # raised anywhere in the executor, which may have begun the transfer
            raise
        except Exception as error:  # refused now, because a repeated call would raise it again
            return self._refuse(plan, CopyError(0, str(error) or type(error).__name__))

    def submit(self, plan: TransferPlan) -> LayerDoneCounter:
        """Take a plan, and return its counter.

        Raises:
            UsageError: no blocks, unequal lists, ids out of range, a duplicate destination, a
                transfer id that is in use, or a route that is not in ``Capabilities.routes``.
                Nothing changed.
            ClosedError: the worker is closing, or is not open.
        """
        if plan.transfer_id in self._entries:
            raise UsageError(f"transfer {plan.transfer_id} is in flight already")
        executor, num_bytes = self._check(plan)
        entry = self.add(plan, executor, executor.num_layers, num_bytes)
        executor.submit(entry)
        return entry.counter

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        entry = self._entries.get(transfer_id)
        return None if entry is None else entry.counter

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan; see :meth:`Plans.cancel`.

        After ``"at once"``, ``gpu_wait`` raises, and waiting coroutines get their error in the next
        pass of the loop.
        """
        entry = self._entries.get(transfer_id)
        if entry is None or entry.state == "ended":
            return "too late"
        cancelled: Cancelled = entry.executor.cancel(entry)
        if cancelled == "at once":
            if entry.on_end is None:
                entry.on_end = _no_report  # the caller knows that it has ended
            self._end_cancelled(entry)
        return cancelled

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Reorder a plan that still waits; see :meth:`Plans.raise_priority`."""
        entry = self._entries.get(transfer_id)
        if entry is not None and entry.state != "ended" and priority < entry.priority:
            entry.priority = priority
            entry.executor.raise_priority(entry)

    async def drain(self) -> None:
        """Wait until all plans have been reported, also those submitted during the wait.

        This includes plans whose step is open: another task has to close the step.

        Cancellation: stops waiting; the transfers go on.
        """
        while (self._entries or self._num_refused) and not self.is_given_up:
            drained = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            try:
                await drained
            finally:
                self._drained.remove(drained)

    def give_up(self) -> None:
        """Stop waiting for reports: an exception has left the state of the engine unknown."""
        self.is_given_up = True
        self._wake_drained()

    def _wake_drained(self) -> None:
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)

    # --- for executors --------------------------------------------------------------------------

    def get(self, transfer_id: int) -> PlanEntry[Any] | None:
        """Return a plan in flight; None for an unknown id."""
        return self._entries.get(transfer_id)

    def add(
        self,
        plan: TransferPlan,
        executor: Executor[W],
        num_layers: int,
        num_bytes: int,
        on_end: Callable[[CopyError | None], None] | None = None,
    ) -> PlanEntry[W]:
        """Add a plan, which the caller gives to its executor.

        Args:
            plan: plan whose id is not in flight.
            executor: executor of its route.
            num_layers: layers that the plan announces.
            num_bytes: number of bytes that it moves.
            on_end: see :class:`PlanEntry`.
        """
        counter = LayerDoneCounter(
            num_layers,
            transfer_id=plan.transfer_id,
            direction=plan.direction,
            num_bytes=num_bytes,
            expedite=partial(self._expedite, plan.transfer_id),
        )
        entry = PlanEntry(plan, executor, counter, on_end)
        self._entries[plan.transfer_id] = entry
        entry.counts.begin()
        return entry

    def begin(self, entry: PlanEntry[Any], seconds: float | None = None) -> None:
        """Note that the bytes of a plan begin to move, at ``seconds`` or now. Idempotent."""
        if entry.state == "waiting":
            entry.state = "begun"
            entry.counter.note_start(seconds)

    def end(
        self,
        entry: PlanEntry[Any],
        failure: CopyError | None = None,
        *,
        cancelled: bool = False,
        moved_blocks: int | None = None,
        results: bytes = b"",
    ) -> None:
        """Note that nothing accesses the blocks of a plan any more. The first call counts.

        ``send_report`` or ``report_soon`` follows.

        Args:
            entry: entry of the plan.
            failure: None when all blocks have moved.
            cancelled: True if no block has moved because the plan was cancelled.
            moved_blocks: number for the statistics; by default all blocks, or 0 after a failure.
            results: result per block of a save; see :class:`TransferReport`.
        """
        if entry.state == "ended":
            return
        entry.state, entry.failure = "ended", failure
        blocks = entry.plan.num_blocks
        if moved_blocks is None:
            moved_blocks = 0 if failure is not None else blocks
        entry.moved_bytes = entry.num_bytes // max(blocks, 1) * moved_blocks
        entry.report = TransferReport(
            transfer_id=entry.plan.transfer_id,
            outcome="done" if failure is None else "cancelled" if cancelled else "failed",
            first_bad_block=0 if failure is None or cancelled else failure.first_bad_block,
            reason="" if failure is None else failure.reason,
            results=results,
        )

    def report_soon(self, entry: PlanEntry[Any]) -> None:
        """Call ``send_report`` in a later callback of the loop."""
        self._soon(partial(self.send_report, entry))

    def _soon(self, call: Callable[[], None]) -> None:
        if self._poller is not None and not self._poller.closed:
            self._poller.soon(call)

    def send_report(self, entry: PlanEntry[Any]) -> None:
        """Release the waiters of a plan that has ended, report it, and forget it. Idempotent.

        Called in a callback of the loop.
        """
        report, counter, transfer_id = entry.report, entry.counter, entry.plan.transfer_id
        if report is None or self._entries.get(transfer_id) is not entry:
            return
        try:
            counter.finish(entry.failure)
            if entry.on_end is None:
                self._deliver(report)
            else:
                entry.on_end(entry.failure)
        finally:
            del self._entries[transfer_id]
            started = counter.started_seconds or counter.created_seconds
            queued = started - counter.created_seconds
            entry.counts.end(report.outcome, entry.moved_bytes, queued)
            if not self._entries:
                self._wake_drained()

    def _refuse(self, plan: TransferPlan, failure: CopyError) -> LayerDoneCounter:
        """Report a plan that was not added. A plan in flight may have the same id."""
        transfer_id = plan.transfer_id
        counter = LayerDoneCounter(
            self._num_layers(), transfer_id=transfer_id, direction=plan.direction
        )
        counter.refuse(failure)

        def end() -> None:
            self._num_refused -= 1
            counter.finish(failure)
            self._deliver(
                TransferReport(transfer_id=transfer_id, outcome="failed", reason=failure.reason)
            )
            self._wake_drained()

        self._num_refused += 1
        self._soon(end)
        return counter

    def cancel_waiting(self, executor: Executor[Any]) -> None:
        """Cancel, and report, the plans of an executor that have not begun."""
        for entry in self:
            is_waiting = entry.executor is executor and entry.state == "waiting"
            if is_waiting and executor.cancel(entry) == "at once":
                self._end_cancelled(entry)

    def _end_cancelled(self, entry: PlanEntry[Any]) -> None:
        entry.counter.refuse(CANCELLED)
        self.end(entry, CANCELLED, cancelled=True)
        self.report_soon(entry)

    def _expedite(self, transfer_id: int) -> bool:
        entry = self._entries.get(transfer_id)
        return True if entry is None else entry.executor.expedite(entry)

    def _deliver(self, report: TransferReport) -> None:
        """Call ``on_report``; the exception handler of the loop gets its exception."""
        try:
            self._on_report(report)
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler(
                {
                    "message": f"aiokv: on_report raised for transfer {report.transfer_id}",
                    "exception": error,
                }
            )


def _no_report(failure: CopyError | None) -> None:
    """Do nothing: a plan that was cancelled at once has no report."""
