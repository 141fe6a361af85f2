"""Entries of the waiting lines, and the number of entries that one transition serves.

A lease waits in up to three lines: for blocks that another lease computes (pending.py), then for
its salt's quota (quota.py), then for capacity (admission.py). Entries are plain data: the
dispatcher owns the futures of the waiting coroutines.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from aiokv.scheduler.line import PriorityLine, Ticket

PER_CALL: Final = 16  # entries of one kind that one transition serves: takes well below 1 ms


class Entry:
    """Lease in a waiting line.

    Attributes:
        lease_id: id of the lease.
        rank: rank in the line; lower ranks go first.
    """

    __slots__ = ("_line", "_ticket", "lease_id", "rank")

    def __init__(self, lease_id: int) -> None:
        self.lease_id = lease_id
        self.rank = 0
        self._line: PriorityLine[Any] | None = None
        self._ticket: Ticket = (0, 0)

    def enter(self, line: PriorityLine[Any], rank: int) -> None:
        """Join a line after all entries of the same rank. Requires that the entry is in no line."""
        self.rank = rank
        self._ticket = line.push(self, rank)
        self._line = line

    def enter_at(self, line: PriorityLine[Any], ticket: Ticket) -> None:
        """Join a line at the place of a ticket. Requires that the entry is in no line."""
        self.rank = ticket[0]
        self._ticket = ticket
        line.insert(self, ticket)
        self._line = line

    def is_in(self, line: PriorityLine[Any]) -> bool:
        """Return True if the entry waits in this line."""
        return self._line is line

    @property
    def ticket(self) -> Ticket:
        """Ticket in the line that the entry has joined last."""
        return self._ticket

    def leave(self) -> None:
        """Leave the line. Idempotent."""
        if self._line is not None:
            self._line.leave(self._ticket)
            self._line = None


E = TypeVar("E", bound=Entry)


class Endings(Generic[E]):
    """Lines whose entries stop waiting, one entry per call."""

    def __init__(self) -> None:
        self._due: deque[tuple[list[PriorityLine[E]], int, Callable[[E], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(
        self,
        lines: Iterable[PriorityLine[E]],
        end: Callable[[E], None],
        *,
        up_to: int = sys.maxsize,
    ) -> None:
        """End the wait of all entries in these lines.

        Args:
            lines: lines; without ``up_to``, no entry may enter them any more.
            end: called with each entry; removes the entry from its line.
            up_to: highest rank of the entries to end.
        """
        self._due.append((list(lines), up_to, end))

    def end_one(self) -> bool:
        """End one wait, or drop a finished line; return False when no line is left."""
        if not self._due:
            return False
        lines, up_to, end = self._due[0]
        entry = lines[-1].first() if lines else None
        if entry is not None and entry.rank <= up_to:
            end(entry)
        elif lines:
            lines.pop()
        else:
            self._due.popleft()
        return True

    def lines(self) -> list[PriorityLine[E]]:
        """Return the lines of which ``end_one`` will end the entries."""
        return [line for lines, _, _ in self._due for line in lines]


def check_entries(
    name: str,
    entries: Mapping[int, Entry],
    lines: Collection[PriorityLine[Any]],
    live: Collection[int],
) -> list[str]:
    """Return a description of each violated invariant of some lines.

    Args:
        name: name of the lines, for the descriptions.
        entries: all waiting entries, by lease id.
        lines: lines in which the entries wait.
        live: ids of the leases that are not released.
    """
    found = []
    standing: set[int] = set()
    for line in {id(line): line for line in lines}.values():
        found += line.check()
        for entry in line.in_order():
            standing.add(id(entry))
            lease = f"lease {entry.lease_id:#x}"
            if entries.get(entry.lease_id) is not entry:
                found.append(f"{name}: an entry of {lease} belongs to no waiting lease")
            if entry.lease_id not in live:
                found.append(f"{name}: {lease} waits, but it is released")
    found += [
        f"{name}: lease {lease_id:#x} waits in no line, and nothing will wake it"
        for lease_id, entry in entries.items()
        if id(entry) not in standing
    ]
    return found
