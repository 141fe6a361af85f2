"""PriorityLine: waiters ordered by priority. Plain data; the dispatcher owns the futures."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Generic, TypeAlias, TypeVar

W = TypeVar("W")

Ticket: TypeAlias = tuple[int, int]  # priority, sequence number


class PriorityLine(Generic[W]):
    """Waiters in order of priority (lower number first), then of arrival.

    The line has one queue per priority, and a binary heap of the priorities with the place of each
    priority in the heap. So entering and leaving cost O(1) among equal priorities and O(log
    priorities) otherwise, at any position in the line. The line keeps no reference to a waiter that
    has left. The scheduler tries only the first waiter: small requests do not starve a large one,
    and the cost of a try does not depend on the number of waiters.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[Ticket, W]] = {}  # by priority; without empty queues
        self._heap: list[int] = []  # the priorities of the queues
        self._places: dict[int, int] = {}  # priority -> index in the heap
        self._sequence = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, waiter: W, priority: int) -> Ticket:
        """Add a waiter; return its ticket for ``leave``."""
        ticket = (priority, next(self._sequence))
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            self._heap.append(priority)
            self._rise(len(self._heap) - 1)
        queue[ticket] = waiter
        self._length += 1
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Remove a waiter. Idempotent."""
        priority = ticket[0]
        queue = self._queues.get(priority)
        if queue is None or ticket not in queue:
            return
        del queue[ticket]
        self._length -= 1
        if not queue:
            del self._queues[priority]
            self._drop(priority)

    def first(self) -> W | None:
        """Return the first waiter, or None."""
        if not self._heap:
            return None
        queue = self._queues[self._heap[0]]
        return queue[next(iter(queue))]

    def first_priority(self) -> int:
        """Return the priority of the first waiter. Requires a waiter."""
        return self._heap[0]

    def in_order(self) -> list[W]:
        """Return all waiters, from the first to the last."""
        return [
            waiter
            for priority in sorted(self._queues)
            for waiter in self._queues[priority].values()
        ]

    def check(self) -> list[str]:
        """Return a description of each violated invariant of the queues and the heap."""
        found = []
        heap = self._heap
        if self._places != {priority: place for place, priority in enumerate(heap)}:
            found.append(f"line: {len(heap)} entries, {len(self._places)} places differ")
        if set(heap) != set(self._queues) or not all(self._queues.values()):
            found.append(f"line: {len(heap)} priorities, {len(self._queues)} queues differ")
        if (waiters := sum(map(len, self._queues.values()))) != self._length:
            found.append(f"line: {waiters} waiters, counted {self._length}")
        found += [
            f"line: entry {place} is in front of its parent"
            for place in range(1, len(heap))
            if heap[place] < heap[(place - 1) // 2]
        ]
        return found

    def _drop(self, priority: int) -> None:
        """Remove a priority without a queue from the heap."""
        place = self._places.pop(priority)
        last = self._heap.pop()
        if place < len(self._heap):
            self._heap[place] = last
            self._sink(place)
            self._rise(self._places[last])

    def _rise(self, place: int) -> None:
        """Move a priority towards the front until its parent is smaller."""
        heap, places = self._heap, self._places
        entry = heap[place]
        while place:
            parent = (place - 1) // 2
            if heap[parent] < entry:
                break
            heap[place] = heap[parent]
            places[heap[place]] = place
            place = parent
        heap[place] = entry
        places[entry] = place

    def _sink(self, place: int) -> None:
        """Move a priority towards the end until it is smaller than its children."""
        heap, places = self._heap, self._places
        entry = heap[place]
        while (child := 2 * place + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1] < heap[child]:
                child += 1
            if entry < heap[child]:
                break
            heap[place] = heap[child]
            places[heap[place]] = place
            place = child
        heap[place] = entry
        places[entry] = place
