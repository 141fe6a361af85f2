"""Preempt with swap, resume and fork among everything else, with the bytes simulated.

After every rule: ``violations()`` is empty (I1-I6), every VALID block that can be matched holds the
KV of exactly its tokens and of the present weights (I4), and so does every lease (I3, I7). A
swapped table is restored completely unless the cache was reset or a copy failed meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv._native import Core, EventStream, Outcome, SavePolicy
from aiokv.errors import LeaseError, RequestTooLarge
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

GARBAGE = ("garbage",)
MAX_LEASES = 5
DEVICE_VALID, HOST_VALID = 1, 4
pick = st.integers(0, 7)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Caller:
    def __init__(self, lease_id: int, tokens: list[int]) -> None:
        self.id = lease_id
        self.tokens = tokens  # of all positions; the first `named` are known to the core
        self.named = len(tokens)
        self.computed = 0
        self.weights = 0
        self.loss_before = 0  # failures and resets when it was swapped


class Moving:
    def __init__(self, device: list[int], host: list[int], is_onload: bool) -> None:
        self.device, self.host, self.is_onload = device, host, is_onload
        self.contents: list[Any] | None = None  # of the sources, once submitted


class SwapMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(4, 10),
        host_blocks=st.integers(0, 10),
        policy=st.sampled_from(list(SavePolicy)),
        low_watermark_blocks=st.sampled_from([0, 3]),
        history_blocks=st.sampled_from([0, 3, 50]),
    )
    def begin(self, **sizes: Any) -> None:
        self.bt: int = sizes["block_tokens"]
        self.host_blocks: int = sizes["host_blocks"]
        self.core = Core(write_policy=sizes.pop("policy"), **sizes)
        self.events = EventStream(self.core, MAX_EVENT_BLOCKS)  # violations() compares it
        self.events.drain(1)
        self.callers: list[Caller] = []
        self.moving: dict[int, Moving] = {}
        self.device: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.weights = 0
        self.losses = 0

    # --- helpers ------------------------------------------------------------------------------

    def states(self) -> tuple[list[Caller], list[Caller], list[Caller]]:
        """Return the leases by state: waiting, granted, and swapping out."""
        waiting = [c for c in self.callers if not self.core.is_granted(c.id)]
        leaving = [c for c in self.callers if self.core.swap_transfer(c.id)]
        granted = [c for c in self.callers if c not in waiting and c not in leaving]
        return waiting, granted, leaving

    def track(self, transfer_id: int) -> None:
        if transfer_id == 0 or transfer_id in self.moving:
            return
        device, host, _ = self.core.transfer(transfer_id)
        is_onload = any(transfer_id in self.core.onloads(c.id) for c in self.callers)
        ids = [np.frombuffer(data, "<i4").tolist() for data in (device, host)]
        self.moving[transfer_id] = Moving(ids[0], ids[1], is_onload)

    def content(self, caller: Caller, index: int, computed: int) -> Any:
        return (caller.weights, tuple(caller.tokens[: min((index + 1) * self.bt, computed)]))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.bt)

    # --- leases -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts)
    def match(self, tokens: list[int]) -> None:
        lease_id, _, _ = self.core.match(np.array(tokens, np.int32))
        self.callers.append(Caller(lease_id, tokens))

    @precondition(lambda self: self.states()[0])
    @rule(which=pick, more=st.integers(0, 3))
    def allocate(self, which: int, more: int) -> None:
        """Allocate for a new lease or for a preempted one."""
        waiting = self.states()[0]
        caller = waiting[which % len(waiting)]
        swapped = self.core.is_swapped(caller.id)
        kept = self.core.computed_tokens(caller.id) if swapped else 0
        num_tokens = max(kept, caller.named) + more
        del caller.tokens[max(kept, caller.named) :]
        caller.tokens += [1] * (num_tokens - len(caller.tokens))
        try:
            expected = self.core.can_allocate(caller.id, num_tokens)
            granted = self.core.allocate(caller.id, num_tokens)
        except RequestTooLarge:
            return
        assert bool(granted) == expected
        if not granted:
            assert self.core.is_swapped(caller.id) == swapped
            return
        cached = self.core.cached_tokens(caller.id)
        if swapped and caller.loss_before == self.losses:
            assert cached == kept
        assert cached <= max(kept, len(caller.tokens))
        caller.computed, caller.weights = cached, self.weights
        onloads = self.core.onloads(caller.id)
        for transfer_id in onloads:
            self.track(transfer_id)
        for index, block in enumerate(self.core.block_table(caller.id).tolist()):
            if index >= self.blocks_for(cached):
                self.device[block] = GARBAGE

    @precondition(lambda self: self.states()[1])
    @rule(which=pick, more=st.integers(1, 4), name=st.integers(0, 3))
    def compute(self, which: int, more: int, name: int) -> None:
        granted = self.states()[1]
        caller = granted[which % len(granted)]
        if self.core.onloads(caller.id):
            return
        position = self.core.recompute_from(caller.id)
        if position >= 0:
            assert position <= caller.computed
            caller.computed = position
        first = caller.computed // self.bt
        caller.computed = min(caller.computed + more, len(caller.tokens))
        table = self.core.block_table(caller.id).tolist()
        for index in range(first, self.blocks_for(caller.computed)):
            self.device[table[index]] = self.content(caller, index, caller.computed)
        names = caller.tokens[caller.named : caller.named + name]
        self.core.append(caller.id, np.array(names, np.int32))
        caller.named += len(names)
        self.core.commit(caller.id, caller.computed)

    @precondition(lambda self: self.states()[1])
    @rule(which=pick, token=st.integers(0, 1))
    def extend(self, which: int, token: int) -> None:
        granted = self.states()[1]
        caller = granted[which % len(granted)]
        old = len(self.core.block_table(caller.id))
        if self.core.extend([caller.id], 1):
            caller.tokens.append(token)
            for block in self.core.block_table(caller.id).tolist()[old:]:
                self.device[block] = GARBAGE

    @precondition(lambda self: self.callers)
    @rule(which=pick, retract=st.booleans())
    def give_back(self, which: int, retract: bool) -> None:
        caller = self.callers[which % len(self.callers)]
        if retract:
            self.core.retract(caller.id)
        else:
            self.callers.remove(caller)
            self.core.release(caller.id)

    # --- swap and fork ------------------------------------------------------------------------

    @precondition(lambda self: self.states()[1])
    @rule(which=pick)
    def preempt(self, which: int) -> None:
        granted = self.states()[1]
        caller = granted[which % len(granted)]
        while saving := self.core.saving(caller.id):
            self.end(saving, self.moving[saving].device)
        before = sorted(self.core.blocks())
        table = self.core.block_table(caller.id).tolist()
        try:
            begun = self.core.swap_out(caller.id)
        except LeaseError:
            begun = False
        caller.loss_before = self.losses
        if begun:
            self.track(self.core.swap_transfer(caller.id))
            for call in (self.core.commit, self.core.truncate):
                try:
                    call(caller.id, 0)
                except LeaseError:
                    continue
                raise AssertionError(f"{call} of a swapped lease")
        else:
            assert sorted(self.core.blocks()) == before
            assert self.core.block_table(caller.id).tolist() == table

    @rule(tokens=prompts, then=st.integers(0, 2))
    def serve_and_leave(self, tokens: list[int], then: int) -> None:
        """Serve a request that may be preempted or forked."""
        if len(self.callers) == MAX_LEASES:
            self.give_back(0, False)
        self.match(tokens)
        caller = self.callers[-1]
        self.allocate(self.states()[0].index(caller), 0)
        if not self.core.is_granted(caller.id) or self.core.onloads(caller.id):
            return
        self.compute(self.states()[1].index(caller), 9, 0)
        if then == 1:
            self.preempt(self.states()[1].index(caller))
        if then == 2 and len(self.callers) < MAX_LEASES:
            self.fork(self.states()[1].index(caller))

    @precondition(lambda self: any(self.core.is_swapped(c.id) for c in self.callers))
    @rule(which=pick, evicted=st.integers(0, 4))
    def come_back(self, which: int, evicted: int) -> None:
        swapped = [c for c in self.callers if self.core.is_swapped(c.id)]
        self.core.evict_device(evicted)
        self.allocate(self.states()[0].index(swapped[which % len(swapped)]), 0)

    @precondition(lambda self: self.states()[1] and len(self.callers) < MAX_LEASES)
    @rule(which=pick)
    def fork(self, which: int) -> None:
        granted = self.states()[1]
        parent = granted[which % len(granted)]
        try:
            lease_id, sources, targets = self.core.fork(parent.id)
        except LeaseError:
            return
        if not lease_id:
            return
        child = Caller(lease_id, list(parent.tokens))
        child.named, child.weights = parent.named, parent.weights
        child.computed = self.core.computed_tokens(lease_id)
        tables = [self.core.block_table(c.id).tolist() for c in (parent, child)]
        for index, block in enumerate(tables[1]):
            if index >= self.blocks_for(child.computed):
                self.device[block] = GARBAGE
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            assert target not in tables[0]
            self.device[target] = self.device[source]
        self.callers.append(child)

    # --- transfers and capacity ---------------------------------------------------------------

    @rule(wanted=st.integers(0, 4))
    def back_up(self, wanted: int) -> None:
        self.track(self.core.take_write_backs(wanted) if wanted else self.core.take_backups())

    @precondition(lambda self: self.moving)
    @rule(which=pick)
    def submit(self, which: int) -> None:
        self.start(sorted(self.moving)[which % len(self.moving)])

    def start(self, transfer_id: int) -> None:
        moving = self.moving[transfer_id]
        if moving.contents is None:
            moving.contents = self.sources(moving)
            self.write(moving, [GARBAGE] * len(moving.device))

    def sources(self, moving: Moving) -> list[Any]:
        if moving.is_onload:
            return [self.host[i] for i in moving.host]
        return [self.device[i] for i in moving.device]

    def write(self, moving: Moving, contents: list[Any]) -> None:
        if moving.is_onload:
            self.device.update(zip(moving.device, contents, strict=True))
        else:
            self.host.update(zip(moving.host, contents, strict=True))

    @precondition(lambda self: self.moving)
    @rule(which=pick, first_bad=st.none() | st.none() | pick)
    def complete(self, which: int, first_bad: int | None) -> None:
        transfer_id = sorted(self.moving)[which % len(self.moving)]
        blocks = self.moving[transfer_id].device
        self.end(transfer_id, blocks if first_bad is None else blocks[: first_bad % len(blocks)])

    def end(self, transfer_id: int, good: list[int]) -> None:
        """I3: blocks of a transfer were not reallocated while it ran."""
        self.start(transfer_id)
        moving = self.moving.pop(transfer_id)
        assert moving.contents is not None
        assert self.sources(moving) == moving.contents
        bad = len(moving.device) - len(good)
        self.write(moving, moving.contents[: len(good)] + [GARBAGE] * bad)
        self.losses += bad > 0
        self.core.complete(transfer_id, Outcome.FAILED if bad else Outcome.DONE, len(good))

    @precondition(lambda self: any(m.contents is None for m in self.moving.values()))
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        waiting = sorted(t for t, m in self.moving.items() if m.contents is None)
        transfer_id = waiting[which % len(waiting)]
        del self.moving[transfer_id]
        self.losses += 1
        self.core.complete(transfer_id, Outcome.CANCELLED)

    @rule(blocks=st.integers(1, 9), host=st.booleans())
    def evict(self, blocks: int, host: bool) -> None:
        (self.core.evict_host if host else self.core.evict_device)(blocks)

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 0:
            self.core.reset()
            self.weights += 1
            self.losses += 1

    @rule(tokens=prompts, verb=st.sampled_from(["demote", "forget"]))
    def prefer(self, tokens: list[int], verb: str) -> None:
        self.losses += getattr(self.core, verb)(np.array(tokens, np.int32), "", [])

    @rule(really=st.integers(0, 9))
    def purge(self, really: int) -> None:
        if really == 0:
            self.core.purge("")
            self.losses += 1

    # --- invariants ---------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        assert self.core.violations() == []

    @invariant()
    def blocks_hold_their_tokens(self) -> None:
        for _, prefix, device, host, flags, _, _ in self.core.blocks():
            expected = (self.weights, tuple(np.frombuffer(prefix, np.int32).tolist()))
            if flags & DEVICE_VALID:
                assert self.device[device] == expected
            if flags & HOST_VALID:
                assert self.host[host] == expected

    @invariant()
    def leases_hold_their_tokens(self) -> None:
        """Check leases up to the first position to recompute, once no transfer writes them."""
        for caller in self.callers:
            if not self.core.is_granted(caller.id) or self.core.onloads(caller.id):
                continue
            computed = min(caller.computed, self.core.computed_tokens(caller.id))
            table = self.core.block_table(caller.id).tolist()
            for index in range(self.blocks_for(computed)):
                weights, tokens = self.device[table[index]]
                expected = self.content(caller, index, computed)
                assert (weights, tokens[: len(expected[1])]) == expected

    def teardown(self) -> None:
        """After all releases, no block is held."""
        if not hasattr(self, "core"):
            return
        for transfer_id in sorted(self.moving):
            self.end(transfer_id, self.moving[transfer_id].device)
        for caller in self.callers:
            self.core.release(caller.id)
        self.core.reset()
        statistics = self.core.statistics()
        assert self.core.violations() == []
        assert statistics.attention.device.free == self.core.device_blocks
        assert statistics.attention.host.free == self.host_blocks


TestSwap = SwapMachine.TestCase
