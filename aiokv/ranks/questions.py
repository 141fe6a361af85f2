"""Questions: sleep and wake_up on all ranks; each does it, or says what it has against it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.errors import RankLost, UsageError
from aiokv.ranks.channel import frame_of
from aiokv.ranks.messages import encode

if TYPE_CHECKING:
    from aiokv.ranks.messages import Answer, Sleep, WakeUp
    from aiokv.ranks.roster import Roster
    from aiokv.ranks.seats import RankTimeouts, Seat
    from aiokv.types import Tier


class Questions:
    """Asked one at a time; who is gone meanwhile, or silent for too long, is named."""

    def __init__(self, timeouts: RankTimeouts) -> None:
        self._timeouts = timeouts
        self._number = 0  # of the newest
        self._answers: dict[int, str] = {}  # to the newest, by rank

    def silent_ranks(self, roster: Roster) -> list[int]:
        """Those that have not answered the newest question."""
        return [s.rank for s in roster.seats if self._number and s.rank not in self._answers]

    def on_answer(self, seat: Seat, answer: Answer) -> None:
        """Those to an earlier question say nothing."""
        if answer.number == self._number:
            self._answers[seat.rank] = answer.error

    async def ask(self, roster: Roster, verb: type[Sleep | WakeUp], tiers: frozenset[Tier]) -> None:
        """Tell all ranks, and wait for their answers.

        Raises:
            UsageError: what ranks have against it, with their numbers.
            RankLost: one is gone, or did not answer in the time of a start.

        Cancellation: the ranks do it all the same.
        """
        self._answers = {}
        self._number += 1
        roster.send(frame_of(encode(verb(number=self._number, tiers=sorted(tiers)))))
        try:
            async with asyncio.timeout(self._timeouts.start):
                while len(self._answers) < len(roster.seats):
                    away = next((seat for seat in roster.seats if not seat.ready), None)
                    if away is not None:
                        raise RankLost(f"rank {away.rank}: {away.why_away}", rank=away.rank)
                    await roster.next_news()
        except TimeoutError:
            raise self._lose_silent(roster) from None
        answers = sorted(self._answers.items())
        if refusals := [f"rank {rank}: {error}" for rank, error in answers if error]:
            raise UsageError("; ".join(refusals))

    def _lose_silent(self, roster: Roster) -> RankLost:
        for rank in self.silent_ranks(roster):
            roster.lose(roster.seats[rank], f"it did not answer for {self._timeouts.start} s")
        silent = next(seat for seat in roster.seats if not seat.ready)
        return RankLost(f"rank {silent.rank}: {silent.why_away}", rank=silent.rank)
