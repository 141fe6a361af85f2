"""Recurrent state with leases, eviction, swaps and failures, compared with a naive model.

The model keeps the snapshots of both tiers (prefix, slot) with the time of their last use, and what
every slot holds: the tokens that its state was computed from. After every rule: ``violations()`` is
empty (I1: slots are free, a snapshot, a lease's or a transfer's), the snapshots are exactly the
model's, so that hits are the deepest of them and victims the oldest, and the state of every lease
whose transfers have ended is that of exactly its computed positions (I3, I4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv._native import STATE_GROUP, Core, EventStream, MoveRoute, Outcome, SavePolicy
from aiokv.base.plan import ID_DTYPE
from aiokv.errors import LeaseError, RequestTooLarge
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

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
        self.is_purged = False


class Tier:
    """Slots of one tier: their contents, and the snapshots, each with the time of its last use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.content: dict[int, Any] = {}
        self.snapshots: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.clock = 0

    def touch(self, prefix: Prefix) -> None:
        if prefix in self.snapshots:
            self.clock += 1
            self.used[prefix] = self.clock

    def attach(self, prefix: Prefix, slot: int) -> None:
        self.snapshots[prefix] = slot
        self.touch(prefix)

    def prefix_of(self, slot: int) -> Prefix | None:
        return next((p for p, saved in self.snapshots.items() if saved == slot), None)

    def idle(self, read: set[int]) -> list[Prefix]:
        """Return the snapshots that can be evicted, the least recently used first."""
        return sorted((p for p, s in self.snapshots.items() if s not in read), key=self.used.get)

    def keep(self, prefixes: set[Prefix]) -> None:
        self.snapshots = {p: slot for p, slot in self.snapshots.items() if p in prefixes}


class StateMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(6, 14),
        host_blocks=st.sampled_from([0, 12]),
        state_slots=st.integers(1, 5),
        leave_tokens=st.integers(1, 2),
    )
    def begin(self, **sizes: int) -> None:
        policy = SavePolicy.WRITE_THROUGH if sizes["host_blocks"] else SavePolicy.NONE
        self.set_up(policy, **sizes, host_state_slots=0)

    def set_up(self, policy: SavePolicy, **sizes: int) -> None:
        self.bt = sizes["block_tokens"]
        self.leave = sizes["leave_tokens"]
        self.core = Core(write_policy=policy, **sizes)
        self.events = EventStream(self.core, MAX_EVENT_BLOCKS)  # violations() compares it
        self.events.drain(1)
        self.saves_all = policy == SavePolicy.WRITE_THROUGH and sizes["host_state_slots"] > 0
        self.device = Tier(sizes["state_slots"])
        self.host = Tier(sizes["host_state_slots"])
        self.queued: set[Prefix] = set()  # to be saved, with write-through
        self.made_in: dict[int, int] = {}  # the step of the snapshot in each slot
        self.moves: dict[int, tuple[int, int, int]] = {}  # source, target, after_step
        self.routes: dict[int, MoveRoute] = {}  # of the moves
        self.callers: list[Caller] = []
        self.pins: list[tuple[int, Tier, int]] = []  # lease, and the snapshot that it holds
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
            is_saved = prefix in self.device.snapshots or prefix in self.host.snapshots
            hit = prefix if is_saved else hit
        return hit

    def touch(self, prefix: Prefix) -> None:
        self.device.touch(prefix)
        self.host.touch(prefix)

    def source_tier(self, transfer_id: int) -> Tier:
        is_from_host = self.routes[transfer_id] == MoveRoute.FROM_HOST
        return self.host if is_from_host else self.device

    def target_tier(self, transfer_id: int) -> Tier:
        return self.host if self.routes[transfer_id] == MoveRoute.TO_HOST else self.device

    def read(self, tier: Tier) -> set[int]:
        """Return the slots whose snapshots a transfer or a pin reads."""
        held = {slot for _, pinned, slot in self.pins if pinned is tier}
        return held | {m[0] for t, m in self.moves.items() if self.source_tier(t) is tier}

    def free_slots(self, tier: Tier) -> int:
        owned = set(tier.snapshots.values()) | self.read(tier)
        owned |= {m[1] for t, m in self.moves.items() if self.target_tier(t) is tier}
        if tier is self.device:
            owned |= {self.core.state_slot(c.id) for c in self.callers}
        return tier.slots - len(owned - {NO_SLOT})

    def idle(self, tier: Tier) -> list[Prefix]:
        return tier.idle(self.read(tier))

    def let_go(self, tier: Tier, slot: int) -> None:
        """Drop a reference to the snapshot, which was used now."""
        prefix = tier.prefix_of(slot)
        if prefix is not None:
            tier.touch(prefix)

    def take_slot(self, tier: Tier, free: int) -> None:
        """Evict the oldest idle snapshot when no slot is free."""
        if not free:
            del tier.snapshots[self.idle(tier)[0]]

    def forget_dropped(self) -> None:
        known = self.indexed()
        self.device.keep(known)
        self.host.keep(known)

    def being_saved(self) -> set[int]:
        return {m[0] for t, m in self.moves.items() if self.routes[t] == MoveRoute.TO_HOST}

    def queue(self, prefix: Prefix) -> None:
        """Note a use that makes the write policy save the snapshot."""
        slot = self.device.snapshots[prefix]
        if prefix not in self.host.snapshots and slot not in self.being_saved():
            self.queued.add(prefix)

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
        hit = self.expected_hit(caller.tokens, len(caller.tokens) * (not caller.is_purged))
        room = self.free_slots(self.device) + len(self.idle(self.device))
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
        caller.failed, caller.epoch = False, -1 if caller.is_purged else self.epoch
        caller.computed = core.cached_tokens(caller.id)
        slot = core.state_slot(caller.id)
        if not swapped:
            assert caller.computed == len(hit) or self.is_shortened(caller.computed, len(hit))
        for transfer_id in set(core.onloads(caller.id)) - known:
            if core.is_move(transfer_id):
                self.begin_move(transfer_id)
        self.note_state(caller, before, slot)

    def is_shortened(self, granted: int, hit: int) -> bool:
        """Return True if a grant may have hit less: blocks of the open step cannot be onloaded to.

        It takes the next snapshot that covers what is left, which the caller checks.
        """
        return self.host.slots > 0 and granted < hit

    def begin_move(self, transfer_id: int) -> None:
        self.moves[transfer_id] = self.move_of(transfer_id)
        self.routes[transfer_id] = self.core.move(transfer_id)[0]
        self.target_tier(transfer_id).content[self.moves[transfer_id][1]] = GARBAGE

    def move_of(self, transfer_id: int) -> tuple[int, int, int]:
        """Return (source, target, after_step) of a move of one slot."""
        _, group, sources, targets, after_step = self.core.move(transfer_id)
        assert group == -1
        (source,), (target,) = (np.frombuffer(ids, ID_DTYPE).tolist() for ids in (sources, targets))
        return source, target, after_step

    def note_state(self, caller: Caller, before: int, slot: int) -> None:
        """Apply the snapshot that was held, evicted or taken over for the lease's slot."""
        moves = [t for t in self.core.onloads(caller.id) if self.core.is_move(t)]
        hit = tuple(caller.tokens[: caller.computed])
        snapshots = self.device.snapshots
        if before == NO_SLOT and snapshots.get(hit) == slot:  # the only available slot
            assert not moves
            assert self.idle(self.device) == [hit]
            del snapshots[hit]
            return
        if moves:
            source, target, _ = self.moves[moves[0]]
            assert target == slot
            tier = self.device if hit in snapshots else self.host
            assert source == tier.snapshots.get(hit, NO_SLOT)
            if source != NO_SLOT:
                assert self.source_tier(moves[0]) is tier
            if hit in snapshots:
                self.queue(hit)
        if before == NO_SLOT:
            # Blocks evicted for the grant may have freed slots of snapshots first.
            if slot in snapshots.values():
                self.take_slot(self.device, 0)
            assert slot not in snapshots.values()

    @precondition(lambda self: self.granted())
    @rule(which=pick, more=st.integers(1, 5), save=st.booleans())
    def compute(self, which: int, more: int, save: bool) -> None:
        """Run a step of the model; the caller ends it at a block boundary to save the state."""
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
        assert self.device.content[slot] == tuple(caller.tokens[: caller.computed])
        end = min(caller.computed + more, len(caller.tokens))
        boundary = end // self.bt * self.bt
        if save and boundary > caller.computed:
            end = boundary
        caller.computed = end
        self.device.content[slot] = tuple(caller.tokens[:end])
        self.core.commit(caller.id, end, self.step)
        if save and end and end % self.bt == 0:
            self.save(caller)

    def save(self, caller: Caller) -> None:
        prefix = tuple(caller.tokens[: caller.computed])
        free, idle = self.free_slots(self.device), self.idle(self.device)
        source, target = self.core.snapshot(caller.id, caller.computed, self.step)
        if caller.epoch == self.epoch:
            self.touch(prefix)
        if prefix in self.device.snapshots:
            assert target == NO_SLOT
            return
        if target == NO_SLOT:
            assert caller.epoch != self.epoch or prefix not in self.indexed() or not (free or idle)
            return
        assert source == self.core.state_slot(caller.id)
        self.take_slot(self.device, free)
        self.device.content[target] = self.device.content[source]
        self.device.attach(prefix, target)
        self.made_in[target] = self.step
        self.queue(prefix)

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
            assert self.device.content[slot] == tuple(caller.tokens[: caller.computed])

    @precondition(lambda self: len(self.callers) < MAX_LEASES and self.granted())
    @rule(which=pick)
    def fork(self, which: int) -> None:
        caller = self.pick_caller(which, granted=True)
        if caller is None or self.core.onloads(caller.id) or caller.failed:
            return
        room = self.free_slots(self.device) + len(self.idle(self.device))
        child_id, *_ = self.core.fork(caller.id, self.step)
        self.forget_dropped()
        if not child_id:
            return
        assert room > 0
        slot = self.core.state_slot(child_id)
        if slot in self.device.snapshots.values():
            self.take_slot(self.device, 0)
        child = Caller(child_id, list(caller.tokens), caller.epoch)
        child.is_purged = caller.is_purged
        child.computed = caller.computed
        content = self.device.content
        content[slot] = content[self.core.state_slot(caller.id)]
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
        held = tuple(tokens[: core.cached_tokens(lease_id)])
        assert held == hit or self.is_shortened(len(held), len(hit))
        if not held:
            core.release(lease_id)
            return
        tier = self.device if held in self.device.snapshots else self.host
        self.pins.append((lease_id, tier, tier.snapshots[held]))

    @precondition(lambda self: self.pins)
    @rule(which=pick)
    def unpin(self, which: int) -> None:
        lease_id, tier, slot = self.pins.pop(which % len(self.pins))
        self.core.release(lease_id, self.step)
        self.core.take_abandoned()
        self.let_go(tier, slot)

    # --- everything else ------------------------------------------------------------------------

    def transfers(self) -> list[int]:
        ids = {t for c in self.callers for t in self.core.onloads(c.id)}
        ids |= {t for lease_id, _, _ in self.pins for t in self.core.onloads(lease_id)}
        ids |= {self.core.swap_transfer(c.id) for c in self.callers} - {0}
        return sorted(ids | set(self.moves))

    @precondition(lambda self: self.transfers())
    @rule(which=pick, outcome=st.sampled_from([Outcome.DONE] * 4 + [Outcome.FAILED]))
    def complete(self, which: int, outcome: Outcome) -> None:
        ids = self.transfers()
        transfer_id = ids[which % len(ids)]
        joined = [c for c in self.callers if transfer_id in self.core.onloads(c.id)]
        if transfer_id in self.moves:
            if self.moves[transfer_id][2] > self.finished:
                return
            self.end_move(transfer_id, outcome)
        elif self.core.transfer(transfer_id)[2] > self.finished:
            return
        self.core.complete(transfer_id, outcome)
        if outcome == Outcome.FAILED:
            for caller in joined:
                caller.failed = True
                assert self.core.cached_tokens(caller.id) == 0
        self.forget_dropped()

    def end_move(self, transfer_id: int, outcome: Outcome) -> None:
        source_tier, target_tier = self.source_tier(transfer_id), self.target_tier(transfer_id)
        source, target, _ = self.moves.pop(transfer_id)
        route = self.routes.pop(transfer_id)
        prefix = source_tier.prefix_of(source)
        if outcome == Outcome.DONE:
            target_tier.content[target] = () if source < 0 else source_tier.content[source]
        if route == MoveRoute.TO_HOST:
            if outcome == Outcome.DONE and prefix is not None:
                self.host.attach(prefix, target)
            return
        self.let_go(source_tier, source)
        if route == MoveRoute.FROM_HOST and outcome == Outcome.FAILED and prefix is not None:
            del self.host.snapshots[prefix]

    @rule()
    def save_states(self) -> None:
        """Begin all saves of snapshots that are possible now."""
        while True:
            free, idle = self.free_slots(self.host), self.idle(self.host)
            waiting = {
                prefix
                for prefix in self.queued & set(self.device.snapshots)
                if self.made_in[self.device.snapshots[prefix]] <= self.finished
            }
            transfer_id = self.core.take_group_save()
            if not transfer_id:
                assert not (self.saves_all and waiting and (free or idle))
                return
            source, target, after_step = self.move_of(transfer_id)
            prefix = self.device.prefix_of(source)
            assert prefix in self.queued
            assert prefix not in self.host.snapshots
            assert source not in self.being_saved()
            assert after_step <= self.finished
            self.take_slot(self.host, free)
            assert target not in set(self.host.snapshots.values()) | self.read(self.host)
            self.queued.discard(prefix)
            self.begin_move(transfer_id)

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
        self.note_reset()

    @rule(tokens=prompts, verb=st.sampled_from(["demote", "forget"]))
    def prefer(self, tokens: list[int], verb: str) -> None:
        getattr(self.core, verb)(np.array(tokens, np.int32), "", [])
        self.forget_dropped()

    @rule()
    def purge(self) -> None:
        """Open leases neither hit nor publish any more."""
        self.core.purge("")
        for caller in self.callers:
            caller.is_purged, caller.epoch = True, -1
        self.note_reset()

    def note_reset(self) -> None:
        assert self.core.group_statistics(STATE_GROUP).device.cached == 0
        self.device.snapshots.clear()
        self.host.snapshots.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "core"):
            return
        assert self.core.violations() == []
        statistics = self.core.group_statistics(STATE_GROUP)
        self.queued &= set(self.device.snapshots)
        assert statistics.device.cached == len(self.device.snapshots)
        assert statistics.device.free == self.free_slots(self.device)
        assert statistics.host.cached == len(self.host.snapshots)
        assert statistics.host.free == self.free_slots(self.host)
        for tier in (self.device, self.host):
            for prefix, slot in tier.snapshots.items():
                assert tier.content[slot] == prefix
        for caller in self.callers:
            if self.core.is_swapped(caller.id):
                kept = self.core.computed_tokens(caller.id)
                caller.computed = min(caller.computed, kept)


class HostStateMachine(StateMachine):
    """Few state slots on the device, so that most hits are restored from the host."""

    @initialize(
        block_tokens=st.integers(1, 2),
        device_blocks=st.integers(8, 24),
        state_slots=st.integers(2, 3),
        host_state_slots=st.integers(1, 5),
        leave_tokens=st.just(1),
        policy=st.sampled_from([SavePolicy.WRITE_THROUGH, SavePolicy.NTH_USE]),
    )
    def begin(self, *, policy: SavePolicy, **sizes: int) -> None:
        self.set_up(policy, **sizes, host_blocks=16)

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(
        requests=st.lists(prompts, min_size=2, max_size=4),
        outcome=st.sampled_from([Outcome.DONE] * 4 + [Outcome.FAILED]),
        stays=st.booleans(),
    )
    def serve_and_save(self, requests: list[list[int]], outcome: Outcome, stays: bool) -> None:
        """Serve requests one by one; copy their blocks and snapshots to the host meanwhile."""
        for tokens in requests:
            self.serve(tokens, False, [self.bt])
            self.back_up()
            self.close_step()
            self.save_states()
            self.holds()
        if stays:
            self.match(requests[0])
            self.allocate_for(self.callers[-1])
        for _ in self.transfers():
            self.complete(0, outcome)
            self.holds()

    @rule(blocks=st.integers(1, 20))
    def evict_and_save(self, blocks: int) -> None:
        self.save_states()
        self.evict(blocks, False)


TestHostStateSlots = HostStateMachine.TestCase
TestStateSlots = StateMachine.TestCase
TestStateSlots.settings = settings(max_examples=max(settings().max_examples, 200))
