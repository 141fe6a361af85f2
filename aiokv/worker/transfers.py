"""Plans that wait for the device, and their order. Plain data, no loop."""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from aiokv.worker.plan_table import PlanEntry

if TYPE_CHECKING:
    from aiokv.worker.steps import WorkerStepClock

Entry: TypeAlias = PlanEntry[Any]


class TransferQueue:
    """Waiting plans of one route: lowest priority number first, then first in, first out."""

    def __init__(self) -> None:
        self._heap: list[
            tuple[int, int, Entry]
        ] = []  # items without an equal place in _places are void
        self._places: dict[int, tuple[int, int]] = {}  # transfer id -> (priority, order)
        self._order = count()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: Entry) -> bool:
        return entry.plan.transfer_id in self._places

    def push(self, entry: Entry) -> None:
        """Queue a plan that is not queued, behind those of its priority."""
        self._put(entry, next(self._order))

    def raise_priority(self, entry: Entry) -> None:
        """Reorder a plan whose ``priority`` was raised, if it is queued; its age stays."""
        if (place := self._places.get(entry.plan.transfer_id)) is not None:
            self._put(entry, place[1])

    def _put(self, entry: Entry, order: int) -> None:
        place = (entry.priority, order)
        self._places[entry.plan.transfer_id] = place
        self._forget_void()
        heapq.heappush(self._heap, (*place, entry))

    def first(self) -> Entry | None:
        """Return the next plan, or None; it stays queued until ``remove``."""
        while self._heap:
            if self._is_valid(self._heap[0]):
                return self._heap[0][2]
            heapq.heappop(self._heap)
        return None

    def remove(self, entry: Entry) -> None:
        """Remove a plan, if it is queued."""
        self._places.pop(entry.plan.transfer_id, None)
        self._forget_void()

    def _forget_void(self) -> None:
        if len(self._heap) > 2 * len(self._places) + 16:
            valid = [item for item in self._heap if self._is_valid(item)]
            heapq.heapify(valid)
            self._heap = valid

    def _is_valid(self, item: tuple[int, int, Entry]) -> bool:
        priority, order, entry = item
        return self._places.get(entry.plan.transfer_id) == (priority, order)


class StepGate:
    """Plans whose step is open.

    Args:
        clock: numbers of the steps.
    """

    def __init__(self, clock: WorkerStepClock) -> None:
        self._clock = clock
        self._held: dict[int, dict[int, Entry]] = {}  # step -> transfer id -> plan

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def hold(self, entry: Entry) -> bool:
        """Let a plan wait if its step is open; return True if it waits."""
        step = entry.plan.after_step
        if self._clock.is_open(step):
            self._held.setdefault(step, {})[entry.plan.transfer_id] = entry
            return True
        return False

    def remove(self, entry: Entry) -> None:
        """Forget a plan, if it waits."""
        self._held.get(entry.plan.after_step, {}).pop(entry.plan.transfer_id, None)

    def free(self) -> list[Entry]:
        """Remove and return the plans that closed steps held, oldest first."""
        closed = sorted(step for step in self._held if not self._clock.is_open(step))
        return [entry for step in closed for entry in self._held.pop(step).values()]
