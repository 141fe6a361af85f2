"""UnplannedFragments: limit of landing slots with fragments that no plan waits for yet. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.peers.incoming import IncomingTicket


class UnplannedFragments:
    """Unplanned fragments of all tickets of one rank.

    They take at most half of the landing slots, so that blocks with a plan can always arrive.

    Args:
        num_slots: landing slots of the rank.
    """

    def __init__(self, num_slots: int) -> None:
        self._most = num_slots // 2
        self._tickets: dict[IncomingTicket[Any], None] = {}  # may include tickets without fragments

    def note(self, incoming: IncomingTicket[Any]) -> None:
        """Note that a ticket may have unplanned fragments from now on."""
        self._tickets[incoming] = None

    def forget(self, incoming: IncomingTicket[Any]) -> None:
        """Note that a ticket has no unplanned fragments, and will get none. Idempotent."""
        self._tickets.pop(incoming, None)

    @property
    def has_room(self) -> bool:
        """True if one more landing slot may have an unplanned fragment."""
        counts = {incoming: incoming.num_unplanned for incoming in self._tickets}
        self._tickets = {incoming: None for incoming, count in counts.items() if count}
        return sum(counts.values()) < self._most

    def violations(self, tickets: Iterable[IncomingTicket[Any]]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            tickets: all tickets of the rank.
        """
        counts = {incoming: incoming.num_unplanned for incoming in tickets}
        problems = [
            f"ticket {incoming.ticket.ticket_id.hex()} has unplanned fragments, but is not noted"
            for incoming, count in counts.items()
            if count and incoming not in self._tickets
        ]
        if (found := sum(counts.values())) > self._most:
            problems.append(
                f"{found} slots have fragments that no plan waits for; at most {self._most} may"
            )
        return problems
