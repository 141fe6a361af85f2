"""Transfers: plans in flight, and the layer counters of each."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.base.logs import DEBUG, Log
from aiokv.base.plan import FETCH, ONLOAD, PEER_ROUTES, Priority, TransferReport
from aiokv.worker.device.base import CopyError
from aiokv.worker.layer_waits import LayerWaits
from aiokv.worker.layers import ALL, LayerDoneCounter
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

    from aiokv.base.plan import Route, TransferPlan
    from aiokv.config.cache_config import CacheConfig
    from aiokv.engine.lifetime import Lifetime
    from aiokv.engine.observers import Observers
    from aiokv.engine.open_step import OpenStep
    from aiokv.errors import AiokvError
    from aiokv.scheduler.reader import CacheReader
    from aiokv.worker.base import Cancelled, Worker

_BLOCK_ONLOAD: Final = ("all", ONLOAD)
_MAY_MISS: Final = PEER_ROUTES | {FETCH}  # a source that lacks a block is not a failure

log = Log(__name__)


class Transfers:
    """Transfers in flight of one engine.

    Args:
        config: configuration of the engine.
        lifetime: loop of the engine.
        read: read access to the scheduler's state.
        worker: executes the plans.
        open_step: notes transfers that wait for the open step.
        observers: are told the ends of transfers.
        on_onload: called with the seconds of each onload that has copied all its blocks.

    Attributes:
        layer_waits: durations of the waits for layers.
    """

    def __init__(
        self,
        config: CacheConfig,
        lifetime: Lifetime,
        read: CacheReader,
        worker: Worker,
        open_step: OpenStep,
        observers: Observers,
        on_onload: Callable[[float], None],
    ) -> None:
        self._block_tokens = config.block_tokens
        # State and windows cannot be rolled back: after a failure, all positions are recomputed.
        self._restarts = bool(config.state_slots or config.windows)
        self._lifetime = lifetime
        self._read = read
        self._worker = worker
        self._open_step = open_step
        self._observers = observers
        self._on_onload = on_onload
        self._counters: dict[int, tuple[TransferPlan, LayerDoneCounter]] = {}
        self.layer_waits = LayerWaits()
        # Futures of tasks that wait for the end, by transfer.
        self._ends: dict[int, list[asyncio.Future[None]]] = {}
        observers.follow(lambda: list(self._counters.values()))

    @property
    def are_in_flight(self) -> bool:
        """True while the report of a transfer is missing."""
        return bool(self._counters)

    def is_in_flight(self, transfer_id: int) -> bool:
        """Return True while the report of a transfer is missing."""
        return transfer_id in self._counters

    def submit(self, plan: TransferPlan) -> None:
        """Submit a plan to the worker. A plan that the worker refuses is reported as failed."""
        self._counters[plan.transfer_id] = plan, self._worker.plans.take(plan)
        self._open_step.note_transfer(plan.after_step)

    def raise_priority(self, transfer_id: int, priority: int) -> None:
        """Raise the priority of a plan that has not reached the device."""
        self._worker.plans.raise_priority(transfer_id, priority)

    def cancel(self, transfer_id: int) -> Cancelled:
        """Cancel a plan that has not reached the device; see ``Plans.cancel``."""
        cancelled = self._worker.plans.cancel(transfer_id)
        if cancelled == "at once":
            ended = self._counters.pop(transfer_id, None)
            if ended is not None and self._observers.active:
                self._observers.transfer_ended(*ended, "cancelled", "")
            self._wake_waiters(transfer_id)  # no report will follow
        return cancelled

    def view(self, lease_id: int, onloads: Iterable[int], owner: str) -> LayerView:
        """Return a view of the layers of the onloads that a grant has begun or joined."""
        joined = [self._counters[transfer_id] for transfer_id in onloads]
        after_step = max(plan.after_step for plan, _ in joined)
        return LayerView(
            [counter for _, counter in joined],
            owner=owner,
            check_wait=partial(self._open_step.check_wait, after_step) if after_step else None,
            locate=self._position_finder(lease_id, [plan for plan, _ in joined]),
            waits=self.layer_waits,
            after_step=after_step,
        )

    def _position_finder(
        self, lease_id: int, plans: list[TransferPlan]
    ) -> Callable[[int, int], int | None]:
        locate = _position_finder(
            {plan.transfer_id: plan for plan in plans if plan.group_route == _BLOCK_ONLOAD},
            self._read.block_table(lease_id),
            self._block_tokens,
        )
        if not self._restarts:
            return locate
        return lambda transfer_id, block: None if locate(transfer_id, block) is None else 0

    async def ended(self, transfer_id: int) -> None:
        """Wait until the scheduler has accounted for the report of a transfer in flight.

        A backup that has not reached the device goes before other backups from now on.

        Cancellation: the transfer continues.
        """
        self._worker.plans.raise_priority(transfer_id, Priority.DEMAND)
        await self._end_of(transfer_id)

    def _end_of(self, transfer_id: int) -> asyncio.Future[None]:
        ended: asyncio.Future[None] = self._lifetime.loop.create_future()
        self._ends.setdefault(transfer_id, []).append(ended)
        return ended

    async def settle(self, *, but: Collection[Route] = ()) -> None:
        """Wait until the transfers in flight were reported or cancelled, not for later ones.

        Args:
            but: routes whose transfers are not waited for.

        Cancellation: the transfers continue.
        """
        plans = [plan for plan, _ in self._counters.values() if plan.route not in but]
        for end in [self._end_of(plan.transfer_id) for plan in plans]:
            await end

    async def settled(self, transfer_id: int) -> None:
        """Wait until the outcome of a fetch is known; its report may still follow.

        Cancellation: the transfer continues.
        """
        if transfer_id in self._counters:
            await self._counters[transfer_id][1].settled(ALL)

    def forget(self, report: TransferReport) -> None:
        """Forget a transfer whose report has arrived: no further lease joins it. Idempotent."""
        if report.transfer_id not in self._counters:
            return
        plan, counter = self._counters[report.transfer_id]
        if report.outcome == "failed" and plan.route not in _MAY_MISS:
            log.warning(
                "transfer.failed",
                transfer_id=report.transfer_id,
                first_bad_block=report.first_bad_block,
                reason=report.reason,
            )
        if report.outcome == "done" and plan.group_route == _BLOCK_ONLOAD:
            self._on_onload(counter.elapsed_seconds)
        del self._counters[report.transfer_id]
        if log.is_on(DEBUG):
            started = counter.started_seconds or counter.end_seconds
            log.debug(
                "transfer.ended",
                transfer_id=plan.transfer_id,
                route=plan.route.name,
                group=plan.group,
                blocks=plan.num_blocks,
                num_bytes=counter.num_bytes,
                queued_seconds=started - counter.created_seconds,
                seconds=max(counter.end_seconds - started, 0.0),
                outcome=report.outcome,
            )
        if self._observers.active:
            self._observers.transfer_ended(plan, counter, report.outcome, report.reason)

    def announce(self, report: TransferReport) -> None:
        """Wake the coroutines that wait for the report of a transfer. Idempotent."""
        self._wake_waiters(report.transfer_id)

    def fail_waits(self, new_error: Callable[[], AiokvError]) -> None:
        """End all waits for transfers and layers with an error: no report follows."""
        for _, counter in self._counters.values():
            counter.abandon(CopyError(0, str(new_error())))
        for ended in chain.from_iterable(self._ends.values()):
            if not ended.done():
                ended.set_exception(new_error())

    def _wake_waiters(self, transfer_id: int) -> None:
        for ended in self._ends.get(transfer_id, ()):
            if not ended.done():
                ended.set_result(None)
        self._ends.pop(transfer_id, None)


def _position_finder(
    plans: dict[int, TransferPlan], block_table: NDArray[np.int32], block_tokens: int
) -> Callable[[int, int], int | None]:
    """Return a function from a transfer and a block of its plan to a position of the lease.

    The function takes the transfer id and the index of the block in the plan, and returns the first
    position of the block. It returns None when the lease does not need the block, and 0 for a
    transfer that is not in ``plans``, which moves recurrent state.
    """

    def locate(transfer_id: int, block: int) -> int | None:
        if transfer_id not in plans:
            return 0
        places = np.flatnonzero(block_table == plans[transfer_id].target_ids[block])
        return int(places[0]) * block_tokens if len(places) else None

    return locate
