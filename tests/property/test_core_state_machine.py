"""The core compared with the naive model, with bytes: KV is never served for wrong tokens.

Here are the rules of leases; ``cache_simulation`` has those of transfers and capacity, and what is
checked after each. Swap and fork have a machine of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from aiokv.errors import LeaseError, RequestTooLarge, UsageError
from tests.property.cache_simulation import GARBAGE, CacheSimulation, Caller, pick

if TYPE_CHECKING:
    from tests.models.cached_blocks import Item

MAX_LEASES = 5
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
mostly = st.sampled_from([True, True, True, True, False])
item_shapes = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4)), max_size=2
)


class CacheMachine(CacheSimulation):
    # --- match and allocate -------------------------------------------------------------------

    @rule(
        tokens=prompts,
        fork=st.integers(0, 9),
        context=st.sampled_from([0, 0, 0, 1]),
        reads=mostly,
        writes=mostly,
        shapes=item_shapes,
    )
    def match(
        self,
        tokens: list[int],
        fork: int,
        context: int,
        reads: bool = True,
        writes: bool = True,
        shapes: list[tuple[int, int, int]] | None = None,
    ) -> None:
        if len(self.callers) == MAX_LEASES:
            self.give_back(0, "release", False)
        tokens = [0] * fork + [token % self.alphabet for token in tokens]
        salt = "tenant" if context else ""
        items = self.items_in(len(tokens), shapes or [])
        array = np.array(tokens, np.int32)
        if items:
            found = self.core.match_items(array, list(items), salt, reads, writes)
        else:
            found = self.core.match(array, salt, reads, writes)
        lease, *expected = self.model.match(tokens, salt, items, reads, writes)
        assert list(found[1:]) == expected
        self.callers.append(Caller(found[0], lease))

    def items_in(self, num_tokens: int, shapes: list[tuple[int, int, int]]) -> tuple[Item, ...]:
        """Draw items by content, preceding gap and length, as far as they fit in the prompt."""
        items: list[Item] = []
        end = 0
        for content, gap, length in shapes if self.with_items else ():
            if end + gap + length <= num_tokens:
                items.append((b"xy"[content : content + 1], end + gap, length))
                end += gap + length
        return tuple(items)

    def waiting(self) -> list[Caller]:
        return [c for c in self.callers if not c.model.granted]

    @precondition(lambda self: self.waiting())
    @rule(which=pick, more=st.integers(-3, 3))
    def allocate(self, which: int, more: int) -> None:
        caller = self.waiting()[which % len(self.waiting())]
        self.try_allocate(caller, max(1, len(caller.model.tokens) + more))

    def try_allocate(self, caller: Caller, num_tokens: int) -> bool:
        lease = caller.model
        if self.model.reserve_for(lease, num_tokens) is None:
            self.refused(RequestTooLarge, self.core.allocate, caller.id, num_tokens)
            self.refused(RequestTooLarge, self.core.can_allocate, caller.id, num_tokens)
            return False
        evicted = self.core.statistics().attention.device.evicted_blocks
        expected = self.core.can_allocate(caller.id, num_tokens)
        assert self.core.statistics().attention.device.evicted_blocks == evicted
        granted = self.core.allocate(caller.id, num_tokens)
        assert bool(granted) == expected
        evicted = self.core.statistics().attention.device.evicted_blocks - evicted
        assert bool(granted) == self.model.allocate(lease, num_tokens, evicted)
        if not granted:
            return False
        onloads = self.core.onloads(caller.id)
        assert granted == (2 if onloads else 1)
        table = self.core.block_table(caller.id).tolist()
        new = set(onloads) - set(self.plans)
        self.model.adopt(lease, table, onloads)
        device_hit, host_hit = self.core.hit(caller.id)
        assert device_hit == sum(b.device_valid for b in lease.path)
        cached_blocks = self.core.cached_tokens(caller.id) // self.bt
        assert device_hit + host_hit == cached_blocks == len(lease.path)
        for transfer_id in new:
            self.new_plan(self.manager.onload_plan(transfer_id))
        for index in range(len(table)):
            if self.model.is_private(lease, index):
                self.device[table[index]] = GARBAGE
        caller.computed = lease.cached_blocks * self.bt
        return True

    @precondition(lambda self: self.waiting())
    @rule(which=pick, more=st.integers(0, 9))
    def allocate_once(self, which: int, more: int) -> None:
        """Allocate as ``Lease.try_allocate`` does: repeat while nothing has to be saved."""
        caller = self.waiting()[which % len(self.waiting())]
        num_tokens = max(1, len(caller.model.tokens) + more)
        if self.model.reserve_for(caller.model, num_tokens) is None:
            return
        expected = self.core.can_allocate(caller.id, num_tokens, True)
        granted = self.try_allocate(caller, num_tokens)
        wanted = self.model.blocks_for(num_tokens)
        while not granted:
            plans = set(self.plans)
            self.save_ahead(wanted)
            evicted = self.core.statistics().attention.device.evicted_blocks
            granted = set(self.plans) == plans and self.try_allocate(caller, num_tokens)
            if granted or set(self.plans) != plans or not self.core.must_look_further():
                break
            if self.core.statistics().attention.device.evicted_blocks == evicted:
                if wanted >= self.model.capacity:
                    break
                wanted = min(2 * wanted, self.model.capacity)
        assert granted == expected

    @precondition(lambda self: self.waiting())
    @rule(which=pick)
    def allocate_insisting(self, which: int) -> None:
        """Make free blocks as the engine does: save victims, or drop those that cannot be saved.

        No wait is endless: without transfers in flight, a request that fits gets its blocks.
        """
        caller = self.waiting()[which % len(self.waiting())]
        num_tokens = max(1, len(caller.model.tokens))
        blocks = self.model.blocks_for(num_tokens)
        reserve = self.model.reserve_for(caller.model, num_tokens)
        if reserve is None:
            return
        granted = self.try_allocate(caller, num_tokens)
        for _ in range(3):
            if granted:
                return
            self.save_ahead(blocks)
            self.complete_all("offload")
            granted = self.try_allocate(caller, num_tokens)
        shared = self.model.granted_path(caller.model, num_tokens)
        evictable = [block for block in self.model.idle("device") if block not in shared]
        room = len(self.model.device_free) + len(evictable)
        assert self.plans or self.model.needs(caller.model, num_tokens) > (room - reserve)

    @rule(tokens=prompts, fork=st.integers(0, 9), context=st.sampled_from([0, 0, 0, 1]))
    def pin(self, tokens: list[int], fork: int, context: int) -> None:
        """Grant a lease on the cached part of a prompt only."""
        self.match(tokens, fork, context)
        caller = self.callers[-1]
        hit = len(self.model.walk(caller.model)) * self.bt
        if not hit or not self.try_allocate(caller, hit):
            self.give_back(len(self.callers) - 1, "release", False)

    @rule(tokens=prompts, fork=st.integers(0, 9), back_up=st.booleans(), keep=st.booleans())
    def serve(self, tokens: list[int], fork: int, back_up: bool, keep: bool) -> None:
        """Serve a whole request; other rules complete its onloads."""
        self.match(tokens, fork, 0)
        caller = self.callers[-1]
        self.allocate(len(self.waiting()) - 1, 0)
        if caller.model.granted:
            self.compute_and_commit(len(self.granted()) - 1, 99, False)
        if back_up:
            self.flush_backups()
            self.complete_all("offload")
        if not keep:
            self.give_back(len(self.callers) - 1, "release", False)

    @precondition(lambda self: self.callers)
    @rule(which=pick, how=st.sampled_from(["release", "retract"]), stale=st.booleans())
    def give_back(self, which: int, how: str, stale: bool) -> None:
        caller = self.callers[which % len(self.callers)]
        step = 0 if stale else self.step
        if how == "release":
            self.callers.remove(caller)
            self.core.release(caller.id, step)
            deferred = caller.model.batches > 0
            self.abandoned |= self.model.release(caller.model, step)
            if not deferred:
                self.refused(LeaseError, self.core.release, caller.id)  # a second release
        else:
            assert bool(self.core.retract(caller.id, step)) == (caller.model.batches > 0)
            self.abandoned |= self.model.give_back(caller.model, step)

    @rule(fewer=st.integers(1, 6), really=st.integers(0, 2))
    def shrink_at_rest(self, fewer: int, really: int) -> None:
        """Without leases, blocks beyond the new size leave the device."""
        if really:
            return
        while self.callers:
            self.give_back(0, "release", True)
        while self.batches:
            self.end_batch(0, False)
        self.complete_all("onload", "offload")
        self.finish_step(0)
        self.resize(-fewer)

    @precondition(lambda self: self.granted())
    @rule(which=pick, tokens=st.lists(st.integers(0, 2), max_size=4), shapes=item_shapes)
    def append(
        self,
        which: int,
        tokens: list[int],
        shapes: list[tuple[int, int, int]] | None = None,
    ) -> None:
        caller = self.granted()[which % len(self.granted())]
        lease = caller.model
        tokens = [token % self.alphabet for token in tokens]
        array = np.array(tokens, np.int32)
        named = len(lease.tokens)
        items = tuple(
            (content, named + offset, length)
            for content, offset, length in self.items_in(len(tokens), shapes or [])
        )
        if named + len(tokens) > lease.num_tokens:
            self.refused(LeaseError, self.core.append_items, caller.id, array, list(items))
            return
        for wrong in ((b"x", named - 1, 1), (b"x", named + len(tokens), 1)):
            self.refused(UsageError, self.core.append_items, caller.id, array, [wrong])
        if items:
            self.core.append_items(caller.id, array, list(items))
        else:
            self.core.append(caller.id, array)
        lease.tokens += tokens
        lease.items += items

    @precondition(lambda self: self.granted())
    @rule(which=pick, more=st.sampled_from([1, 2, 99]), take_note=st.booleans())
    def compute_and_commit(self, which: int, more: int, take_note: bool) -> None:
        caller = self.granted()[which % len(self.granted())]
        lease = caller.model
        if take_note and not lease.onloads:
            position = self.core.recompute_from(caller.id)
            assert position == self.model.recompute_from(lease)
            if position >= 0:
                caller.computed = position
        last = min(caller.computed + more, lease.num_tokens, len(lease.tokens))
        self.compute(caller, last)
        step = self.step
        published = self.core.commit(caller.id, caller.computed, step)
        assert published == self.model.commit(lease, caller.computed, step)

    def compute(self, caller: Caller, last: int) -> None:
        """Write the KV of positions up to ``last``, correct only if all earlier positions are."""
        lease = caller.model
        for index in range(caller.computed // self.bt, self.model.blocks_for(last)):
            context, tokens, items = self.model.key(lease, index + 1)
            before = [
                self.device.get(i) == self.model.key(lease, k + 1) or bool(lease.onloads)
                for k, i in enumerate(lease.table[:index])
            ]
            if all(before) and self.device.get(lease.table[index]) == (context, tokens, items):
                continue  # of an item that is computed again: the same KV
            computed = (context, tokens[:last], items)
            self.device[lease.table[index]] = computed if all(before) else GARBAGE
            for batch in self.batches.values():
                batch.targets.discard(lease.table[index])
        caller.computed = max(caller.computed, last)

    @precondition(lambda self: self.granted())
    @rule(which=pick, back=st.integers(0, 4))
    def truncate(self, which: int, back: int) -> None:
        caller = self.granted()[which % len(self.granted())]
        lease = caller.model
        num_tokens = lease.num_tokens - back
        if num_tokens < len(lease.path) * self.bt or self.model.cuts_item(lease, num_tokens):
            self.refused(LeaseError, self.core.truncate, caller.id, num_tokens)
            return
        self.core.truncate(caller.id, num_tokens, self.step)
        self.model.truncate(lease, num_tokens, self.step)
        caller.computed = min(caller.computed, num_tokens)

    @precondition(lambda self: self.granted())
    @rule(first=pick, second=st.none() | pick, more=st.integers(0, 4))
    def extend(self, first: int, second: int | None, more: int) -> None:
        chosen = [self.granted()[first % len(self.granted())]]
        if second is not None:
            chosen.append(self.granted()[second % len(self.granted())])
        ids = [caller.id for caller in chosen]
        if len(set(ids)) < len(ids):
            self.refused(LeaseError, self.core.extend, ids, more)
            return
        evicted = self.core.statistics().attention.device.evicted_blocks
        extended = self.core.extend(ids, more)
        evicted = self.core.statistics().attention.device.evicted_blocks - evicted
        assert extended == self.model.extend([c.model for c in chosen], more, evicted)
        for caller in chosen if extended else []:
            old = len(caller.model.table)
            self.model.adopt_extension(caller.model, self.core.block_table(caller.id).tolist())
            self.device.update(dict.fromkeys(caller.model.table[old:], GARBAGE))

    @precondition(lambda self: self.callers)
    @rule(which=pick, by=st.sampled_from([-1, 1 << 40]))
    def bad_numbers(self, which: int, by: int) -> None:
        """I7: misuse is a typed error and changes nothing."""
        caller = self.callers[which % len(self.callers)]
        for call in (self.core.commit, self.core.truncate):
            self.refused(LeaseError, call, caller.id, by)
        self.refused(LeaseError, self.core.extend, [caller.id], by)
        self.refused(LeaseError, self.core.allocate, caller.id, by)
        self.refused(LeaseError, self.core.commit, caller.id + (1 << 32), 0)
        if not caller.model.granted:
            self.refused(LeaseError, self.core.commit, caller.id, 0)
            self.refused(LeaseError, self.core.truncate, caller.id, 0)


TestCacheMachine = CacheMachine.TestCase
