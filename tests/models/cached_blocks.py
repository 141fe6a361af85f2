"""Model of the cached blocks: a dict of prefixes that every query scans, and the eviction order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["none", "write_through", "nth_use", "write_back"]
Item = tuple[bytes, int, int]  # content hash, offset, length
# context, all tokens up to the end of the block, the items that begin before that
Key = tuple[str, tuple[int, ...], tuple[Item, ...]]


@dataclass(eq=False)
class Block:
    """One block and its copies. ``None`` ids: no copy; not valid: a transfer writes it."""

    key: Key
    parent: Block | None
    device: int | None = None
    device_valid: bool = False
    host: int | None = None
    host_valid: bool = False
    refs: int = 0
    pins: int = 0
    uses: int = 0
    attached: bool = True
    wants_backup: bool = False
    given_up: bool = False  # could not be saved, and was not used since
    rank: int = 0  # of last use; the lowest is evicted first
    passed_over: bool = False  # was blocked when it was first in eviction order
    loading_by: int = 0
    # Of stores:
    holds: int = 0  # saves of the block, and fetches that continue it
    saving: bool = False
    stored: bool = False
    save_queued: bool = False
    save_refused: bool = False
    fetched: bool = False  # and not hit since then

    @property
    def resident(self) -> bool:
        return self.device is not None

    @property
    def unsaved(self) -> bool:
        """Return True if the block has no host copy and none is being written."""
        return self.host is None and not self.given_up

    @property
    def ancestors(self) -> list[Block]:
        return [] if self.parent is None else [self.parent, *self.parent.ancestors]


@dataclass(eq=False)
class Lease:
    context: str
    tokens: list[int]
    items: tuple[Item, ...] = ()
    reads: bool = True
    writes: bool = True
    path: list[Block] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    grown_blocks: int = 0  # the most that an extension gave it
    computed: int = 0
    cached_blocks: int = 0
    onloads: set[int] = field(default_factory=set)
    granted: bool = False
    failed: bool = False
    promises: bool = False  # others may wait for the blocks that it will publish
    epoch: int = 0
    last_step: int = 0  # newest step that computed with the blocks
    named: bool = False  # by a batch, since it was granted
    batches: int = 0  # in flight
    released: bool = False  # while batches are in flight


@dataclass(eq=False)
class Transfer:
    direction: str
    blocks: list[Block]
    after_step: int = 0
    leases: list[Lease] = field(default_factory=list)


class CachedBlocks:
    """Blocks, ids and recency.

    Eviction: least recently used first, deepest first among equals. A block that was
    first but blocked goes to the front again as soon as it can be evicted.
    """

    def __init__(
        self, *, block_tokens: int, device_blocks: int, host_blocks: int, policy: Policy
    ) -> None:
        self.block_tokens = block_tokens
        self.policy: Policy = policy if host_blocks else "none"
        self.capacity = device_blocks
        self.device_free = set(range(device_blocks))
        self.host_free = set(range(host_blocks))
        self.blocks: dict[Key, Block] = {}
        self.step_of: dict[int, int] = {}  # device id -> newest step that used it
        self.finished_step = 0
        self.closed_step = 0
        self.deferred_unsaved: list[Block] = []  # passed over; some were saved or used since then
        self._newest = 0
        self._oldest = 0

    # --- places of blocks ---------------------------------------------------------------------

    def children(self, block: Block) -> list[Block]:
        return [b for b in self.blocks.values() if b.parent is block]

    def idle(self, tier: str) -> list[Block]:
        """Return the blocks that no lease holds, by their fastest tier, oldest first."""
        found = [b for b in self.blocks.values() if b.refs == 0]
        if tier == "device":
            found = [b for b in found if b.device_valid]
        else:
            found = [b for b in found if not b.resident]
        return sorted(found, key=lambda b: b.rank)

    def in_line(self, tier: str) -> list[Block]:
        """Return the blocks that will be evicted, in order."""
        return [block for block in self.idle(tier) if not block.passed_over]

    def blocked(self, block: Block) -> bool:
        """Return the blocks that are idle but not evictable (I6)."""
        children = self.children(block)
        if block.resident:
            children = [c for c in children if c.resident]
        return block.pins > 0 or bool(children)

    def after_step(self, device_id: int) -> int:
        step = self.step_of.get(device_id, 0)
        return step if step > self.finished_step else 0

    def close_step(self, step: int) -> None:
        self.closed_step = max(self.closed_step, step)

    def finish_step(self, step: int) -> None:
        self.finished_step = max(self.finished_step, step)
        self.close_step(step)

    def writable(self) -> int:
        """Return the free ids that a transfer may write, without those of an open step."""
        return sum(self.after_step(i) <= self.closed_step for i in self.device_free)

    def _free_device(self, device_id: int) -> None:
        assert device_id not in self.device_free, f"device id {device_id} freed twice"
        self.device_free.add(device_id)

    def _free_host(self, host_id: int) -> None:
        assert host_id not in self.host_free, f"host id {host_id} freed twice"
        self.host_free.add(host_id)

    def _take_device(self, ids: list[int]) -> None:
        assert len(set(ids)) == len(ids), "an id was given out twice in one table"
        assert self.device_free.issuperset(ids), "an id was given out that is not free"
        cool = {i for i in self.device_free if not self.after_step(i)}
        if any(i not in cool for i in ids):
            assert cool.issubset(ids), "an id of an unfinished step, though others were free"
        steps = [self.after_step(i) for i in ids]
        assert steps == sorted(steps), "an id of a newer step before one of an older"
        self.device_free -= set(ids)

    # --- recency ------------------------------------------------------------------------------

    def _refresh(self, block: Block) -> None:
        self._newest += 1
        block.rank = self._newest
        block.passed_over = False

    def _touch(self, path: list[Block]) -> None:
        for block in reversed(path):
            if block.refs == 0 and (block.device_valid or not block.resident):
                self._refresh(block)

    def _unblock(self, block: Block | None) -> None:
        if block is not None and block.passed_over and not self.blocked(block):
            self._oldest -= 1
            block.rank = self._oldest
            block.passed_over = False

    def _ref(self, block: Block) -> None:
        block.refs += 1
        block.passed_over = False

    def _unref(self, block: Block) -> None:
        block.refs -= 1
        if block.refs > 0:
            return
        if not block.attached:
            self._free_if_unowned(block)
        elif block.device_valid or not block.resident:
            self._refresh(block)

    # --- eviction -----------------------------------------------------------------------------

    def victim(self, tier: str) -> Block | None:
        """Return the next victim; None if there is none or its save has not ended."""
        for block in self.in_line(tier):
            if not self.blocked(block):
                return block
            if self.policy == "write_back" and tier == "device" and block.pins:
                return None
            block.passed_over = True
            if tier == "device" and block.unsaved and block not in self.deferred_unsaved:
                self.deferred_unsaved.append(block)
        return None

    def evict_host(self) -> bool:
        block = self.victim("host")
        if block is not None:
            self.drop(block)
        return block is not None

    def leave_device(self, block: Block) -> None:
        """Drop the device copy of the block; drop the block when it has no other copy."""
        if not block.host_valid:
            self.drop(block)
            return
        assert block.device is not None
        self._free_device(block.device)
        block.device, block.device_valid = None, False
        self._refresh(block)
        self._unblock(block.parent)

    def drop(self, block: Block) -> None:
        """Remove the block and its descendants from the index; the last owner frees the ids."""
        for gone in [b for b in self.blocks.values() if b is block or block in b.ancestors]:
            del self.blocks[gone.key]
            self._detach(gone)
        self._unblock(block.parent)

    def _detach(self, block: Block) -> None:
        block.attached = block.wants_backup = False
        self._free_if_unowned(block)

    def _free_if_unowned(self, block: Block) -> None:
        if block.pins:
            return
        if block.host is not None:  # the remaining leases use its device copy
            self._free_host(block.host)
            block.host, block.host_valid = None, False
        if block.device is not None and not block.refs:
            self._free_device(block.device)
