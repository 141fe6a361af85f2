"""TransferBroadcast: sends plans to all ranks, and reduces their reports to one per plan."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.base.logs import Log
from aiokv.base.plan import (
    OFFLOAD,
    ONLOAD,
    PEER_ROUTES,
    STORE_ROUTES,
    TransferReport,
    group_routes,
)
from aiokv.errors import UsageError
from aiokv.ranks.channel import MAX_FRAME_BYTES, frame_of
from aiokv.ranks.messages import TransferBatch, encode
from aiokv.ranks.reduce import GroupTransfer
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RunningCounts, worker_statistics
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.reports import deliver
from aiokv.worker.settling import ReportWaiters

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.base.groups import Retention
    from aiokv.base.plan import TransferPlan
    from aiokv.base.statistics import WorkerStatistics
    from aiokv.errors import RankLost
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import Layout, Reports
    from aiokv.ranks.rank_state import RankState, RankTimeouts

log = Log(__name__)

_RETENTIONS: Final[tuple[Retention, ...]] = ("all", "window")
TIER_ROUTES: Final = group_routes(ONLOAD, OFFLOAD, retentions=_RETENTIONS)
SAVED_ROUTES: Final = group_routes(*STORE_ROUTES, retentions=_RETENTIONS)
SENT_ROUTES: Final = group_routes(*PEER_ROUTES)
_ALL_ROUTES: Final = TIER_ROUTES | SAVED_ROUTES | SENT_ROUTES

BATCH_BYTES: Final = MAX_FRAME_BYTES // 4  # of block ids in one batch


class TransferBroadcast:
    """The transfers of a group, from submission to the last rank's report.

    Args:
        membership: the ranks.
        timeouts: time limits.
        clock: seconds.

    Attributes:
        batches: batches so far; each was sent to every rank.
        plans: plans in those batches.
        batch_bytes: bytes of those batches, each counted once.
        given_up: transfers that failed because a rank was slow or lost.
    """

    def __init__(
        self,
        membership: Membership,
        timeouts: RankTimeouts,
        clock: Callable[[], float],
    ) -> None:
        self._membership = membership
        self._timeouts = timeouts
        self._clock = clock
        self._on_report: Callable[[TransferReport], None] = _ignore_report
        self._transfers: dict[int, GroupTransfer] = {}
        self._report_waiters = ReportWaiters()
        self._counts = {route: RunningCounts(clock) for route in _ALL_ROUTES}
        self._new_plans: list[TransferPlan] = []
        self._new_cancels: list[int] = []
        self._new_priorities: dict[int, int] = {}  # by transfer id
        self._new_id_bytes = 0
        self._flush_scheduled = False
        self.batches = self.plans = self.batch_bytes = self.given_up = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def open(self, on_report: Callable[[TransferReport], None]) -> None:
        """Take plans from now on.

        Args:
            on_report: gets one report per plan, in a callback of the loop.
        """
        self._on_report = on_report

    def statistics(self) -> WorkerStatistics:
        """Return the counts of each route; a transfer counts once, not once per rank."""
        ranks = self._membership.ranks
        counts = worker_statistics(
            self._num_held(), {route: counts.statistics() for route, counts in self._counts.items()}
        )
        routes = {
            name: msgspec.structs.replace(
                route, queue_seconds=sum(state.queue_seconds[name] for state in ranks) / len(ranks)
            )
            for name, route in counts.routes.items()
        }
        return msgspec.structs.replace(counts, routes=routes)

    # --- to the ranks ---------------------------------------------------------------------------

    def counter(self, transfer_id: int) -> LayerDoneCounter | None:
        """Return the counter of a plan in flight; None for an unknown id."""
        transfer = self._transfers.get(transfer_id)
        return None if transfer is None else transfer.counter

    def submit(
        self, plan: TransferPlan, layout: Layout, failure: RankLost | None
    ) -> LayerDoneCounter:
        """Take a plan whose ids have been checked; it is sent with the others of this pass.

        Args:
            plan: new.
            layout: of the ranks.
            failure: of the group, which fails the plan at once; no rank gets it.

        Raises:
            UsageError: the transfer is in flight, or too large for a message. Nothing changed.
        """
        if plan.transfer_id in self._transfers:
            raise UsageError(f"transfer {plan.transfer_id} is in flight already")
        id_bytes = len(plan.source_blocks) + len(plan.target_blocks) + len(plan.digests)
        if id_bytes > MAX_FRAME_BYTES // 2:
            raise UsageError(
                f"transfer {plan.transfer_id} has {plan.num_blocks} blocks; a message holds the "
                f"ids of at most {MAX_FRAME_BYTES // 16}"
            )
        num_ranks = len(self._membership.ranks)
        num_bytes = layout.bytes_per_block(plan) * plan.num_blocks
        transfer = GroupTransfer(
            plan,
            LayerDoneCounter(
                layout.num_layers,
                transfer_id=plan.transfer_id,
                direction=plan.direction,
                num_bytes=num_bytes * num_ranks,
            ),
            num_ranks=num_ranks,
            num_bytes=num_bytes,
            since=self._clock(),
        )
        self._transfers[plan.transfer_id] = transfer
        self._counts[plan.group_route].begin(plan.transfer_id)
        if failure is not None:
            transfer.give_up(CopyError(0, str(failure), failure.rank))
            asyncio.get_running_loop().call_soon(self._end, transfer)
            return transfer.counter
        self._new_plans.append(plan)
        self._new_id_bytes += id_bytes
        self._schedule_flush()
        if self._new_id_bytes > BATCH_BYTES:
            self.flush()
        return transfer.counter

    def cancel(self, transfer_id: int) -> bool:
        """Ask the ranks to cancel a plan; False when it has ended."""
        if transfer_id not in self._transfers:
            return False
        self._new_cancels.append(transfer_id)
        self._schedule_flush()
        return True

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Ask the ranks to submit a plan sooner; without effect on one that has ended."""
        if transfer_id in self._transfers:
            self._new_priorities[transfer_id] = priority
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the plans of this pass, encoded once, to every rank."""
        self._flush_scheduled = False
        if not (self._new_plans or self._new_cancels or self._new_priorities):
            return
        batch = TransferBatch(
            generation=self._membership.generation,
            plans=self._new_plans,
            cancels=self._new_cancels,
            priorities=list(self._new_priorities.items()),
        )
        frame = frame_of(encode(batch))
        self.batches += 1
        self.plans += len(self._new_plans)
        self.batch_bytes += len(frame)
        self._new_plans, self._new_cancels, self._new_id_bytes = [], [], 0
        self._new_priorities = {}
        self._membership.send(frame)
        for plan in batch.plans:
            if (transfer := self._transfers.get(plan.transfer_id)) is not None:
                transfer.counter.note_start()

    # --- from the ranks -------------------------------------------------------------------------

    def on_reports(self, state: RankState, reports: Reports) -> None:
        """Process the reports of a rank, which belong to the current generation.

        Raises:
            ChannelError: a layer does not exist, or a transfer other than a fetch is overdue.
        """
        for report in reports.overdue:
            transfer = self._transfers.get(report.transfer_id)
            if transfer is not None:
                transfer.release(state.rank, report)
        for transfer_id, layers in reports.arrived:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.arrive(state.rank, layers)
        for report in reports.ended:
            transfer = self._transfers.get(report.transfer_id)
            if transfer is not None and transfer.end(state.rank, report):
                self._end(transfer)

    def give_up_all(self, failure: CopyError) -> None:
        """Fail all waiters; a transfer that still moves is reported as failed when it has ended."""
        for transfer in self._transfers.values():
            self._give_up(transfer, failure)

    def cancel_all(self) -> None:
        """Ask the ranks to cancel all plans that still wait, e.g. for a step."""
        for transfer_id in self._transfers:
            self.cancel(transfer_id)

    def end_rank(self, lost: RankLost) -> None:
        """End all transfers on a lost rank, which moves nothing any more."""
        for transfer in list(self._transfers.values()):
            failed = TransferReport(
                transfer_id=transfer.plan.transfer_id, outcome="failed", reason=str(lost)
            )
            if transfer.end(lost.rank, failed):
                self._end(transfer)

    def end_all(self) -> None:
        """Report all transfers: no rank moves any of their bytes."""
        for transfer in list(self._transfers.values()):
            self._end(transfer)

    def _give_up(self, transfer: GroupTransfer, failure: CopyError) -> None:
        if transfer.given_up is None:
            self.given_up += 1
            transfer.give_up(failure)

    def _end(self, transfer: GroupTransfer) -> None:
        """Report a transfer whose bytes no rank moves any more."""
        transfer_id = transfer.plan.transfer_id
        if self._transfers.pop(transfer_id, None) is None:
            return
        report = transfer.report()
        is_done = report.outcome == "done"
        moved_bytes = transfer.num_bytes * len(self._membership.ranks) if is_done else 0
        self._counts[transfer.plan.group_route].end(transfer_id, report.outcome, moved_bytes)
        deliver(self._on_report, report)
        self._report_waiters.note_report(transfer_id)

    # --- waiting --------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until the plans submitted so far have been reported.

        Cancellation: stops waiting; the transfers go on.
        """
        await self._report_waiters.wait(self._transfers)

    def _num_held(self) -> int:
        """Return the number of transfers that wait on a rank for its runner to close their step."""
        closed = min(state.finished_step for state in self._membership.ranks)
        return sum(transfer.plan.after_step > closed for transfer in self._transfers.values())

    def find_slow_ranks(self) -> None:
        """Fail the transfers of slow ranks, and lose a rank that stays slow.

        The time allowed for a transfer counts from the rank's last report of any transfer.
        """
        now = self._clock()
        for transfer in list(self._transfers.values()):
            if transfer.plan.route in PEER_ROUTES:
                continue  # it waits for another engine, until the deadline of its ticket
            if transfer.plan.route in STORE_ROUTES and not transfer.may_give_up:
                continue
            late = next(
                (state for state in self._owing(transfer) if self._is_late(transfer, state, now)),
                None,
            )
            if late is None:
                continue
            allowed = self._timeouts.allowed_seconds(transfer.num_bytes)
            what = f"rank {late.rank} has not finished it, nor reported, for {allowed:.3g} s"
            if transfer.given_up is not None:
                self._membership.lose(late, f"transfer {transfer.plan.transfer_id}: {what}, again")
                return
            log.warning("rank.slow", rank=late.rank, transfer_id=transfer.plan.transfer_id)
            self._give_up(transfer, CopyError(0, what, late.rank))
            transfer.since = now  # after the same time again, the rank is lost

    def _owing(self, transfer: GroupTransfer) -> list[RankState]:
        return [self._membership.ranks[rank] for rank in sorted(transfer.owing)]

    def _is_late(self, transfer: GroupTransfer, state: RankState, now: float) -> bool:
        if state.finished_step < transfer.plan.after_step:
            return False  # the rank's runner has not closed the step yet
        waited = now - max(transfer.since, state.progress_at)
        return waited > self._timeouts.allowed_seconds(transfer.num_bytes)


def _ignore_report(report: TransferReport) -> None:
    """Take the place of ``on_report`` before ``open``."""
