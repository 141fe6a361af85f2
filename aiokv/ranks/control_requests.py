"""ControlRequests: ``sleep`` and ``wake_up`` on all ranks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import RankLost, UsageError

if TYPE_CHECKING:
    from aiokv.base.types import Tier
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import ControlReply, Sleep, WakeUp
    from aiokv.ranks.rank_state import RankState, RankTimeouts


class ControlRequests:
    """One request at a time, sent to all ranks; each rank replies.

    Args:
        timeouts: time limits.
    """

    def __init__(self, timeouts: RankTimeouts) -> None:
        self._timeouts = timeouts
        self._number = 0  # of the newest
        self._replies: dict[int, str] = {}  # to the newest, by rank

    def silent_ranks(self, membership: Membership) -> list[int]:
        """Return the ranks that have not replied to the newest request."""
        return [s.rank for s in membership.ranks if self._number and s.rank not in self._replies]

    def on_reply(self, state: RankState, reply: ControlReply) -> None:
        """Note the reply of a rank; one to an earlier request is ignored."""
        if reply.number == self._number:
            self._replies[state.rank] = reply.error

    async def send(
        self,
        membership: Membership,
        verb: type[Sleep | WakeUp],
        tiers: frozenset[Tier],
        **fields: int,
    ) -> None:
        """Send a request to all ranks, and wait for their replies.

        Args:
            membership: the ranks.
            verb: the request.
            tiers: tiers of the request.
            fields: further fields of the request.

        Raises:
            UsageError: a rank refuses; names each rank that refuses, and its reason.
            RankLost: a rank is lost, or did not reply within ``RankTimeouts.start``.

        Cancellation: the ranks execute the request all the same.
        """
        self._replies = {}
        self._number += 1
        membership.send(verb(number=self._number, tiers=sorted(tiers), **fields))
        try:
            async with asyncio.timeout(self._timeouts.start):
                while len(self._replies) < len(membership.ranks):
                    away = next((state for state in membership.ranks if not state.ready), None)
                    if away is not None:
                        raise RankLost(f"rank {away.rank}: {away.absence_reason}", rank=away.rank)
                    await membership.next_change()
        except TimeoutError:
            raise self._lose_silent(membership) from None
        replies = sorted(self._replies.items())
        if refusals := [f"rank {rank}: {error}" for rank, error in replies if error]:
            raise UsageError("; ".join(refusals))

    def _lose_silent(self, membership: Membership) -> RankLost:
        for rank in self.silent_ranks(membership):
            membership.lose(
                membership.ranks[rank], f"it did not reply for {self._timeouts.start} s"
            )
        silent = next(state for state in membership.ranks if not state.ready)
        return RankLost(f"rank {silent.rank}: {silent.absence_reason}", rank=silent.rank)
