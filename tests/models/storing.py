"""Model of the ways between the host tier and the stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.models.cached_blocks import Block
from tests.models.prefix_cache import PrefixCacheModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.models.cached_blocks import Key, Lease, Transfer

MAX_SAVES = 4  # in flight
SAVE_BLOCKS = 256
MISSING_BLOCKS = 2048  # of one answer, for blocks of up to 16 tokens
DONE, REFUSED = 0, 3  # results of a block of a save


@dataclass(eq=False)
class Fetch:
    """Blocks in flight from a store; their host ids belong to the fetch."""

    keys: list[Key]
    host: list[int]
    above: Block | None
    epoch: int
    replaced: set[Key] = field(default_factory=set)  # keys for which another fetch is joined


class StoringModel(PrefixCacheModel):
    """Model that predicts what a fetch brings, what it leaves, and which blocks a save copies."""

    def __init__(
        self,
        *,
        store_policy: Literal["write_through", "nth_use", "write_back"],
        store_uses: int,
        queue_blocks: int,
        **sizes: Any,
    ) -> None:
        super().__init__(**sizes)
        self.store_policy = store_policy
        self.store_uses = store_uses
        self.queue_blocks = queue_blocks
        self.has_host = bool(sizes["host_blocks"])
        self.fetches: dict[int, Fetch] = {}
        self.saves: dict[int, list[Block]] = {}
        self.queue: list[Block] = []
        self.dropped = 0
        self.hit_blocks = 0

    # --- rules of the other parts that depend on fetches and saves ----------------------------

    def blocked(self, block: Block) -> bool:
        return super().blocked(block) or (not block.resident and block.holds > 0)

    def reclaimable_copies(self) -> list[Block]:
        return [block for block in super().reclaimable_copies() if not block.holds]

    def _free_if_unowned(self, block: Block) -> None:
        if not block.saving:
            super()._free_if_unowned(block)

    @property
    def at_rest(self) -> bool:
        return super().at_rest and not self.fetches and not self.saves

    def reset(self) -> None:
        self.queue = []
        super().reset()

    def evict_host(self) -> bool:
        block = self.victim("host")
        if block is not None and self.has_host:
            self.dropped += self._awaits_save(block)
        return super().evict_host()

    def forget_host(self) -> None:
        for block in self.blocks.values():
            if block.host_valid:
                self.dropped += self._awaits_save(block)
                block.save_queued = False
        super().forget_host()

    def _awaits_save(self, block: Block) -> bool:
        kept = block.stored or block.save_refused
        return not kept if self.store_policy == "write_back" else block.save_queued

    def _hold(self, block: Block | None) -> None:
        if block is not None:
            block.holds += 1

    def _unhold(self, block: Block | None) -> None:
        if block is not None:
            block.holds -= 1
            if block.attached:
                self._unblock(block)

    # --- fetches ------------------------------------------------------------------------------

    def missing(self, lease: Lease) -> tuple[int, list[Key]]:
        """Return the first block of a prompt that is not cached, and the next keys from there."""
        if lease.granted or not self.has_host:
            return 0, []
        first = len(self.cached(lease))
        end = min(self._most_blocks(lease), first + MISSING_BLOCKS)
        return first, [self.key(lease, i + 1) for i in range(first, end)]

    def fetch_of(self, key: Key) -> int:
        """Return the fetch that brings the block; 0 for none."""
        return next(
            (i for i, f in self.fetches.items() if key in f.keys and key not in f.replaced), 0
        )

    def begin_fetch(self, lease: Lease, most: int, replaced: int = 0) -> Fetch | None:
        """Make room for a fetch of the next missing blocks, of which no fetch but ``replaced``
        brings the first.

        Host copies of blocks on the device are not reclaimed here: the implementation chooses.
        """
        keys = self.missing(lease)[1][:most]
        others = (i for i, key in enumerate(keys) if self.fetch_of(key) not in (0, replaced))
        keys = keys[: next(others, len(keys))]
        if not keys:
            return None
        path = self.cached(lease)
        self._touch(self.walk(lease))
        above = path[-1] if path else None
        self._hold(above)
        while len(self.host_free) < len(keys) and self.evict_host():
            pass
        return Fetch(keys, [], above, self.epoch)

    def adopt_fetch(
        self, transfer_id: int, fetch: Fetch, reclaimed: Sequence[Block], host: list[int]
    ) -> None:
        """Take the choice of the implementation: reclaimed copies, and the ids of the fetch."""
        short = max(0, len(fetch.keys) - len(self.host_free))
        candidates = self.reclaimable_copies()
        assert set(reclaimed) <= set(candidates)
        assert len(reclaimed) == min(short, len(candidates))
        self._reclaim(reclaimed)
        assert len(host) == len(set(host)) == min(len(fetch.keys), len(self.host_free))
        if not host:
            assert not transfer_id
            self._unhold(fetch.above)
            return
        assert self.host_free.issuperset(host)
        self.host_free -= set(host)
        fetch.host, fetch.keys = host, fetch.keys[: len(host)]
        for other in self.fetches.values():
            other.replaced.update(key for key in fetch.keys if key in other.keys)
        self.fetches[transfer_id] = fetch

    def end_fetch(self, transfer_id: int, good: int) -> None:
        fetch = self.fetches.pop(transfer_id)
        above = fetch.above
        if fetch.epoch != self.epoch or (above is not None and not above.attached):
            good = 0
        parent = above
        new = []
        for key, host in zip(fetch.keys[:good], fetch.host, strict=False):
            block = self.blocks.get(key)
            if block is None:
                block = self.blocks[key] = Block(key, parent, host=host, host_valid=True)
                block.fetched = True
                new.append(block)
            elif block.host is None:
                block.host, block.host_valid = host, True
            else:
                self._free_host(host)
            block.stored = True
            parent = block
        for block in reversed(new):
            self._refresh(block)
        for host in fetch.host[good:]:
            self._free_host(host)
        self._unhold(above)

    # --- saves --------------------------------------------------------------------------------

    def _is_due(self, block: Block) -> bool:
        """Return True if the block should be saved as soon as it is on the host."""
        wanted = self.store_policy == "write_through" or (
            self.store_policy == "nth_use" and block.uses >= self.store_uses
        )
        return wanted and not block.stored and not block.saving

    def _fit_early_copies(
        self, found: list[Block], reclaimed: Sequence[Block], evicted: int
    ) -> list[Block]:
        """Make room for the blocks that stores wait for, which come first."""
        due = [block for block in found if self._is_due(block)]
        short = max(0, len(due) - len(self.host_free))
        copies = [b for b in self.reclaimable_copies() if not self._awaits_save(b)]
        assert set(reclaimed) <= set(copies)
        assert len(reclaimed) == min(short, len(copies))
        self._reclaim(reclaimed)
        before = len(self.host_free)
        while len(self.host_free) < len(due) and self.evict_host():
            pass
        assert evicted == len(self.host_free) - before
        return due + [block for block in found if block not in due]

    def _queue(self, block: Block) -> None:
        if not block.host_valid or not self._is_due(block) or block.save_queued:
            return
        if len(self.queue) >= self.queue_blocks:
            self.dropped += 1
            return
        block.save_queued = True
        self.queue.append(block)

    def _end_offload(self, transfer: Transfer, good: int) -> None:
        super()._end_offload(transfer, good)
        for block in transfer.blocks[:good]:
            if block.attached:
                self._queue(block)

    def adopt(self, lease: Lease, table: list[int], onloads: list[int]) -> None:
        missing = [block for block in lease.path if not block.resident]
        super().adopt(lease, table, onloads)
        if not self.has_host:
            return
        for block in missing:
            block.uses += 1
        for block in lease.path:
            block.save_refused = False
            self._queue(block)
            self.hit_blocks += block.fetched
            block.fetched = False

    def take_saves(self) -> list[Block]:
        """Return the blocks of the next save."""
        if len(self.saves) >= MAX_SAVES:
            return []
        if self.store_policy == "write_back":
            ahead = 0 if self.host_free or not self.has_host else 1
            candidates = self.in_line("host")[:ahead]
        else:
            candidates = [block for block in self.queue if block.save_queued]
            self.queue = []
            assert len(candidates) <= SAVE_BLOCKS
        found = []
        for block in candidates:
            block.save_queued = False
            known = block.stored or block.saving or block.save_refused
            if block.attached and block.host_valid and not known:
                found.append(block)
        return found

    def begin_save(self, transfer_id: int, blocks: list[Block]) -> None:
        for block in blocks:
            self._hold(block)
            block.saving = True
        self.saves[transfer_id] = blocks

    def end_save(self, transfer_id: int, results: Sequence[int]) -> None:
        for block, result in zip(self.saves.pop(transfer_id), results, strict=True):
            block.saving = False
            if result == DONE:
                block.stored = True
            else:
                block.save_refused = True
            self._unhold(block)
            if not block.attached:
                self._free_if_unowned(block)
