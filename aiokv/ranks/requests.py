"""RankRequests: requests to all ranks that are in flight, each with one reply per rank."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

from aiokv.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.errors import AiokvError
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import FromManager, Reply
    from aiokv.ranks.rank_state import RankState


class RankRequest:
    """A request that was sent to all ranks.

    Args:
        num_ranks: number of ranks.
        decides: returns True for a reply that makes the other replies unnecessary.

    Attributes:
        replies: replies that have arrived, by rank.
    """

    def __init__(self, num_ranks: int, decides: Callable[[Reply], bool]) -> None:
        self.replies: dict[int, Reply] = {}
        self._num_ranks = num_ranks
        self._decides = decides
        self._error: AiokvError | None = None
        self._decided = asyncio.Event()

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks whose replies are missing."""
        return [rank for rank in range(self._num_ranks) if rank not in self.replies]

    def note(self, rank: int, reply: Reply) -> None:
        """Note the reply of a rank."""
        self.replies[rank] = reply
        if not self.silent_ranks or self._decides(reply):
            self._decided.set()

    def fail(self, error: AiokvError) -> None:
        """Note that some replies will not arrive."""
        if not self._decided.is_set():
            self._error = error
            self._decided.set()

    async def decided(self, seconds: float | None) -> list[Reply]:
        """Return the replies, by rank, when all have arrived, or one that decides.

        Raises:
            TimeoutError: replies were missing after ``seconds``.
            RankLost: a rank was lost.
            ClosedError: the group closes.

        Cancellation: the ranks execute the request all the same.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._decided.wait()
        if self._error is not None:
            raise self._error
        if not self._decided.is_set():
            raise TimeoutError
        return [self.replies[rank] for rank in sorted(self.replies)]


class RankRequests:
    """Requests that wait for replies. A request ends with its last reply, or at ``fail``.

    Args:
        membership: the ranks.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._numbers = count(1)
        self._requests: dict[int, RankRequest] = {}

    def send(
        self,
        message: Callable[[int], FromManager],
        decides: Callable[[Reply], bool] = lambda reply: False,
    ) -> RankRequest:
        """Send a request to all ranks, and return it.

        Args:
            message: returns the message with the number that its replies have.
            decides: see :class:`RankRequest`.

        Raises:
            RankLost: a rank is lost, or the group is closed. Nothing was sent.
        """
        away = next((state for state in self._membership.ranks if not state.ready), None)
        if away is not None:
            raise RankLost(f"rank {away.rank}: {away.absence_reason}", rank=away.rank)
        number = next(self._numbers)
        self._membership.send(message(number))
        request = RankRequest(len(self._membership.ranks), decides)
        self._requests[number] = request
        return request

    def on_reply(self, state: RankState, reply: Reply) -> None:
        """Record the reply of a rank. Ignore replies to ended requests."""
        request = self._requests.get(reply.number)
        if request is not None:
            request.note(state.rank, reply)
            if not request.silent_ranks:
                del self._requests[reply.number]

    def fail(self, new_error: Callable[[], AiokvError]) -> None:
        """End all requests with an error of their own: a rank is lost, or the group closes."""
        for request in self._requests.values():
            request.fail(new_error())
        self._requests.clear()
