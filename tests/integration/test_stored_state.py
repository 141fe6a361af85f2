"""Snapshots of recurrent state in stores: saved with their blocks, and brought back with them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiokv.stores import DirectoryStore, DiskStore
from aiokv.testing import ScriptedStore
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
        assert (statistics.fetched_blocks, statistics.fetched_snapshots) == (3, 1)
        assert statistics.onloaded_states == 1
        assert statistics.hit_store_tokens == 6
        assert await from_stores(model, PROMPT) == 6
        assert model.engine.statistics().fetches == 1


async def test_statistics_tell_pools_apart():
    async with hybrid(store := await filled(PROMPT)) as model:
        assert await from_stores(model, PROMPT) == 6
        blocks, snapshots = model.engine.store_statistics()
        assert (blocks.pool, blocks.loaded_blocks) == ("host", 3)
        assert (snapshots.pool, snapshots.loaded_blocks) == ("host_state", 1)
        worker = model.engine.worker.statistics()
        assert (worker.fetch.done, worker.state_fetch.done) == (1, 1)
        assert worker.state_fetch.moved_bytes == snapshots.loaded_bytes > 0
    assert store.calls["load"] == 1
    assert store.parts["host_state"].calls["load"] == 1
