"""ControlRequests: ``sleep`` and ``wake_up`` on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import RankLost, UsageError

if TYPE_CHECKING:
    from aiokv.base.types import Tier
    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import Sleep, WakeUp
    from aiokv.ranks.rank_state import RankTimeouts
    from aiokv.ranks.requests import RankRequest, RankRequests


class ControlRequests:
    """One control request at a time, sent to all ranks.

    Args:
        membership: the ranks.
        requests: sends the requests.
        timeouts: time limits.
    """

    def __init__(
        self, membership: Membership, requests: RankRequests, timeouts: RankTimeouts
    ) -> None:
        self._membership = membership
        self._requests = requests
        self._timeouts = timeouts
        self._newest: RankRequest | None = None

    @property
    def silent_ranks(self) -> list[int]:
        """Ranks that have not replied to the newest request."""
        return [] if self._newest is None else self._newest.silent_ranks

    async def send(self, verb: type[Sleep | WakeUp], tiers: frozenset[Tier], **fields: int) -> None:
        """Send a request to all ranks, and wait for their replies.

        Args:
            verb: the request.
            tiers: tiers of the request.
            fields: further fields of the request.

        Raises:
            UsageError: a rank refuses; names each rank that refuses, and its reason.
            RankLost: a rank is lost, or did not reply within ``RankTimeouts.start``.
            ClosedError: the group closes.

        Cancellation: the ranks execute the request all the same.
        """
        request = self._newest = self._requests.send(
            lambda number: verb(number=number, tiers=sorted(tiers), **fields)
        )
        try:
            replies = await request.decided(self._timeouts.start)
        except TimeoutError:
            raise self._lose(request.silent_ranks) from None
        if refusals := [f"rank {rank}: {r.error}" for rank, r in enumerate(replies) if r.error]:
            raise UsageError("; ".join(refusals))

    def _lose(self, ranks: list[int]) -> RankLost:
        for rank in ranks:
            self._membership.lose(
                self._membership.ranks[rank], f"it did not reply for {self._timeouts.start} s"
            )
        state = self._membership.ranks[ranks[0]]
        return RankLost(f"rank {state.rank}: {state.absence_reason}", rank=state.rank)
