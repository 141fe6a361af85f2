"""Recurrent state with leases, eviction, swaps and failures, compared with a naive model.

The model keeps a list of snapshots (prefix, slot), the least recently used first, and what every
slot holds: the tokens that its state was computed from. After every rule: ``violations()`` is empty
(I1: slots are free, a snapshot, or a lease's), the snapshots are exactly the model's, so that hits
are the deepest of them and victims the oldest, and the state of every lease whose transfers have
ended is that of exactly its computed positions (I3, I4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv._native import Core, Outcome, WritePolicy
from aiokv.errors import LeaseError, RequestTooLarge

GARBAGE = ("garbage",)
MAX_LEASES = 5
NO_SLOT = -1
pick = st.integers(0, 7)
prompts = st.one_of(
    st.integers(3, 9).map(lambda n: [0] * n), st.lists(st.integers(0, 1), min_size=1, max_size=9)
)
Prefix = tuple[int, ...]


class Caller:
    def __init__(self, lease_id: int, tokens: list[int], epoch: int) -> None:
        self.id = lease_id
        self.tokens = tokens
        self.computed = 0
        self.failed = False
        self.epoch = epoch


class StateMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(6, 14),
        host_blocks=st.sampled_from([0, 12]),
        state_slots=st.integers(1, 5),
        leave_tokens=st.integers(1, 2),
    )
    def begin(self, **sizes: int) -> None:
        self.bt = sizes["block_tokens"]
        self.leave = sizes["leave_tokens"]
        policy = WritePolicy.WRITE_THROUGH if sizes["host_blocks"] else WritePolicy.NONE
        self.core = Core(write_policy=policy, **sizes)
        self.slots = sizes["state_slots"]
        self.content: dict[int, Any] = {}
        self.snapshots: dict[Prefix, int] = {}
        self.idle: list[Prefix] = []  # least recently used first
        self.moves: dict[int, tuple[int, int, int]] = {}  # source, target, after_step
        self.callers: list[Caller] = []
        self.pins: list[tuple[int, int]] = []  # lease, and the slot of the snapshot that it holds
        self.step = 1
        self.finished = 0
        self.epoch = 0

    # --- the model ----------------------------------------------------------------------------

    def indexed(self) -> set[Prefix]:
        """Return the prefixes whose KV is cached; other tests cover that part of the index."""
        return {tuple(np.frombuffer(block[1], "<i4").tolist()) for block in self.core.blocks()}

    def expected_hit(self, tokens: list[int], usable: int) -> Prefix:
        limit = max(len(tokens) - self.leave, 0) // self.bt
        known = self.indexed()
        hit: Prefix = ()
        for blocks in range(1, min(limit, usable // self.bt) + 1):
            prefix = tuple(tokens[: blocks * self.bt])
            if prefix not in known:
                break
            hit = prefix if prefix in self.snapshots else hit
        return hit

    def touch(self, prefix: Prefix) -> None:
        if prefix in self.idle:
            self.idle.remove(prefix)
            self.idle.append(prefix)

    def free_slots(self) -> int:
        owned = {self.core.state_slot(c.id) for c in self.callers} - {NO_SLOT}
        owned |= set(self.snapshots.values())
        for source, target, _ in self.moves.values():
            owned |= {source, target} - {NO_SLOT}
        owned |= {slot for _, slot in self.pins}
        return self.slots - len(owned)

    def let_go(self, slot: int) -> None:
        """Drop a reference to the snapshot; the last one makes it the newest to be evicted."""
        held = {source for source, _, _ in self.moves.values()} | {held for _, held in self.pins}
        if slot not in held:
            self.idle.extend(p for p, saved in self.snapshots.items() if saved == slot)

    def take_slot(self, free: int) -> None:
        """Evict the oldest idle snapshot when no slot is free."""
        if not free:
            del self.snapshots[self.idle.pop(0)]

    def forget_dropped(self) -> None:
        known = self.indexed()
        for prefix in [p for p in self.snapshots if p not in known]:
            del self.snapshots[prefix]
        self.idle = [p for p in self.idle if p in self.snapshots]

    def pick_caller(self, which: int, *, granted: bool) -> Caller | None:
        among = [
            c
            for c in self.callers
            if self.core.is_granted(c.id) == granted and not self.core.swap_transfer(c.id)
        ]
        return among[which % len(among)] if among else None

    def granted(self) -> bool:
        return self.pick_caller(0, granted=True) is not None

    # --- leases -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts, stay=st.booleans(), cuts=st.lists(st.integers(1, 4), max_size=4))
    def serve(self, tokens: list[int], stay: bool, cuts: list[int]) -> None:
        """Serve a whole request in random chunks; save the state wherever possible."""
        self.match(tokens)
        self.allocate_for(self.callers[-1])
        self.close_step()
        for _ in self.transfers():
            self.complete(0, Outcome.DONE)
        for more in [*cuts, 9]:
            if self.core.is_granted(self.callers[-1].id):
                self.compute_for(self.callers[-1], more, save=True)
        if not stay:
            self.release(len(self.callers) - 1)

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts)
    def match_only(self, tokens: list[int]) -> None:
        self.match(tokens)

    def match(self, tokens: list[int]) -> None:
        lease_id, device, host = self.core.match(np.array(tokens, np.int32))
        hit = self.expected_hit(tokens, len(tokens))
        assert (device + host) * self.bt == len(hit)
        self.touch(hit)
        self.callers.append(Caller(lease_id, tokens, self.epoch))

    @precondition(lambda self: self.pick_caller(0, granted=False))
    @rule(which=pick)
    def allocate(self, which: int) -> None:
        self.allocate_for(self.pick_caller(which, granted=False))

    def allocate_for(self, caller: Caller | None) -> None:
        assert caller is not None
        core = self.core
        before = core.state_slot(caller.id)
        swapped = core.is_swapped(caller.id)
        hit = self.expected_hit(caller.tokens, len(caller.tokens))
        free, room = self.free_slots(), self.free_slots() + len(self.idle)
        if not self.moves and not any(core.is_granted(c.id) for c in self.callers):
            # No lease will end: slots kept by swapped leases can be taken.
            room += sum(core.state_slot(c.id) != NO_SLOT for c in self.callers if c is not caller)
        known = set(core.onloads(caller.id))
        try:
            expected = core.can_allocate(caller.id, len(caller.tokens))
            granted = core.allocate(caller.id, len(caller.tokens))
        except RequestTooLarge:
            return
        assert bool(granted) == expected
        self.forget_dropped()  # blocks that were evicted for it
        if not granted:
            assert core.state_slot(caller.id) == before
            return
        assert room > 0 or before != NO_SLOT
        caller.failed, caller.epoch = False, self.epoch
        caller.computed = core.cached_tokens(caller.id)
        slot = core.state_slot(caller.id)
        if not swapped:
            assert caller.computed == len(hit)
        self.note_state(caller, free, before, slot)
        for transfer_id in set(core.onloads(caller.id)) - known:
            if core.is_state_move(transfer_id):
                self.moves[transfer_id] = core.state_move(transfer_id)
                self.content[slot] = GARBAGE

    def note_state(self, caller: Caller, free: int, before: int, slot: int) -> None:
        """Apply the snapshot that was held, evicted or taken over for the lease's slot."""
        moves = [t for t in self.core.onloads(caller.id) if self.core.is_state_move(t)]
        hit = tuple(caller.tokens[: caller.computed])
        if before == NO_SLOT and self.snapshots.get(hit) == slot:  # the only available slot
            assert not moves
            assert self.idle == [hit]
            del self.snapshots[hit]
            self.idle.remove(hit)
            return
        if moves:
            source, target, _ = self.core.state_move(moves[0])
            assert target == slot
            assert source == self.snapshots.get(hit, NO_SLOT)
            if source != NO_SLOT and hit in self.idle:
                self.idle.remove(hit)
        if before == NO_SLOT:
            # Blocks evicted for the grant may have freed slots of snapshots first.
            if slot in self.snapshots.values():
                self.take_slot(0)
            assert slot not in self.snapshots.values()

    @precondition(lambda self: self.granted())
    @rule(which=pick, more=st.integers(1, 5), save=st.booleans())
    def compute(self, which: int, more: int, save: bool) -> None:
        """Run a step of the model; the caller ends it at a block border to save the state."""
        caller = self.pick_caller(which, granted=True)
        assert caller is not None
        self.compute_for(caller, more, save)

    def compute_for(self, caller: Caller, more: int, save: bool) -> None:
        if self.core.onloads(caller.id):
            return
        slot = self.core.state_slot(caller.id)
        if caller.failed:
            with pytest.raises(LeaseError):
                self.core.recompute_from(caller.id)
            self.core.commit(caller.id, len(caller.tokens), self.step)
            return
        assert self.content[slot] == tuple(caller.tokens[: caller.computed])
        end = min(caller.computed + more, len(caller.tokens))
        border = end // self.bt * self.bt
        if save and border > caller.computed:
            end = border
        caller.computed = end
        self.content[slot] = tuple(caller.tokens[:end])
        self.core.commit(caller.id, end, self.step)
        if save and end and end % self.bt == 0:
            self.save(caller)

    def save(self, caller: Caller) -> None:
        prefix = tuple(caller.tokens[: caller.computed])
        free = self.free_slots()
        source, target = self.core.snapshot(caller.id, caller.computed, self.step)
        if prefix in self.snapshots:
            assert target == NO_SLOT
            if caller.epoch == self.epoch:
                self.touch(prefix)
            return
        if target == NO_SLOT:
            assert (
                caller.epoch != self.epoch
                or prefix not in self.indexed()
                or not (free or self.idle)
            )
            return
        assert source == self.core.state_slot(caller.id)
        self.take_slot(free)
        self.content[target] = self.content[source]
        self.snapshots[prefix] = target
        self.idle.append(prefix)

    @precondition(lambda self: self.granted())
    @rule(which=pick)
    def bad_snapshots(self, which: int) -> None:
        caller = self.pick_caller(which, granted=True)
        if caller is None:
            return
        computed = self.core.computed_tokens(caller.id)
        for num_tokens in {0, computed - 1, computed + self.bt, len(caller.tokens) + 9}:
            with pytest.raises(LeaseError):
                self.core.snapshot(caller.id, num_tokens, self.step)
        if computed:
            with pytest.raises(LeaseError):
                self.core.truncate(caller.id, computed - 1, self.step)

    @precondition(lambda self: self.callers)
    @rule(which=pick)
    def release(self, which: int) -> None:
        caller = self.callers.pop(which % len(self.callers))
        self.core.release(caller.id, self.step)
        self.core.take_abandoned()

    @precondition(lambda self: self.granted())
    @rule(which=pick)
    def preempt(self, which: int) -> None:
        caller = self.pick_caller(which, granted=True)
        if caller is not None:
            self.core.retract(caller.id, self.step)
            caller.computed, caller.failed = 0, False

    @precondition(lambda self: self.granted())
    @rule(which=pick)
    def swap_out(self, which: int) -> None:
        caller = self.pick_caller(which, granted=True)
        if caller is None or self.core.onloads(caller.id) or caller.failed:
            return
        if not self.core.saving(caller.id) and self.core.swap_out(caller.id, self.step):
            slot = self.core.state_slot(caller.id)
            assert self.content[slot] == tuple(caller.tokens[: caller.computed])

    @precondition(lambda self: len(self.callers) < MAX_LEASES and self.granted())
    @rule(which=pick)
    def fork(self, which: int) -> None:
        caller = self.pick_caller(which, granted=True)
        if caller is None or self.core.onloads(caller.id) or caller.failed:
            return
        room = self.free_slots() + len(self.idle)
        child_id, *_ = self.core.fork(caller.id, self.step)
        self.forget_dropped()
        if not child_id:
            return
        assert room > 0
        slot = self.core.state_slot(child_id)
        if slot in self.snapshots.values():
            self.take_slot(0)
        child = Caller(child_id, list(caller.tokens), caller.epoch)
        child.computed = caller.computed
        self.content[slot] = self.content[self.core.state_slot(caller.id)]
        self.callers.append(child)

    # --- pins ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.pins) < 2)
    @rule(tokens=prompts)
    def pin(self, tokens: list[int]) -> None:
        """Pin a hit with its snapshot; the pin has no slot."""
        core = self.core
        lease_id, *_ = core.match(np.array(tokens, np.int32))
        hit = self.expected_hit(tokens, len(tokens))
        self.touch(hit)
        core.hold_only(lease_id)
        granted = hit and core.allocate(lease_id, len(hit))
        self.forget_dropped()
        if not granted:
            core.release(lease_id)
            return
        self.pins.append((lease_id, self.snapshots[hit]))
        if hit in self.idle:
            self.idle.remove(hit)

    @precondition(lambda self: self.pins)
    @rule(which=pick)
    def unpin(self, which: int) -> None:
        lease_id, slot = self.pins.pop(which % len(self.pins))
        self.core.release(lease_id, self.step)
        self.core.take_abandoned()
        self.let_go(slot)

    # --- everything else ------------------------------------------------------------------------

    def transfers(self) -> list[int]:
        ids = {t for c in self.callers for t in self.core.onloads(c.id)}
        ids |= {t for lease_id, _ in self.pins for t in self.core.onloads(lease_id)}
        ids |= {self.core.swap_transfer(c.id) for c in self.callers} - {0}
        return sorted(ids | set(self.moves))

    @precondition(lambda self: self.transfers())
    @rule(which=pick, outcome=st.sampled_from([Outcome.DONE] * 4 + [Outcome.FAILED]))
    def complete(self, which: int, outcome: Outcome) -> None:
        ids = self.transfers()
        transfer_id = ids[which % len(ids)]
        joined = [c for c in self.callers if transfer_id in self.core.onloads(c.id)]
        if transfer_id in self.moves:
            source, target, after_step = self.moves[transfer_id]
            if after_step > self.finished:
                return
            del self.moves[transfer_id]
            if outcome == Outcome.DONE:
                self.content[target] = () if source < 0 else self.content[source]
            self.let_go(source)
        elif self.core.transfer(transfer_id)[2] > self.finished:
            return
        self.core.complete(transfer_id, outcome)
        if outcome == Outcome.FAILED:
            for caller in joined:
                caller.failed = True
                assert self.core.cached_tokens(caller.id) == 0
        self.forget_dropped()

    @rule()
    def back_up(self) -> None:
        transfer_id = self.core.take_backups()
        if transfer_id:
            self.core.finish_step(self.step)
            self.finished, self.step = self.step, self.step + 1
            self.core.complete(transfer_id, Outcome.DONE)
        self.forget_dropped()  # host blocks that were evicted

    @rule()
    def close_step(self) -> None:
        self.finished, self.step = self.step, self.step + 1
        self.core.finish_step(self.finished)

    @rule(blocks=st.integers(1, 4), on_host=st.booleans())
    def evict(self, blocks: int, on_host: bool) -> None:
        (self.core.evict_host if on_host else self.core.evict_device)(blocks)
        self.forget_dropped()

    @rule()
    def reset(self) -> None:
        self.core.reset()
        self.epoch += 1
        assert self.core.statistics().state_snapshots == 0
        self.snapshots.clear()
        self.idle.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.violations() == []
        statistics = self.core.statistics()
        assert statistics.state_snapshots == len(self.snapshots)
        assert statistics.state_free == self.free_slots()
        for prefix, slot in self.snapshots.items():
            assert self.content[slot] == prefix
        for caller in self.callers:
            if self.core.is_swapped(caller.id):
                kept = self.core.computed_tokens(caller.id)
                caller.computed = min(caller.computed, kept)


TestStateSlots = StateMachine.TestCase
TestStateSlots.settings = settings(max_examples=max(settings().max_examples, 200))
