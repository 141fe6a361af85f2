"""A line of waiters, ordered by priority. Plain data; the engine owns the futures."""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar

W = TypeVar("W")


class Admission(Generic[W]):
    """Waiters in order of priority (lower number first), then of arrival.

    A binary heap that knows the place of each entry: entering and leaving cost O(log n) wherever
    the waiter stands, and a waiter that has left is not referenced any more. Only the first is
    tried, so small requests do not starve a large one, and the cost of a try does not depend on
    the number of waiters.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, W]] = []  # (priority, ticket, waiter)
        self._places: dict[int, int] = {}  # ticket -> index in the heap
        self._sequence = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, waiter: W, priority: int) -> int:
        """Add a waiter; return the ticket to leave with."""
        ticket = next(self._sequence)
        self._heap.append((priority, ticket, waiter))
        self._rise(len(self._heap) - 1)
        return ticket

    def leave(self, ticket: int) -> None:
        """Remove a waiter. Idempotent."""
        place = self._places.pop(ticket, None)
        if place is None:
            return
        last = self._heap.pop()
        if place < len(self._heap):
            self._heap[place] = last
            self._sink(place)
            self._rise(self._places[last[1]])

    def first(self) -> W | None:
        return self._heap[0][2] if self._heap else None

    def drop_first(self) -> None:
        """Remove the first waiter. Requires that there is one."""
        self.leave(self._heap[0][1])

    def in_order(self) -> list[W]:
        """Return all waiters, the first one first."""
        return [waiter for _, _, waiter in sorted(self._heap, key=lambda entry: entry[:2])]

    def check(self) -> list[str]:
        """Return a description of each violated invariant of the heap."""
        found = []
        if self._places != {ticket: i for i, (_, ticket, _) in enumerate(self._heap)}:
            found.append(f"line: {len(self._heap)} entries, {len(self._places)} places differ")
        found += [
            f"line: entry {place} is in front of its parent"
            for place in range(1, len(self._heap))
            if self._heap[place][:2] < self._heap[(place - 1) // 2][:2]
        ]
        return found

    def _rise(self, place: int) -> None:
        """Move an entry towards the front until its parent goes before it."""
        heap, places = self._heap, self._places
        entry = heap[place]
        while place:
            parent = (place - 1) // 2
            if heap[parent][:2] < entry[:2]:
                break
            heap[place] = heap[parent]
            places[heap[place][1]] = place
            place = parent
        heap[place] = entry
        places[entry[1]] = place

    def _sink(self, place: int) -> None:
        """Move an entry towards the end until it goes before its children."""
        heap, places = self._heap, self._places
        entry = heap[place]
        while (child := 2 * place + 1) < len(heap):
            if child + 1 < len(heap) and heap[child + 1][:2] < heap[child][:2]:
                child += 1
            if entry[:2] < heap[child][:2]:
                break
            heap[place] = heap[child]
            places[heap[place][1]] = place
            place = child
        heap[place] = entry
        places[entry[1]] = place
