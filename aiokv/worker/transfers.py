"""Transfers that wait for the device, and their order. Plain data, no loop."""

from __future__ import annotations

import heapq
import time
from itertools import count
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiokv.base.plan import TransferPlan
    from aiokv.worker.device.base import CopyError, Event
    from aiokv.worker.layers import LayerDoneCounter
    from aiokv.worker.steps import StepClock

State = Literal["held", "queued", "submitted", "ended"]


class Transfer:
    """A plan that a controller executes.

    ``held`` (its step is open) -> ``queued`` -> ``submitted`` (the device has it) -> ``ended``.

    Attributes:
        priority: the plan's, or a more urgent one that was asked for later.
        created_at: time of the submission of its plan.
        started_at: time of its latest hand-over to the device; 0.0 before.
        unproven: layer -> time of its arrival, of layers whose checksums are not verified yet.
        reported: the scheduler knows the outcome, and gets no report.
        after: event that the first byte waits for, in place of that of the plan's step; None for
            none.
        on_end: gets the failure, or None, instead of a report; None for a plan of the scheduler.
    """

    __slots__ = (
        "after",
        "counter",
        "created_at",
        "num_bytes",
        "on_end",
        "plan",
        "priority",
        "reported",
        "started_at",
        "state",
        "unproven",
    )

    def __init__(
        self,
        plan: TransferPlan,
        counter: LayerDoneCounter,
        num_bytes: int,
        on_end: Callable[[CopyError | None], None] | None = None,
        after: Event | None = None,
    ) -> None:
        self.plan = plan
        self.after = after
        self.on_end = on_end
        self.priority: int = plan.priority
        self.counter = counter
        self.num_bytes = num_bytes
        self.state: State = "queued"
        self.created_at = time.monotonic()
        self.started_at = 0.0
        self.unproven: dict[int, float | None] = {}
        self.reported = False


class TransferQueue:
    """Waiting transfers of one route: lowest priority number first, then first in, first out."""

    def __init__(self) -> None:
        self._heap: list[
            tuple[int, int, Transfer]
        ] = []  # entries without an equal place in _places are void
        self._places: dict[int, tuple[int, int]] = {}  # transfer id -> (priority, order)
        self._order = count()

    def __len__(self) -> int:
        return len(self._places)

    def push(self, transfer: Transfer) -> None:
        """Queue a transfer that is not queued, behind those of its priority."""
        self._put(transfer, next(self._order))
        transfer.state = "queued"

    def raise_priority(self, transfer: Transfer) -> None:
        """Reorder a queued transfer whose ``priority`` was raised; its age among equals stays."""
        _, order = self._places[transfer.plan.transfer_id]
        self._put(transfer, order)

    def _put(self, transfer: Transfer, order: int) -> None:
        place = (transfer.priority, order)
        self._places[transfer.plan.transfer_id] = place
        self._forget_void()
        heapq.heappush(self._heap, (*place, transfer))

    def first(self) -> Transfer | None:
        """Return the next transfer, or None; it stays queued until ``remove``."""
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def remove(self, transfer: Transfer) -> None:
        """Remove a transfer, if it is queued."""
        self._places.pop(transfer.plan.transfer_id, None)
        self._forget_void()

    def _forget_void(self) -> None:
        if len(self._heap) > 2 * len(self._places) + 16:
            valid = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(valid)
            self._heap = valid

    def _is_valid(self, entry: tuple[int, int, Transfer]) -> bool:
        priority, order, transfer = entry
        return self._places.get(transfer.plan.transfer_id) == (priority, order)


class StepGate:
    """Transfers whose step is open.

    Args:
        clock: numbers of the steps.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._held: dict[int, dict[int, Transfer]] = {}  # step -> transfer id -> transfer

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def is_open(self, step: int) -> bool:
        """Return True if the transfers of the step have to wait."""
        return self._clock.is_open(step)

    def hold(self, transfer: Transfer) -> None:
        """Let a transfer wait for its step, which is open. Idempotent."""
        held = self._held.setdefault(transfer.plan.after_step, {})
        held[transfer.plan.transfer_id] = transfer
        transfer.state = "held"

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer. Idempotent."""
        held = self._held.get(transfer.plan.after_step, {})
        held.pop(transfer.plan.transfer_id, None)

    def free(self) -> Iterator[Transfer]:
        """Yield transfers that closed steps held, oldest first, and remove them."""
        for step in sorted(s for s in self._held if not self.is_open(s)):
            yield from self._held.pop(step).values()
