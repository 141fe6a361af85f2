"""Fetches and saves of the core compared with the naive model, beside all other rules.

They end done, failed, in part or cancelled, in any order, while leases come and go, and blocks are
evicted, reset, forgotten and resized. Every VALID copy holds the KV of exactly its tokens, and the
stores get no other bytes under the digest of a block.
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from aiokv.base.plan import FETCH, SAVE, TransferReport
from tests.models.prompt_digests import digest_of
from tests.models.storing import DONE, REFUSED, StoringModel
from tests.property.cache_simulation import pick
from tests.property.test_core_state_machine import CacheMachine
from tests.property.test_core_walks import walk

if TYPE_CHECKING:
    from random import Random

    from aiokv.base.plan import TransferPlan
    from tests.property.test_core_walks import Rule

FAILED = 4
DIGEST_BYTES = 32


class StoreMachine(CacheMachine):
    store_options = {"store_policy": "write_through", "store_queue_blocks": 6}  # noqa: RUF012
    model: StoringModel

    def new_model(self, sizes: dict[str, Any]) -> StoringModel:
        options = self.store_options
        self.store: dict[bytes, Any] = {}  # what saves have written, by digest
        self.key_of: dict[bytes, Any] = {}  # of the digests of plans
        return StoringModel(
            store_policy=options["store_policy"].partition(":")[0],
            store_uses=2,
            queue_blocks=options["store_queue_blocks"],
            **sizes,
        )

    def digests(self, keys: list[Any]) -> bytes:
        found = [digest_of(self.bt, key) for key in keys]
        self.key_of.update(zip(found, keys, strict=True))
        return b"".join(found)

    # --- fetches ------------------------------------------------------------------------------

    @precondition(lambda self: self.callers)
    @rule(which=pick)
    def missing(self, which: int) -> None:
        caller = self.callers[which % len(self.callers)]
        first, digests = self.core.missing(caller.id)
        expected, keys = self.model.missing(caller.model)
        assert digests == self.digests(keys)
        assert first == expected or not keys

    @precondition(lambda self: self.callers)
    @rule(which=pick, blocks=st.integers(0, 9), replaces=st.booleans())
    def fetch(self, which: int, blocks: int, replaces: bool) -> None:
        caller = self.callers[which % len(self.callers)]
        keys = self.model.missing(caller.model)[1][:blocks]
        joined = self.model.fetch_of(keys[0]) if keys else 0
        late = joined if replaces else 0
        if joined and not late:
            assert self.core.begin_fetch(caller.id, blocks) == joined
            return
        fetch = self.model.begin_fetch(caller.model, blocks, late)
        transfer_id = self.core.begin_fetch(caller.id, blocks, late)
        if fetch is None:
            assert not transfer_id
            return
        host: list[int] = []
        if transfer_id:
            plan = self.plans[transfer_id] = self.manager.fetch_plan(transfer_id)
            host = plan.target_ids.tolist()
            assert plan.digests == self.digests(fetch.keys[: len(host)])
            assert plan.source_ids.tolist() == list(range(len(host)))
        self.model.adopt_fetch(transfer_id, fetch, self.reclaimed(), host)

    # --- saves --------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        blocks = self.model.take_saves()
        plan = self.manager.save_plan()
        if plan is None:
            assert not blocks
            return
        by_host = {block.host: block for block in blocks}
        blocks = [by_host.pop(host) for host in plan.source_ids.tolist()]
        assert not by_host, "blocks that are due are not saved"
        assert plan.digests == self.digests([block.key for block in blocks])
        self.model.begin_save(plan.transfer_id, blocks)
        self.plans[plan.transfer_id] = plan

    # --- the worker ---------------------------------------------------------------------------

    def sources(self, plan: TransferPlan) -> list[Any]:
        if plan.route == FETCH:
            return [self.key_of[digest] for digest in split(plan.digests)]
        if plan.route == SAVE:
            return [self.host[block] for block in plan.source_ids.tolist()]
        return super().sources(plan)

    def write(self, plan: TransferPlan, contents: list[Any]) -> None:
        if plan.route == SAVE:
            self.store.update(zip(split(plan.digests), contents, strict=True))
        else:
            super().write(plan, contents)

    def end(self, plan: TransferPlan, outcome: Any, good: int) -> None:
        if plan.route not in (FETCH, SAVE):
            super().end(plan, outcome, good)
            return
        del self.plans[plan.transfer_id]
        results = [DONE] * good
        results += [REFUSED, FAILED] * plan.num_blocks
        report = TransferReport(
            transfer_id=plan.transfer_id,
            outcome=outcome,
            first_bad_block=good,
            results=bytes(results[: plan.num_blocks]) if plan.route == SAVE else b"",
        )
        self.manager.complete(report)
        if plan.route == FETCH:
            self.model.end_fetch(plan.transfer_id, good)
            return
        self.model.end_save(plan.transfer_id, report.results)
        for digest in split(plan.digests)[:good]:
            assert self.store[digest] == self.key_of[digest], "a store got other KV"

    # --- invariants ---------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.core.statistics()
        assert statistics.attention.unsaved_by_cause["dropped"] == self.model.dropped
        assert statistics.hit_store_tokens == self.model.hit_blocks * self.bt
        fetched = sum(len(fetch.host) for fetch in self.model.fetches.values())
        assert statistics.attention.host.in_flight >= fetched
        assert self.core.wants_saves() or not self.due()

    def due(self) -> bool:
        waiting = any(b.save_queued and b.attached for b in self.model.queue)
        return waiting and len(self.model.saves) < 4


class NthUseMachine(StoreMachine):
    store_options = {"store_policy": "nth_use:2", "store_queue_blocks": 4}  # noqa: RUF012


class EvictionMachine(StoreMachine):
    store_options = {"store_policy": "write_back", "store_queue_blocks": 4}  # noqa: RUF012


MACHINES = (StoreMachine, NthUseMachine, EvictionMachine)
TestStoreMachine = StoreMachine.TestCase
TestNthUseMachine = NthUseMachine.TestCase
TestEvictionMachine = EvictionMachine.TestCase


def split(digests: bytes) -> list[bytes]:
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


def store_rules(machine: StoreMachine, random: Random) -> list[Rule]:
    m = machine

    def fetch() -> None:
        m.fetch(random.randint(0, 7), random.randint(0, 9), random.random() < 0.5)

    return [
        (6, lambda: m.callers, fetch),
        (1, lambda: m.callers, lambda: m.missing(random.randint(0, 7))),
        (5, lambda: True, m.save),
        (3, lambda: True, m.counts_agree),
    ]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("seed", range(150 if os.environ.get("AIOKV_DEEP") else 15))
def test_random_walk_with_stores(machine: type[StoreMachine], seed: int) -> None:
    walk(seed, 250, machine, store_rules).teardown()


def test_walks_reach_fetches_saves_and_their_failures() -> None:
    """Negative control: the walks above fetch, hit, save, drop, and fail."""
    statistics = [
        walk(seed, 250, machine, store_rules).core.statistics()
        for machine in MACHINES
        for seed in range(24)
    ]
    for name in (
        "fetches", "attention.fetched_blocks", "attention.unfetched_blocks", "hit_store_tokens",
        "attention.saved_blocks", "reclaimed_host_copies",
    ):  # fmt: skip
        assert sum(map(attrgetter(name), statistics)) > 0, name
    for cause in ("dropped", "refused", "failed"):
        assert sum(s.attention.unsaved_by_cause[cause] for s in statistics) > 0, cause
