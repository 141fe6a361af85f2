"""GroupLookups: lookups in the stores of all ranks, each of which has its shard of a block."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from aiokv._native import derive_keys, may_have_any
from aiokv.base.groups import ATTENTION
from aiokv.errors import ClosedError, RankLost, StoreError
from aiokv.ranks.messages import Lookup, Purge
from aiokv.stores.base import KEY_BYTES
from aiokv.stores.store_set import NOTHING, Found, StoreAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.ranks.messages import Reply
    from aiokv.ranks.rank_state import RankTimeouts
    from aiokv.ranks.requests import RankRequests
    from aiokv.stores.base import StoreFilters


class GroupLookups:
    """Lookups of one group; see :class:`aiokv.worker.base.StoreLookups`.

    Args:
        requests: sends the lookups.
        timeouts: time limits.
        has_answers: returns True while all ranks answer lookups.
        filters: returns what one of the ranks has sent last; each rank must have a block.
    """

    def __init__(
        self,
        requests: RankRequests,
        timeouts: RankTimeouts,
        has_answers: Callable[[], bool],
        filters: Callable[[], StoreFilters | None],
    ) -> None:
        self._requests = requests
        self._timeouts = timeouts
        self._has_answers = has_answers
        self._filters = filters
        self._mapped: _Mapped | None = None

    def may_have(self, digest: bytes) -> bool:
        """Return False if no store of the first rank has a block, as the filters of these stores
        tell. They are those of the last heartbeat; what they have is current."""
        if (filters := self._filters()) is None:
            self._mapped = None
            return True
        if self._mapped is None or self._mapped.filters != filters:
            self._mapped = _Mapped(filters)
        return self._mapped.may_have(digest)

    def is_lacking(self, digest: bytes) -> bool:
        """Return True if the filters, in which ``may_have`` has found no block, are those of all
        stores: no store is only saved to."""
        filters = self._filters()
        return filters is not None and filters.covers_all

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

    async def purge(self, label: bytes) -> int:
        """Purge the stores of all ranks; see ``StoreLookups.purge``.

        Raises:
            StoreError: a rank is lost, or one of its stores was not purged; names each such rank.

        Cancellation: the ranks execute the request all the same.
        """
        if not self._has_answers():
            raise StoreError("purge: a rank is lost, or the group is closing")
        try:
            request = self._requests.send(lambda number: Purge(number=number, label=label))
            replies = await request.decided(None)
        except (RankLost, ClosedError) as error:
            raise StoreError(f"purge: {error}") from error
        if failed := [f"rank {rank}: {r.error}" for rank, r in enumerate(replies) if r.error]:
            raise StoreError(f"purge: {'; '.join(failed)}")
        return sum(reply.removed for reply in replies)

    async def _ask(self, digests: bytes, group: str, num_seconds: int) -> StoreAnswer:
        """Ask all ranks; the answer is empty when one does not answer in time."""
        if not self._has_answers():
            return NOTHING
        with suppress(TimeoutError, RankLost, ClosedError):
            request = self._requests.send(
                lambda number: Lookup(number=number, digests=digests, group=group),
                decides=lambda reply: not reply.seconds,
            )
            return _reduced(await request.decided(self._timeouts.lookup), num_seconds)
        return NOTHING


class _Mapped:
    """Filters of stores, mapped in this process."""

    def __init__(self, filters: StoreFilters) -> None:
        self.filters = filters
        self._maps: list[NDArray[np.uint8]] | None = None
        with suppress(OSError):  # of a rank that has closed its store, or in another container
            self._maps = [one.map() for one in filters.filters]

    def may_have(self, digest: bytes) -> bool:
        if self._maps is None:
            return True
        key = derive_keys(self.filters.fingerprint, digest)
        return any(may_have_any(counters, key) for counters in self._maps)


def _reduced(replies: list[Reply], num_seconds: int) -> StoreAnswer:
    """Return the shortest run of the ranks, and the longest times."""
    blocks = min(num_seconds, *(len(reply.seconds) for reply in replies))
    if not blocks:
        return NOTHING
    return StoreAnswer(blocks, np.max([reply.seconds[:blocks] for reply in replies], axis=0))
