"""GroupTickets: tickets of peers on all ranks, each of which receives or sends its own heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import ClosedError, LayoutError, PeerError, UsageError
from aiokv.peers.ticket import decode
from aiokv.ranks.messages import CloseTicket, Expect, OpenTicket

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.peers.ticket import Endpoint
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import Reply, TicketEnded
    from aiokv.ranks.rank_state import RankState
    from aiokv.ranks.requests import RankRequest, RankRequests
    from aiokv.worker.device.base import Event

ERRORS: dict[str, type[AiokvError]] = {
    error.__name__: error for error in (PeerError, LayoutError, UsageError, ClosedError)
}


class GroupTickets:
    """Tickets of one group; see :class:`aiokv.worker.base.Tickets`. Ranks have the connections.

    Args:
        membership: the ranks.
        requests: sends requests to them.
        flush: sends the plans that were submitted before.
        check: raises unless all ranks can receive and send blocks.

    Attributes:
        on_end: called with the id of a ticket that has ended on a rank, and the reason.
    """

    def __init__(
        self,
        membership: Membership,
        requests: RankRequests,
        flush: Callable[[], None],
        check: Callable[[], None],
    ) -> None:
        self.on_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None
        self._membership = membership
        self._requests = requests
        self._flush = flush
        self._check = check
        self._expected: dict[bytes, RankRequest] = {}  # by ticket

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
        """Do nothing, because each rank records its own event; see ``Rank.layers_done``."""

    def expect(self, ticket: bytes, seconds: float, open_seconds: float) -> None:
        """Let senders open a ticket on all ranks; see :meth:`Tickets.expect`.

        Raises:
            RankLost: a rank is lost.
        """
        self._check()
        if not self.endpoints:
            raise UsageError("the ranks do not listen for peers", hint="set Peers(listen=...)")
        ticket_id = decode(ticket, self.ticket_key).ticket_id
        self._expected[ticket_id] = self._requests.send(
            lambda number: Expect(
                number=number, ticket=ticket, seconds=seconds, open_seconds=open_seconds
            ),
            decides=_is_refused,
        )

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
        request = self._requests.send(
            lambda number: OpenTicket(number=number, ticket=ticket, layouts=layouts),
            decides=_is_refused,
        )
        await self._answered(request, decoded.ticket_id, decoded.timeout_seconds)

    async def _answered(self, request: RankRequest, ticket_id: bytes, seconds: float) -> None:
        """Wait for the replies of all ranks; after an error, the ticket is closed.

        Cancellation: likewise.
        """
        try:
            await request.decided(seconds)
            for rank, reply in request.replies.items():
                if reply.error:
                    raise ERRORS.get(reply.kind, PeerError)(f"rank {rank}: {reply.error}")
        except BaseException as error:
            self.close_ticket(ticket_id, "the ticket could not be opened on all ranks")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"ranks {request.silent_ranks} have not opened the ticket within "
                    f"{seconds:.3g} s"
                ) from None
            raise

    def close_ticket(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket on all ranks, with the plans that were submitted before."""
        self._flush()
        self._membership.send(CloseTicket(ticket_id=ticket_id, reason=reason))

    def on_ended(self, state: RankState, message: TicketEnded) -> None:
        """Take note that a ticket has ended on a rank."""
        self.on_end(message.ticket_id, f"rank {state.rank}: {message.reason}")


def _is_refused(reply: Reply) -> bool:
    return bool(reply.error)
