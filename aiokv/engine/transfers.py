"""Transfers: plans on their way to the worker, and the counters of their layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aiokv.errors import AiokvError
from aiokv.observe.logs import Log
from aiokv.plan import ONLOAD, Priority, TransferReport
from aiokv.worker.device.base import CopyError
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from aiokv.config import CacheConfig
    from aiokv.engine.lifetime import Lifetime
    from aiokv.engine.open_step import OpenStep
    from aiokv.plan import TransferPlan
    from aiokv.scheduler.reader import CacheReader
    from aiokv.worker.base import Cancelled, Worker
    from aiokv.worker.poller import EventPoller

log = Log(__name__)


class Transfers:
    """The transfers in flight of one engine.

    Args:
        on_report: called in a later pass with the report of a plan that the worker refused.
    """

    def __init__(
        self,
        config: CacheConfig,
        lifetime: Lifetime,
        read: CacheReader,
        worker: Worker,
        poller: EventPoller,
        open_step: OpenStep,
        on_report: Callable[[TransferReport], None],
    ) -> None:
        self._block_tokens = config.block_tokens
        # State and windows cannot go back to a position: all positions are to be computed again.
        self._restarts = bool(config.state_slots or config.windows)
        self._lifetime = lifetime
        self._read = read
        self._worker = worker
        self._poller = poller
        self._open_step = open_step
        self._on_report = on_report
        self._counters: dict[int, tuple[TransferPlan, LayerDoneCounter]] = {}
        self._ends: dict[int, list[asyncio.Future[None]]] = {}  # coroutines that wait for a report

    def submit(self, plan: TransferPlan) -> None:
        """Give a plan to the worker. A plan that the worker refuses is reported as failed.

        Idempotent: the dispatcher submits a plan again after an interrupt.
        """
        if plan.transfer_id in self._counters:
            return
        try:
            counter = self._worker.counter(plan.transfer_id) or self._worker.submit(plan)
        except AiokvError as error:
            counter = self._refused(plan, CopyError(0, str(error)))
        else:
            self._open_step.note_transfer(plan.after_step)
        self._counters[plan.transfer_id] = (plan, counter)

    def _refused(self, plan: TransferPlan, failure: CopyError) -> LayerDoneCounter:
        counter = LayerDoneCounter(
            self._worker.num_layers, transfer_id=plan.transfer_id, direction=plan.direction
        )
        counter.refuse(failure)

        def end() -> None:
            self._on_report(
                TransferReport(
                    transfer_id=plan.transfer_id, outcome="failed", reason=failure.reason
                )
            )
            counter.finish(failure)

        self._poller.soon(end)
        return counter

    def raise_priority(self, transfer_id: int, priority: Priority) -> None:
        """Submit a plan that still waits as if it had been given with this priority."""
        self._worker.raise_priority(transfer_id, priority)

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that no device has yet; see ``Worker.cancel``."""
        cancelled = self._worker.cancel(transfer_id)
        if cancelled == "at once":
            self._counters.pop(transfer_id, None)
        return cancelled

    def view(self, lease_id: int, onloads: Iterable[int], owner: str) -> LayerView:
        """Return the layers of the onloads that a grant has begun or joined."""
        joined = [self._counters[transfer_id] for transfer_id in onloads]
        after_step = max(plan.after_step for plan, _ in joined)
        return LayerView(
            [counter for _, counter in joined],
            owner=owner,
            check_wait=partial(self._open_step.check_wait, after_step) if after_step else None,
            locate=self._position_finder(lease_id, [plan for plan, _ in joined]),
        )

    def _position_finder(
        self, lease_id: int, plans: list[TransferPlan]
    ) -> Callable[[int, int], int | None]:
        locate = _position_finder(
            {plan.transfer_id: plan for plan in plans if plan.route == ONLOAD},
            self._read.block_table(lease_id).tolist(),
            self._block_tokens,
        )
        if not self._restarts:
            return locate
        return lambda transfer_id, block: None if locate(transfer_id, block) is None else 0

    async def ended(self, transfer_id: int) -> None:
        """Wait until the report of a transfer in flight was accounted for.

        A backup that still waits for the device is submitted before others from now on.

        Cancellation: the transfer goes on.
        """
        self._worker.raise_priority(transfer_id, Priority.DEMAND)
        ended: asyncio.Future[None] = self._lifetime.loop.create_future()
        self._ends.setdefault(transfer_id, []).append(ended)
        await ended

    def forget(self, report: TransferReport) -> None:
        """Note that no further lease joins a transfer: its report has come. Idempotent."""
        self._counters.pop(report.transfer_id, None)

    def announce(self, report: TransferReport) -> None:
        """Wake the coroutines that wait for a report which was accounted for. Idempotent."""
        for ended in self._ends.get(report.transfer_id, ()):
            if not ended.done():
                ended.set_result(None)
        self._ends.pop(report.transfer_id, None)
        if report.outcome == "failed":
            log.warning(
                "transfer.failed",
                transfer_id=report.transfer_id,
                first_bad_block=report.first_bad_block,
                reason=report.reason,
            )


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
