"""Holdings: which requests of one scheduler hold blocks, and which blocks leave with ended ones."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiokv.connectors.fastdeploy.holding import Holding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiokv import Item
    from aiokv.connectors.fastdeploy.requests import Request
    from aiokv.connectors.fastdeploy.settings import Sizes
    from aiokv.sync import Calls


class Holdings:
    """Blocks of the requests of one scheduler. The caller holds the lock of :class:`RequestBlocks`.

    ::

        add ──► by_id ──► parked       matched without room; until the end of the next batch
                  ├─────► onloading    until the request is scheduled again
                  └─────► leaving      ended; until the onload has arrived and nothing is sent

    Args:
        sizes: settings of the scheduler.

    Attributes:
        sizes: as given, or those after a resize.
        by_id: requests with blocks.
        prefilling: requests to look at after each batch.
        onloading: requests that wait for their onloads in the scheduler's queue, by id.
        matched: request of the last match, until blocks are taken.
        parked: request that was matched and found no room.
        spare_blocks: blocks of ``by_id`` and ``parked`` that the scheduler has not taken yet.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.by_id: dict[str, Holding] = {}
        self.prefilling: list[Holding] = []
        self.onloading: dict[str, Holding] = {}
        self.matched: Holding | None = None
        self.parked: Holding | None = None
        self.spare_blocks = 0
        self._leaving: list[Holding] = []  # ended requests whose blocks are in use
        self._parked_in = 0  # number of batches at that time

    def __iter__(self) -> Iterator[Holding]:
        """Iterate over everything that has blocks."""
        yield from self.by_id.values()
        yield from self._leaving
        yield from self.onloading.values()
        if self.parked is not None:
            yield self.parked

    @property
    def leaving(self) -> Sequence[Holding]:
        """Ended requests whose blocks are still in use."""
        return self._leaving

    @property
    def leaving_blocks(self) -> int:
        """Number of blocks of ended requests, and of those that wait for their onloads."""
        return sum(len(left.table) for left in (*self._leaving, *self.onloading.values()))

    def add(self, request: Request, num_tokens: int, items: Sequence[Item] | None) -> Holding:
        """Add a request without blocks."""
        holding = Holding(request, num_tokens, items)
        self.restore(holding)
        return holding

    def restore(self, holding: Holding) -> None:
        """Take a request back whose blocks were kept."""
        self.by_id[holding.request.request_id] = holding
        self.spare_blocks += holding.spare
        self.prefilling.append(holding)

    def remove(self, request_id: str) -> Holding | None:
        """Remove a request from ``by_id``, and return it."""
        holding = self.by_id.pop(request_id, None)
        if holding is not None:
            self.spare_blocks -= holding.spare
            if holding is self.matched:
                self.matched = None
        return holding

    def give(self, holding: Holding, num_blocks: int) -> list[int]:
        """Give spare blocks to the scheduler, and return their ids."""
        first = holding.given
        holding.given += num_blocks
        self.spare_blocks -= num_blocks
        return holding.table[first : holding.given]

    def read_table(self, holding: Holding, given: int) -> None:
        """Read the blocks of a lease, of which the scheduler has the first ``given``."""
        before = holding.spare
        holding.next_outputs, holding.given = 0, given
        if holding.lease is not None:
            holding.table = holding.lease.block_table.tolist()
        self.spare_blocks += holding.spare - before

    def pop_prefilling(self) -> list[Holding]:
        """Return the requests in prefill, and forget the others of ``prefilling``."""
        self.prefilling = [
            holding
            for holding in self.prefilling
            if holding.is_prefilling and self.by_id.get(holding.request.request_id) is holding
        ]
        return self.prefilling

    # --- blocks that are kept ---------------------------------------------------------------------

    def park(self, calls: Calls, holding: Holding, batch: int) -> None:
        """Keep the blocks of a request that the scheduler has no room for, until they are needed.

        Args:
            calls: releases the blocks of the request that was parked before.
            holding: the request.
            batch: number of batches until now.
        """
        self.record_parked(calls)
        self.remove(holding.request.request_id)
        self.parked, self._parked_in = holding, batch
        self.spare_blocks += holding.spare

    def unpark(self, parked: Holding) -> Holding:
        """Give the parked blocks back to their request, which was matched again; return it."""
        self.parked, self.matched = None, parked
        self.spare_blocks -= parked.spare
        self.restore(parked)
        return parked

    def is_left(self, batch: int) -> bool:
        """Return True if a request is parked that the last whole batch has not matched again."""
        return self.parked is not None and self._parked_in + 1 < batch

    def record_parked(self, calls: Calls) -> None:
        """Give back the blocks of the parked request."""
        parked, self.parked = self.parked, None
        if parked is not None:
            self.spare_blocks -= parked.spare
            parked.record_release(calls)  # no batch has used its blocks: the step may stay open

    def leave(self, holding: Holding) -> None:
        """Keep the blocks of an ended request while they are in use."""
        self._leaving.append(holding)

    def stop_waiting(self, request_id: str) -> None:
        """Let a request leave that waits for its onload."""
        if (holding := self.onloading.pop(request_id, None)) is not None:
            self.leave(holding)

    def record_departures(self, calls: Calls) -> bool:
        """Release ended requests whose blocks are in use no more; return True if there are any."""
        now = time.monotonic()
        arrived = [
            holding
            for holding in self._leaving
            if holding.has_arrived and holding.kept_until <= now
        ]
        for holding in arrived:
            holding.record_release(calls)
            self._leaving.remove(holding)
        return bool(arrived)

    # --- all --------------------------------------------------------------------------------------

    def record_release_of_all(self, calls: Calls) -> None:
        """Release all blocks, and forget the requests."""
        for holding in self:
            holding.record_release(calls)
        self.by_id.clear()
        self._forget_kept()

    def record_loss(self, calls: Calls) -> None:
        """Release all blocks, whose contents are gone. The requests of ``by_id`` have failed."""
        for holding in self:
            holding.record_release(calls)
            holding.has_failed = holding.has_failed or bool(holding.table)
            holding.lease, holding.table, holding.given = None, [], 0
        self._forget_kept()

    def _forget_kept(self) -> None:
        self.spare_blocks, self.parked = 0, None
        self._leaving.clear()
        self.onloading.clear()
