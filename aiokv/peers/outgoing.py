"""OutgoingTicket: a ticket that receivers have accepted, and its fragments. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from aiokv.base.groups import STATE
from aiokv.peers.departures import Fragment
from aiokv.peers.messages import fragment_key, split_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from collections.abc import Mapping as Dictionary

    from aiokv.peers.departures import ReceiverRank, Send
    from aiokv.peers.send_queue import SendQueue
    from aiokv.peers.ticket import Ticket

C = TypeVar("C", bound="Hashable")  # a connection


class OutgoingTicket(Generic[C]):
    """A ticket that all its receivers have accepted. Blocks are named by ``block_key``.

    Args:
        ticket: ticket of the receiving engine.
        deadline: by the clock of the sender.
        rank: number of this rank.
        targets: by receiver rank; connections differ.
        queues: queues of fragments to these ranks, in the same order.

    Attributes:
        queues: by receiver rank.
        sends: plans in flight, by transfer id.
        fragments: by connection and block.
        planned: blocks that a plan has, or had.
        cancelled: connections of ranks that have cancelled.
        closed: reason why it has ended; "" before.
    """

    def __init__(
        self,
        ticket: Ticket,
        deadline: float,
        rank: int,
        targets: Dictionary[int, ReceiverRank[C]],
        queues: dict[int, SendQueue[C]],
    ) -> None:
        self.ticket = ticket
        self.deadline = deadline
        self.queues = queues
        self.sends: dict[int, Send] = {}
        self.fragments: dict[tuple[C, int], Fragment[C]] = {}
        self.planned: set[int] = set()
        self.cancelled: set[C] = set()
        self.closed = ""
        self._rank = rank
        self._targets = targets

    def wanted(self, send: Send, block_tokens: int) -> list[int]:
        """Return the blocks of a plan that the ticket asks for.

        Args:
            send: the plan.
            block_tokens: positions per block of this engine.
        """
        if send.plan.group == STATE:
            return list(send.positions)
        ticket = self.ticket
        blocks = range(ticket.first_position // block_tokens, -(-ticket.num_tokens // block_tokens))
        return [key for key in send.positions if split_key(key)[1] in blocks]

    def add_fragments(self, send: Send, receiver_rank: int) -> list[Fragment[C]]:
        """Add the fragments of a plan to one receiver rank, and return them."""
        ticket, queue = self.ticket, self.queues[receiver_rank]
        new = []
        for block in send.unproven:
            group, index = split_key(block)
            key = fragment_key(
                ticket.ticket_id, ticket.generation, self._rank, index, receiver_rank, group
            )
            fragment = Fragment(send, block, queue, self._targets[receiver_rank], key)
            self.fragments[queue.connection, block] = fragment
            new.append(fragment)
        return new

    def drop(self, send: Send, queue: SendQueue[C]) -> Iterator[Fragment[C]]:
        """Let nothing of the fragments of a plan to one receiver rank be sent any more.

        Yields:
            Each fragment that was not acknowledged by all ranks.
        """
        for block in send.unproven:
            fragment = self.fragments.get((queue.connection, block))
            if fragment is not None and fragment.send is send:
                fragment.dropped = True
                yield fragment

    @property
    def may_be_proven(self) -> bool:
        """True while acknowledgements of fragments may be on their way.

        The acknowledgements of a rank come before its cancellation.
        """
        unproven = {p.queue.connection for p in self.fragments.values() if not p.proven}
        return bool(unproven) and unproven.isdisjoint(self.cancelled)
