"""Leases on device blocks that a server owns, among everything else, with real bytes.

After every rule: ``violations()`` is empty; every host block that can be matched holds the KV of
exactly its tokens and of the present weights, byte for byte; so do the blocks of every lease; a
lease is not idle while a transfer that was begun for it is in flight. At rest, all leases are idle,
nothing is pending, and, unless something was lost, all committed blocks are cached.

The server may be careless: it reuses blocks that saves still read. Then an onload into such a block
is refused, and a save of one that is computed anew is not cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv._native import Core, EventStream, LeaseState, Outcome, SavePolicy, StoreConfig
from aiokv.errors import LeaseError, UsageError
from tests.models.external_device import BLOCK_BYTES, GARBAGE, ExternalDevice, block_bytes
from tests.property.event_subscriber import MAX_EVENT_BLOCKS

MAX_LEASES = 6
DEVICE_VALID, HOST_VALID = 1, 4
POLICIES = (SavePolicy.WRITE_THROUGH, SavePolicy.NTH_USE, SavePolicy.NONE)
pick = st.integers(0, 7)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Caller:
    def __init__(self, lease_id: int, tokens: list[int], writes: bool) -> None:
        self.id = lease_id
        self.tokens = tokens
        self.writes = writes
        self.table: list[int] = []
        self.computed = 0  # written to the table
        self.weights = 0
        self.is_granted = False
        self.losses = 0  # when it was granted


class Moving:
    def __init__(self, device: list[int], host: list[int], lease_ids: set[int], *, onload: bool):
        self.device, self.host, self.is_onload = device, host, onload
        self.lease_ids = lease_ids  # that have named the device blocks
        self.seen: Any = None  # bytes of the sources, once the copy has begun


class ExternalMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(6, 20),
        host_blocks=st.integers(1, 16),
        history_blocks=st.sampled_from([0, 4, 50]),
        min_onload_blocks=st.sampled_from([0, 0, 2]),
        write_policy=st.sampled_from([POLICIES[0], *POLICIES]),
        store_queue=st.sampled_from([0, 2, 50]),
    )
    def begin(self, store_queue: int, **sizes: Any) -> None:
        self.bt: int = sizes["block_tokens"]
        self.policy = sizes["write_policy"]
        stores = StoreConfig(queue_blocks=store_queue) if store_queue else None
        self.core = Core(external_device=True, stores=stores, **sizes)
        self.events = EventStream(self.core, MAX_EVENT_BLOCKS)  # violations() compares it
        self.events.drain(1)
        self.device = ExternalDevice(sizes["device_blocks"])
        self.host = np.tile(GARBAGE, (sizes["host_blocks"], 1))
        self.callers: list[Caller] = []
        self.moving: dict[int, Moving] = {}
        self.storing: dict[int, tuple[list[int], Any]] = {}  # host ids and their bytes
        # Device id -> leases whose saves of it are queued; empty where that is not certain.
        self.queued: dict[int, set[int]] = {}
        self.committed: list[tuple[int, ...]] = []  # prefixes that must be cached at rest
        self.weights = 0
        self.losses = 0  # failures, resets, evictions, blocks that were skipped or overwritten

    # --- helpers ------------------------------------------------------------------------------

    def content(self, caller: Caller, index: int) -> Any:
        """KV of a block of a lease: of the prefix that ends with it, as far as it is computed."""
        end = min((index + 1) * self.bt, caller.computed)
        return block_bytes(caller.weights, caller.tokens[:end])

    def granted(self, *, assigned: bool = False) -> list[Caller]:
        return [c for c in self.callers if c.is_granted and (c.table or not assigned)]

    def is_failed(self, caller: Caller) -> bool:
        return bool(self.core.lease_state(caller.id) == LeaseState.FAILED)

    def used_ids(self, *, reads: bool) -> set[int]:
        ids = {i for m in self.moving.values() if m.is_onload != reads for i in m.device}
        return ids | set(self.queued) if reads else ids

    def note_queued(self, caller: Caller) -> None:
        for block in self.core.take_queued_ids().tolist():
            self.queued[block] = set() if block in self.queued else {caller.id}

    def note_overwritten(self, blocks: list[int]) -> None:
        """Note that leases will compute in blocks, of which saves may still read some."""
        if self.used_ids(reads=True) & set(blocks):
            self.losses += 1
            self.queued = {block: set() for block in self.queued}
        self.core.settle()

    # --- leases -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.callers) < MAX_LEASES)
    @rule(tokens=prompts, writes=st.sampled_from([True, True, True, False]))
    def match(self, tokens: list[int], writes: bool) -> None:
        lease_id, device_blocks, _ = self.core.match(np.array(tokens, np.int32), writes=writes)
        assert device_blocks == 0
        self.callers.append(Caller(lease_id, tokens, writes))

    @precondition(lambda self: any(not c.is_granted for c in self.callers))
    @rule(which=pick, fewer=st.sampled_from([0, 0, 2]))
    def allocate(self, which: int, fewer: int) -> None:
        matched = [c for c in self.callers if not c.is_granted]
        caller = matched[which % len(matched)]
        num_tokens = max(len(caller.tokens) - fewer, 1)
        if -(-num_tokens // self.bt) > len(self.device.memory):
            return
        assert self.core.can_allocate(caller.id, num_tokens)
        assert self.core.allocate(caller.id, num_tokens) == 1
        caller.is_granted, caller.weights, caller.losses = True, self.weights, self.losses
        caller.computed = 0
        assert self.core.cached_tokens(caller.id) <= num_tokens

    @precondition(lambda self: any(not c.table for c in self.granted()))
    @rule(which=pick, shared=st.integers(0, 4), more=st.integers(0, 2))
    def assign(self, which: int, shared: int, more: int) -> None:
        """Name the first blocks: leading ones of the server's cache, the others free ones."""
        waiting = [c for c in self.granted() if not c.table]
        caller = waiting[which % len(waiting)]
        cached = self.core.cached_tokens(caller.id) // self.bt
        known: list[int] = []
        for index in range(min(shared, len(caller.tokens) // self.bt)):
            prefix = caller.tokens[: (index + 1) * self.bt]
            block = self.device.find(block_bytes(caller.weights, prefix))
            if block is None or caller.weights != self.weights:
                break
            known.append(block)
        fresh = [b for b in self.device.free if b not in known][
            : max(cached - len(known), 0) + more
        ]
        if len(known) + len(fresh) < cached or not known + fresh:
            return
        ids, computed = known + fresh, len(known) * self.bt
        before = (self.core.block_table(caller.id).tolist(), self.core.cached_tokens(caller.id))
        targets = set(ids[len(known) : cached])
        in_use = self.used_ids(reads=True) | self.used_ids(reads=False)
        written = self.used_ids(reads=False) & set(ids[len(known) :])
        try:
            self.core.assign(caller.id, np.array(ids, np.int32), computed)
        except LeaseError:  # the hit was dropped after the grant
            assert len(known) < cached
            assert caller.losses != self.losses
            return
        except UsageError:
            assert targets & in_use or written
            now = self.core.block_table(caller.id).tolist(), self.core.cached_tokens(caller.id)
            assert now == before
            return
        assert not targets & in_use - set(self.queued)
        assert not written
        self.note_overwritten(fresh)
        caller.table = ids
        self.device.share(known)
        self.device.take(fresh)
        caller.computed = max(cached * self.bt, computed)
        for block in fresh[max(cached - len(known), 0) :]:
            self.device.memory[block] = GARBAGE
        for transfer_id in self.core.onloads(caller.id):
            self.track(transfer_id, {caller.id}, onload=True)
        if len(known) < cached:
            assert self.core.onloads(caller.id)

    @precondition(lambda self: self.granted(assigned=True))
    @rule(which=pick, more=st.integers(1, 4), token=st.integers(0, 1))
    def compute(self, which: int, more: int, token: int) -> None:
        """Compute positions, with new blocks and generated tokens where they are needed."""
        callers = self.granted(assigned=True)
        caller = callers[which % len(callers)]
        if self.core.onloads(caller.id):
            return
        position = self.core.recompute_from(caller.id)
        if position >= 0:
            assert position <= caller.computed
            caller.computed = position
        end = caller.computed + more
        named = [token] * max(end - len(caller.tokens), 0)
        missing = -(-end // self.bt) - len(caller.table)
        if missing > 0:
            fresh = self.device.free[:missing]
            if len(fresh) < missing or set(fresh) & self.used_ids(reads=False):
                return
            self.core.assign(caller.id, np.array(fresh, np.int32))
            self.note_overwritten(fresh)
            caller.table += fresh
            self.device.take(fresh)
        if named:
            self.core.append(caller.id, np.array(named, np.int32))
            caller.tokens += named
        first = caller.computed // self.bt
        caller.computed = end
        for index in range(first, -(-end // self.bt)):
            self.device.forget(caller.table[index])
            self.device.memory[caller.table[index]] = self.content(caller, index)
        self.commit(caller)

    def commit(self, caller: Caller) -> None:
        self.core.commit(caller.id, caller.computed)
        self.note_queued(caller)
        if caller.weights != self.weights:
            return
        for index in range(caller.computed // self.bt):
            self.device.cache(self.content(caller, index), caller.table[index])
            if caller.writes and self.policy == SavePolicy.WRITE_THROUGH:
                self.committed.append(tuple(caller.tokens[: (index + 1) * self.bt]))

    @precondition(lambda self: self.granted(assigned=True))
    @rule(which=pick, kept=st.none() | pick)
    def retire(self, which: int, kept: int | None) -> None:
        """Drop the refs of a lease; copy what host memory lacks, except for some leading blocks."""
        callers = self.granted(assigned=True)
        caller = callers[which % len(callers)]
        loads = self.core.onloads(caller.id)
        before = self.core.block_table(caller.id).tolist(), self.core.cached_tokens(caller.id)
        retires = self.core.retire(caller.id)
        assert not (retires and (loads or not caller.writes or self.is_failed(caller)))
        now = self.core.block_table(caller.id).tolist(), self.core.cached_tokens(caller.id)
        assert now == before
        if kept is None or not caller.computed == len(caller.table) * self.bt <= len(caller.tokens):
            return
        free = self.core.statistics().attention.host.free
        none = np.array([], np.int32)
        queued = self.core.commit_blocks(caller.id, none, none, None, 0, kept)
        if kept >= len(caller.table):
            assert queued <= free
        self.losses += kept > 0
        self.note_queued(caller)

    @precondition(lambda self: self.granted(assigned=True))
    @rule(which=pick, less=st.integers(1, 4))
    def truncate(self, which: int, less: int) -> None:
        callers = self.granted(assigned=True)
        caller = callers[which % len(callers)]
        # The server's cache may share committed blocks that no save has indexed.
        length = max(len(caller.tokens) - less, caller.computed // self.bt * self.bt)
        before = self.core.block_table(caller.id).tolist()
        if length > len(caller.table) * self.bt:
            return
        try:
            self.core.truncate(caller.id, length)
        except LeaseError:
            assert self.core.block_table(caller.id).tolist() == before
            return
        blocks = -(-length // self.bt)
        self.device.give_up(caller.id, caller.table[blocks:])
        del caller.table[blocks:]
        del caller.tokens[length:]
        caller.computed = min(caller.computed, length)
        if not caller.tokens:  # a lease without tokens is of no more use here
            self.give_back(self.callers.index(caller), False)

    @precondition(lambda self: self.callers)
    @rule(which=pick, retract=st.booleans())
    def give_back(self, which: int, retract: bool) -> None:
        caller = self.callers[which % len(self.callers)]
        self.device.give_up(caller.id, caller.table)
        caller.table = []
        if retract:
            self.core.retract(caller.id)
            caller.is_granted = False
        else:
            self.callers.remove(caller)
            self.core.release(caller.id)

    @rule(tokens=prompts, release=st.booleans(), shared=st.sampled_from([0, 0, 4]))
    def serve(self, tokens: list[int], release: bool, shared: int) -> None:
        """Serve a request as far as the device has room for it."""
        if len(self.callers) == MAX_LEASES:
            self.give_back(0, False)
        self.device.collect(self.core.is_idle)
        self.match(tokens, True)
        caller = self.callers[-1]
        self.allocate([c for c in self.callers if not c.is_granted].index(caller), 0)
        if not caller.is_granted:
            return
        self.assign([c for c in self.granted() if not c.table].index(caller), shared, 2)
        if caller.table and not self.core.onloads(caller.id):
            self.compute(self.granted(assigned=True).index(caller), 4, 1)
        if release and caller in self.callers:
            self.give_back(self.callers.index(caller), False)

    @rule(which=pick, more=st.integers(1, 3), rests=st.booleans(), fails=st.none() | pick)
    def serve_again(self, which: int, more: int, rests: bool, fails: int | None) -> None:
        """Serve a prompt that begins with committed blocks, and end its onload."""
        if rests:
            self.rest()
        if not self.committed:
            return
        prefix = self.committed[-1 - which % len(self.committed)]
        self.serve([*prefix, *[0] * more], False, 0)
        onloads = [t for t, moving in self.moving.items() if moving.is_onload]
        for transfer_id in onloads[-1:]:
            blocks = len(self.moving[transfer_id].device)
            self.end(transfer_id, blocks if fails is None else fails % blocks)

    # --- the server -----------------------------------------------------------------------------

    @rule(careless=st.sampled_from([False, False, True]))
    def collect(self, careless: bool) -> None:
        if careless:
            self.device.hurry()
        else:
            self.device.collect(self.core.is_idle)

    # --- transfers ------------------------------------------------------------------------------

    def track(self, transfer_id: int, lease_ids: set[int], *, onload: bool) -> None:
        device, host, _ = (
            np.frombuffer(ids, "<i4").tolist() if isinstance(ids, bytes) else ids
            for ids in self.core.transfer(transfer_id)
        )
        self.moving[transfer_id] = Moving(device, host, lease_ids, onload=onload)

    @rule(really=st.sampled_from([True, True, True, False]))
    def save(self, really: bool) -> None:
        """Begin the saves that are queued, or give them up."""
        if really:
            wanted = set(self.queued)
            transfer_id = self.core.take_backups()
            if transfer_id:
                device = np.frombuffer(self.core.transfer(transfer_id)[0], "<i4").tolist()
                assert set(device) <= wanted
                lease_ids = set().union(*(self.queued[i] for i in device))
                self.track(transfer_id, lease_ids, onload=False)
                wanted -= set(device)
            self.losses += bool(wanted)
        else:
            self.core.give_up_saves()
            self.losses += 1
        self.queued.clear()
        self.core.settle()

    @precondition(lambda self: self.moving)
    @rule(which=pick)
    def start(self, which: int) -> None:
        self.begin_copy(self.moving[sorted(self.moving)[which % len(self.moving)]])

    def begin_copy(self, moving: Moving) -> None:
        if moving.seen is not None:
            return
        moving.seen = self.sources(moving)
        targets = self.device.memory if moving.is_onload else self.host
        targets[moving.device if moving.is_onload else moving.host] = GARBAGE

    def sources(self, moving: Moving) -> Any:
        if moving.is_onload:
            return self.host[moving.host].copy()
        return self.device.memory[moving.device].copy()

    @precondition(lambda self: self.moving)
    @rule(which=pick, first_bad=st.none() | st.none() | pick)
    def complete(self, which: int, first_bad: int | None) -> None:
        transfer_id = sorted(self.moving)[which % len(self.moving)]
        blocks = len(self.moving[transfer_id].device)
        self.end(transfer_id, blocks if first_bad is None else first_bad % blocks)

    def end(self, transfer_id: int, good: int) -> None:
        """Each copied block has bytes of two moments: when the copy began, and when it ended."""
        moving = self.moving[transfer_id]
        self.begin_copy(moving)
        torn = self.sources(moving)
        half = BLOCK_BYTES // 2
        if moving.is_onload:
            assert (torn == moving.seen).all()  # I3: the host blocks were not reused
        torn[:, :half] = moving.seen[:, :half]
        torn[good:] = GARBAGE
        targets = self.device.memory if moving.is_onload else self.host
        targets[moving.device if moving.is_onload else moving.host] = torn
        del self.moving[transfer_id]
        failed = good < len(moving.device)
        self.losses += failed
        self.core.complete(transfer_id, Outcome.FAILED if failed else Outcome.DONE, good)
        self.note_settled()

    @precondition(lambda self: any(m.seen is None for m in self.moving.values()))
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        waiting = sorted(t for t, m in self.moving.items() if m.seen is None)
        transfer_id = waiting[which % len(waiting)]
        del self.moving[transfer_id]
        self.losses += 1
        self.core.complete(transfer_id, Outcome.CANCELLED)
        self.note_settled()

    def note_settled(self) -> None:
        """The end of an onload may have queued blocks."""
        for block in self.core.take_queued_ids().tolist():
            owners = {c.id for c in self.callers if block in c.table}
            known = block not in self.queued and len(owners) == 1
            self.queued[block] = owners if known else set()

    @rule()
    def store(self) -> None:
        """Begin a save to the stores, which reads host memory until its end."""
        if (transfer_id := self.core.take_saves()) != 0:
            ids = np.frombuffer(self.core.store_transfer(transfer_id)[1], "<i4").tolist()
            self.storing[transfer_id] = ids, self.host[ids].copy()

    @precondition(lambda self: self.storing)
    @rule(which=pick, refuses=st.booleans())
    def stored(self, which: int, refuses: bool) -> None:
        transfer_id = sorted(self.storing)[which % len(self.storing)]
        ids, seen = self.storing.pop(transfer_id)
        assert (self.host[ids] == seen).all()  # I3: the host blocks were not reused
        self.core.complete(transfer_id, Outcome.FAILED if refuses else Outcome.DONE)
        self.core.settle()

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks: int) -> None:
        self.losses += self.core.evict_host(blocks) > 0

    @rule(tokens=prompts, verb=st.sampled_from(["demote", "forget"]))
    def prefer(self, tokens: list[int], verb: str) -> None:
        self.losses += getattr(self.core, verb)(np.array(tokens, np.int32), "", [])

    @rule(really=st.integers(0, 9))
    def reset(self, really: int) -> None:
        if really == 0:
            self.core.reset()
            self.core.settle()
            self.weights += 1
            self.losses += 1
            self.queued.clear()
            self.committed.clear()

    @rule(really=st.integers(0, 9))
    def purge(self, really: int) -> None:
        """Leases that are open keep their blocks, and publish no more."""
        if really == 0:
            self.core.purge("")
            self.core.settle()
            self.losses += 1
            self.queued = {block: set() for block in self.queued}
            self.committed.clear()
            assert self.core.blocks() == []
            for caller in self.callers:
                caller.writes = False

    @rule()
    def rest(self) -> None:
        """End all transfers: every lease is idle, and what was committed is cached."""
        evicted = self.core.statistics().attention.host.evicted_blocks
        for _ in range(3):
            for transfer_id in sorted(self.moving):
                self.end(transfer_id, len(self.moving[transfer_id].device))
            self.save(True)
            self.store()
            while self.storing:
                self.stored(0, False)
        assert not self.moving
        assert not self.core.wants_backups()
        assert all(self.core.is_idle(c.id) for c in self.callers)
        self.device.collect(self.core.is_idle)
        assert self.core.statistics().releasing_leases == 0
        evicted_now = self.core.statistics().attention.host.evicted_blocks
        if not self.losses and not evicted_now and not evicted:
            for prefix in self.committed:
                probe = np.array([*prefix, 0], np.int32)
                assert sum(self.core.would_hit(probe, [])) * self.bt >= len(prefix)
        if not any(c.is_granted for c in self.callers):
            for caller in self.callers:
                assert self.core.pending(caller.id) == (0, 0)

    def teardown(self) -> None:
        """Retired leases keep no block of host memory when nothing is being saved."""
        if not hasattr(self, "core"):
            return
        for caller in list(self.callers):
            if not self.core.retire(caller.id):
                self.give_back(self.callers.index(caller), False)
        self.rest()
        cached = self.core.statistics().attention.host.cached
        assert self.core.evict_host(len(self.host)) == cached

    # --- invariants ---------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        assert self.core.violations() == []

    @invariant()
    def blocks_hold_their_tokens(self) -> None:
        for _, prefix, device, host, flags, _, _ in self.core.blocks():
            assert device == -1
            assert not flags & DEVICE_VALID
            assert flags & HOST_VALID
            tokens = np.frombuffer(prefix, np.int32).tolist()
            assert (self.host[host] == block_bytes(self.weights, tokens)).all()

    @invariant()
    def leases_hold_their_tokens(self) -> None:
        """Check leases up to the first position to recompute, once no transfer writes them."""
        for caller in self.callers:
            if not caller.table or self.core.onloads(caller.id):
                continue
            assert self.core.block_table(caller.id).tolist() == caller.table
            whole = min(caller.computed, self.core.computed_tokens(caller.id)) // self.bt
            for index in range(whole):
                expected = block_bytes(caller.weights, caller.tokens[: (index + 1) * self.bt])
                assert (self.device.memory[caller.table[index]] == expected).all()

    @invariant()
    def leases_are_idle_only_without_transfers(self) -> None:
        for moving in self.moving.values():
            assert not any(self.core.is_idle(lease_id) for lease_id in moving.lease_ids)


TestExternalBlocks = ExternalMachine.TestCase
TestExternalBlocks.settings = settings(max_examples=3 * settings().max_examples)
