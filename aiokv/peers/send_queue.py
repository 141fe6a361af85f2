"""SendQueue: fragments to one receiver rank that wait for credits, and the credits. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.peers.messages import Return

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from aiokv.peers.departures import Fragment
    from aiokv.peers.messages import SlotCredit

C = TypeVar("C", bound="Hashable")  # a connection


class SendQueue(Generic[C]):
    """Fragments of all tickets to one receiver rank, in order.

    Each waiting fragment has a credit, or one is asked for; when the sender has handled an event,
    there are no others: those are given back.

    Args:
        connection: to the receiver rank.

    Attributes:
        connection: to the receiver rank.
        credits: landing slots that no fragment uses yet.
        waiting: fragments that are ready and have no credit, in order.
        wanted: credits that were asked for and did not come yet.
        slots: outgoing slots that its fragments have.
        tickets: tickets that use the queue.
    """

    def __init__(self, connection: C) -> None:
        self.connection = connection
        self.credits: deque[SlotCredit] = deque()
        self.waiting: deque[Fragment[C]] = deque()
        self.wanted = 0
        self.slots = 0
        self.tickets: set[bytes] = set()

    @property
    def next(self) -> Fragment[C] | None:
        """The first fragment, if there is a credit for it."""
        return self.waiting[0] if self.credits and self.waiting else None

    def add(self, fragments: Sequence[Fragment[C]]) -> int:
        """Add fragments; return the number of credits to ask for."""
        self.waiting.extend(fragments)
        spare = len(self.credits) + self.wanted - (len(self.waiting) - len(fragments))
        missing = max(len(fragments) - max(spare, 0), 0)
        self.wanted += missing
        return missing

    def add_credits(self, slots: Sequence[SlotCredit]) -> None:
        """Note that credits have come."""
        self.credits.extend(slots)
        self.wanted = max(self.wanted - len(slots), 0)

    def take(self) -> Fragment[C]:
        """Remove the next fragment, and give it a credit. Requires that both exist."""
        fragment = self.waiting.popleft()
        fragment.credit = self.credits.popleft()
        return fragment

    def remove_dropped(self) -> None:
        """Remove the fragments that will not be sent any more."""
        self.waiting = deque(fragment for fragment in self.waiting if not fragment.dropped)

    def take_spare(self) -> Return | None:
        """Remove the credits, and the wishes for them, that no fragment waits for.

        Returns:
            The message to the receiver that gives them back; None if there are none.
        """
        spare = len(self.credits) + self.wanted - len(self.waiting)
        if spare <= 0:
            return None
        unwanted = min(spare, self.wanted)
        self.wanted -= unwanted
        slots = [self.credits.pop() for _ in range(spare - unwanted)]
        return Return(slots=slots, unwanted=unwanted)

    def disconnect(self) -> None:
        """Drop all credits and requests for credits, because the connection has ended."""
        self.credits.clear()
        self.wanted = 0

    def violations(self) -> list[str]:
        """Return a description of each violated invariant."""
        found = len(self.credits) + self.wanted
        if found == len(self.waiting):
            return []
        known = f"{len(self.credits)} have arrived and {self.wanted} are requested"
        return [f"{len(self.waiting)} fragments wait for credits, but {known}"]
