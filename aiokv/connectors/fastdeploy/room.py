"""Room: how many device blocks a scheduler can take for sure."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from aiokv import Hit
from aiokv.errors import AllocateTimeout, RequestTooLarge

if TYPE_CHECKING:
    from aiokv import Lease
    from aiokv.connectors.fastdeploy.handovers import Handovers
    from aiokv.connectors.fastdeploy.holdings import Holdings
    from aiokv.connectors.fastdeploy.steps import Steps
    from aiokv.sync import Answer, Calls, SyncEngine, SyncLease


class Room:
    """Room of one engine. The caller holds the lock of :class:`RequestBlocks`.

    Args:
        engine: the cache.
        steps: closes the step in which blocks were evicted.
        holdings: requests with blocks.
        handovers: prompts that arrive. An arrived block keeps the cached blocks before it, which
            could be evicted until then.

    Attributes:
        certain: number of blocks that can be taken if no block arrives; 0 if it is not known.
        promised: number of blocks that the scheduler was told it can take.
        reserved_blocks: number of blocks that are taken for it already.
    """

    def __init__(
        self,
        engine: SyncEngine,
        steps: Steps,
        holdings: Holdings,
        handovers: Handovers,
    ) -> None:
        self._engine = engine
        self._steps = steps
        self._holdings = holdings
        self._handovers = handovers
        self._begun_receives = 0  # those that had ended when `certain` was set; -1 while one moves
        self._reserved: SyncLease | None = None
        self.certain = 0
        self.promised = 0
        self.reserved_blocks = 0

    def forget(self) -> None:
        """Take back what was promised."""
        self.certain = self.promised = 0

    @property
    def known(self) -> int:
        """``certain``; 0 if blocks may have arrived since it was set."""
        return 0 if self._may_change else self.certain

    @property
    def _may_change(self) -> bool:
        return self._begun_receives != self._handovers.begun_receives

    def promise(self, num_blocks: int, missing: int) -> bool:
        """Promise blocks, for which room was found.

        Args:
            num_blocks: number of blocks.
            missing: those among them that are to be taken from the engine.

        Returns:
            False if blocks that have arrived meanwhile have taken the room.
        """
        if missing > 0 and self._may_change and not self._reserve(missing):
            return False
        self.promised = num_blocks
        return True

    @property
    def is_reserved(self) -> bool:
        """True if ``record_unreserve`` has something to give back."""
        return self._reserved is not None

    def _reserve(self, num_blocks: int) -> bool:
        """Take blocks until they are used, or given back; return False without room."""
        calls = self._engine.calls()
        self.record_unreserve(calls)
        lease = calls.match([0], read=False, write=False, owner="FastDeploy")
        num_tokens = num_blocks * self._holdings.sizes.block_tokens
        taken = calls.try_allocate(lease, num_tokens, reserve_blocks=0)
        calls.run(raise_errors=False)
        self.certain = 0
        has_taken = taken.error is None and taken.value
        self._reserved, self.reserved_blocks = lease, num_blocks if has_taken else 0
        return has_taken

    def record_unreserve(self, calls: Calls) -> None:
        """Give reserved blocks back; later calls of the same crossing find them free."""
        if self._reserved is not None:
            calls.release(self._reserved)
            self._reserved, self.reserved_blocks = None, 0

    def has(self, num_blocks: int) -> bool:
        """Ask the engine; return True if so many blocks can be taken now."""
        if num_blocks <= 0:
            return True
        if num_blocks > self._holdings.sizes.device_blocks:
            return False
        calls = self._engine.calls()
        self.record_unreserve(calls)
        room = self.record(calls, num_blocks)
        calls.run()
        self.certain = room.value
        return self.certain >= num_blocks

    def record(self, calls: Calls, num_blocks: int) -> Answer[int]:
        """Ask how many blocks can be taken: at least ``num_blocks``, or those of a step."""
        arriving, begun = self._handovers.are_arriving, self._handovers.begun_receives
        self._begun_receives = -1 if arriving else begun
        if self._holdings.sizes.write_policy == "write_back":
            return calls.add(self._free, num_blocks)
        limit = max(self._holdings.sizes.room_blocks(len(self._holdings.by_id)), num_blocks)
        return calls.allocatable_blocks(reserve_blocks=0, limit=limit)

    def make(self, num_blocks: int, wait_seconds: float) -> bool:
        """Evict blocks, which may have to be saved before; return True if there is room.

        Args:
            num_blocks: number of blocks.
            wait_seconds: how long to wait for saves; 0 to only begin them.
        """
        if wait_seconds:
            return self._wait_for_saves(num_blocks, wait_seconds)
        calls = self._engine.calls()
        has_room = calls.add(self._evict, num_blocks)
        calls.run()
        self.certain = num_blocks if has_room.value else 0
        return has_room.value

    def _wait_for_saves(self, num_blocks: int, wait_seconds: float) -> bool:
        lease = self._engine.match([0], read=False, write=False, owner="FastDeploy")
        future = lease.allocate(
            num_blocks * self._holdings.sizes.block_tokens, timeout=wait_seconds, reserve_blocks=0
        )
        has_room = True
        try:
            future.result()
        except (AllocateTimeout, RequestTooLarge):
            has_room = False
        calls = self._engine.calls()
        calls.release(lease)
        self._steps.record_close(calls)
        calls.run()
        return has_room and self.has(num_blocks)

    # --- on the engine's loop ---------------------------------------------------------------------

    def grant(self, lease: SyncLease, prefill_tokens: int, onload: bool) -> tuple[Hit, int]:
        """Take the cached prefix of a prompt, and with it the blocks of its next batch.

        The scheduler asks for these next, which needs no crossing then. Without room for them, and
        for a request that waits for its onload, only the prefix is taken. If the batch completes
        the prompt, the blocks of its first generated tokens are taken, too, but only if there is
        room for a further step.

        Returns:
            The granted prefix by tier, and the number of blocks that can be taken for sure.
        """
        sizes, cache, inner, hit = self._holdings.sizes, self._engine.cache, lease.inner, lease.hit
        size = sizes.block_tokens
        end = min(prefill_tokens, hit.total + sizes.batch_tokens)
        blocks = max(-(-end // size) - hit.total // size, 0)
        if end == prefill_tokens and -end % size <= sizes.decode_slots + 1:
            ahead = sizes.decode_blocks  # due when the first token has arrived
            room = cache.free_device_blocks + cache.evictable_device_blocks
            step = sizes.step_blocks(len(self._holdings.by_id))
            if room >= hit.total // size + blocks + ahead + step:
                blocks += ahead
        has_all = False
        if blocks and not hit.host_tokens:
            with suppress(RequestTooLarge):
                has_all = inner.try_allocate(hit.total + blocks * size, reserve_blocks=0)
        if not has_all:
            hit = _grant_hit(inner, onload)
        if sizes.write_policy == "write_back":
            return hit, cache.free_device_blocks
        limit = sizes.room_blocks(len(self._holdings.by_id))
        return hit, cache.allocatable_blocks(reserve_blocks=0, limit=limit)

    def _free(self, num_blocks: int) -> int:
        """Evict until ``num_blocks`` blocks hold nothing, and return how many do.

        Under ``"write_back"``, only these can be taken for sure: as soon as host memory has a free
        block, a block that could have been dropped has to be saved first.
        """
        cache = self._engine.cache
        if cache.free_device_blocks < num_blocks:
            self._evict(num_blocks)
        return cache.free_device_blocks

    def _evict(self, num_blocks: int) -> bool:
        """Evict until ``num_blocks`` blocks hold nothing.

        Returns:
            False if blocks must be saved before, which begins.
        """
        lease = self._engine.cache.match([0], read=False, write=False, owner="FastDeploy")
        has_room = False
        with suppress(RequestTooLarge):
            num_tokens = num_blocks * self._holdings.sizes.block_tokens
            has_room = lease.try_allocate(num_tokens, reserve_blocks=0)
        lease.release()
        self._steps.close()
        return has_room


def _grant_hit(lease: Lease, onload: bool) -> Hit:
    """Take the cached prefix, or as much of it as there is room for."""
    found = lease.hit
    for num_tokens in (found.total if onload else 0, found.device_tokens):
        if num_tokens and lease.try_allocate(num_tokens):
            cached = lease.cached_tokens  # a part of the hit, if transfers may write too few blocks
            if cached < num_tokens:
                lease.truncate(cached)
            device = min(found.device_tokens, cached)
            return Hit(device, cached - device)
    return Hit(0, 0)
