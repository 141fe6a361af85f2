"""CacheManager against the naive model, with bytes: no KV is ever served for the wrong tokens.

After every rule: ``violations()`` is empty (I1-I6), every block is where the model says, with the
same copies, refs and pins, and every VALID copy holds the KV of exactly its tokens (I4).

Covers INVENTORY B1.3-4, B3.1-7, B3.9-11, B3.16-22, B4.1-13, B4.17 and the defects C1.1-6, C1.9-14.
"""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.config import CacheConfig
from aiokv.errors import LeaseError, RequestTooLarge, UsageError
from aiokv.plan import Priority, TransferPlan, TransferReport
from aiokv.scheduler.manager import CacheManager
from tests.models.prefix_cache import Lease, PrefixCacheModel

if TYPE_CHECKING:
    from collections.abc import Callable

GARBAGE = ("garbage",)
MAX_LEASES = 5
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
pick = st.integers(0, 7)  # an index, modulo the number of candidates

# flags of Core.blocks()
DEVICE_VALID, DEVICE_LOADING, HOST_VALID, HOST_LOADING = 1, 2, 4, 8


class Caller:
    """What a serving loop knows of one request."""

    def __init__(self, lease_id: int, model: Lease) -> None:
        self.id = lease_id
        self.model = model
        self.computed = 0  # positions whose KV it has, or believes to have


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(3, 9),
        host_blocks=st.integers(0, 9),
        leave_tokens=st.integers(1, 2),
        reserve_blocks=st.integers(0, 1),
        alphabet=st.integers(1, 3),
    )
    def begin(self, alphabet: int, **sizes: int) -> None:
        self.alphabet = alphabet
        self.bt = sizes["block_tokens"]
        self.manager = CacheManager(CacheConfig(**sizes, low_watermark_blocks=0))
        self.core = self.manager.core
        self.model = PrefixCacheModel(**sizes, write_through=sizes["host_blocks"] > 0)
        self.callers: list[Caller] = []
        self.plans: dict[int, TransferPlan] = {}
        self.submitted: dict[int, list[Any]] = {}  # transfer -> what its sources held
        self.abandoned: set[int] = set()
        self.device: dict[int, Any] = {}  # the bytes of a block, as the tokens they come from
        self.host: dict[int, Any] = {}
        self.step = 1

    # --- leases -------------------------------------------------------------------------------

    @rule(tokens=prompts, fork=st.integers(0, 9), context=st.sampled_from([0, 0, 0, 1]))
    def match(self, tokens: list[int], fork: int, context: int) -> None:
        if len(self.callers) == MAX_LEASES:
            self.give_back(0, "release", False)
        tokens = [0] * fork + [token % self.alphabet for token in tokens]
        salt = "tenant" if context else ""
        lease_id, device, host = self.core.match(np.array(tokens, np.int32), salt)
        lease, *expected = self.model.match(tokens, salt)
        assert [device, host] == expected
        self.callers.append(Caller(lease_id, lease))

    def waiting(self) -> list[Caller]:
        return [c for c in self.callers if not c.model.granted]

    def granted(self) -> list[Caller]:
        return [c for c in self.callers if c.model.granted]

    @precondition(lambda self: self.waiting())
    @rule(which=pick, more=st.integers(-3, 3))
    def allocate(self, which: int, more: int) -> None:
        caller = self.waiting()[which % len(self.waiting())]
        lease = caller.model
        num_tokens = max(1, len(lease.tokens) + more)
        if self.model.blocks_for(num_tokens) + self.model.reserve_blocks > self.model.capacity:
            self.refused(RequestTooLarge, self.core.allocate, caller.id, num_tokens)
            return
        granted = self.core.allocate(caller.id, num_tokens)
        assert bool(granted) == self.model.allocate(lease, num_tokens)
        if not granted:
            return
        onloads = self.core.onloads(caller.id)
        assert granted == (2 if onloads else 1)
        table = self.core.block_table(caller.id).tolist()
        new = set(onloads) - set(self.plans)
        self.model.adopt(lease, table, onloads)
        device_hit, host_hit = self.core.hit(caller.id)
        assert device_hit == sum(b.device_valid for b in lease.path)
        assert (
            device_hit + host_hit
            == self.core.cached_tokens(caller.id) // self.bt
            == len(lease.path)
        )
        for transfer_id in new:
            self.new_plan(self.manager.onload_plan(transfer_id, Priority.DEMAND))
        for index in range(len(table)):
            if self.model.is_private(lease, index):
                self.device[table[index]] = GARBAGE
        caller.computed = lease.cached_blocks * self.bt

    @rule(tokens=prompts, fork=st.integers(0, 9), back_up=st.booleans(), keep=st.booleans())
    def serve(self, tokens: list[int], fork: int, back_up: bool, keep: bool) -> None:
        """A whole request; its onloads, if any, are left to other rules."""
        self.match(tokens, fork, 0)
        caller = self.callers[-1]
        self.allocate(len(self.waiting()) - 1, 0)
        if caller.model.granted:
            self.compute_and_commit(len(self.granted()) - 1, 99, False)
        if back_up:
            self.flush_backups()
            self.complete_all_offloads()
        if not keep:
            self.give_back(len(self.callers) - 1, "release", False)

    def complete_all_offloads(self) -> None:
        for plan in [p for p in self.plans.values() if p.direction == "offload"]:
            if plan.transfer_id not in self.submitted:
                self.begin_copy(plan)
            self.finish_copy(plan.transfer_id, plan.num_blocks)

    @precondition(lambda self: self.callers)
    @rule(which=pick, how=st.sampled_from(["release", "retract"]), stale=st.booleans())
    def give_back(self, which: int, how: str, stale: bool) -> None:
        caller = self.callers[which % len(self.callers)]
        step = 0 if stale else self.step
        if how == "release":
            self.callers.remove(caller)
            self.core.release(caller.id, step)
            self.abandoned |= self.model.release(caller.model, step)
            self.refused(LeaseError, self.core.release, caller.id)  # B4: a sixth release
        else:
            self.core.retract(caller.id, step)
            self.abandoned |= self.model.give_back(caller.model, step)

    @precondition(lambda self: self.granted())
    @rule(which=pick, tokens=st.lists(st.integers(0, 2), max_size=3))
    def append(self, which: int, tokens: list[int]) -> None:
        caller = self.granted()[which % len(self.granted())]
        lease = caller.model
        tokens = [token % self.alphabet for token in tokens]
        array = np.array(tokens, np.int32)
        if len(lease.tokens) + len(tokens) > lease.num_tokens:
            self.refused(LeaseError, self.core.append, caller.id, array)
            return
        self.core.append(caller.id, array)
        lease.tokens += tokens

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
        """Write the KV of positions up to ``last``; right only if all before them is."""
        lease = caller.model
        for index in range(caller.computed // self.bt, self.model.blocks_for(last)):
            name = (lease.context, tuple(lease.tokens[: min((index + 1) * self.bt, last)]))
            before = [
                self.device.get(i) == (lease.context, tuple(lease.tokens[: (k + 1) * self.bt]))
                or bool(lease.onloads)
                for k, i in enumerate(lease.table[:index])
            ]
            self.device[lease.table[index]] = name if all(before) else GARBAGE
        caller.computed = max(caller.computed, last)

    @precondition(lambda self: self.granted())
    @rule(which=pick, back=st.integers(0, 4))
    def truncate(self, which: int, back: int) -> None:
        caller = self.granted()[which % len(self.granted())]
        lease = caller.model
        num_tokens = lease.num_tokens - back
        if num_tokens < len(lease.path) * self.bt:
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
        extended = self.core.extend(ids, more)
        assert extended == self.model.extend([c.model for c in chosen], more)
        for caller in chosen if extended else []:
            old = len(caller.model.table)
            self.model.adopt_extension(caller.model, self.core.block_table(caller.id).tolist())
            self.device.update(dict.fromkeys(caller.model.table[old:], GARBAGE))

    @precondition(lambda self: self.callers)
    @rule(which=pick, by=st.sampled_from([-1, 1 << 40]))
    def bad_numbers(self, which: int, by: int) -> None:
        """B4, I7: misuse is a typed error and changes nothing."""
        caller = self.callers[which % len(self.callers)]
        for call in (self.core.commit, self.core.truncate):
            self.refused(LeaseError, call, caller.id, by)
        self.refused(LeaseError, self.core.extend, [caller.id], by)
        self.refused(LeaseError, self.core.allocate, caller.id, by)
        self.refused(LeaseError, self.core.commit, caller.id + (1 << 32), 0)
        if not caller.model.granted:
            self.refused(LeaseError, self.core.commit, caller.id, 0)
            self.refused(LeaseError, self.core.truncate, caller.id, 0)

    def refused(self, error: type[Exception], call: Any, *args: Any) -> None:
        before = sorted(self.core.blocks())
        try:
            call(*args)
        except error:
            assert sorted(self.core.blocks()) == before
        else:
            raise AssertionError(f"{call} took {args}")

    # --- transfers ----------------------------------------------------------------------------

    def new_plan(self, plan: TransferPlan) -> None:
        transfer = self.model.transfers[plan.transfer_id]
        assert plan.transfer_id not in self.plans
        assert plan.device_ids.tolist() == [b.device for b in transfer.blocks]
        assert plan.host_ids.tolist() == [b.host for b in transfer.blocks]
        assert plan.after_step == transfer.after_step
        self.plans[plan.transfer_id] = plan

    @rule()
    def flush_backups(self) -> None:
        candidates, count = self.model.backup()
        plans = self.manager.backup_plans()
        assert [plan.num_blocks for plan in plans] == ([count] if count else [])
        for plan in plans:
            ids = plan.device_ids.tolist(), plan.host_ids.tolist()
            self.model.adopt_backup(plan.transfer_id, candidates, *ids)
            self.new_plan(plan)

    def sources(self, plan: TransferPlan) -> list[Any]:
        if plan.direction == "onload":
            return [self.host[i] for i in plan.host_ids.tolist()]
        return [self.device[i] for i in plan.device_ids.tolist()]

    def write(self, plan: TransferPlan, contents: list[Any]) -> None:
        if plan.direction == "onload":
            self.device.update(zip(plan.device_ids.tolist(), contents, strict=True))
        else:
            self.host.update(zip(plan.host_ids.tolist(), contents, strict=True))

    @precondition(lambda self: set(self.plans) - set(self.submitted))
    @rule(which=pick)
    def submit(self, which: int) -> None:
        waiting = sorted(set(self.plans) - set(self.submitted))
        self.begin_copy(self.plans[waiting[which % len(waiting)]])

    def begin_copy(self, plan: TransferPlan) -> None:
        self.submitted[plan.transfer_id] = self.sources(plan)
        self.write(plan, [GARBAGE] * plan.num_blocks)

    @precondition(lambda self: self.submitted)
    @rule(which=pick, failed=st.booleans(), first_bad=pick)
    def complete(self, which: int, failed: bool, first_bad: int) -> None:
        """I3: what a transfer reads and writes was nobody else's all the while."""
        transfer_id = sorted(self.submitted)[which % len(self.submitted)]
        num_blocks = self.plans[transfer_id].num_blocks
        self.finish_copy(transfer_id, first_bad % num_blocks if failed else num_blocks)

    def finish_copy(self, transfer_id: int, good: int) -> None:
        plan, contents = self.plans[transfer_id], self.submitted.pop(transfer_id)
        assert self.sources(plan) == contents
        self.write(plan, contents[:good] + [GARBAGE] * (plan.num_blocks - good))
        self.end(plan, "failed" if good < plan.num_blocks else "done", good)

    @precondition(lambda self: set(self.plans) - set(self.submitted))
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        """The worker takes back what it has not begun; somebody may have joined meanwhile."""
        waiting = sorted(set(self.plans) - set(self.submitted))
        self.end(self.plans[waiting[which % len(waiting)]], "cancelled", 0)

    def end(self, plan: TransferPlan, outcome: Any, good: int) -> None:
        del self.plans[plan.transfer_id]
        joined = list(self.model.transfers[plan.transfer_id].leases)
        before = {id(lease): lease.cached_blocks for lease in joined}
        self.manager.complete(
            TransferReport(transfer_id=plan.transfer_id, outcome=outcome, first_bad_block=good)
        )
        self.model.complete(plan.transfer_id, outcome, good)
        for caller in self.callers:
            assert caller.model not in joined or (
                self.core.cached_tokens(caller.id) // self.bt == caller.model.cached_blocks
            )
        for lease in joined:
            if lease.cached_blocks < before[id(lease)]:  # what was computed on top is worthless
                for device_id in lease.table[lease.cached_blocks :]:
                    self.device[device_id] = GARBAGE
        self.refused(Exception, self.core.transfer, plan.transfer_id)

    @rule()
    def take_abandoned(self) -> None:
        idle = {t for t in self.abandoned & set(self.plans) if not self.model.transfers[t].leases}
        assert set(self.core.take_abandoned()) == idle
        self.abandoned = set()

    # --- capacity -----------------------------------------------------------------------------

    @rule(blocks=st.integers(0, 9), tier=st.sampled_from(["device", "device", "host"]))
    def evict(self, blocks: int, tier: str) -> None:
        call = self.core.evict_device if tier == "device" else self.core.evict_host
        expected = 0
        while expected < blocks and self.model.evict(tier):
            expected += 1
        assert call(blocks) == expected

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if really:
            return  # an empty cache is not what most steps should see
        self.core.reset()
        self.model.reset()

    @rule(by=st.integers(-3, 3))
    def resize(self, by: int) -> None:
        capacity = self.model.capacity + by
        assume(capacity <= 12)
        if self.model.can_resize(capacity):
            self.core.resize_device(capacity)
            self.model.resize(capacity)
        else:
            self.refused(UsageError, self.core.resize_device, capacity)

    @rule(lag=st.integers(0, 1))
    def finish_step(self, lag: int) -> None:
        self.step += 1
        self.core.finish_step(self.step - 1 - lag)
        self.model.finish_step(self.step - 1 - lag)

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        assert self.core.violations() == []

    @invariant()
    def model_agrees(self) -> None:
        found = {}
        for context, prefix, device, host, flags, refs, pins in self.core.blocks():
            key = (context, tuple(np.frombuffer(prefix, np.int32).tolist()))
            assert key not in found
            found[key] = (device, host, flags & 15, refs, pins)
        expected = {}
        for key, block in self.model.blocks.items():
            flags = DEVICE_VALID * block.device_valid
            flags |= DEVICE_LOADING * (block.resident and not block.device_valid)
            flags |= HOST_VALID * block.host_valid
            flags |= HOST_LOADING * (block.host is not None and not block.host_valid)
            ids = [-1 if i is None else i for i in (block.device, block.host)]
            expected[key] = (*ids, flags, block.refs, block.pins)
        assert found == expected
        statistics = self.core.statistics()
        assert statistics.device_free == len(self.model.device_free)
        assert statistics.host_free == len(self.model.host_free)
        assert statistics.evictable_blocks == len(self.model.idle("device"))
        assert statistics.leases == len(self.callers)
        total = statistics.device_free + statistics.device_cached + statistics.device_leased
        assert total + statistics.device_in_flight == self.model.capacity
        total = statistics.host_free + statistics.host_cached + statistics.host_in_flight
        assert total == self.manager.config.host_blocks

    @invariant()
    def no_wrong_kv_can_be_served(self) -> None:
        for context, prefix, device, host, flags, _, _ in self.core.blocks():
            key = (context, tuple(np.frombuffer(prefix, np.int32).tolist()))
            if flags & DEVICE_VALID:
                assert self.device[device] == key, "a device block holds other KV"
            if flags & HOST_VALID:
                assert self.host[host] == key, "a host block holds other KV"
        for caller in self.granted():
            lease = caller.model
            if not lease.onloads and not lease.failed:
                for index in range(self.core.cached_tokens(caller.id) // self.bt):
                    key = (lease.context, tuple(lease.tokens[: (index + 1) * self.bt]))
                    assert self.device[lease.table[index]] == key, "a lease was served other KV"

    def teardown(self) -> None:
        """I7: when all is given back and over, every pool is full again."""
        if not hasattr(self, "core"):
            return
        for caller in self.callers:
            self.core.release(caller.id)
        for transfer_id in list(self.plans):
            self.manager.complete(TransferReport(transfer_id=transfer_id, outcome="cancelled"))
        self.core.finish_step(self.step)
        self.core.evict_device(100)
        self.core.evict_host(100)
        statistics = self.core.statistics()
        assert statistics.device_free == self.model.capacity
        assert statistics.host_free == self.manager.config.host_blocks
        assert statistics.leases == 0
        assert statistics.nodes == 1, "roots of unused contexts are kept"
        assert self.core.violations() == []


TestCacheMachine = CacheMachine.TestCase


def walk(seed: int, steps: int) -> CacheMachine:
    """The same rules, drawn with weights that fill the cache: Hypothesis shrinks, this digs."""
    random = Random(seed)
    machine = CacheMachine()
    machine.begin(
        block_tokens=random.randint(1, 3),
        device_blocks=random.randint(3, 9),
        host_blocks=random.choice([0, 4, 12]),
        leave_tokens=random.randint(1, 2),
        reserve_blocks=random.randint(0, 1),
        alphabet=random.randint(1, 3),
    )

    def number(limit: int = 7) -> int:
        return random.randint(0, limit)

    def prompt() -> list[int]:
        return [number(2) for _ in range(random.randint(1, 6))]

    def flag() -> bool:
        return random.random() < 0.5

    m = machine
    rules: list[tuple[int, Callable[[], Any], Callable[[], Any]]] = [
        (6, lambda: True, lambda: m.serve(prompt(), number(9), flag(), flag())),
        (6, lambda: True, lambda: m.match(prompt(), number(9), number(5) == 0)),
        (9, m.waiting, lambda: m.allocate(number(), random.randint(-3, 3))),
        (4, m.granted, lambda: m.compute_and_commit(number(), random.choice([1, 2, 99]), flag())),
        (3, lambda: m.callers, lambda: m.give_back(number(), "release", flag())),
        (1, lambda: m.callers, lambda: m.give_back(number(), "retract", flag())),
        (2, m.granted, lambda: m.append(number(), prompt()[:3])),
        (1, m.granted, lambda: m.truncate(number(), number(4))),
        (2, m.granted, lambda: m.extend(number(), random.choice([None, number()]), number(4))),
        (1, lambda: m.callers, lambda: m.bad_numbers(number(), random.choice([-1, 1 << 40]))),
        (2, lambda: True, m.flush_backups),
        (9, lambda: set(m.plans) - set(m.submitted), lambda: m.submit(number())),
        (9, lambda: m.submitted, lambda: m.complete(number(), random.random() < 0.3, number())),
        (1, lambda: set(m.plans) - set(m.submitted), lambda: m.cancel(number())),
        (1, lambda: True, m.take_abandoned),
        (3, lambda: True, lambda: m.evict(number(9), random.choice(["device", "device", "host"]))),
        (1, lambda: True, lambda: m.reset(number(9))),
        (1, lambda: True, lambda: m.finish_step(number(1))),
    ]
    weights = [weight for weight, _, _ in rules]
    for _ in range(steps):
        _, possible, act = random.choices(rules, weights)[0]
        if possible():
            act()
            m.invariants_hold()
            m.model_agrees()
            m.no_wrong_kv_can_be_served()
    return machine


@pytest.mark.parametrize("seed", range(400 if os.environ.get("AIOKV_DEEP") else 40))
def test_random_walk(seed: int) -> None:
    machine = walk(seed, 250)
    machine.teardown()


def test_walks_reach_what_matters() -> None:
    """The walks above are worth something only if they onload, fail and evict."""
    machines = [walk(seed, 250) for seed in range(10)]
    statistics = [machine.core.statistics() for machine in machines]
    for name in ("hit_device_tokens", "hit_host_tokens", "onloaded_blocks", "offloaded_blocks"):
        assert sum(getattr(s, name) for s in statistics) > 0, name
    for name in ("evicted_device_blocks", "evicted_host_blocks", "failed_blocks"):
        assert sum(getattr(s, name) for s in statistics) > 0, name
