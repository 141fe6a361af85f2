"""PriorityLine: waiters ordered by priority. Plain data; the dispatcher owns the futures."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count, islice
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

W = TypeVar("W")

Ticket: TypeAlias = tuple[int, int]  # priority, sequence number


class _Queue(Generic[W]):
    """Waiters of one priority, in order of their tickets."""

    __slots__ = ("_late", "_order", "_waiters")

    def __init__(self) -> None:
        self._waiters: OrderedDict[Ticket, W] = OrderedDict()  # in order of arrival
        # Waiters with a ticket from before they entered, and a heap of these tickets. The ticket of
        # a waiter that has left is removed when it is the first of the heap.
        self._late: dict[Ticket, W] = {}
        self._order: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._waiters) + len(self._late)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._waiters or ticket in self._late

    def add(self, ticket: Ticket, waiter: W) -> None:
        if not self._waiters or next(reversed(self._waiters)) < ticket:
            self._waiters[ticket] = waiter
        else:
            self._late[ticket] = waiter
            heapq.heappush(self._order, ticket)

    def remove(self, ticket: Ticket) -> None:
        if ticket in self._late:
            del self._late[ticket]
            if len(self._order) > 2 * len(self._late) + 16:
                self._order = sorted(self._late)
        else:
            del self._waiters[ticket]

    def first(self) -> W:
        """Return the waiter with the lowest ticket. Requires a waiter."""
        while self._order and self._order[0] not in self._late:
            heapq.heappop(self._order)
        ticket = next(iter(self._waiters), None)
        if self._order and (ticket is None or self._order[0] < ticket):
            return self._late[self._order[0]]
        assert ticket is not None
        return self._waiters[ticket]

    def in_order(self, limit: int | None = None) -> list[W]:
        if not self._late:
            return list(islice(self._waiters.values(), limit))
        waiters = {**self._waiters, **self._late}
        return [waiters[ticket] for ticket in islice(sorted(waiters), limit)]

    def check(self) -> bool:
        """Return True if each late waiter is in the heap, and the others are in order."""
        return set(self._late) <= set(self._order) and list(self._waiters) == sorted(self._waiters)


class PriorityLine(Generic[W]):
    """Waiters in order of priority (lower number first), then of arrival.

    The line has one queue per priority, and a binary heap of the priorities with the place of each
    priority in the heap. So entering and leaving cost O(1) among equal priorities and O(log
    priorities) otherwise, at any position in the line. The line keeps no reference to a waiter that
    has left. The scheduler tries only the first waiter: small requests do not starve a large one,
    and the cost of a try does not depend on the number of waiters.

    Args:
        sequence: numbers of the arrivals, of lines that share their tickets; None for numbers of
            the line's own.
    """

    def __init__(self, sequence: Iterator[int] | None = None) -> None:
        self._queues: dict[int, _Queue[W]] = {}  # by priority; no queue is empty
        self._heap: list[int] = []  # the priorities of the queues
        self._places: dict[int, int] = {}  # priority -> index in the heap
        self._sequence = count() if sequence is None else sequence
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, waiter: W, priority: int) -> Ticket:
        """Add a waiter; return its ticket for ``leave``."""
        ticket = (priority, next(self._sequence))
        self.insert(waiter, ticket)
        return ticket

    def insert(self, waiter: W, ticket: Ticket) -> None:
        """Add a waiter at the place of a ticket from a line with the same sequence."""
        priority = ticket[0]
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = _Queue()
            self._heap.append(priority)
            self._rise(len(self._heap) - 1)
        queue.add(ticket, waiter)
        self._length += 1

    def leave(self, ticket: Ticket) -> None:
        """Remove a waiter. Idempotent."""
        priority = ticket[0]
        queue = self._queues.get(priority)
        if queue is None or ticket not in queue:
            return
        queue.remove(ticket)
        self._length -= 1
        if not queue:
            del self._queues[priority]
            self._drop(priority)

    def first(self) -> W | None:
        """Return the first waiter, or None."""
        if not self._heap:
            return None
        return self._queues[self._heap[0]].first()

    def first_priority(self) -> int:
        """Return the priority of the first waiter. Requires a waiter."""
        return self._heap[0]

    def in_order(self, limit: int | None = None) -> list[W]:
        """Return the first ``limit`` waiters, or all, from the first to the last."""
        waiters = (
            waiter
            for priority in sorted(self._queues)
            for waiter in self._queues[priority].in_order(limit)
        )
        return list(islice(waiters, limit))

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
            f"line: the queue of priority {priority} is not in order"
            for priority, queue in self._queues.items()
            if not queue.check()
        ]
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
