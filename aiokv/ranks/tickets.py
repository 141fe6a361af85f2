"""GroupTickets: tickets of peers on all ranks, each of which receives or sends its own heads."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING

from aiokv.errors import ClosedError, LayoutError, PeerError, RankLost, UsageError
from aiokv.peers.ticket import decode
from aiokv.ranks.channel import frame_of
from aiokv.ranks.messages import CloseTicket, Expect, OpenTicket, TicketEnded, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import TicketReply
    from aiokv.ranks.rank_state import RankState

ERRORS: dict[str, type[AiokvError]] = {
    error.__name__: error for error in (PeerError, LayoutError, UsageError, ClosedError)
}


class _Opening:
    """One ``OpenTicket``; its future is done when all ranks have answered, or one cannot."""

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
    """Tickets of one group; the ranks have the connections.

    Args:
        membership: the ranks.
        key: returns the key of tickets.

    Attributes:
        on_end: called with the id of a ticket that has ended on a rank, and the reason.
    """

    def __init__(self, membership: Membership, key: Callable[[], bytes]) -> None:
        self._key = key
        self.on_end: Callable[[bytes, str], None] = lambda ticket_id, reason: None
        self._membership = membership
        self._numbers = count(1)
        self._openings: dict[int, _Opening] = {}

    def expect(self, ticket: bytes, seconds: float) -> None:
        """Let senders open a ticket on all ranks; see :meth:`Worker.expect`."""
        decode(ticket, self._key())
        self._membership.send(frame_of(encode(Expect(ticket=ticket, seconds=seconds))))

    async def open(self, ticket: bytes) -> None:
        """Let each rank connect to its receivers; see :meth:`Worker.open_ticket`.

        Raises:
            RankLost: a rank was lost meanwhile.
        """
        decoded = decode(ticket, self._key())
        number = next(self._numbers)
        opening = self._openings[number] = _Opening(len(self._membership.ranks))
        try:
            layouts = [state.peer_layout for state in self._membership.ranks]
            message = OpenTicket(number=number, ticket=ticket, layouts=layouts)
            self._membership.send(frame_of(encode(message)))
            async with asyncio.timeout(decoded.timeout_seconds):
                await opening.ended
        except BaseException as error:
            self.close(decoded.ticket_id, "the sender could not open the ticket on all ranks")
            if isinstance(error, TimeoutError):
                raise PeerError(
                    f"ranks {sorted(opening.owing)} have not opened the ticket within "
                    f"{decoded.timeout_seconds:.3g} s"
                ) from None
            raise
        finally:
            del self._openings[number]
            if opening.ended.done() and not opening.ended.cancelled():
                opening.ended.exception()  # retrieved, also when the caller was cancelled

    def close(self, ticket_id: bytes, reason: str) -> None:
        """End a ticket on all ranks. Plans that were sent before it are ended, too."""
        self._membership.send(frame_of(encode(CloseTicket(ticket_id=ticket_id, reason=reason))))

    def on_message(self, state: RankState, message: TicketReply | TicketEnded) -> None:
        """Note the answer of a rank, or the end of a ticket on it; a late answer is ignored."""
        if isinstance(message, TicketEnded):
            self.on_end(message.ticket_id, f"rank {state.rank}: {message.reason}")
        elif (opening := self._openings.get(message.number)) is not None:
            opening.note(state.rank, message)

    def end_all(self, lost: RankLost | None = None) -> None:
        """Fail the callers that wait: a rank was lost, or the group closes."""
        for opening in self._openings.values():
            if lost is None:
                opening.fail(ClosedError("the group of ranks is closing"))
            else:
                opening.fail(RankLost(str(lost), rank=lost.rank))
