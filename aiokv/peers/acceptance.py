"""Acceptance: conditions under which a sender may open a ticket. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.errors import LayoutError
from aiokv.peers.messages import PROTOCOL_VERSION, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.peers.arrivals import SenderBlocks
    from aiokv.peers.incoming import IncomingTicket
    from aiokv.peers.messages import Open


class Acceptance:
    """Checks of the ``Open`` messages that reach one rank.

    Args:
        rank: number of the rank.
        transport: name of its transport.
        slot_bytes: bytes of a landing slot.
        num_assembly: assembly slots.
        source: returns the source of an ``Open``, or raises ``LayoutError`` if its blocks cannot be
            received.
    """

    def __init__(
        self,
        *,
        rank: int,
        transport: str,
        slot_bytes: int,
        num_assembly: int,
        source: Callable[[Open], SenderBlocks],
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._slot_bytes = slot_bytes
        self._num_assembly = num_assembly
        self._source = source

    def check(self, message: Open, incoming: IncomingTicket[Any] | None) -> SenderBlocks | Refused:
        """Return the source of a message, or the reply that refuses it.

        Args:
            message: message of the sender.
            incoming: the ticket that it names; None if it is unknown.
        """
        if reason := self._misuse(message, incoming):
            return Refused(ticket_id=message.ticket_id, kind="ticket", reason=reason)
        try:
            source = self._source(message)
            self._check_room(source)
        except LayoutError as error:
            return Refused(ticket_id=message.ticket_id, kind="layout", reason=str(error)[:1024])
        known = [] if incoming is None else [*incoming.sources.values()]
        if known and any(each.is_identity for each in (*known, source)):
            # One of the two sends whole blocks, so no other rank of its engine has to add a part.
            reason = "a sender of another engine has, or had, the ticket"
            return Refused(ticket_id=message.ticket_id, kind="ticket", reason=reason)
        return source

    def _misuse(self, message: Open, incoming: IncomingTicket[Any] | None) -> str:
        """Return the reason why a message is refused whatever its blocks are; "" without any."""
        if message.protocol != PROTOCOL_VERSION:
            return f"the protocol is {message.protocol}; it must be {PROTOCOL_VERSION}"
        if incoming is None or incoming.closed:
            return "the ticket is unknown, or has ended"
        if message.generation != incoming.ticket.generation:
            return "the ticket is of another generation of the engine"
        if message.receiver_rank != self._rank:
            return f"this is rank {self._rank}, not {message.receiver_rank}"
        if message.transport != self._transport:
            return f"the transport is {message.transport!r}; here it is {self._transport!r}"
        if message.sender_rank in incoming.sources or incoming.done:
            # This includes a sender that has ended: its fragments may be in assemblies.
            return f"a sender of rank {message.sender_rank} has, or had, the ticket"
        return ""

    def _check_room(self, source: SenderBlocks) -> None:
        """Check that a fragment fits in a slot, and that there are enough assembly slots.

        Raises:
            LayoutError: otherwise.
        """
        fragment_bytes = max(source.fragment_bytes(group) for group in range(len(source.mappings)))
        if fragment_bytes > self._slot_bytes:
            raise LayoutError(
                f"a fragment of the sender takes {fragment_bytes} bytes, a landing slot of the "
                f"receiver {self._slot_bytes} bytes",
                hint="send with smaller blocks than the receiver has, or with equal ones",
            )
        needed = max(len(mapping.receiver_blocks(0)) for mapping in source.mappings) + 1
        if not source.is_identity and self._num_assembly < needed:
            raise LayoutError(
                f"the ring of the receiver has room for {self._num_assembly} blocks of another "
                f"layout; it needs {needed}",
                hint="raise Peers.ring_bytes of the receiver",
            )
