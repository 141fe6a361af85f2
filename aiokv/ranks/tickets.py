"""GroupTickets: tickets of peers on all ranks, each of which receives or sends its own heads."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

from aiokv.errors import ClosedError, LayoutError, PeerError, RankLost, UsageError
from aiokv.peers.ticket import decode
from aiokv.ranks.messages import CloseTicket, Expect, OpenTicket, TicketEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.peers.ticket import Endpoint
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import TicketReply
    from aiokv.ranks.rank_state import RankState
    from aiokv.worker.device.base import Event

ERRORS: dict[str, type[AiokvError]] = {
    error.__name__: error for error in (PeerError, LayoutError, UsageError, ClosedError)
}


class _Request:
    """One ``Expect`` or ``OpenTicket``; its future is done when all ranks have answered, or one
    cannot."""

    def __init__(self, num_ranks: int) -> None:
        self.owing = set(range(num_ranks))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: AiokvError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def note(self, rank: int, reply: TicketReply) -> None:
        self.owing.discard(rank)
        if reply.error:
            self.fail(ERRORS.get(reply.kind, PeerError)(f"rank {rank}: {reply.error}"))
        elif not self.owing and not self.ended.done():
            self.ended.set_result(None)


class GroupTickets:
    """Tickets of one group; see :class:`aiokv.worker.base.Tickets`. Ranks have the connections.

    Args:
        membership: the ranks.
        flush: sends the plans that were submitted before.
        check: raises unless all ranks can receive and send blocks.

    Attributes:
        on_end: called with the id of a ticket that has ended on a rank, and the reason.
    """

    def __init__(
        self, membership: Membership, flush: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self.on_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None
        self._membership = membership
        self._flush = flush
        self._check = check
        self._numbers = count(1)
        self._requests: dict[int, _Request] = {}
        self._expected: dict[bytes, int] = {}  # numbers of requests, by ticket

    @property
    def endpoints(self) -> list[Endpoint]:
        """Addresses at which the ranks listen for senders; empty while a rank is lost."""
        ranks = self._membership.ranks
        found = [endpoint for state in ranks for endpoint in state.endpoints]
        return found if len(found) == len(ranks) else []

    @property
    def ticket_key(self) -> bytes:
        """Key of tickets, from rank 0."""
        return self._membership.ranks[0].ticket_key

    @property
    def layer_ends(self) -> list[int]:
        """Ranges of layers of all ranks; see :attr:`Tickets.layer_ends`.

        Raises:
            PeerError: the ranks have different ranges.
        """
        ends = [state.layer_ends for state in self._membership.ranks]
        for rank, other in enumerate(ends):
            if other != ends[0]:
                raise PeerError(
                    f"rank {rank} sends blocks in {len(other) or 1} ranges of layers, rank 0 in "
                    f"{len(ends[0]) or 1}",
                    hint="set the same Peers(layer_ranges=...) on all ranks",
                )
        return ends[0]

    def layers_done(self, ticket_id: bytes, mark: int, event: Event | None) -> None:
        """Do nothing: each rank notes the mark with an event of its own; ``Rank.layers_done``."""

    def expect(self, ticket: bytes, seconds: float, open_seconds: float) -> None:
        """Let senders open a ticket on all ranks; see :meth:`Tickets.expect`.

        Raises:
            RankLost: a rank is lost.
        """
        self._check()
        if not self.endpoints:
            raise UsageError("the ranks do not listen for peers", hint="set Peers(listen=...)")
        ticket_id = decode(ticket, self.ticket_key).ticket_id
        number = self._expected[ticket_id] = self._new_request()
        self._send(Expect(number=number, ticket=ticket, seconds=seconds, open_seconds=open_seconds))

    async def expected(self, ticket_id: bytes, seconds: float) -> None:
        """Wait until all ranks let senders open a ticket; see :meth:`Tickets.expected`.

        Raises:
            RankLost: a rank was lost meanwhile.
        """
        await self._answered(self._expected.pop(ticket_id), ticket_id, seconds)

    async def open_ticket(self, ticket: bytes) -> None:
        """Let each rank connect to its receivers; see :meth:`Tickets.open_ticket`.

        Raises:
            RankLost: a rank is lost.
        """
        self._check()
        decoded = decode(ticket, self.ticket_key)
        layouts = [state.peer_layout for state in self._membership.ranks]
        number = self._new_request()
        self._send(OpenTicket(number=number, ticket=ticket, layouts=layouts))
        await self._answered(number, decoded.ticket_id, decoded.timeout_seconds)

    def _new_request(self) -> int:
        """Return the number of a new request, which the caller sends; ``_answered`` follows."""
        number = next(self._numbers)
        self._requests[number] = _Request(len(self._membership.ranks))
        return number

    async def _answered(self, number: int, ticket_id: bytes, seconds: float) -> None:
        """Wait for the replies of all ranks; after an error, the ticket is closed.

        Cancellation: likewise.
        """
        request = self._requests[number]
        try:
            async with asyncio.timeout(seconds):
                await request.ended
        except BaseException as error:
            self.close_ticket(ticket_id, "the ticket could not be opened on all ranks")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"ranks {sorted(request.owing)} have not opened the ticket within "
                    f"{seconds:.3g} s"
                ) from None
            raise
        finally:
            del self._requests[number]
            if request.ended.done() and not request.ended.cancelled():
                request.ended.exception()  # retrieved, also when the caller was cancelled

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket on all ranks, with the plans that were submitted before."""
        self._flush()
        self._send(CloseTicket(ticket_id=ticket_id, reason=reason))

    def _send(self, message: Expect | OpenTicket | CloseTicket) -> None:
        self._membership.send(message)

    def on_message(self, state: RankState, message: TicketReply | TicketEnded) -> None:
        """Note the answer of a rank, or the end of a ticket on it; a late answer is ignored."""
        if isinstance(message, TicketEnded):
            self.on_end(message.ticket_id, f"rank {state.rank}: {message.reason}")
        elif (request := self._requests.get(message.number)) is not None:
            request.note(state.rank, message)

    def end_all(self, lost: RankLost | None = None) -> None:
        """Fail the callers that wait: a rank was lost, or the group closes."""
        for request in self._requests.values():
            if lost is None:
                request.fail(ClosedError("the group of ranks is closing"))
            else:
                request.fail(RankLost(str(lost), rank=lost.rank))
