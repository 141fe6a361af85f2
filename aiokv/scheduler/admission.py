"""Who waits for blocks, and who is next. Plain data; the engine owns the futures."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

W = TypeVar("W")


class Admission(Generic[W]):
    """Waiters in order of priority (lower number first), then of arrival.

    Only the first is ever tried, so a large request is not starved by small ones behind it, and
    the cost of a try does not depend on how many wait.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, W]] = []
        self._sequence = count()
        self._waiting: set[int] = set()  # sequence numbers; the heap may hold more

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, waiter: W, priority: int) -> int:
        """Returns the ticket to leave with."""
        ticket = next(self._sequence)
        self._waiting.add(ticket)
        heapq.heappush(self._heap, (priority, ticket, waiter))
        return ticket

    def leave(self, ticket: int) -> None:
        """Idempotent."""
        self._waiting.discard(ticket)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)

    def first(self) -> W | None:
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[W]:
        """Everybody, the first one first."""
        return [
            waiter for _, ticket, waiter in sorted(self._heap, key=_rank) if ticket in self._waiting
        ]

    def drop_first(self) -> None:
        """The first one was served. Requires that there is one."""
        self._waiting.discard(heapq.heappop(self._heap)[1])


def _rank(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[:2]
