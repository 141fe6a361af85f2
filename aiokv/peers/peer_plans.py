"""PeerPlans: the executor of plans from and to peers, which sender and receiver carry out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from aiokv.base.plan import RECEIVE
from aiokv.errors import UsageError
from aiokv.worker.device.base import CopyError
from aiokv.worker.lanes import RouteCounts, RouteTable
from aiokv.worker.plan_table import Executor, PlanEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.peers.receiver import Receiver
    from aiokv.peers.sender import Sender
    from aiokv.worker.base import Cancelled
    from aiokv.worker.plan_table import PlanTable


class _Work:
    """State of a plan of peers."""

    is_cancelled = False


_Entry: TypeAlias = PlanEntry[_Work]


class PeerPlans(Executor[_Work]):
    """Plans of the peer routes of one worker.

    Args:
        plans: plans of the worker.
        receiver: returns the receiver; None while the worker does not receive.
        sender: likewise, the sender.
    """

    def __init__(
        self,
        plans: PlanTable,
        receiver: Callable[[], Receiver[Any] | None],
        sender: Callable[[], Sender[Any] | None],
    ) -> None:
        self._plans = plans
        self._receiver = receiver
        self._sender = sender
        self._counts = RouteTable(RouteCounts)

    @property
    def counts(self) -> RouteTable[RouteCounts]:
        """Counts of each group and route."""
        return self._counts

    def new_work(self, entry: _Entry) -> _Work:
        """Return the state of a plan."""
        return _Work()

    def submit(self, entry: _Entry) -> None:
        """Give a plan to the receiver or the sender; their refusal is its failure."""
        plan = entry.plan
        end = self._receiver() if plan.route == RECEIVE else self._sender()
        try:
            if end is None:
                raise UsageError(f"the engine has no route {plan.route} now")
            end.submit(plan)
        except UsageError as error:
            self._plans.end(entry, CopyError(0, str(error)))
            self._plans.report_soon(entry)

    def cancel(self, entry: _Entry) -> Cancelled:
        """Give up a plan: no further byte of it moves, and its report follows."""
        entry.work.is_cancelled = True
        for end in (self._receiver(), self._sender()):
            if end is not None:
                end.cancel(entry.plan.transfer_id, "cancelled")
        return "asked"

    def begin(self, transfer_id: int) -> None:
        """Note that the first bytes of a plan move; without effect for an unknown id."""
        if (entry := self._plans.get(transfer_id)) is not None:
            self._plans.begin(entry)

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
            transfer_id: id of the plan; one that was reported is ignored.
            leading_blocks: blocks that have moved, from the first on.
            failure: why the others have not moved; None when all have.
            is_touched: the blocks of a plan that has failed may have been written.
        """
        entry: _Entry | None = self._plans.get(transfer_id)
        if entry is None:
            return
        if failure is not None:
            failure = CopyError(leading_blocks, failure.reason)
        # A lease keeps its old state unless the transfer has written it.
        is_state = entry.plan.group_route == ("last", RECEIVE)
        cancelled = not is_touched if is_state else entry.work.is_cancelled and not leading_blocks
        self._plans.end(entry, failure, cancelled=cancelled, moved_blocks=leading_blocks)
        self._plans.report_soon(entry)
