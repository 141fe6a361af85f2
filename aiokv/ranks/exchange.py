"""Exchange: plans out to all ranks, their reports in, one report of all to the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiokv.errors import UsageError
from aiokv.observe.logs import Log
from aiokv.plan import TransferReport
from aiokv.ranks.channel import MAX_FRAME_BYTES, frame_of
from aiokv.ranks.fold import RankTransfer
from aiokv.ranks.lanes import RankLane
from aiokv.ranks.messages import TransferBatch, encode
from aiokv.worker.device.base import CopyError
from aiokv.worker.layers import LayerDoneCounter

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import RankLost
    from aiokv.plan import Direction, TransferPlan
    from aiokv.ranks.messages import Layout, Reports
    from aiokv.ranks.roster import Roster
    from aiokv.ranks.seats import RankTimeouts, Seat

log = Log(__name__)

BATCH_BYTES: Final = MAX_FRAME_BYTES // 4  # of block ids; more leave in a second batch


class Exchange:
    """The transfers of a group, from submission to the last rank's report.

    Args:
        roster: the ranks.
        on_report: gets one report a plan, in a callback of the loop.

    Attributes:
        batches: submissions so far; each went to every rank.
        plans: in those batches.
        batch_bytes: of one rank's copy.
        given_up: transfers that failed because a rank lagged or was lost.
    """

    def __init__(
        self,
        roster: Roster,
        timeouts: RankTimeouts,
        clock: Callable[[], float],
        on_report: Callable[[TransferReport], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._roster = roster
        self._timeouts = timeouts
        self._clock = clock
        self._on_report = on_report
        self._transfers: dict[int, RankTransfer] = {}
        self._waiting: list[tuple[set[int], asyncio.Future[None]]] = []
        self._lanes: dict[Direction, RankLane] = {
            "onload": RankLane(), "offload": RankLane(), "state": RankLane()
        }  # fmt: skip
        self._new_plans: list[TransferPlan] = []
        self._new_cancels: list[int] = []
        self._new_priorities: dict[int, int] = {}  # by transfer id
        self._new_id_bytes = 0
        self._flush_scheduled = False
        self._sequence = 0
        self.batches = self.plans = self.batch_bytes = self.given_up = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def lane(self, direction: Direction) -> RankLane:
        """Counts of one direction."""
        return self._lanes[direction]

    # --- to the ranks ---------------------------------------------------------------------------

    def submit(
        self, plan: TransferPlan, layout: Layout, failure: RankLost | None
    ) -> LayerDoneCounter:
        """Take a plan whose ids are checked; it leaves with the others of this pass.

        Args:
            plan: new.
            layout: of the ranks.
            failure: fails it at once: no rank is told.

        Raises:
            UsageError: the transfer is under way, or too large for a message. Nothing changed.
        """
        if plan.transfer_id in self._transfers:
            raise UsageError(f"transfer {plan.transfer_id} is under way already")
        id_bytes = len(plan.device_blocks) + len(plan.host_blocks)
        if id_bytes > MAX_FRAME_BYTES // 2:
            raise UsageError(f"{plan.num_blocks} blocks in one plan are too many for a message")
        transfer = RankTransfer(
            plan,
            LayerDoneCounter(
                layout.num_layers, transfer_id=plan.transfer_id, direction=plan.direction
            ),
            num_ranks=len(self._roster.seats),
            num_bytes=layout.block_bytes * plan.num_blocks,
            since=self._clock(),
        )
        self._transfers[plan.transfer_id] = transfer
        self._lanes[plan.direction].begin(transfer.since)
        if failure is not None:
            transfer.give_up(CopyError(0, str(failure), failure.rank))
            self._loop.call_soon(self._end, transfer)
            return transfer.counter
        self._new_plans.append(plan)
        self._new_id_bytes += id_bytes
        self._schedule_flush()
        if self._new_id_bytes > BATCH_BYTES:
            self.flush()
        return transfer.counter

    def cancel(self, transfer_id: int) -> bool:
        """Ask the ranks to take a plan back; False when it has ended."""
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
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the plans of this pass, encoded once, to every rank."""
        self._flush_scheduled = False
        try:
            self._flush()
        except Exception:
            raise
        except BaseException:
            self._schedule_flush()  # interrupted; messages that were sent are not sent again
            raise

    def _flush(self) -> None:
        if not (self._new_plans or self._new_cancels or self._new_priorities):
            return
        self._sequence += 1
        batch = TransferBatch(
            generation=self._roster.generation,
            sequence=self._sequence,
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
        self._roster.send(frame)

    # --- from the ranks -------------------------------------------------------------------------

    def on_reports(self, seat: Seat, reports: Reports) -> None:
        """Of a rank in the current generation.

        Raises:
            ChannelError: of layers that do not exist.
        """
        for transfer_id, layers in reports.arrived:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.arrive(seat.rank, layers)
        for report in reports.ended:
            transfer = self._transfers.get(report.transfer_id)
            if transfer is not None and transfer.end(seat.rank, report):
                self._end(transfer)

    def give_up_all(self, failure: CopyError) -> None:
        """Wake all waiters; what still moves is reported as failed when it has ended."""
        for transfer in self._transfers.values():
            self._give_up(transfer, failure)

    def cancel_all(self) -> None:
        """Ask the ranks to cancel all plans that still wait, e.g. for a step."""
        for transfer_id in self._transfers:
            self.cancel(transfer_id)

    def rank_is_gone(self, lost: RankLost) -> None:
        """It moves nothing any more, of what it was asked for."""
        for transfer in list(self._transfers.values()):
            gone = TransferReport(
                transfer_id=transfer.plan.transfer_id, outcome="failed", reason=str(lost)
            )
            if transfer.end(lost.rank, gone):
                self._end(transfer)

    def end_all(self) -> None:
        """No rank moves anything of what was submitted so far: report it."""
        self._sequence = 0
        for transfer in list(self._transfers.values()):
            self._end(transfer)

    def _give_up(self, transfer: RankTransfer, failure: CopyError) -> None:
        if transfer.given_up is None:
            self.given_up += 1
            transfer.give_up(failure)

    def _end(self, transfer: RankTransfer) -> None:
        """No rank moves its bytes any more."""
        transfer_id = transfer.plan.transfer_id
        if self._transfers.pop(transfer_id, None) is None:
            return
        report = transfer.report()
        moved_bytes = transfer.num_bytes * len(self._roster.seats)
        self._lanes[transfer.plan.direction].end(report.outcome, moved_bytes, self._clock())
        try:
            self._on_report(report)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"aiokv: the report of {transfer_id} raised", "exception": error}
            )
        for waited_for, settled in self._waiting:
            waited_for.discard(transfer_id)
            if not waited_for and not settled.done():
                settled.set_result(None)

    # --- waiting --------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until the plans submitted so far have been reported.

        Cancellation: stops waiting; the transfers go on.
        """
        if not self._transfers:
            return
        entry = (set(self._transfers), self._loop.create_future())
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)

    def num_held(self) -> int:
        """Transfers that wait on a rank for its runner to close their step."""
        closed = min(seat.finished_step for seat in self._roster.seats)
        return sum(transfer.plan.after_step > closed for transfer in self._transfers.values())

    def find_laggards(self) -> None:
        """A rank may take so long for a transfer, from its last report of anything on."""
        now = self._clock()
        for transfer in list(self._transfers.values()):
            late = next(
                (seat for seat in self._owing(transfer) if self._is_late(transfer, seat, now)), None
            )
            if late is None:
                continue
            allowed = self._timeouts.allowed_seconds(transfer.num_bytes)
            what = f"rank {late.rank} has not finished it, nor anything else, for {allowed:.3g} s"
            if transfer.given_up is not None:
                self._roster.lose(late, f"transfer {transfer.plan.transfer_id}: {what} more")
                return
            log.warning("rank.lags", rank=late.rank, transfer_id=transfer.plan.transfer_id)
            self._give_up(transfer, CopyError(0, what, late.rank))
            transfer.since = now  # as long again, then the rank is lost

    def _owing(self, transfer: RankTransfer) -> list[Seat]:
        return [self._roster.seats[rank] for rank in sorted(transfer.owing)]

    def _is_late(self, transfer: RankTransfer, seat: Seat, now: float) -> bool:
        if seat.finished_step < transfer.plan.after_step:
            return False  # its runner has not closed the step yet
        waited = now - max(transfer.since, seat.progress_at)
        return waited > self._timeouts.allowed_seconds(transfer.num_bytes)
