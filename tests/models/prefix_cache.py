"""The prefix cache, slow and obviously right: a dict of prefixes, scanned for every question.

It mirrors the design's rules, not the native code: no tree, no queues, no free lists. Ids are not
predicted (any free id will do) but adopted from the implementation, and checked to be free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Key = tuple[str, tuple[int, ...]]  # context, all tokens up to the end of the block


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
    attached: bool = True
    wants_backup: bool = False
    rank: int = 0  # of last use; the lowest goes first
    passed_over: bool = False  # was blocked when its turn to be evicted came
    loading_by: int = 0

    @property
    def resident(self) -> bool:
        return self.device is not None


@dataclass(eq=False)
class Lease:
    context: str
    tokens: list[int]
    path: list[Block] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_tokens: int = 0
    computed: int = 0
    cached_blocks: int = 0
    onloads: set[int] = field(default_factory=set)
    granted: bool = False
    failed: bool = False
    epoch: int = 0


@dataclass(eq=False)
class Transfer:
    direction: str
    blocks: list[Block]
    after_step: int = 0
    leases: list[Lease] = field(default_factory=list)


class PrefixCacheModel:
    """Predicts hits, grants, victims and the effects of transfers.

    Eviction: least recently used first, deepest first among equals. One that was blocked when its
    turn came keeps it: it goes to the front as soon as it can be evicted.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        leave_tokens: int,
        reserve_blocks: int,
        write_through: bool,
    ) -> None:
        self.block_tokens = block_tokens
        self.leave_tokens = leave_tokens
        self.reserve_blocks = reserve_blocks
        self.write_through = write_through
        self.capacity = device_blocks
        self.device_free = set(range(device_blocks))
        self.host_free = set(range(host_blocks))
        self.blocks: dict[Key, Block] = {}
        self.leases: list[Lease] = []
        self.transfers: dict[int, Transfer] = {}
        self.backups: list[Block] = []
        self.step_of: dict[int, int] = {}  # device id -> newest step that used it
        self.finished_step = 0
        self.epoch = 1
        self._newest = 0
        self._oldest = 0

    # --- what is where ------------------------------------------------------------------------

    def children(self, block: Block) -> list[Block]:
        return [b for b in self.blocks.values() if b.parent is block]

    def idle(self, tier: str) -> list[Block]:
        """Blocks that no lease holds, by the fastest tier that has them, oldest first."""
        found = [b for b in self.blocks.values() if b.refs == 0]
        if tier == "device":
            found = [b for b in found if b.device_valid]
        else:
            found = [b for b in found if not b.resident]
        return sorted(found, key=lambda b: b.rank)

    def blocked(self, block: Block) -> bool:
        """I6: not evictable although idle."""
        children = self.children(block)
        if block.resident:
            children = [c for c in children if c.resident]
        return block.pins > 0 or bool(children)

    def after_step(self, device_id: int) -> int:
        step = self.step_of.get(device_id, 0)
        return step if step > self.finished_step else 0

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
        for block in self.idle(tier):
            if not self.blocked(block):
                return block
            block.passed_over = True
        return None

    def evict(self, tier: str) -> bool:
        block = self.victim(tier)
        if block is None:
            return False
        if tier == "host" or not block.host_valid:
            self.drop(block)
            return True
        assert block.device is not None
        self._free_device(block.device)
        block.device, block.device_valid = None, False
        self._refresh(block)
        self._unblock(block.parent)
        return True

    def _make_room(self, blocks: int) -> bool:
        while len(self.device_free) < blocks:
            if not self.evict("device"):
                return False
        return True

    def drop(self, block: Block) -> None:
        """The block and all below it can be found no more; ids go with their last owner."""
        context, prefix = block.key
        for key in [k for k in self.blocks if k[0] == context and k[1][: len(prefix)] == prefix]:
            self._detach(self.blocks.pop(key))
        self._unblock(block.parent)

    def _detach(self, block: Block) -> None:
        block.attached = block.wants_backup = False
        self._free_if_unowned(block)

    def _free_if_unowned(self, block: Block) -> None:
        if block.refs or block.pins:
            return
        if block.device is not None:
            self._free_device(block.device)
        if block.host is not None:
            self._free_host(block.host)

    # --- leases -------------------------------------------------------------------------------

    def walk(self, lease: Lease) -> list[Block]:
        limit = max(0, len(lease.tokens) - self.leave_tokens) // self.block_tokens
        path = []
        for index in range(1, limit + 1):
            key = (lease.context, tuple(lease.tokens[: index * self.block_tokens]))
            if key not in self.blocks:
                break
            path.append(self.blocks[key])
        return path

    def match(self, tokens: list[int], context: str) -> tuple[Lease, int, int]:
        lease = Lease(context, list(tokens))
        self.leases.append(lease)
        path = self.walk(lease)
        self._touch(path)
        valid = sum(b.device_valid for b in path)
        return lease, valid, len(path) - valid

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def allocate(self, lease: Lease, num_tokens: int) -> bool:
        """True: granted, and ``adopt`` comes next with the real table."""
        path = self.walk(lease)[: num_tokens // self.block_tokens]
        resident = sum(b.resident for b in path)
        assert [b.resident for b in path] == [True] * resident + [False] * (len(path) - resident)
        needed = self.blocks_for(num_tokens) - resident
        for block in path:
            self._ref(block)
        room = len(self.device_free) + len(self.idle("device"))
        if needed + self.reserve_blocks > room or not self._make_room(needed):
            for block in reversed(path):
                self._unref(block)
            return False
        lease.path, lease.num_tokens = path, num_tokens
        return True

    def adopt(self, lease: Lease, table: list[int], onloads: list[int]) -> None:
        """Take over the ids that the implementation chose."""
        shared = [b for b in lease.path if b.resident]
        assert len(table) == self.blocks_for(lease.num_tokens)
        assert table[: len(shared)] == [b.device for b in shared]
        self._take_device(table[len(shared) :])
        lease.table = table
        lease.granted, lease.failed, lease.epoch = True, False, self.epoch
        lease.cached_blocks = len(lease.path)
        lease.computed = lease.cached_blocks * self.block_tokens
        lease.onloads = {b.loading_by for b in shared if not b.device_valid}
        for transfer in lease.onloads:
            self.transfers[transfer].leases.append(lease)
        for block in shared:
            self._use_once_more(block)
        missing = lease.path[len(shared) :]
        assert set(onloads) >= lease.onloads
        new = set(onloads) - lease.onloads
        assert len(new) == bool(missing), "one onload for what is on the host only"
        for transfer_id in new:
            self._start_onload(transfer_id, lease, missing, table[len(shared) :])

    def _start_onload(
        self, transfer_id: int, lease: Lease, path: list[Block], ids: list[int]
    ) -> None:
        for block, device_id in zip(path, ids, strict=False):
            assert block.host_valid
            block.device, block.loading_by = device_id, transfer_id
            block.pins += 1
        after = max(self.after_step(i) for i in ids[: len(path)])
        self.transfers[transfer_id] = Transfer("onload", list(path), after, [lease])
        lease.onloads.add(transfer_id)

    def _use_once_more(self, block: Block) -> None:
        if self.write_through and block.host is None and not block.wants_backup:
            block.wants_backup = True
            self.backups.append(block)

    def is_private(self, lease: Lease, index: int) -> bool:
        return index >= len(lease.path) or lease.path[index].device != lease.table[index]

    def extend(self, leases: list[Lease], more: int) -> bool:
        needed = sum(self.blocks_for(x.num_tokens + more) - len(x.table) for x in leases)
        if needed > len(self.device_free) + len(self.idle("device")):
            return False
        if not self._make_room(needed):
            return False
        for lease in leases:
            lease.num_tokens += more
        return True

    def adopt_extension(self, lease: Lease, table: list[int]) -> None:
        old = len(lease.table)
        assert table[:old] == lease.table, "ids of a granted table changed"
        assert len(table) == self.blocks_for(lease.num_tokens)
        self._take_device(table[old:])
        lease.table = table

    def _use(self, lease: Lease, first: int, last: int, step: int) -> None:
        for device_id in lease.table[first:last]:
            self.step_of[device_id] = max(self.step_of.get(device_id, 0), step)

    def truncate(self, lease: Lease, num_tokens: int, step: int) -> None:
        keep = self.blocks_for(num_tokens)
        self._use(lease, keep, len(lease.table), step)
        for device_id in lease.table[keep:]:
            self._free_device(device_id)
        lease.table = lease.table[:keep]
        lease.num_tokens = num_tokens
        lease.computed = min(lease.computed, num_tokens)
        lease.tokens = lease.tokens[:num_tokens]

    def give_back(self, lease: Lease, step: int) -> set[int]:
        """Undo a grant; returns the onloads that nobody waits for any more."""
        abandoned = set()
        for transfer_id in lease.onloads:
            transfer = self.transfers[transfer_id]
            transfer.leases.remove(lease)
            if not transfer.leases:
                abandoned.add(transfer_id)
        self._use(lease, 0, len(lease.table), step)
        for index, device_id in enumerate(lease.table):
            if self.is_private(lease, index):
                self._free_device(device_id)
        for block in reversed(lease.path):
            self._unref(block)
        lease.path, lease.table, lease.onloads = [], [], set()
        lease.num_tokens = lease.computed = lease.cached_blocks = 0
        lease.granted = lease.failed = False
        return abandoned

    def release(self, lease: Lease, step: int) -> set[int]:
        self.leases.remove(lease)
        return self.give_back(lease, step) if lease.granted else set()

    # --- commit -------------------------------------------------------------------------------

    def commit(self, lease: Lease, num_tokens: int, step: int) -> int:
        if not lease.failed and num_tokens > lease.computed:
            first = lease.computed // self.block_tokens
            self._use(lease, first, self.blocks_for(num_tokens), step)
            lease.computed = num_tokens
        return self.publish(lease)

    def publish(self, lease: Lease) -> int:
        """Computed, named, full blocks become findable, once all that they rest on is proven."""
        if lease.epoch != self.epoch or lease.failed or lease.onloads:
            return 0
        target = min(lease.computed, len(lease.tokens)) // self.block_tokens
        detached = bool(lease.path) and not lease.path[-1].attached
        if target <= len(lease.path) and not detached:
            return 0
        if not self._take_back_detached(lease):
            return 0
        published = 0
        for index in range(len(lease.path), target):
            key = (lease.context, tuple(lease.tokens[: (index + 1) * self.block_tokens]))
            parent = lease.path[-1] if lease.path else None
            block = self.blocks.setdefault(key, Block(key, parent))
            self._ref(block)
            lease.path.append(block)
            if block.resident:
                continue  # first proof wins: the lease's own copy stays private
            block.device, block.device_valid = lease.table[index], True
            published += 1
            self._use_once_more(block)
        return published

    def _take_back_detached(self, lease: Lease) -> bool:
        lost = [(i, b) for i, b in enumerate(lease.path) if not b.attached]
        own = [(i, b) for i, b in lost if b.device == lease.table[i]]
        if any(b.refs > 1 or b.pins for _, b in own):
            return False
        for _, block in own:
            block.device, block.device_valid = None, False
        for _, block in reversed(lost):
            self._unref(block)
        del lease.path[len(lease.path) - len(lost) :]
        return True

    def recompute_from(self, lease: Lease) -> int:
        if not lease.failed:
            return -1
        lease.failed = False
        return lease.cached_blocks * self.block_tokens

    # --- transfers ----------------------------------------------------------------------------

    def backup(self) -> tuple[list[Block], int]:
        """Candidates of the next offload, and how many of them find room on the host."""
        found = [b for b in self.backups if b.wants_backup and b.device_valid and b.host is None]
        for block in self.backups:
            block.wants_backup = False
        self.backups = []
        while len(self.host_free) < len(found) and self.evict("host"):
            pass
        return found, min(len(found), len(self.host_free))

    def adopt_backup(
        self, transfer_id: int, candidates: list[Block], device_ids: list[int], host_ids: list[int]
    ) -> None:
        by_id = {block.device: block for block in candidates}
        blocks = [by_id[device_id] for device_id in device_ids]
        assert len(set(host_ids)) == len(host_ids)
        assert self.host_free.issuperset(host_ids)
        self.host_free -= set(host_ids)
        for block, host_id in zip(blocks, host_ids, strict=True):
            block.host = host_id
            block.pins += 1
        after = max(self.after_step(b.device) for b in blocks if b.device is not None)
        self.transfers[transfer_id] = Transfer("offload", blocks, after)

    def complete(self, transfer_id: int, outcome: str, first_bad: int) -> None:
        transfer = self.transfers.pop(transfer_id)
        good = len(transfer.blocks)
        if outcome != "done":
            good = 0 if outcome == "cancelled" else min(first_bad, good)
        for block in transfer.blocks:
            block.pins -= 1
        if transfer.direction == "offload":
            self._end_offload(transfer, good)
        elif outcome == "cancelled" and not transfer.leases:
            self._cancel_onload(transfer)
        else:
            self._end_onload(transfer_id, transfer, good)

    def _end_offload(self, transfer: Transfer, good: int) -> None:
        for index in reversed(range(len(transfer.blocks))):
            block = transfer.blocks[index]
            assert block.host is not None
            if index < good:
                block.host_valid = True
            else:
                self._free_host(block.host)
                block.host = None
            if block.attached:
                self._unblock(block)
            else:
                self._free_if_unowned(block)

    def _end_onload(self, transfer_id: int, transfer: Transfer, good: int) -> None:
        for block in transfer.blocks[:good]:
            block.device_valid = True
        if good < len(transfer.blocks):
            bad = transfer.blocks[good]
            for lease in transfer.leases:
                if bad in lease.path:
                    lease.failed = True
                    lease.cached_blocks = min(lease.cached_blocks, lease.path.index(bad))
                    lease.computed = min(lease.computed, lease.cached_blocks * self.block_tokens)
        for block in transfer.blocks:
            if not block.attached:
                self._free_if_unowned(block)
        if good < len(transfer.blocks) and transfer.blocks[good].attached:
            self.drop(transfer.blocks[good])
        for block in reversed(transfer.blocks[:good]):
            if block.attached and block.refs == 0:
                self._refresh(block)
        for lease in list(transfer.leases):
            lease.onloads.discard(transfer_id)
            if not lease.onloads:
                self.publish(lease)

    def _cancel_onload(self, transfer: Transfer) -> None:
        """Nothing was moved and nobody waits: the blocks are on the host as before."""
        for block in reversed(transfer.blocks):
            if not block.attached:
                self._free_if_unowned(block)
            elif block.refs or any(c.resident for c in self.children(block)):
                self.drop(block)
            else:
                assert block.device is not None
                self._free_device(block.device)
                block.device = None
                self._refresh(block)
                self._unblock(block.parent)

    # --- the rest -----------------------------------------------------------------------------

    def finish_step(self, step: int) -> None:
        self.finished_step = max(self.finished_step, step)

    def reset(self) -> None:
        self.epoch += 1
        self.backups = []
        for block in list(self.blocks.values()):
            del self.blocks[block.key]
            self._detach(block)

    def can_resize(self, capacity: int) -> bool:
        beyond = set(range(capacity, self.capacity))
        if capacity <= self.reserve_blocks:
            return False
        if capacity < self.capacity and any(self.after_step(i) for i in self.device_free):
            return False
        if any(self.after_step(i) for i in beyond):
            return False
        held = {i for lease in self.leases for i in lease.table}
        held |= {b.device for b in self.blocks.values() if b.refs or b.pins}
        held |= {b.device for t in self.transfers.values() for b in t.blocks}
        return beyond.isdisjoint(held)

    def resize(self, capacity: int) -> None:
        for block in list(self.blocks.values()):
            if block.attached and block.device is not None and block.device >= capacity:
                self.drop(block)
        self.device_free |= set(range(self.capacity, capacity))
        self.device_free = {i for i in self.device_free if i < capacity}
        self.capacity = capacity
