"""Snapshots of recurrent state in stores: saved with their blocks, and brought back with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiokv.stores import DirectoryStore, DiskStore, StoreUse
from aiokv.testing import ScriptedStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.recurrence import Hybrid

PROMPT = [5, 6, 7, 8, 9, 10, 11]  # 3 full blocks and a partial one
LONGER = [*PROMPT, 12, 13, 14]

pytestmark = pytest.mark.asyncio


def hybrid(*stores: Any, **config: Any) -> Hybrid:
    sizes = {"state_slots": 4, "host_state_slots": 4, "host_blocks": 32}
    return Hybrid(stores=stores, **{**sizes, **config})


async def filled(*prompts: list[int], **config: Any) -> ScriptedStore:
    """Return a store of another process that has served the prompts."""
    store = ScriptedStore()
    async with hybrid(store, **config) as model:
        for tokens in prompts:
            await model.serve(tokens)
    return ScriptedStore(objects=store.objects)


async def from_stores(model: Hybrid, tokens: list[int]) -> int:
    return await model.serve(tokens, wait_store=math.inf)


# --- the ways down and up -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DiskStore, DirectoryStore])
async def test_restart_continues_from_a_snapshot_on_disk(kind, tmp_path):
    def store() -> Any:
        return kind(tmp_path / "kv", bytes="64MiB")

    async with hybrid(store()) as model:
        assert await from_stores(model, PROMPT) == 0
    async with hybrid(store()) as model:
        assert await from_stores(model, PROMPT) == 6
        statistics = model.engine.statistics()
        assert (statistics.attention.fetched_blocks, statistics.groups["state"].fetched_blocks) == (
            3,
            1,
        )
        assert statistics.groups["state"].onloaded_blocks == 1
        assert statistics.hit_store_tokens == 6
        assert await from_stores(model, PROMPT) == 6
        assert model.engine.statistics().fetches == 1


async def test_statistics_tell_pools_apart():
    async with hybrid(store := await filled(PROMPT)) as model:
        assert await from_stores(model, PROMPT) == 6
        blocks, snapshots = model.engine.statistics().stores
        assert (blocks.group, blocks.loaded_blocks) == ("attention", 3)
        assert (snapshots.group, snapshots.loaded_blocks) == ("state", 1)
        worker = model.engine.statistics().worker
        assert (worker.attention.fetch.done, worker.groups["state"].fetch.done) == (1, 1)
        assert worker.groups["state"].fetch.moved_bytes == snapshots.loaded_bytes > 0
    assert store.calls["load"] == 1
    assert store.parts["state"].calls["load"] == 1


# --- what is fetched ------------------------------------------------------------------------------


async def test_snapshot_is_fetched_alone_when_the_blocks_are_cached():
    async with hybrid(store := ScriptedStore(), state_slots=2, host_state_slots=1) as model:
        await from_stores(model, PROMPT)
        await model.engine.drain()
        for name in range(2):
            await model.serve([name, *PROMPT])
            await model.engine.drain()
        async with model.engine.match(PROMPT) as lease:
            assert lease.hit.total == 0, "both tiers have dropped the snapshot"
        calls = store.calls.copy()
        assert await from_stores(model, PROMPT) == 6
        statistics = model.engine.statistics()
        assert (statistics.attention.fetched_blocks, statistics.groups["state"].fetched_blocks) == (
            0,
            1,
        )
        assert store.calls == calls, "no block was missing"


async def test_hit_ends_at_the_deepest_snapshot_whose_blocks_are_all_stored():
    store = await filled(PROMPT, LONGER)
    store.answer("lookup", results=[1, 1, 1, 0])
    async with hybrid(store) as model:
        assert await from_stores(model, LONGER) == 6


async def test_blocks_behind_the_deepest_snapshot_are_not_fetched():
    async with hybrid(store := await filled(PROMPT, LONGER)) as model:
        store.parts["state"].answer("lookup", results=[0, 0, 1, 0])
        assert await from_stores(model, LONGER) == 6
        assert model.engine.statistics().attention.fetched_blocks == 3


@pytest.mark.parametrize(("wrong", "cached"), [(1, 6), (2, 0)])
async def test_wrong_snapshot_makes_the_hit_shorter(wrong, cached):
    async with hybrid(store := await filled(PROMPT, LONGER)) as model:
        for call in range(wrong):
            store.parts["state"].corrupt("load", call)
        assert await from_stores(model, LONGER) == cached
        statistics = model.engine.statistics()
        assert statistics.groups["state"].unfetched_blocks == wrong
        assert statistics.groups["state"].fetched_blocks == (cached > 0)


async def test_snapshot_without_its_blocks_is_not_fetched():
    async with hybrid(store := await filled(PROMPT)) as model:
        store.corrupt("load")
        assert await from_stores(model, PROMPT) == 0
        assert store.parts["state"].calls["load"] == 0


async def test_prompt_that_the_store_is_known_to_lack_is_not_looked_up(monkeypatch):
    async with hybrid(store := await filled(PROMPT)) as model:
        monkeypatch.setattr(store, "may_have_any", lambda keys: keys[:32] in store.objects)
        assert await from_stores(model, [20, *PROMPT]) == 0
        assert store.calls["lookup"] == 0
        assert await from_stores(model, PROMPT) == 6


async def test_store_without_pools_costs_no_request():
    class BlocksOnly(ScriptedStore):
        def for_group(self, group: str) -> None:  # type: ignore[override]
            return None

    store = BlocksOnly()
    for _ in range(2):
        async with hybrid(store) as model:
            assert await from_stores(model, PROMPT) == 0
    assert len(store.objects) == 3
    assert store.calls["load"] == 0, "blocks without a snapshot are of no use"


async def test_cache_without_state_asks_for_no_snapshots():
    store = ScriptedStore()
    for _ in range(2):
        async with hybrid(store, state_slots=4, host_state_slots=0) as model:
            assert await from_stores(model, PROMPT) == 0
    assert store.parts == {}
    assert store.objects == {}


async def test_prefetch_brings_blocks_and_snapshot():
    async with hybrid(await filled(PROMPT)) as model:
        await model.engine.prefetch(PROMPT, timeout=PATIENCE_SECONDS)
        async with model.engine.match(PROMPT) as lease:
            assert lease.hit.total == 6
        assert await model.serve(PROMPT) == 6


async def test_pin_brings_blocks_and_snapshot():
    async with hybrid(await filled(PROMPT)) as model:
        pin = await model.engine.pin(PROMPT, timeout=PATIENCE_SECONDS)
        assert pin.tokens == 6
        assert await model.serve(PROMPT) == 6
        pin.release()


# --- what is saved --------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2])
async def test_snapshot_is_saved_at_its_nth_use(uses):
    async with hybrid(ScriptedStore(), store_policy="nth_use:2") as model:
        for _ in range(uses):
            await model.serve(PROMPT)
            await model.engine.drain()
        assert model.engine.statistics().groups["state"].saved_blocks == (uses == 2)


async def test_snapshots_are_saved_shortly_before_their_eviction():
    async with hybrid(ScriptedStore(), store_policy="write_back", host_state_slots=3) as model:
        for name in range(2):
            await model.serve([name, *PROMPT])
            await model.engine.drain()
        assert model.engine.statistics().groups["state"].saved_blocks == 0, "a host slot is free"
        await model.serve(PROMPT)
        await model.engine.drain()
        assert model.engine.statistics().groups["state"].saved_blocks == 1


async def test_snapshot_of_other_weights_is_not_found():
    async with hybrid(store := ScriptedStore(), weights_version="1") as model:
        await model.serve(PROMPT)
        await model.engine.drain()
        async with model.engine.updating_weights(version="2"):
            model.weights = 2
        assert await from_stores(model, PROMPT) == 0
        await model.engine.drain()
        async with model.engine.updating_weights(version="1"):
            model.weights = 0
        assert await from_stores(model, PROMPT) == 6
    assert len(store.objects) == 2 * (3 + 1)


async def test_sleeping_host_tier_opens_its_stores_again():
    async with hybrid(store := ScriptedStore()) as model:
        await model.serve(PROMPT)
        await model.engine.sleep({"host"})
        assert not store.parts["state"].is_open
        await model.engine.wake_up({"host"})
        assert await from_stores(model, PROMPT) == 6


async def test_two_models_share_a_directory(tmp_path):
    """Their snapshots and blocks have other lengths and other keys."""
    for _ in range(2):
        for model_name, dtype in (("a", 1), ("b", 2)):
            store = StoreUse(
                DirectoryStore(tmp_path / "kv"), lookup_deadline_seconds=PATIENCE_SECONDS
            )
            async with hybrid(store, model=model_name) as model:
                model.weights = dtype
                await from_stores(model, PROMPT)
    assert model.engine.statistics().groups["state"].fetched_blocks == 1
