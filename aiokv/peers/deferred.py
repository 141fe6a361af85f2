"""DeferredFragments: fragments that senders keep until the receiver has room for them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from aiokv.peers.assembly import AssemblySlots
    from aiokv.peers.incoming import IncomingTicket, OpenSender

C = TypeVar("C", bound="Hashable")  # a connection


class DeferredFragment(NamedTuple, Generic[C]):
    """A fragment that its sender may send again.

    Attributes:
        ticket_id: id of its ticket.
        sender: rank that has the fragment.
        block: block of the sender, by ``block_key``.
    """

    ticket_id: bytes
    sender: OpenSender[C]
    block: int


class DeferredFragments(Generic[C]):
    """Deferred fragments of all tickets of one rank, in order.

    Each ticket with deferred fragments is listed; those without are removed when they are met.

    Args:
        slots: assembly slots of the rank.
    """

    def __init__(self, slots: AssemblySlots) -> None:
        self._slots = slots
        self._tickets: dict[IncomingTicket[C], None] = {}

    def add(self, incoming: IncomingTicket[C], place: tuple[int, int]) -> None:
        """Add a fragment, by rank and block of the sender."""
        incoming.deferred[place] = None
        self._tickets[incoming] = None

    def take(self) -> Iterator[DeferredFragment[C]]:
        """Remove, and yield, the fragments for which there is room now.

        Fragments of senders that have ended are removed, too.
        """
        room = self._slots.num_free
        for incoming in list(self._tickets):
            if not incoming.deferred:
                del self._tickets[incoming]
                continue
            for place in list(incoming.deferred):
                sender = incoming.senders.get(place[0])
                if sender is None:
                    del incoming.deferred[place]
                    continue
                needed = incoming.slots_needed(sender.source, place)
                if needed is None or (needed and needed > room - incoming.reserved(place)):
                    continue
                room -= needed
                del incoming.deferred[place]
                yield DeferredFragment(incoming.ticket.ticket_id, sender, place[1])

    def violations(self, tickets: Iterable[IncomingTicket[C]]) -> list[str]:
        """Return a description of each violated invariant.

        Args:
            tickets: all tickets of the rank.
        """
        return [
            f"ticket {incoming.ticket.ticket_id.hex()} has deferred fragments, but is not listed"
            for incoming in tickets
            if incoming.deferred and incoming not in self._tickets
        ]
