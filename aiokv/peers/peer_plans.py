"""PeerPlans: the plans from and to peers that a worker has in flight, and their reports."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiokv.base.plan import RECEIVE, TransferReport
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RunningCounts
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.reports import deliver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.base.plan import GroupRoute, Outcome, TransferPlan
    from aiokv.base.statistics import RouteStatistics
    from aiokv.worker.poller import EventPoller


class _Transfer:
    """A plan in flight; ``end`` is set when it is at rest."""

    def __init__(self, plan: TransferPlan, counter: LayerDoneCounter, num_bytes: int) -> None:
        self.plan = plan
        self.counter = counter
        self.num_bytes = num_bytes
        self.is_cancelled = False
        self.end: tuple[int, CopyError | None] | None = None  # leading blocks, failure
        self.is_touched = False

    @property
    def outcome(self) -> Outcome:
        """Outcome for the report of a transfer that has ended."""
        leading, failure = (0, None) if self.end is None else self.end
        if failure is None:
            return "done"
        # The state of a lease is the one before, unless it was written.
        is_state = self.plan.group_route == ("last", RECEIVE)
        is_cancelled = not self.is_touched if is_state else self.is_cancelled and not leading
        return "cancelled" if is_cancelled else "failed"


class PeerPlans:
    """Reports each plan exactly once, in a callback of the loop.

    Args:
        routes: of the plans.
        on_end: called with the id of each plan after its report.
    """

    def __init__(self, routes: Iterable[GroupRoute], on_end: Callable[[int], None]) -> None:
        self._on_end = on_end
        self._poller: EventPoller | None = None
        self._on_report: Callable[[TransferReport], None] = lambda report: None
        self._transfers: dict[int, _Transfer] = {}
        self._counts = {route: RunningCounts() for route in routes}

    def open(self, poller: EventPoller, on_report: Callable[[TransferReport], None]) -> None:
        """Send the reports to ``on_report`` from now on, in callbacks of ``poller``."""
        self._poller, self._on_report = poller, on_report

    @property
    def in_flight(self) -> Iterable[int]:
        """Ids of the plans that were not reported yet."""
        return self._transfers.keys()

    def begin(self, plan: TransferPlan, num_bytes: int) -> LayerDoneCounter:
        """Note a plan, which ``end`` ends."""
        counter = LayerDoneCounter(
            0, transfer_id=plan.transfer_id, direction=plan.direction, num_bytes=num_bytes
        )
        self._transfers[plan.transfer_id] = _Transfer(plan, counter, num_bytes)
        self._counts[plan.group_route].begin(plan.transfer_id)
        return counter

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.counter

    def note_start(self, transfer_id: int) -> None:
        """Note that the first bytes of a plan move; does nothing for an unknown id. Idempotent."""
        if (transfer := self._transfers.get(transfer_id)) is not None:
            transfer.counter.note_start()

    def cancel(self, transfer_id: int) -> bool:
        """Report a plan that fails from now on as cancelled, if none of its blocks has moved.

        Returns:
            False for a plan that has ended, or is unknown.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.end is not None:
            return False
        transfer.is_cancelled = True
        return True

    def end(
        self,
        transfer_id: int,
        leading_blocks: int,
        failure: CopyError | None,
        *,
        is_touched: bool = False,
    ) -> None:
        """Report a plan soon: nothing accesses its device blocks any more. Idempotent.

        Args:
            transfer_id: of the plan; one that was reported is ignored.
            leading_blocks: blocks that have moved, from the first on.
            failure: why the others have not moved; None when all have.
            is_touched: the blocks of a plan that has failed may have been written.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.end is not None:
            return
        if failure is not None:
            failure = CopyError(leading_blocks, failure.reason)
        transfer.end = (leading_blocks, failure)
        transfer.is_touched = is_touched
        if self._poller is not None and not self._poller.closed:
            self._poller.soon(partial(self._finish, transfer, *transfer.end))

    def _finish(self, transfer: _Transfer, leading: int, failure: CopyError | None) -> None:
        """Report a plan that is at rest."""
        plan, outcome = transfer.plan, transfer.outcome
        transfer.counter.finish(failure)
        report = TransferReport(
            transfer_id=plan.transfer_id,
            outcome=outcome,
            first_bad_block=leading if outcome == "failed" else 0,
            reason="" if failure is None else failure.reason,
        )
        deliver(self._on_report, report)
        self._on_end(plan.transfer_id)
        del self._transfers[plan.transfer_id]
        moved_bytes = transfer.num_bytes // max(plan.num_blocks, 1) * leading
        self._counts[plan.group_route].end(plan.transfer_id, outcome, moved_bytes)

    def lane_statistics(self) -> dict[GroupRoute, RouteStatistics]:
        """Return the counts of each route. Any thread."""
        return {route: counts.statistics() for route, counts in self._counts.items()}
