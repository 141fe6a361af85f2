"""Fetches: bring blocks from the stores to the host tier while computing them would take longer.

    read.missing ─► worker.lookup ─► fetch or compute? ─► fetches.begin ─► its end ─► missing ...

Blocks that the model computes sooner are not fetched: see :mod:`aiokv.engine.comparison`. A store
that was too slow is measured again with small fetches for which no lease waits.

With recurrent state or sliding windows, a hit may end only where a tier has a snapshot, or the
window: see :class:`~aiokv.engine.boundaries.BoundarySearch`. The blocks before such a boundary are
fetched in parts, too; the copies of other groups follow as the last part.

A fetch belongs to no lease: blocks that arrive after a lease has stopped waiting are cached, too.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiokv.base.plan import Priority
from aiokv.engine.boundaries import BoundarySearch
from aiokv.engine.comparison import PARTS, Comparison, FetchPart, rest_of
from aiokv.engine.fetch_line import AT_A_TIME, FetchLine
from aiokv.errors import AiokvError
from aiokv.stores.base import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.misses import StoreMiss
    from aiokv.engine.fetch_line import Place
    from aiokv.engine.observers import End
    from aiokv.engine.parts import Parts
    from aiokv.stores.store_set import Found

PROBE_PAUSE: Final = 100  # pause in multiples of the last fetch: probes take 1 % of the time
LEAST_PROBE_PAUSE_SECONDS: Final = 1.0
# Limit of the pause, because a store is rarely slow for long.
MOST_PROBE_PAUSE_SECONDS: Final = 10.0


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
        """End the wait, and begin no more fetches. Fetches in flight continue."""
        self.is_stopped = True
        self.end()
        if self.task is not None:
            self.task.cancel()


class _Newest:
    """Newest fetch of one request, and what it leaves in the stores.

    Attributes:
        stored_blocks: blocks of the prompt up to the last one that a store has; 0: unknown.
        left: why they were not all fetched.
        transfer_id: the fetch; 0 before the first.
        began: begin of the wait for it.
        blocks: number of blocks that it is to bring.
        late_id: an earlier fetch that was late, after which the stores were asked again; 0 for
            none.
    """

    def __init__(self) -> None:
        self.stored_blocks = 0
        self.left: StoreMiss = "failed"
        self.transfer_id = 0
        self.began = 0.0
        self.blocks = 0
        self.late_id = 0

    def note(self, transfer_id: int, blocks: int, began: float) -> None:
        """Note that the request waits for a fetch."""
        self.transfer_id, self.blocks, self.began = transfer_id, blocks, began

    def can_be_replaced(self, seconds: NDArray[np.float64], now: float) -> bool:
        """Return True if the stores are expected to bring its blocks in half of the time lost.

        A store that is late itself is expected to take longer: see ``Cost.parts``.

        Args:
            seconds: expected time to fetch the first i + 1 of them.
            now: time of the loop.
        """
        times = seconds[: self.blocks]
        return len(times) > 0 and float(times[-1]) < (now - self.began) / 2


class Fetches:
    """Lets the leases of one engine wait for blocks of its stores.

    Attributes:
        has_stores: False when the engine has no stores; then no method may be called.
    """

    def __init__(self, parts: Parts) -> None:
        self.has_stores = parts.worker.facts.capabilities.stores
        self._block_tokens = parts.config.block_tokens
        # Without groups, a hit may end at each cached block.
        self._groups = parts.scheduler.read.groups
        self._read = parts.scheduler.read
        self._scheduler = parts.scheduler
        self._dispatcher = parts.dispatcher
        self._worker = parts.worker
        self._transfers = parts.transfers
        self._lifetime = parts.lifetime
        self._speed = parts.speed
        self._observers = parts.observers
        self._requests = parts.requests
        self._line = FetchLine(lambda: self._lifetime.loop.time())
        self._tasks: set[asyncio.Task[None]] = set()  # the loop keeps weak references only
        self._num_compared = 0  # fetches in flight that a comparison has started
        self._probe_at = 0.0  # earliest time of the next probe, on the clock of the loop

    def is_incomplete(self, lease_id: int) -> bool:
        """Return True if the tiers lack something that a longer hit of the lease needs, and that a
        store may have."""
        if self._groups:
            boundaries = self._read.boundaries(lease_id)
            if boundaries.cached > boundaries.hit:  # a store may have copies of other groups
                return bool(boundaries.digests)
            digest = boundaries.digests[:KEY_BYTES]
        else:
            _, digest = self._read.missing(lease_id, 1)
        if not digest or self._worker.stores.may_have(digest):
            return bool(digest)
        if self._worker.stores.is_lacking(digest):
            self._note_lacking(lease_id)
        return False

    def _note_lacking(self, lease_id: int) -> None:
        """Report that no store has the first missing block of a lease, if it was reported."""
        if self._read.reports_stores:
            self._dispatcher.apply(self._scheduler.fetches.note_lacking(lease_id))

    def begin(self, lease_id: int, timeout: float | None, queued_tokens: int) -> StoreWait:
        """Fetch the missing blocks of a lease that has its place in line, then let it be served.

        Args:
            lease_id: a lease that waits for a store in line.
            timeout: seconds after which the lease is served without them; None for no limit.
            queued_tokens: tokens of other prompts that the model computes before this one.

        Returns:
            The wait. The caller must call ``stop``.
        """
        owner = self._read.owner(lease_id)
        wait = StoreWait(lambda wait, outcome: self._note_end(lease_id, owner, wait, outcome))
        if self._observers.active:
            self._observers.begin_wait(lease_id, owner, "store", wait.began)
        wait.task = self._spawn(self._bring_and_serve(lease_id, timeout, queued_tokens, wait))
        return wait

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._lifetime.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _note_end(self, lease_id: int, owner: str, wait: StoreWait, outcome: End) -> None:
        if self._observers.active:
            self._observers.end_wait(lease_id, owner, "store", wait.began, outcome, wait.ended)

    async def _bring_and_serve(
        self, lease_id: int, timeout: float | None, queued_tokens: int, wait: StoreWait
    ) -> None:
        newest = _Newest()
        try:
            comparison = self.comparison(queued_tokens)
            await self.bring(lease_id, timeout, Priority.DEMAND, comparison, newest)
        finally:
            wait.end()
            if self._observers.active and not wait.is_stopped:
                owner = self._read.owner(lease_id)
                self._observers.begin_wait(lease_id, owner, "capacity", time.monotonic())
            if self._lifetime.is_running:
                left = newest.stored_blocks, newest.left
                self._dispatcher.apply(self._scheduler.end_store_wait(lease_id, left))

    def comparison(self, queued_tokens: int) -> Comparison | None:
        """Return the comparison for a request; None while the speed of the model is unknown.

        Args:
            queued_tokens: tokens of other prompts that the model computes before this one.
        """
        speed = self._speed.tokens_per_second
        if not speed:
            return None
        return Comparison(speed, self._block_tokens, self._lifetime.loop.time, queued_tokens)

    async def bring(
        self,
        lease_id: int,
        timeout: float | None,
        priority: Priority,
        comparison: Comparison | None = None,
        newest: _Newest | None = None,
    ) -> None:
        """Fetch the missing blocks of a matched lease to the host tier; return when they arrived.

        Returns earlier when ``timeout`` seconds have passed, when no more blocks can be fetched,
        and when the lease or the engine has ended.

        Args:
            lease_id: the lease.
            timeout: seconds; None for no limit.
            priority: priority of the fetches.
            comparison: decides which blocks are fetched; None to fetch all blocks that a store
                has, at any speed.
            newest: is told of each fetch, and of the blocks that stay in the stores; None for no
                record of them.

        Cancellation: begins no more fetches; those in flight go on.
        """
        newest = newest or _Newest()
        try:
            async with asyncio.timeout(timeout):
                if self._groups:
                    await self._bring_to_boundary(lease_id, priority, comparison, newest)
                else:
                    await self._bring(lease_id, priority, comparison, newest)
        except TimeoutError:
            newest.left = "late"
        except AiokvError:  # the lease was released, or the engine fails and tells its waiters
            return

    async def _bring(
        self, lease_id: int, priority: Priority, comparison: Comparison | None, newest: _Newest
    ) -> None:
        """Bring the missing blocks in parts: ``read.missing`` returns a bounded number of them.

        The stores are asked again after a late part, once: another store may be quicker.
        """
        is_again = False
        first, digests = self._read.missing(lease_id)
        while digests:
            answer = await self._worker.stores.lookup(digests)
            end = newest.stored_blocks = first + answer.blocks
            is_whole = answer.blocks == len(digests) // KEY_BYTES
            if comparison is None:
                reached, digests = await self._bring_blocks(lease_id, end, priority, newest)
            else:
                seconds = answer.seconds[: answer.blocks]
                if is_again and not newest.can_be_replaced(seconds, self._now()):
                    return
                await self._bring_while_sooner(
                    lease_id, first, seconds, priority, comparison, newest
                )
                reached, digests = self._read.missing(lease_id)
                if is_again := reached < end and self._is_late(newest):
                    first, newest.late_id = reached, newest.transfer_id
                    continue
            if reached == end and answer.is_lacking:
                self._note_lacking(lease_id)
            if reached < end or (reached == end and not is_whole):
                return
            first = reached  # the next part; other leases may have brought blocks of it

    def _now(self) -> float:
        return self._lifetime.loop.time()

    def _is_late(self, newest: _Newest) -> bool:
        """Return True if the newest fetch is in flight, and no earlier fetch was late."""
        return not newest.late_id and self._transfers.is_in_flight(newest.transfer_id)

    async def _bring_while_sooner(
        self,
        lease_id: int,
        first: int,
        seconds: NDArray[np.float64],
        priority: Priority,
        comparison: Comparison,
        newest: _Newest,
    ) -> None:
        """Fetch blocks from block ``first`` on in parts, while this is sooner than computing.

        Args:
            lease_id: the lease.
            first: the first missing block.
            seconds: expected time to fetch the first i + 1 blocks.
            priority: priority of the fetches.
            comparison: decides how many blocks are fetched.
            newest: receives the fetches.
        """
        loop = self._lifetime.loop
        part = comparison.next_part(seconds, self._line.seconds)
        if part.blocks:
            place = self._line.enter(part.work)
            try:
                if not await self._turn(place, part, comparison):
                    newest.left = "late"
                    return
                while (part := comparison.next_part(seconds)).blocks:
                    self._line.note(place, part.work)
                    began = loop.time()
                    reached = await self._bring_part(
                        lease_id, first, part, priority, comparison, newest
                    )
                    moved = reached - first
                    if moved < part.blocks:
                        return
                    elapsed = (loop.time() - began) / self._line.num_fetching
                    seconds = rest_of(seconds, min(moved, len(seconds)), elapsed)
                    first = reached
            finally:
                self._line.leave(place)
        if len(seconds):
            newest.left = "declined"
        if len(seconds) and not newest.late_id:
            self._requests.note_declined_fetch()
            self._probe(lease_id, comparison)

    async def _turn(self, place: Place, part: FetchPart, comparison: Comparison) -> bool:
        """Wait for the turn of a request; return False if the wait was too long."""
        try:
            async with asyncio.timeout(comparison.patience(part.blocks, self._line.seconds)):
                await place.turn
        except TimeoutError:
            self._requests.note_late_fetch()
            return False
        return True

    async def _bring_part(
        self,
        lease_id: int,
        first: int,
        part: FetchPart,
        priority: Priority,
        comparison: Comparison,
        newest: _Newest,
    ) -> int:
        """Fetch a part, and stop waiting if it is late; return the first block still missing."""
        seconds = part.seconds * AT_A_TIME
        try:
            async with asyncio.timeout(comparison.patience(part.blocks, seconds)):
                reached, _ = await self._bring_blocks(
                    lease_id, first + part.blocks, priority, newest, is_compared=True
                )
        except TimeoutError:
            self._requests.note_late_fetch()
            newest.left = "late"
            reached, _ = self._read.missing(lease_id)
        return reached

    def _probe(self, lease_id: int, comparison: Comparison, boundary: int = 0) -> None:
        """Begin a small fetch that measures the stores again, without waiting for it.

        Args:
            lease_id: the lease.
            comparison: knows a suitable number of blocks.
            boundary: blocks of a hit whose copies are fetched if no block is missing; 0 for none.
        """
        is_measured = self._num_compared or not self._line.is_empty
        if is_measured or self._lifetime.loop.time() < self._probe_at:
            return
        blocks = comparison.probe_blocks
        transfer_id = self._dispatcher.apply(
            self._scheduler.fetches.begin(lease_id, blocks, Priority.BACKUP)
        )
        for group in self._groups if boundary else ():
            transfer_id = transfer_id or self._dispatcher.apply(
                self._scheduler.fetches.begin(lease_id, boundary, Priority.BACKUP, group=group.name)
            )
        if transfer_id:
            self._note_compared(transfer_id)

    def _note_compared(self, transfer_id: int) -> None:
        """Delay the next probe, because a fetch has begun that also measures the stores."""
        self._num_compared += 1
        self._spawn(self._delay_probe(transfer_id))

    async def _delay_probe(self, transfer_id: int) -> None:
        loop = self._lifetime.loop
        began = loop.time()
        try:
            with suppress(AiokvError):
                await self._transfers.settled(transfer_id)
        finally:
            self._num_compared -= 1
            pause = max(PROBE_PAUSE * (loop.time() - began), LEAST_PROBE_PAUSE_SECONDS)
            self._probe_at = loop.time() + min(pause, MOST_PROBE_PAUSE_SECONDS)

    async def _bring_blocks(
        self,
        lease_id: int,
        end: int,
        priority: Priority,
        newest: _Newest,
        *,
        is_compared: bool = False,
    ) -> tuple[int, bytes]:
        """Bring the missing blocks before block ``end``, as far as possible.

        Args:
            lease_id: the lease.
            end: number of blocks of its prompt.
            priority: priority of the fetches.
            newest: receives the fetches; its late fetch is replaced.
            is_compared: True if a comparison has begun the fetch.

        Returns:
            As ``read.missing``, at the end.
        """
        reached, digests = self._read.missing(lease_id)
        while digests and reached < end:
            before = reached
            transfer_id = self._dispatcher.apply(
                self._scheduler.fetches.begin(lease_id, end - reached, priority, newest.late_id)
            )
            if not transfer_id:
                newest.left = "declined"  # host memory has no room
                break
            newest.note(transfer_id, end - reached, self._now())
            if self._observers.active:
                self._observers.caused(lease_id, transfer_id)
            if is_compared:
                self._note_compared(transfer_id)
            await self._transfers.settled(transfer_id)
            reached, digests = self._read.missing(lease_id)
            if reached <= before:
                break
        return reached, digests

    async def _bring_to_boundary(
        self,
        lease_id: int,
        priority: Priority,
        comparison: Comparison | None,
        newest: _Newest,
    ) -> None:
        """Bring the blocks before a boundary, and the copies of other groups that a hit needs.

        The blocks come first: a copy is attached to its block. When something does not arrive, the
        next best boundary is tried.
        """
        search = await self._find_boundaries(lease_id)
        newest.stored_blocks = search.best(None)
        if comparison is not None:
            await self._bring_to_boundary_while_sooner(
                lease_id, priority, search, comparison, newest
            )
            return
        while end := search.best(None):
            reached, _ = await self._bring_blocks(lease_id, end, priority, newest)
            search.note_blocks(reached, is_end=reached < end)
            if reached >= end and await self._bring_copies(lease_id, end, priority, search):
                return

    async def _bring_to_boundary_while_sooner(
        self,
        lease_id: int,
        priority: Priority,
        search: BoundarySearch,
        comparison: Comparison,
        newest: _Newest,
    ) -> None:
        """Bring a boundary's blocks in parts, then its copies, while this is sooner than computing.

        The comparison before each part includes the copies. When a part is late, the boundary may
        become one among the blocks that have arrived.
        """
        is_short = False
        if end := search.best(comparison, self._line.seconds):
            place = self._line.enter(search.seconds(end))
            try:
                if not await self._turn(place, _share_of(search, end, comparison), comparison):
                    newest.left = "late"
                    return
                while end := search.best(comparison):
                    self._line.note(place, search.seconds(end))
                    first, _ = self._read.missing(lease_id)
                    if first < end:
                        is_short = not await self._bring_part_of_boundary(
                            lease_id, first, end, priority, search, comparison, newest
                        )
                    elif await self._bring_copies_in_time(
                        lease_id, end, priority, search, comparison, newest
                    ):
                        return
            finally:
                self._line.leave(place)
        boundary = search.best(None)
        if boundary and not is_short:
            newest.left = "declined"
            self._requests.note_declined_fetch()
            self._probe(lease_id, comparison, boundary)

    async def _bring_part_of_boundary(
        self,
        lease_id: int,
        first: int,
        end: int,
        priority: Priority,
        search: BoundarySearch,
        comparison: Comparison,
        newest: _Newest,
    ) -> bool:
        """Fetch the next part of the blocks of a boundary; return True if all of it has arrived."""
        loop = self._lifetime.loop
        part = comparison.first_part(search.block_seconds(first, end))
        began = loop.time()
        reached = await self._bring_part(lease_id, first, part, priority, comparison, newest)
        elapsed = (loop.time() - began) / self._line.num_fetching
        is_whole = reached >= first + part.blocks
        search.note_part(first, reached, part.seconds, elapsed)
        search.note_blocks(reached, is_end=not is_whole)
        return is_whole

    async def _bring_copies_in_time(
        self,
        lease_id: int,
        end: int,
        priority: Priority,
        search: BoundarySearch,
        comparison: Comparison,
        newest: _Newest,
    ) -> bool:
        """Do as ``_bring_copies``, but return True if late copies have ended the wait."""
        share = _share_of(search, end, comparison)
        seconds = search.copy_seconds(end) * AT_A_TIME
        try:
            async with asyncio.timeout(comparison.patience(share.blocks, seconds)):
                return await self._bring_copies(lease_id, end, priority, search, is_compared=True)
        except TimeoutError:
            newest.left = "late"
            self._requests.note_late_fetch()
            return True

    async def _bring_copies(
        self,
        lease_id: int,
        end: int,
        priority: Priority,
        search: BoundarySearch,
        *,
        is_compared: bool = False,
    ) -> bool:
        """Fetch the copies that a hit of ``end`` cached blocks lacks; note those that do not
        arrive, and return False then."""
        begun = []
        for group in self._groups:
            fetching = self._scheduler.fetches.begin(lease_id, end, priority, group=group.name)
            if transfer_id := self._dispatcher.apply(fetching):
                begun.append(transfer_id)
                if is_compared:
                    self._note_compared(transfer_id)
        for transfer_id in begun:
            await self._transfers.settled(transfer_id)
        if self._read.boundaries(lease_id).hit >= end:
            return True
        self._note_cached(search, lease_id)
        search.note_failure(end)
        return False

    async def _find_boundaries(self, lease_id: int) -> BoundarySearch:
        """Ask the stores for the blocks of a prompt behind its hit, and for copies of those that
        can be reached."""
        search = BoundarySearch(self._read.boundaries(lease_id), self._groups, self._block_tokens)
        while search.digests:
            answer = await self._worker.stores.lookup(search.missing_digests)
            found = await self._find_copies(search.reachable(answer))
            if search.note(answer, found):
                search.go_on(self._read.boundaries(lease_id, search.asked))
        self._note_cached(search, lease_id)
        return search

    async def _find_copies(self, digests: bytes) -> list[Found]:
        """Ask the stores for the copies of the blocks of all groups at the same time."""
        return await asyncio.gather(
            *(self._worker.stores.find(group.name, digests) for group in self._groups)
        )

    def _note_cached(self, search: BoundarySearch, lease_id: int) -> None:
        for group in self._groups:
            end = search.hit + search.asked
            search.note_cached(group.name, self._read.has_copies(lease_id, group, search.hit, end))


def _share_of(search: BoundarySearch, end: int, comparison: Comparison) -> FetchPart:
    """Return the part of a fetch to a boundary for which a wait must not take longer."""
    blocks = max(math.ceil((end - search.hit) / PARTS), comparison.probe_blocks)
    return FetchPart(blocks, 0.0, search.seconds(end))
