"""TransferBroadcast: the executor of plans on all ranks; reduces their reports to one per plan."""

from __future__ import annotations

import asyncio
from statistics import fmean
from typing import TYPE_CHECKING, Final, TypeAlias

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
from aiokv.base.statistics import GroupTransferStatistics
from aiokv.errors import ClosedError, UsageError
from aiokv.ranks.messages import MAX_MESSAGE_BYTES, TransferBatch
from aiokv.ranks.reduce import GroupTransfer
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RouteCounts, RouteTable, worker_statistics
from aiokv.worker.plan_table import CANCELLED, Executor, PlanEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiokv.base.groups import Retention
    from aiokv.base.plan import TransferPlan
    from aiokv.base.statistics import WorkerStatistics
    from aiokv.errors import RankLost
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import Reports
    from aiokv.ranks.rank_state import RankState, RankTimeouts
    from aiokv.worker.base import Cancelled
    from aiokv.worker.plan_table import PlanTable

log = Log(__name__)

_RETENTIONS: Final[tuple[Retention, ...]] = ("all", "window")
TIER_ROUTES: Final = group_routes(ONLOAD, OFFLOAD, retentions=_RETENTIONS)
SAVED_ROUTES: Final = group_routes(*STORE_ROUTES, retentions=_RETENTIONS)
SENT_ROUTES: Final = group_routes(*PEER_ROUTES)

BATCH_BYTES: Final = MAX_MESSAGE_BYTES // 4  # bytes of block ids per batch


_Entry: TypeAlias = PlanEntry[GroupTransfer]


class TransferBroadcast(Executor[GroupTransfer]):
    """The transfers of a group, from submission to the last rank's report.

    Args:
        membership: the ranks.
        timeouts: time limits.
        clock: seconds.
        plans: plans of the group.
        failure: returns the loss of a rank, which fails new plans; None while none is lost.

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
        plans: PlanTable,
        failure: Callable[[], RankLost | None],
    ) -> None:
        self._membership = membership
        self._timeouts = timeouts
        self._clock = clock
        self._plans = plans
        self._failure = failure
        self._counts = RouteTable(lambda: RouteCounts(clock))
        self._new_plans: list[TransferPlan] = []
        self._new_cancels: list[int] = []
        self._new_priorities: dict[int, int] = {}  # by transfer id
        self._new_id_bytes = 0
        self._flush_scheduled = False
        self.batches = self.plans = self.batch_bytes = self.given_up = 0

    @property
    def counts(self) -> RouteTable[RouteCounts]:
        """Counts of each group and route; a transfer counts once, not once per rank."""
        return self._counts

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        layout = self._membership.layout
        return 0 if layout is None else layout.num_layers

    def statistics(self, groups: Iterable[str]) -> WorkerStatistics:
        """Return the counts of each group and route; a transfer counts once, not once per rank."""
        ranks = self._membership.ranks
        counts = worker_statistics(groups, [self._counts], held=self._num_held())
        by_group = {
            group: GroupTransferStatistics(
                **{
                    name: msgspec.structs.replace(
                        route, queue_seconds=fmean(r.queue_seconds[group, name] for r in ranks)
                    )
                    for name, route in transfers.routes.items()
                }
            )
            for group, transfers in counts.groups.items()
        }
        return msgspec.structs.replace(counts, groups=by_group)

    # --- to the ranks ---------------------------------------------------------------------------

    def check(self, plan: TransferPlan) -> int:
        """Return the bytes that a plan moves on all ranks.

        Raises:
            UsageError: the plan is too large for a message.
            ClosedError: no rank has connected.
        """
        layout = self._membership.layout
        if layout is None:
            raise ClosedError(f"transfer {plan.transfer_id}: the group of ranks is not open")
        if _id_bytes(plan) > MAX_MESSAGE_BYTES // 2:
            raise UsageError(
                f"transfer {plan.transfer_id} has {plan.num_blocks} blocks; a message holds the "
                f"ids of at most {MAX_MESSAGE_BYTES // 16}"
            )
        return layout.block_bytes.get(plan.group, 0) * plan.num_blocks * len(self._membership.ranks)

    def new_work(self, entry: _Entry) -> GroupTransfer:
        """Return the reduction of the reports of a plan."""
        num_ranks = len(self._membership.ranks)
        return GroupTransfer(
            entry.plan,
            entry.counter,
            num_ranks=num_ranks,
            num_bytes=entry.num_bytes // num_ranks,
            since=self._clock(),
        )

    def submit(self, entry: _Entry) -> None:
        """Take a plan, which is sent with the others of this pass; no rank gets it after a loss."""
        transfer = entry.work
        if (failure := self._failure()) is not None:
            transfer.give_up(CopyError(0, str(failure), failure.rank))
            self._plans.end(entry, transfer.given_up)
            self._plans.report_soon(entry)
            return
        self._new_plans.append(entry.plan)
        self._new_id_bytes += _id_bytes(entry.plan)
        self._schedule_flush()
        if self._new_id_bytes > BATCH_BYTES:
            self.flush()

    def cancel(self, entry: _Entry) -> Cancelled:
        """Ask the ranks to cancel a plan."""
        self._new_cancels.append(entry.plan.transfer_id)
        self._schedule_flush()
        return "asked"

    def raise_priority(self, entry: _Entry) -> None:
        """Ask the ranks to submit a plan sooner."""
        self._new_priorities[entry.plan.transfer_id] = entry.priority
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
        self.batches += 1
        self.plans += len(self._new_plans)
        self._new_plans, self._new_cancels, self._new_id_bytes = [], [], 0
        self._new_priorities = {}
        self.batch_bytes += self._membership.send(batch)
        for plan in batch.plans:
            if (entry := self._plans.get(plan.transfer_id)) is not None:
                self._plans.begin(entry)

    # --- from the ranks -------------------------------------------------------------------------

    def on_reports(self, state: RankState, reports: Reports) -> None:
        """Process the reports of a rank, which belong to the current generation.

        Raises:
            ProtocolError: a layer does not exist, or a transfer other than a fetch is overdue.
        """
        for report in reports.overdue:
            if (entry := self._plans.get(report.transfer_id)) is not None:
                entry.work.release(state.rank, report)
        for transfer_id, layers in reports.arrived:
            if (entry := self._plans.get(transfer_id)) is not None:
                entry.work.arrive(state.rank, layers)
        for report in reports.ended:
            entry = self._plans.get(report.transfer_id)
            if entry is not None and entry.work.end(state.rank, report):
                self._end(entry)

    def give_up_all(self, failure: CopyError) -> None:
        """Fail all waiters; a transfer that still moves is reported as failed when it has ended."""
        for entry in self._plans:
            self._give_up(entry.work, failure)

    def cancel_all(self) -> None:
        """Ask the ranks to cancel all plans that still wait, e.g. for a step."""
        for entry in self._plans:
            self.cancel(entry)

    def end_rank(self, lost: RankLost) -> None:
        """End all transfers on a lost rank, which moves nothing any more."""
        for entry in self._plans:
            failed = TransferReport(
                transfer_id=entry.plan.transfer_id, outcome="failed", reason=str(lost)
            )
            if entry.work.end(lost.rank, failed):
                self._end(entry)

    def end_all(self) -> None:
        """Report all transfers: no rank moves any of their bytes."""
        for entry in self._plans:
            self._end(entry)

    def _give_up(self, transfer: GroupTransfer, failure: CopyError) -> None:
        if transfer.given_up is None:
            self.given_up += 1
            transfer.give_up(failure)

    def _end(self, entry: _Entry) -> None:
        """Report a transfer whose bytes no rank moves any more."""
        failure = entry.work.reduced()
        self._plans.end(entry, failure, cancelled=failure is CANCELLED, results=entry.work.results)
        self._plans.send_report(entry)

    def _num_held(self) -> int:
        """Return the number of transfers that wait on a rank for its runner to close their step."""
        closed = min(state.finished_step for state in self._membership.ranks)
        return sum(entry.plan.after_step > closed for entry in self._plans)

    def find_slow_ranks(self) -> None:
        """Fail the transfers of slow ranks, and lose a rank that stays slow.

        The time allowed for a transfer counts from the rank's last report of any transfer.
        """
        now = self._clock()
        for entry in self._plans:
            transfer = entry.work
            if transfer.plan.route in PEER_ROUTES:
                continue  # it waits for another engine until its ticket's deadline
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
            transfer.since = now  # the rank is lost after the same time again

    def _owing(self, transfer: GroupTransfer) -> list[RankState]:
        return [self._membership.ranks[rank] for rank in sorted(transfer.owing)]

    def _is_late(self, transfer: GroupTransfer, state: RankState, now: float) -> bool:
        if state.finished_step < transfer.plan.after_step:
            return False  # the rank's runner has not closed the step yet
        waited = now - max(transfer.since, state.progress_at)
        return waited > self._timeouts.allowed_seconds(transfer.num_bytes)


def _id_bytes(plan: TransferPlan) -> int:
    """Return the bytes of the ids of a plan in a message."""
    return len(plan.source_blocks) + len(plan.target_blocks) + len(plan.digests)
