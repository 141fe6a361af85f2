"""GroupLookups: lookups in the stores of all ranks, each of which has its shard of a block."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from aiokv.base.groups import ATTENTION
from aiokv.ranks.messages import Lookup
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.store_set import NOTHING, Found, StoreAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.ranks.membership import Membership
    from aiokv.ranks.messages import LookupReply
    from aiokv.ranks.rank_state import RankState, RankTimeouts


class _GroupLookup:
    """One lookup; its future is done when all ranks have answered, or one is lost."""

    def __init__(self, num_ranks: int, num_seconds: int) -> None:
        self.owing = set(range(num_ranks))
        self.blocks = num_seconds
        self.seconds = np.zeros(num_seconds)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def note(self, rank: int, seconds: list[float]) -> None:
        """Note the answer of a rank: the shortest run and the longest times count."""
        self.owing.discard(rank)
        self.blocks = min(self.blocks, len(seconds))
        both = [self.seconds[: self.blocks], np.asarray(seconds[: self.blocks], np.float64)]
        self.seconds = np.maximum(*both)
        if not self.owing or not self.blocks:
            self.end()

    def end(self) -> None:
        """Resume the waiting coroutine. Idempotent."""
        if not self.ended.done():
            self.ended.set_result(None)

    def answer(self) -> StoreAnswer:
        """Return the blocks that all ranks have; none while the answer of a rank is missing."""
        return NOTHING if self.owing or not self.blocks else StoreAnswer(self.blocks, self.seconds)


class GroupLookups:
    """Lookups of one group in flight; see :class:`aiokv.worker.base.StoreLookups`.

    Args:
        membership: the ranks.
        timeouts: time limits.
        has_answers: returns True while all ranks answer lookups.
    """

    def __init__(
        self, membership: Membership, timeouts: RankTimeouts, has_answers: Callable[[], bool]
    ) -> None:
        self._membership = membership
        self._timeouts = timeouts
        self._has_answers = has_answers
        self._numbers = count(1)
        self._lookups: dict[int, _GroupLookup] = {}

    async def lookup(self, digests: bytes) -> StoreAnswer:
        """Ask all ranks for the leading blocks that all of them have; see ``StoreLookups.lookup``.

        Returns the times of the slowest rank; nothing when a rank is lost, or has not answered
        within ``RankTimeouts.lookup``.

        Cancellation: the answers are ignored.
        """
        return await self._ask(digests, ATTENTION, len(digests) // KEY_BYTES)

    async def find(self, group: str, digests: bytes) -> Found:
        """Ask all ranks for the objects that all of them have; see ``StoreLookups.find``.

        Returns nothing in the cases of ``lookup``.

        Cancellation: the answers are ignored.
        """
        num_objects = len(digests) // KEY_BYTES
        if not num_objects:
            return Found.nothing(0)
        answer = await self._ask(digests, group, 1 + num_objects)
        if answer.blocks <= num_objects:
            return Found.nothing(num_objects)
        return Found(answer.seconds[1:], float(answer.seconds[0]))

    async def _ask(self, digests: bytes, group: str, num_seconds: int) -> StoreAnswer:
        """Ask all ranks; the answer is empty when one does not answer in time."""
        if not self._has_answers():
            return NOTHING
        number = next(self._numbers)
        lookup = self._lookups[number] = _GroupLookup(len(self._membership.ranks), num_seconds)
        try:
            message = Lookup(number=number, digests=digests, group=group)
            self._membership.send(message)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.lookup):
                    await lookup.ended
        finally:
            del self._lookups[number]
        return lookup.answer()

    def on_reply(self, state: RankState, reply: LookupReply) -> None:
        """Note the answer of a rank; one that comes late is ignored."""
        if reply.number in self._lookups:
            self._lookups[reply.number].note(state.rank, reply.seconds)

    def end_all(self) -> None:
        """End all lookups without an answer: a rank is lost, or the group closes."""
        for lookup in self._lookups.values():
            lookup.end()
