"""Fetch or compute with recurrent state: a hit needs a snapshot, which comes behind its blocks."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.stores import cost
from aiokv.testing import ScriptedDevice, ScriptedStore, running_clock, spin
from tests.harness.recurrence import Hybrid

if TYPE_CHECKING:
    import numpy as np

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

NUM_TOKENS = 41  # 20 blocks and a token: a model of 20 tokens per second computes them in 2 s
A, B, C = (list(range(1000 * seed, 1000 * seed + NUM_TOKENS)) for seed in (1, 2, 3))
HEAD_OF_A = A[:17]  # 8 blocks and a token
STEPS, PASSES = 40, 40


class PacedStore(ScriptedStore):
    """A store whose loads take time per block; from a given block on, more.

    Attributes:
        block_seconds: time per block.
        slow_seconds: time per block after ``fast_blocks`` blocks.
    """

    block_seconds = 0.0
    slow_seconds = 0.0
    fast_blocks = 0

    async def load(self, keys: bytes, blocks: np.ndarray) -> np.ndarray:
        fast = min(len(blocks), self.fast_blocks)
        self.fast_blocks -= fast
        slow = len(blocks) - fast
        await asyncio.sleep(fast * self.block_seconds + slow * self.slow_seconds)
        return await super().load(keys, blocks)


class Model(Hybrid):
    """A hybrid model whose test fails without waiting for what its store has held or delayed."""

    def __init__(self, store: PacedStore, **config: Any) -> None:
        sizes = {"device_blocks": 100, "state_slots": 8, "host_state_slots": 8, "host_blocks": 100}
        super().__init__(
            stores=[store],
            device=ScriptedDevice(),
            prefill_tokens_per_second=20.0,
            **{**sizes, **config},
        )
        self.store = store

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        leaving = asyncio.create_task(super().__aexit__(exc_type, exc, traceback))
        while not leaving.done():
            for store in (self.store, *self.store.parts.values()):
                store.end_script()
            await running_clock().advance(1.0)
        await leaving


async def filled(*prompts: list[int]) -> PacedStore:
    """Return a store of another process that has served the prompts."""
    store = PacedStore()
    async with Model(store) as model:
        for tokens in prompts:
            await model.serve(tokens)
    return PacedStore(objects=store.objects)


async def advance(seconds: float) -> None:
    """Advance the clock in small steps, with passes for the transfers that follow one another."""
    for _ in range(STEPS):
        await spin(PASSES)
        await running_clock().advance(seconds / STEPS)


async def served(model: Model, tokens: list[int], seconds: float) -> int:
    """Return the cached tokens of a request that is served within ``seconds``."""
    serving = asyncio.create_task(model.serve(tokens, wait_store=math.inf))
    await advance(seconds)
    assert serving.done()
    return await serving


async def measured(model: Model, store: PacedStore, tokens: list[int], seconds: float) -> None:
    """Fetch a prompt at any price, with loads of ``seconds``."""
    store.delay("load", seconds=seconds)
    fetching = asyncio.create_task(model.engine.prefetch(tokens))
    await advance(2 * seconds + 0.1)
    assert (await fetching).total == NUM_TOKENS - 1


async def test_stores_are_asked_for_snapshots_of_blocks_that_can_be_reached():
    store = await filled(HEAD_OF_A)
    async with Model(store) as model:
        assert await served(model, B, 0.1) == 0
        snapshots = store.parts["state"]
        assert snapshots.calls["lookup"] == 0
        assert await served(model, A, 0.1) == len(HEAD_OF_A) - 1
        assert [len(keys) for call, keys in snapshots.keys if call == "lookup"] == [8]


async def test_slow_store_is_declined_and_measured_again():
    store = await filled(A, B)
    async with Model(store) as model:
        await measured(model, store, A, 3.0)
        store.end_script()
        store.delay("load", seconds=0.01)
        cached: list[int] = []
        while len(cached) < 20 and not any(cached):
            cached.append(await served(model, B, 1.0))
            await model.engine.reset()
            await advance(1.0)
        assert cached[0] == 0
        assert cached[-1] == NUM_TOKENS - 1
        counts = model.engine.statistics().requests
        assert (counts.declined_fetches, counts.late_fetches) == (len(cached) - 1, 0)


async def test_loads_of_blocks_measure_the_store_for_snapshots_too():
    store = await filled(A, B)
    async with Model(store) as model:
        await measured(model, store, A, 1.2)
        shown = {one.group: one.load_seconds for one in model.engine.statistics().stores}
        assert shown["state"] == shown["attention"] == pytest.approx(1.2, rel=0.1)
        assert await served(model, B, 0.0) == 0  # 1.2 s for blocks, and as long for the snapshot
        assert model.engine.statistics().requests.declined_fetches == 1


async def test_snapshots_measure_a_slow_store_if_no_block_is_missing():
    store = await filled(A, B)
    async with Model(store, state_slots=2, host_state_slots=1) as model:
        for tokens in (A, [0, *A], [1, *A]):  # both tiers drop the snapshot of A
            await model.serve(tokens)
            await model.engine.drain()
        await measured(model, store, B, 3.0)
        before = model.engine.statistics().worker.groups["state"].fetch.done
        assert await served(model, A, 0.0) == 0
        assert model.engine.statistics().attention.fetched_blocks == 20  # those of B
        assert model.engine.statistics().worker.groups["state"].fetch.done == before + 1
        assert model.engine.statistics().requests.declined_fetches == 1


async def test_request_does_not_wait_for_a_late_snapshot():
    store = await filled(A)
    async with Model(store) as model:
        late = store.parts["state"].hold("load")
        assert await served(model, A, 1.0) == 0  # all blocks take 2 s to compute
        assert model.engine.statistics().requests.late_fetches == 1
        late.open()
        await advance(0.1)
        assert await served(model, A, 0.0) == NUM_TOKENS - 1
        statistics = model.engine.statistics()
        assert (statistics.attention.fetched_blocks, statistics.groups["state"].fetched_blocks) == (
            20,
            1,
        )


async def test_blocks_before_a_late_part_are_a_hit_where_a_snapshot_is_stored(monkeypatch):
    monkeypatch.setattr(cost, "LATENCY_BYTES", 1)
    store = await filled(HEAD_OF_A, A)
    store.block_seconds, store.slow_seconds, store.fast_blocks = 0.05, 9.0, 10
    async with Model(store) as model:
        assert await served(model, A, 1.5) == len(HEAD_OF_A) - 1
        counts = model.engine.statistics().requests
        assert (counts.declined_fetches, counts.late_fetches) == (0, 1)
        await advance(100.0)


async def test_fetch_ends_when_its_parts_are_slower_than_computing(monkeypatch):
    monkeypatch.setattr(cost, "LATENCY_BYTES", 1)
    store = await filled(A)
    store.slow_seconds = 0.12  # computing takes 0.1 s per block
    async with Model(store) as model:
        assert await served(model, A, 0.5) == 0
        assert model.engine.statistics().attention.fetched_blocks == 3
        counts = model.engine.statistics().requests
        assert (counts.declined_fetches, counts.late_fetches) == (1, 0)


async def test_fetches_of_earlier_requests_count_in_the_comparison():
    store = await filled(A, B, C)
    async with Model(store) as model:
        await measured(model, store, A, 0.6)
        first = asyncio.create_task(
            model.serve(B, wait_store=math.inf)
        )  # 0.6 s, also for snapshots
        await advance(0.1)
        assert await served(model, C, 0.0) == 0
        await advance(1.5)
        assert await first == NUM_TOKENS - 1


async def test_rest_of_a_fetch_counts_with_the_speed_of_its_first_parts(monkeypatch):
    monkeypatch.setattr(cost, "LATENCY_BYTES", 1)
    store = await filled(A, B)
    store.slow_seconds = 0.09  # computing takes 0.1 s per block
    async with Model(store) as model:
        first = asyncio.create_task(model.serve(A, wait_store=math.inf))  # 1.8 s, as it turns out
        await advance(0.6)
        assert not first.done()
        assert await served(model, B, 0.0) == 0  # 1.8 s behind the rest of the first
        assert model.engine.statistics().requests.declined_fetches == 1
        await advance(2.0)
        assert await first == NUM_TOKENS - 1
