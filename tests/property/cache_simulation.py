"""The core beside the naive model, with simulated bytes: transfers, capacity and invariants.

After every rule: ``violations()`` is empty (I1-I6), every block is as the model predicts, with the
same copies, refs and pins, and every VALID copy holds the KV of exactly its tokens (I4).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.base.plan import ONLOAD, TransferPlan, TransferReport
from aiokv.config.cache_config import CacheConfig
from aiokv.config.save_policy import SavePolicy
from aiokv.errors import LeaseError, UsageError
from tests.models.prefix_cache import PrefixCacheModel
from tests.property.event_subscriber import Subscriber
from tests.property.planned_core import PlannedCore

if TYPE_CHECKING:
    from tests.models.cached_blocks import Block, Lease, Policy

GARBAGE = ("garbage",)
POLICIES: tuple[Policy, ...] = ("none", "write_through", "nth_use", "write_back")
pick = st.integers(0, 7)  # an index, modulo the number of candidates

# flags of Core.blocks()
DEVICE_VALID, DEVICE_LOADING, HOST_VALID, HOST_LOADING = 1, 2, 4, 8


class Caller:
    """State of one request in a serving loop."""

    def __init__(self, lease_id: int, model: Lease) -> None:
        self.id = lease_id
        self.model = model
        self.computed = 0  # positions whose KV it has computed or expects to be cached


class Batch:
    """Batch of a runner, which may write its targets until the batch ends."""

    def __init__(self, model: list[Lease], targets: set[int]) -> None:
        self.model = model
        self.targets = targets  # device ids that it has not written yet


class CacheSimulation(RuleBasedStateMachine):
    store_options: ClassVar[dict[str, Any]] = {}  # of the configuration; empty: no stores

    @initialize(
        block_tokens=st.integers(1, 3),
        device_blocks=st.integers(3, 9),
        host_blocks=st.integers(0, 9),
        leave_tokens=st.integers(1, 2),
        reserve_blocks=st.integers(0, 2),
        min_onload_blocks=st.sampled_from([0, 0, 2]),
        policy=st.sampled_from(POLICIES),
        threshold=st.integers(1, 3),
        low_watermark=st.sampled_from([0, 2, 5]),
        alphabet=st.integers(1, 3),
        with_items=st.booleans(),
        splits_items=st.sampled_from([False, False, True]),
        event_blocks=st.sampled_from([0, 1, 6, 100]),
    )
    def begin(self, alphabet: int, with_items: bool, event_blocks: int, **sizes: Any) -> None:
        self.alphabet = alphabet
        self.with_items = with_items
        self.bt: int = sizes["block_tokens"]
        self.manager = PlannedCore(
            CacheConfig(
                block_tokens=self.bt,
                device_blocks=sizes["device_blocks"],
                host_blocks=sizes["host_blocks"],
                leave_tokens=sizes["leave_tokens"],
                reserve_blocks=sizes["reserve_blocks"],
                miss_history_blocks=2 * sizes["device_blocks"] if with_items else 0,
                min_onload_tokens=sizes["min_onload_blocks"] * self.bt,
                write_policy=str(SavePolicy(sizes["policy"], sizes["threshold"])),
                item_hits="partial" if sizes["splits_items"] else "whole",
                low_watermark_blocks=min(sizes["low_watermark"], sizes["device_blocks"]),
                **self.store_options,
            ),
            has_stores=bool(self.store_options),
        )
        sizes["low_watermark"] = min(sizes["low_watermark"], sizes["device_blocks"])
        self.core = self.manager.core
        self.model = self.new_model(sizes)
        self.callers: list[Caller] = []
        self.plans: dict[int, TransferPlan] = {}
        self.submitted: dict[int, list[Any]] = {}  # transfer -> what its sources held
        self.abandoned: set[int] = set()
        self.device: dict[int, Any] = {}  # the bytes of a block, as the tokens they come from
        self.host: dict[int, Any] = {}
        self.step = 1
        self.batches: dict[int, Batch] = {}
        self.subscribers: list[Subscriber] = []
        if event_blocks:
            self.subscribe(event_blocks)

    def new_model(self, sizes: dict[str, Any]) -> PrefixCacheModel:
        return PrefixCacheModel(**sizes)

    def refused(self, error: type[Exception], call: Any, *args: Any) -> None:
        before = sorted(self.core.blocks())
        try:
            call(*args)
        except error:
            assert sorted(self.core.blocks()) == before
        else:
            raise AssertionError(f"{call} took {args}")

    def granted(self) -> list[Caller]:
        return [c for c in self.callers if c.model.granted]

    # --- events -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.subscribers) < 3)
    @rule(max_blocks=st.sampled_from([1, 6, 100]))
    def subscribe(self, max_blocks: int) -> None:
        self.subscribers.append(Subscriber(self.core, self.bt, max_blocks))

    @precondition(lambda self: self.subscribers)
    @rule(which=pick, max_blocks=st.integers(1, 4), repeats=st.booleans())
    def take_events(self, which: int, max_blocks: int, repeats: bool) -> None:
        subscriber = self.subscribers[which % len(self.subscribers)]
        if repeats:
            subscriber.events.repeat()
        subscriber.take(max_blocks)

    @precondition(lambda self: self.subscribers)
    @rule(which=pick, ends=st.booleans())
    def take_all_events(self, which: int, ends: bool) -> None:
        subscriber = self.subscribers[which % len(self.subscribers)]
        subscriber.take_all()
        subscriber.check(self.model.blocks.values())
        if ends:
            self.subscribers.remove(subscriber)

    # --- saving -------------------------------------------------------------------------------

    def new_plan(self, plan: TransferPlan) -> None:
        transfer = self.model.transfers[plan.transfer_id]
        assert plan.transfer_id not in self.plans
        sides = (plan.source_ids.tolist(), plan.target_ids.tolist())
        host_ids, device_ids = sides if plan.route == ONLOAD else sides[::-1]
        assert device_ids == [b.device for b in transfer.blocks]
        assert host_ids == [b.host for b in transfer.blocks]
        assert plan.after_step == transfer.after_step
        self.plans[plan.transfer_id] = plan

    @rule()
    def flush_backups(self) -> None:
        """Begin the saves queued by uses, then those of the watermark."""
        evicted = self.core.statistics().attention.host.evicted_blocks
        plan = self.manager.save_early()
        evicted = self.core.statistics().attention.host.evicted_blocks - evicted
        device_ids = [] if plan is None else plan.source_ids.tolist()
        blocks = self.model.adopt_early_copies(self.reclaimed(), evicted, device_ids)
        if plan is not None:
            self.model.start_offload(plan.transfer_id, blocks, plan.target_ids.tolist())
            self.new_plan(plan)
        if self.core.wants_write_backs():
            self.save_ahead(0)

    @rule(wanted=st.integers(0, 6))
    def save_ahead(self, wanted: int) -> None:
        evicted = self.core.statistics().attention.host.evicted_blocks
        plan = self.manager.make_clean(wanted)
        evicted = self.core.statistics().attention.host.evicted_blocks - evicted
        self.saved_ahead(wanted, plan, evicted)

    def saved_ahead(self, wanted: int, plan: TransferPlan | None, evicted: int) -> None:
        device_ids = [] if plan is None else plan.source_ids.tolist()
        blocks = self.model.adopt_save_ahead(wanted, self.reclaimed(), evicted, device_ids)
        if plan is not None:
            self.model.start_offload(plan.transfer_id, blocks, plan.target_ids.tolist())
            self.new_plan(plan)

    def reclaimed(self) -> list[Block]:
        """Return the blocks that had a valid host copy in the model and have none now."""
        without = {device for _, _, device, host, _, _, _ in self.core.blocks() if host < 0}
        return [b for b in self.model.reclaimable_copies() if b.device in without]

    # --- copies -------------------------------------------------------------------------------

    def sources(self, plan: TransferPlan) -> list[Any]:
        if plan.direction == "onload":
            return [self.host[i] for i in plan.source_ids.tolist()]
        return [self.device[i] for i in plan.source_ids.tolist()]

    def write(self, plan: TransferPlan, contents: list[Any]) -> None:
        if plan.direction == "onload":
            self.device.update(zip(plan.target_ids.tolist(), contents, strict=True))
        else:
            self.host.update(zip(plan.target_ids.tolist(), contents, strict=True))

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
        """I3: blocks of a transfer were not reallocated while it ran."""
        transfer_id = sorted(self.submitted)[which % len(self.submitted)]
        num_blocks = self.plans[transfer_id].num_blocks
        self.finish_copy(transfer_id, first_bad % num_blocks if failed else num_blocks)

    def finish_copy(self, transfer_id: int, good: int) -> None:
        plan, contents = self.plans[transfer_id], self.submitted.pop(transfer_id)
        assert self.sources(plan) == contents
        self.write(plan, contents[:good] + [GARBAGE] * (plan.num_blocks - good))
        self.end(plan, "failed" if good < plan.num_blocks else "done", good)

    def complete_all(self, *directions: str) -> None:
        for plan in [p for p in self.plans.values() if p.direction in directions]:
            if plan.transfer_id not in self.submitted:
                self.begin_copy(plan)
            self.finish_copy(plan.transfer_id, plan.num_blocks)

    @precondition(lambda self: set(self.plans) - set(self.submitted))
    @rule(which=pick)
    def cancel(self, which: int) -> None:
        """Cancel a transfer that has not begun; another lease may have joined it meanwhile."""
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
            if lease.cached_blocks < before[id(lease)]:  # tokens computed after it are invalid
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
        if tier == "device":
            self.model.evict_as_seen(self.core.evict_device(blocks), blocks)
            return
        expected = 0
        while expected < blocks and self.model.evict_host():
            expected += 1
        assert self.core.evict_host(blocks) == expected

    @rule(really=st.integers(0, 4))
    def reset(self, really: int) -> None:
        if really:
            return  # most steps should run with a filled cache
        self.core.reset()
        self.model.reset()

    @rule(tier=st.sampled_from(["device", "host"]))
    def forget(self, tier: str) -> None:
        """Clear a tier as ``sleep`` does; only without transfers, and only late in a run."""
        forget = self.core.forget_device if tier == "device" else self.core.forget_host
        if not self.model.at_rest:
            self.refused(UsageError, forget)
            return
        forget()
        if tier == "device":
            self.model.forget_device()
        else:
            self.model.forget_host()

    @rule(by=st.integers(-3, 3))
    def resize(self, by: int) -> None:
        capacity = min(self.model.capacity + by, 12)
        if self.model.can_resize(capacity):
            self.core.resize_device(capacity)
            self.model.resize(capacity)
        else:
            self.refused(UsageError, self.core.resize_device, capacity)

    @rule(lag=st.integers(0, 1))
    def finish_step(self, lag: int) -> None:
        self.step += 1
        for steps in (self.core, self.model):
            steps.close_step(self.step - 1)
            steps.finish_step(self.step - 1 - lag)

    # --- compute in flight --------------------------------------------------------------------

    @precondition(lambda self: self.granted())
    @rule(first=pick, second=st.none() | pick)
    def begin_batch(self, first: int, second: int | None) -> None:
        granted = self.granted()
        chosen = [granted[i % len(granted)] for i in (first, second) if i is not None]
        ids = [caller.id for caller in chosen]
        if len(set(ids)) < len(ids):
            self.refused(LeaseError, self.core.begin_batch, ids)
            return
        targets = {i for c in chosen for i in c.model.table[c.computed // self.bt :]}
        model = self.model.begin_batch([caller.model for caller in chosen])
        self.batches[self.core.begin_batch(ids)] = Batch(model, targets)

    @precondition(lambda self: self.batches)
    @rule(which=pick, in_step=st.booleans())
    def end_batch(self, which: int, in_step: bool) -> None:
        """Write the pending targets of a runner that writes late."""
        batch_id = sorted(self.batches)[which % len(self.batches)]
        batch = self.batches.pop(batch_id)
        self.device.update(dict.fromkeys(batch.targets, GARBAGE))
        self.no_wrong_kv_can_be_served()
        step = self.step if in_step else 0
        freed = self.core.end_batch(batch_id, step)
        assert len(freed) == sum(x.released and x.batches == 1 for x in batch.model)
        self.abandoned |= self.model.end_batch(batch.model, step)

    # --- invariants ---------------------------------------------------------------------------

    @invariant()
    def invariants_hold(self) -> None:
        assert self.core.violations() == []

    @invariant()
    def model_agrees(self) -> None:
        found = Counter(
            (context, tuple(np.frombuffer(prefix, np.int32).tolist()), ids, flags & 15, refs, pins)
            for context, prefix, *ids_, flags, refs, pins in self.core.blocks()
            for ids in [tuple(ids_)]
        )
        assert found == Counter(map(_as_dumped, self.model.blocks.values()))
        statistics = self.core.statistics()
        device, host = statistics.attention.device, statistics.attention.host
        assert device.free == len(self.model.device_free)
        assert host.free == len(self.model.host_free)
        assert statistics.evictable_blocks == len(self.model.idle("device"))
        assert statistics.leases == len(self.callers)
        assert statistics.releasing_leases == sum(lease.released for lease in self.model.leases)
        total = device.free + device.cached + device.leased + device.in_flight
        assert total == device.blocks == self.model.capacity
        total = host.free + host.cached + host.in_flight
        assert total == host.blocks == self.manager.config.host_blocks

    @invariant()
    def saving_runs_ahead(self) -> None:
        if self.model.policy != "none" and not self.core.wants_write_backs():
            assert self.model.ready_ahead() >= self.model.low_watermark

    @invariant()
    def promises_are_known(self) -> None:
        for caller in self.callers:
            most, owners = self.model.pending(caller.model)
            owner, blocks = self.core.pending(caller.id)
            assert blocks == most
            assert owner in [c.id for c in self.callers if c.model in owners] or not owner
            assert bool(owner) == bool(owners)

    @invariant()
    def no_wrong_kv_can_be_served(self) -> None:
        for key, block in self.model.blocks.items():
            if block.device_valid:
                assert self.device[block.device or 0] == key, "a device block holds other KV"
            if block.host_valid:
                assert self.host[block.host or 0] == key, "a host block holds other KV"
        for caller in self.granted():
            lease = caller.model
            if not lease.onloads and not lease.failed:
                for index in range(self.core.cached_tokens(caller.id) // self.bt):
                    key = self.model.key(lease, index + 1)
                    assert self.device[lease.table[index]] == key, "a lease was served other KV"

    def teardown(self) -> None:
        """I7: after all releases and transfers, every pool is full again."""
        if not hasattr(self, "core"):
            return
        for caller in self.callers:
            self.core.release(caller.id)
        for batch_id in self.batches:
            self.core.end_batch(batch_id)
        for transfer_id in list(self.plans):
            self.manager.complete(TransferReport(transfer_id=transfer_id, outcome="cancelled"))
        self.core.finish_step(self.step)
        self.core.reset()
        for subscriber in self.subscribers:
            subscriber.take_all()
            subscriber.check(())
        statistics = self.core.statistics()
        assert statistics.attention.device.free == self.model.capacity
        assert statistics.attention.host.free == self.manager.config.host_blocks
        assert statistics.leases == 0
        assert statistics.nodes == 1, "roots of unused contexts are kept"
        assert self.core.violations() == []


def _as_dumped(block: Block) -> tuple[object, ...]:
    context, tokens, _ = block.key
    flags = DEVICE_VALID * block.device_valid
    flags |= DEVICE_LOADING * (block.resident and not block.device_valid)
    flags |= HOST_VALID * block.host_valid
    flags |= HOST_LOADING * (block.host is not None and not block.host_valid)
    ids = tuple(-1 if i is None else i for i in (block.device, block.host))
    return context, tokens, ids, flags, block.refs, block.pins
