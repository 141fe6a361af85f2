"""Naive model of the prefix cache: a dict of prefixes that every query scans.

It mirrors the design's rules, not the native code: no tree, no queues, no free lists. Ids are not
predicted (any free id will do) but adopted from the implementation, and checked to be free.
"""

from __future__ import annotations

from tests.models.cached_blocks import Block, Item, Key, Lease, Policy, Transfer
from tests.models.saving import Saving


class PrefixCacheModel(Saving):
    """Model that predicts hits, grants, victims, pending blocks and the effects of transfers."""

    def __init__(
        self,
        *,
        block_tokens: int,
        device_blocks: int,
        host_blocks: int,
        leave_tokens: int = 1,
        reserve_blocks: int = 0,
        min_onload_blocks: int = 0,
        policy: Policy = "none",
        threshold: int = 2,
        low_watermark: int = 0,
        splits_items: bool = False,
    ) -> None:
        super().__init__(
            block_tokens=block_tokens,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            policy=policy,
            threshold=threshold,
            low_watermark=low_watermark,
        )
        self.leave_tokens = leave_tokens
        self.splits_items = splits_items
        self.reserve_blocks = reserve_blocks
        self.min_onload_blocks = min_onload_blocks
        self.leases: list[Lease] = []
        self.batches: list[list[Lease]] = []  # in flight
        self.epoch = 1

    # --- leases -------------------------------------------------------------------------------

    def key(self, lease: Lease, blocks: int) -> Key:
        """Return the key of the prefix of ``blocks`` blocks."""
        end = blocks * self.block_tokens
        items = tuple(item for item in lease.items if item[1] < end)
        return lease.context, tuple(lease.tokens[:end]), items

    def walk(self, lease: Lease) -> list[Block]:
        path = self.cached(lease)
        return path[: self._before_cut_item(lease, len(path))]

    def cached(self, lease: Lease) -> list[Block]:
        """Return the cached blocks of the prompt; a hit may end earlier, before a cut item."""
        path = []
        for index in range(1, self._most_blocks(lease) + 1):
            if self.key(lease, index) not in self.blocks:
                break
            path.append(self.blocks[self.key(lease, index)])
        return path

    def _most_blocks(self, lease: Lease) -> int:
        """Return the most blocks that a match may hit: the last tokens are always computed."""
        if not lease.reads:
            return 0
        return max(0, len(lease.tokens) - self.leave_tokens) // self.block_tokens

    def _before_cut_item(self, lease: Lease, blocks: int) -> int:
        """Return the most blocks, up to ``blocks``, where a hit may end: outside items."""
        if self.splits_items:
            return blocks

        def cuts(end: int) -> bool:
            return any(offset < end < offset + length for _, offset, length in lease.items)

        return max(n for n in range(blocks + 1) if not cuts(n * self.block_tokens))

    def match(
        self,
        tokens: list[int],
        context: str,
        items: tuple[Item, ...] = (),
        reads: bool = True,
        writes: bool = True,
    ) -> tuple[Lease, int, int]:
        lease = Lease(context, list(tokens), items, reads, writes)
        self.leases.append(lease)
        path = self.walk(lease)
        self._touch(path)
        valid = sum(b.device_valid for b in path)
        return lease, valid, len(path) - valid

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def needs(self, lease: Lease, num_tokens: int) -> int:
        """Return the number of device blocks that a grant takes besides the shared ones."""
        path = self.granted_path(lease, num_tokens)
        return self.blocks_for(num_tokens) - sum(b.resident for b in path)

    def granted_path(self, lease: Lease, num_tokens: int) -> list[Block]:
        """Return the blocks that a grant would share, unless too few to onload."""
        path = self.walk(lease)
        if sum(not b.device_valid for b in path) < self.min_onload_blocks:
            path = [b for b in path if b.resident]
        usable = min(len(path), num_tokens // self.block_tokens)
        return path[: self._before_cut_item(lease, usable)]

    def reserve_for(self, lease: Lease, num_tokens: int) -> int | None:
        """Return the blocks that a grant leaves to extensions; None when it can never succeed."""
        blocks = self.blocks_for(num_tokens)
        if blocks + self.reserve_blocks > self.capacity and blocks > lease.grown_blocks:
            return None
        reserve = min(self.reserve_blocks, self.capacity - blocks)
        return reserve if reserve >= 0 else None

    def allocate(self, lease: Lease, num_tokens: int, evicted: int) -> bool:
        """Grant the lease and return True, or return False; ``adopt`` then takes the real table.

        Args:
            lease: not granted.
            num_tokens: positions.
            evicted: how many device blocks the implementation evicted for it.
        """
        path = self.granted_path(lease, num_tokens)
        resident = sum(b.resident for b in path)
        assert [b.resident for b in path] == [True] * resident + [False] * (len(path) - resident)
        needed = self.blocks_for(num_tokens) - resident
        for block in path:
            self._ref(block)
        room = len(self.device_free) + len(self.idle("device"))
        short = max(0, needed - len(self.device_free))
        if needed + (self.reserve_for(lease, num_tokens) or 0) > room:
            short = -1  # not even tried
        first = min(evicted, max(short, 0))
        if not self.evict_as_seen(first, max(short, 0)) or short < 0:
            for block in reversed(path):
                self._unref(block)
            return False
        path = self._fit_writable(lease, path)
        short = self.blocks_for(num_tokens) - sum(b.resident for b in path) - len(self.device_free)
        if not self.evict_as_seen(evicted - first, max(short, 0)):
            for block in reversed(path):
                self._unref(block)
            return False
        lease.path, lease.num_tokens = path, num_tokens
        return True

    def _fit_writable(self, lease: Lease, path: list[Block]) -> list[Block]:
        """Return the blocks to onload; their ids must be writable before the open step closes."""
        resident = sum(b.resident for b in path)
        writable = self.writable()
        if len(path) - resident <= writable:
            return path
        keep = self._before_cut_item(lease, resident + writable)
        if resident < keep < resident + self.min_onload_blocks:
            keep = self._before_cut_item(lease, resident)
        for block in reversed(path[keep:]):
            self._unref(block)
        return path[:keep]

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
        self._update_pending(lease)

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

    def is_private(self, lease: Lease, index: int) -> bool:
        return index >= len(lease.path) or lease.path[index].device != lease.table[index]

    def extend(self, leases: list[Lease], more: int, evicted: int) -> bool:
        needed = sum(self.blocks_for(x.num_tokens + more) - len(x.table) for x in leases)
        if needed > len(self.device_free) + len(self.idle("device")):
            self.evict_as_seen(evicted, 0)
            return False
        short = max(0, needed - len(self.device_free))
        if not self.evict_as_seen(evicted, short, drops_unsaved=self.policy != "write_back"):
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
        lease.grown_blocks = max(lease.grown_blocks, len(table))

    def _last_use(self, lease: Lease, step: int) -> int:
        """Return the last step of the lease; without batches, count ``step`` as a use."""
        return lease.last_step if lease.named else max(lease.last_step, step)

    def _use(self, lease: Lease, first: int, last: int, step: int) -> None:
        for device_id in lease.table[first:last]:
            self.step_of[device_id] = max(self.step_of.get(device_id, 0), step)

    def truncate(self, lease: Lease, num_tokens: int, step: int) -> None:
        keep = self.blocks_for(num_tokens)
        if lease.batches and lease.table[keep:]:
            keeper = Lease(lease.context, [], writes=False, table=lease.table[keep:])
            self._wait_for_batches(lease, keeper)
        else:
            self._use(lease, keep, len(lease.table), self._last_use(lease, step))
            for device_id in lease.table[keep:]:
                self._free_device(device_id)
        lease.table = lease.table[:keep]
        lease.num_tokens = num_tokens
        lease.computed = min(lease.computed, num_tokens)
        if num_tokens < len(lease.tokens):
            lease.tokens = lease.tokens[:num_tokens]
            lease.items = tuple(item for item in lease.items if item[1] < num_tokens)

    def cuts_item(self, lease: Lease, num_tokens: int) -> bool:
        """Return True if a truncation would leave a part of an item."""
        return num_tokens < len(lease.tokens) and any(
            offset < num_tokens < offset + length for _, offset, length in lease.items
        )

    def give_back(self, lease: Lease, step: int) -> set[int]:
        """Undo a grant; return the onloads that are abandoned."""
        if lease.batches:
            self._set_aside(lease)
            return set()
        step = self._last_use(lease, step)
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
        lease.granted = lease.failed = lease.promises = lease.named = False
        lease.last_step = 0
        return abandoned

    def release(self, lease: Lease, step: int) -> set[int]:
        if lease.batches:
            lease.released, lease.promises = True, False
            return set()
        self.leases.remove(lease)
        return self.give_back(lease, step) if lease.granted else set()

    # --- compute in flight --------------------------------------------------------------------

    def begin_batch(self, leases: list[Lease]) -> list[Lease]:
        """Return the batch as a list, in which keepers replace leases that returned blocks."""
        for lease in leases:
            lease.batches += 1
            lease.named = True
        self.batches.append(list(leases))
        return self.batches[-1]

    def end_batch(self, batch: list[Lease], step: int) -> set[int]:
        """Free the blocks that waited for the batch; return the onloads that are abandoned."""
        self.batches = [other for other in self.batches if other is not batch]
        abandoned = set()
        for lease in batch:
            lease.last_step = max(lease.last_step, step)
            lease.batches -= 1
            if lease.released and not lease.batches:
                abandoned |= self.release(lease, 0)
        return abandoned

    def _set_aside(self, lease: Lease) -> None:
        """Keep all blocks of the lease for its batches; reset the lease to a matched one."""
        keeper = Lease(lease.context, [], writes=False, path=lease.path, table=lease.table)
        keeper.onloads, keeper.num_tokens = lease.onloads, lease.num_tokens
        keeper.cached_blocks, keeper.computed = lease.cached_blocks, lease.computed
        keeper.failed, keeper.epoch = lease.failed, lease.epoch
        for transfer_id in keeper.onloads:
            joined = self.transfers[transfer_id].leases
            joined[joined.index(lease)] = keeper
        for batch in self.batches:
            batch[:] = [keeper if other is lease else other for other in batch]
        self._keep(lease, keeper)
        keeper.batches, lease.batches = lease.batches, 0
        lease.path, lease.table, lease.onloads = [], [], set()
        lease.num_tokens = lease.computed = lease.cached_blocks = lease.last_step = 0
        lease.granted = lease.failed = lease.promises = lease.named = False

    def _wait_for_batches(self, lease: Lease, keeper: Lease) -> None:
        self._keep(lease, keeper)
        for batch in self.batches:
            if lease in batch:
                batch.append(keeper)
                keeper.batches += 1

    def _keep(self, lease: Lease, keeper: Lease) -> None:
        keeper.granted = keeper.named = keeper.released = True
        keeper.last_step = lease.last_step
        self.leases.append(keeper)

    # --- commit -------------------------------------------------------------------------------

    def commit(self, lease: Lease, num_tokens: int, step: int) -> int:
        if not lease.failed and num_tokens > lease.computed:
            first = lease.computed // self.block_tokens
            self._use(lease, first, self.blocks_for(num_tokens), step)
            lease.computed = num_tokens
            lease.last_step = max(lease.last_step, step)
        return self.publish(lease)

    def publish(self, lease: Lease) -> int:
        """Index computed full blocks with known tokens whose prefix has arrived."""
        if not lease.writes or lease.epoch != self.epoch or lease.failed or lease.onloads:
            return 0
        target = min(lease.computed, len(lease.tokens)) // self.block_tokens
        detached = bool(lease.path) and not lease.path[-1].attached
        if target <= len(lease.path) and not detached:
            return 0
        if not self._take_back_detached(lease):
            return 0
        published = 0
        for index in range(len(lease.path), target):
            key = self.key(lease, index + 1)
            parent = lease.path[-1] if lease.path else None
            block = self.blocks.setdefault(key, Block(key, parent))
            self._ref(block)
            lease.path.append(block)
            if block.resident:
                continue  # the first valid copy wins: the lease's own copy stays private
            block.device, block.device_valid = lease.table[index], True
            published += 1
            self._use_once_more(block)
        self._update_pending(lease)
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

    # --- pending blocks -----------------------------------------------------------------------

    def _update_pending(self, lease: Lease) -> None:
        """Note the blocks behind the indexed ones that the lease will compute and publish."""
        more = len(lease.path) < len(lease.tokens) // self.block_tokens
        alive = not (lease.failed or lease.released)
        lease.promises = more and lease.writes and alive and lease.epoch == self.epoch

    def pending(self, lease: Lease) -> tuple[int, list[Lease]]:
        """Return the most pending blocks behind the cached ones, and their owner."""
        if lease.granted:
            return 0, []
        path = self.cached(lease)
        promised = {
            owner: self._promised(owner, lease, len(path))
            for owner in self.leases
            if owner.promises and owner.context == lease.context and owner.path[-1:] == path[-1:]
        }
        most = max(promised.values(), default=0)
        return most, [owner for owner, blocks in promised.items() if most and blocks == most]

    def _promised(self, owner: Lease, lease: Lease, first: int) -> int:
        last = min(len(owner.tokens) // self.block_tokens, self._most_blocks(lease))
        blocks = 0
        while first + blocks < last:
            end = first + blocks + 1
            if self.key(owner, end) != self.key(lease, end):
                break
            blocks += 1
        return blocks

    # --- transfers ----------------------------------------------------------------------------

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

    def _end_onload(self, transfer_id: int, transfer: Transfer, good: int) -> None:
        for block in transfer.blocks[:good]:
            block.device_valid = True
        if good < len(transfer.blocks):
            bad = transfer.blocks[good]
            for lease in transfer.leases:
                if bad in lease.path:
                    lease.failed, lease.promises = True, False
                    arrived = self._before_cut_item(lease, lease.path.index(bad))
                    lease.cached_blocks = min(lease.cached_blocks, arrived)
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
        """Undo an abandoned onload that copied nothing: the blocks remain on the host."""
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

    def reset(self) -> None:
        self.epoch += 1
        self.backups = []
        for lease in self.leases:
            lease.promises = False
        for block in list(self.blocks.values()):
            del self.blocks[block.key]
            self._detach(block)

    @property
    def at_rest(self) -> bool:
        """Return True if no lease and no transfer needs a block."""
        return not self.transfers and not any(lease.granted for lease in self.leases)

    def forget_device(self) -> None:
        for block in self.leaving(0):
            self.leave_device(block)

    def forget_host(self) -> None:
        for block in list(self.blocks.values()):
            if block.attached and not block.resident:
                self.drop(block)
        for block in self.blocks.values():
            if block.host is not None:
                self.host_free.add(block.host)
                block.host, block.host_valid = None, False

    def leaving(self, capacity: int) -> list[Block]:
        """Return the blocks beyond a shrunk pool, and their descendants on the device.

        In order of eviction, children before parents; those not in line last, by id.
        """
        gone = [b for b in self.blocks.values() if b.device is not None and b.device >= capacity]
        line = self.in_line("device")
        gone.sort(key=lambda b: (0, line.index(b)) if b in line else (1, b.device))
        order: list[Block] = []
        for top in gone:
            below = self._resident_below(top)
            order += [b for b in reversed(below) if b not in order]
        return order

    def _resident_below(self, top: Block) -> list[Block]:
        found = [top]
        for block in found:
            found += sorted(
                (c for c in self.children(block) if c.resident), key=lambda c: c.device or 0
            )
        return found

    def can_resize(self, capacity: int) -> bool:
        beyond = set(range(capacity, self.capacity))
        if capacity <= self.reserve_blocks:
            return False
        if capacity < self.capacity and any(self.after_step(i) for i in self.device_free):
            return False
        if any(self.after_step(i) for i in beyond):
            return False
        leaving = self.leaving(capacity)
        if any(b.refs or b.pins or self.after_step(b.device or 0) for b in leaving):
            return False
        # A lease, a transfer or a save to a store has the others: a save keeps dropped blocks.
        return beyond <= self.device_free | {b.device for b in leaving}

    def resize(self, capacity: int) -> None:
        for block in self.leaving(capacity):
            self.leave_device(block)
        self.device_free |= set(range(self.capacity, capacity))
        self.device_free = {i for i in self.device_free if i < capacity}
        self.capacity = capacity
