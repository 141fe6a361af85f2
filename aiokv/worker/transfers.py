"""Transfers that wait for the device, and which of them goes next. Plain data, no loop."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Literal

from aiokv.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.plan import Plan
    from aiokv.worker.device.base import Event
    from aiokv.worker.layers import LayerDoneCounter

State = Literal["held", "queued", "submitted", "ended"]


class Transfer:
    """A plan on its way.

    ``held`` (its step is open) -> ``queued`` -> ``submitted`` (the device has it) -> ``ended``.
    """

    __slots__ = ("counter", "num_bytes", "plan", "started_at", "state", "unproven")

    def __init__(self, plan: Plan, counter: LayerDoneCounter, num_bytes: int) -> None:
        self.plan = plan
        self.counter = counter
        self.num_bytes = num_bytes
        self.state: State = "held"
        self.started_at = 0.0
        self.unproven: list[tuple[int, float | None]] = []  # layers that wait for checksums


class TransferQueue:
    """Waiting transfers of one direction: lowest priority number first, then first come."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Transfer]] = []
        self._sequence = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, transfer: Transfer) -> None:
        transfer.state = "queued"
        heapq.heappush(self._heap, (transfer.plan.priority, next(self._sequence), transfer))
        self._size += 1

    def pop(self) -> Transfer | None:
        """The next one, or None; the caller submits or ends it."""
        while self._heap:
            _, _, transfer = heapq.heappop(self._heap)
            if transfer.state == "queued":
                self._size -= 1
                return transfer
        return None

    def remove(self, transfer: Transfer) -> None:
        """Take out a queued transfer; its entry in the heap is skipped later."""
        transfer.state = "ended"
        self._size -= 1
        if len(self._heap) > 2 * self._size + 16:
            self._heap = [entry for entry in self._heap if entry[2].state == "queued"]
            heapq.heapify(self._heap)


class StepGate:
    """Transfers wait here while their step is open; later its event says when they may start."""

    def __init__(self) -> None:
        self.closed_step = 0
        self._held: dict[int, list[Transfer]] = {}
        self._finished_step = 0
        self._events: deque[tuple[int, Event | None]] = deque()  # later steps, ascending

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def __iter__(self) -> Iterator[Transfer]:
        """What is held, in no order."""
        for held in self._held.values():
            yield from held

    def is_open(self, step: int) -> bool:
        return step > self.closed_step

    def hold(self, transfer: Transfer) -> None:
        transfer.state = "held"
        self._held.setdefault(transfer.plan.after_step, []).append(transfer)

    def remove(self, transfer: Transfer) -> None:
        self._held[transfer.plan.after_step].remove(transfer)
        transfer.state = "ended"

    def close(self, step: int, event: Event | None) -> list[Transfer]:
        """Close all steps up to ``step``; returns what they held back, oldest step first.

        Raises:
            UsageError: the step is closed already.
        """
        if not self.is_open(step):
            raise UsageError(f"step {step} is closed already, up to {self.closed_step}")
        self.closed_step = step
        self._events.append((step, event))
        self._forget_finished()
        freed = []
        for held_step in sorted(s for s in self._held if s <= step):
            freed += self._held.pop(held_step)
        return freed

    def event_for(self, step: int) -> Event | None:
        """What work after a closed step has to wait for; None when it has finished."""
        self._forget_finished()
        for event_step, event in self._events:
            if event_step >= step > self._finished_step:
                return None if _is_done(event) else event
        return None

    def _forget_finished(self) -> None:
        while self._events and _is_done(self._events[0][1]):
            self._finished_step = self._events.popleft()[0]


def _is_done(event: Event | None) -> bool:
    """An event that cannot be asked is not done; the poller tells the engine what is wrong."""
    try:
        return event is None or event.done
    except Exception:
        return False
