"""Fetches: bring blocks from the stores to the host tier, as far as computing them takes longer.

    read.missing ─► worker.lookup ─► fetch or compute? ─► fetches.begin ─► its end ─► missing ...

With recurrent state or sliding windows, a hit may end only where a tier has a snapshot, or the
window: see :class:`~aiokv.engine.borders.BorderSearch`.

A fetch belongs to no lease: blocks that arrive after a lease has stopped waiting are cached, too.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from aiokv.engine.borders import BorderSearch
from aiokv.errors import AiokvError
from aiokv.plan import Priority
from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from aiokv.engine.observers import End
    from aiokv.engine.parts import Parts
    from aiokv.stores.store_set import Found


class StoreWait:
    """Wait of a lease that stands in line while its blocks are fetched from the stores.

    Args:
        on_end: called once with the outcome, when the wait has ended.

    Attributes:
        began: ``time.monotonic()`` at the begin of the wait.
        ended: the same at its end; None before.
        task: brings the blocks.
        is_stopped: the lease no longer stands in line.
    """

    def __init__(self, on_end: Callable[[StoreWait, End], None]) -> None:
        self._on_end = on_end
        self.began = time.monotonic()
        self.ended: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.is_stopped = False

    @property
    def seconds(self) -> float:
        """Time until the wait has ended; else until now."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def end(self, outcome: End = "done") -> None:
        """Note that the lease no longer waits for stores. Idempotent."""
        if self.ended is None:
            self.ended = time.monotonic()
            self._on_end(self, outcome)

    def stop(self) -> None:
        """End the wait, and begin no more fetches; those in flight go on."""
        self.is_stopped = True
        self.end()
        if self.task is not None:
            self.task.cancel()


class Fetches:
    """Waits for stores of one engine.

    Attributes:
        has_stores: False when the engine has no stores; then no method may be called.
    """

    def __init__(self, parts: Parts) -> None:
        self.has_stores = parts.worker.capabilities.stores
        self._block_tokens = parts.config.block_tokens
        self._pools = parts.scheduler.read.pools  # without any, each cached block can be hit
        self._read = parts.scheduler.read
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._transfers = parts.transfers
        self._lifetime = parts.lifetime
        self._speed = parts.speed
        self._observers = parts.observers
        self._tasks: set[asyncio.Task[None]] = set()  # the loop keeps weak references only

    def is_incomplete(self, lease_id: int) -> bool:
        """Return True if the tiers lack something that a longer hit of the lease needs."""
        if self._pools:
            return bool(self._read.borders(lease_id).digests)
        return bool(self._read.missing(lease_id)[1])

    def begin(self, lease_id: int, timeout: float | None) -> StoreWait:
        """Fetch the missing blocks of a lease that has its place in line, then let it be served.

        Args:
            lease_id: a lease that waits for a store in line.
            timeout: seconds after which the lease is served without them; None for no limit.

        Returns:
            The wait. The caller must call ``stop``.
        """
        owner = self._read.owner(lease_id)
        wait = StoreWait(lambda wait, outcome: self._note_end(lease_id, owner, wait, outcome))
        if self._observers.active:
            self._observers.begin_wait(lease_id, owner, "store", wait.began)
        wait.task = self._lifetime.loop.create_task(self._bring_and_serve(lease_id, timeout, wait))
        self._tasks.add(wait.task)
        wait.task.add_done_callback(self._tasks.discard)
        return wait

    def _note_end(self, lease_id: int, owner: str, wait: StoreWait, outcome: End) -> None:
        if self._observers.active:
            self._observers.end_wait(lease_id, owner, "store", wait.began, outcome, wait.ended)

    async def _bring_and_serve(self, lease_id: int, timeout: float | None, wait: StoreWait) -> None:
        try:
            await self.bring(lease_id, timeout, Priority.DEMAND)
        finally:
            wait.end()
            if self._observers.active and not wait.is_stopped:
                owner = self._read.owner(lease_id)
                self._observers.begin_wait(lease_id, owner, "capacity", time.monotonic())
            if self._lifetime.is_running:
                self._dispatcher.apply(self._scheduler.end_store_wait(lease_id))

    async def bring(
        self, lease_id: int, timeout: float | None, priority: Priority, *, at_any_cost: bool = False
    ) -> None:
        """Fetch the missing blocks of a matched lease to the host tier; return when they are there.

        Returns earlier when ``timeout`` seconds have passed, when no more blocks can be fetched,
        and when the lease or the engine has ended.

        Args:
            lease_id: the lease.
            timeout: seconds; None for no limit.
            priority: of the fetches.
            at_any_cost: True to fetch what the model could compute sooner, too.

        Cancellation: begins no more fetches; those in flight go on.
        """
        try:
            async with asyncio.timeout(timeout):
                if self._pools:
                    await self._bring_to_border(lease_id, priority, at_any_cost=at_any_cost)
                else:
                    await self._bring(lease_id, priority, at_any_cost=at_any_cost)
        except TimeoutError:
            return
        except AiokvError:  # the lease was released, or the engine fails: its waiters are told
            return

    async def _bring(self, lease_id: int, priority: Priority, *, at_any_cost: bool) -> None:
        """Bring the missing blocks in parts: ``read.missing`` returns a bounded number of them."""
        first, digests = self._read.missing(lease_id)
        while digests:
            answer = await self._worker.lookup(digests)
            blocks = answer.blocks if at_any_cost else self._worthwhile(answer.seconds)
            end, is_whole = first + blocks, blocks == len(digests) // KEY_BYTES
            reached, digests = await self._bring_blocks(lease_id, end, priority)
            if reached < end or (reached == end and not is_whole):
                return
            first = reached  # the next part; other leases may have brought blocks of it

    async def _bring_blocks(self, lease_id: int, end: int, priority: Priority) -> tuple[int, bytes]:
        """Bring the missing blocks before block ``end``, as far as possible.

        Returns:
            As ``read.missing``, at the end.
        """
        reached, digests = self._read.missing(lease_id)
        while digests and reached < end:
            before = reached
            fetching = self._scheduler.fetches.begin(lease_id, end - reached, priority)
            transfer_id = self._dispatcher.apply(fetching)
            if not transfer_id:
                break
            if self._observers.active:
                self._observers.caused(lease_id, transfer_id)
            await self._transfers.settled(transfer_id)
            reached, digests = self._read.missing(lease_id)
            if reached <= before:
                break
        return reached, digests

    async def _bring_to_border(
        self, lease_id: int, priority: Priority, *, at_any_cost: bool
    ) -> None:
        """Bring the blocks before a border, and the copies that a hit needs in other pools.

        The blocks come first: a copy is attached to its block. When something does not arrive, the
        next best border is tried.
        """
        search = await self._find_borders(lease_id)
        speed = 0.0 if at_any_cost else self._speed.tokens_per_second or 0.0
        while end := search.best(speed):
            reached, _ = await self._bring_blocks(lease_id, end, priority)
            search.note_blocks(reached, is_end=reached < end)
            if reached < end:
                continue
            begun = [
                self._dispatcher.apply(
                    self._scheduler.fetches.begin_auxiliary(lease_id, end, pool.name, priority)
                )
                for pool in self._pools
            ]
            for transfer_id in filter(None, begun):
                await self._transfers.settled(transfer_id)
            if self._read.borders(lease_id).hit >= end:
                return
            self._note_cached(search, lease_id)
            search.note_failure(end)

    async def _find_borders(self, lease_id: int) -> BorderSearch:
        """Ask the stores for the blocks of a prompt behind its hit, and for their copies."""
        search = BorderSearch(self._read.borders(lease_id), self._pools, self._block_tokens)
        while search.digests:
            answer, found = await asyncio.gather(
                self._worker.lookup(search.missing_digests), self._find_copies(search.digests)
            )
            if search.note(answer, found):
                search.go_on(self._read.borders(lease_id, search.asked))
        self._note_cached(search, lease_id)
        return search

    async def _find_copies(self, digests: bytes) -> list[Found]:
        """Ask the stores for the copies of blocks in all pools at the same time."""
        return await asyncio.gather(
            *(self._worker.find(pool.name, digests) for pool in self._pools)
        )

    def _note_cached(self, search: BorderSearch, lease_id: int) -> None:
        for pool in self._pools:
            end = search.hit + search.asked
            search.note_cached(
                pool.name, self._read.has_copies(lease_id, pool.name, search.hit, end)
            )

    def _worthwhile(self, seconds: NDArray[np.float64]) -> int:
        """Return how many blocks to fetch, so that the prompt is ready soonest.

        Args:
            seconds: ``[N]`` expected time to fetch the first i + 1 blocks.
        """
        speed = self._speed.tokens_per_second
        if not speed or not len(seconds):
            return len(seconds)
        computing = np.arange(1, len(seconds) + 1) * (self._block_tokens / speed)
        gains = computing - seconds
        best = int(gains.argmax())
        return best + 1 if gains[best] > 0 else 0
