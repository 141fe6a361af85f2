"""CachedFirst: ranks waiting requests by the share of their prompts that is cached."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from aiokv.base.cached_rank import cached_rank

if TYPE_CHECKING:
    from aiokv._native import Core
    from aiokv.scheduler.admission import WaitingRequest
    from aiokv.scheduler.line import PriorityLine

MATCHES_PER_ATTEMPT: Final = 8  # prompts that an attempt to grant matches again: below 1 ms


class CachedFirst:
    """Ranks of the requests that wait for capacity, with ``admission="cached_first"``.

    Their order is that of ``cached_rank``; of equal ranks, the request that came first goes first.

    Evictions and commits change the shares while requests wait. Each attempt to grant matches the
    first prompt again until the first request keeps its place, and ``MATCHES_PER_ATTEMPT`` other
    prompts in rotation. So its cost does not depend on the number of requests in line. In a longer
    line, a share that has grown is noticed within (requests / ``MATCHES_PER_ATTEMPT``) grants.

    Each match marks the hit as used: what these requests will hit is evicted last.
    """

    def __init__(self, core: Core, block_tokens: int) -> None:
        self._core = core
        self._block_tokens = block_tokens
        self._rotation: OrderedDict[int, WaitingRequest] = OrderedDict()  # by lease id

    def rank_of(self, lease_id: int, priority: int) -> int:
        """Return the rank of a request that is not overdue; matches its prompt again."""
        return cached_rank(priority, *self._core.rematch(lease_id))

    def enter(self, request: WaitingRequest) -> int:
        """Note a request that enters the line, and return its rank."""
        self._rotation[request.lease_id] = request
        return self._present_rank(request)

    def left(self, request: WaitingRequest) -> None:
        """Note that a request has left the line. Idempotent."""
        self._rotation.pop(request.lease_id, None)

    def move(self, line: PriorityLine[WaitingRequest], request: WaitingRequest) -> bool:
        """Move a request to the place of its present rank; return True if it has moved back."""
        before, rank = request.rank, self._present_rank(request)
        if rank != before:
            arrival = request.ticket[1]
            request.leave()
            request.enter_at(line, (rank, arrival))
        return rank > before

    def first(self, line: PriorityLine[WaitingRequest]) -> WaitingRequest | None:
        """Return the first request after moving it to its place.

        After ``MATCHES_PER_ATTEMPT`` requests that have moved back, return the next one as it is.
        """
        for _ in range(MATCHES_PER_ATTEMPT):
            request = line.first()
            if request is None or not self.move(line, request):
                break
        return line.first()

    def first_after_rotation(
        self, line: PriorityLine[WaitingRequest], room_blocks: int
    ) -> WaitingRequest | None:
        """Return the first request after moving it and the next ones of the rotation.

        Args:
            line: the line.
            room_blocks: device blocks that are free or can be evicted. If the first request
                certainly needs more, the other requests are not moved.
        """
        first = self.first(line)
        if first is None or first.num_blocks - first.cached_blocks > room_blocks:
            return first
        for _ in range(min(MATCHES_PER_ATTEMPT, len(self._rotation))):
            lease_id = next(iter(self._rotation))
            self._rotation.move_to_end(lease_id)
            self.move(line, self._rotation[lease_id])
        return self.first(line)

    def _present_rank(self, request: WaitingRequest) -> int:
        cached, tokens = self._core.rematch(request.lease_id)
        request.cached_blocks = cached // self._block_tokens
        return cached_rank(request.priority, cached, tokens, is_overdue=request.is_overdue)
