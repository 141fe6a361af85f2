"""Blocks of sliding windows in stores: saved by the policy, and brought back for a hit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from aiokv.stores import DirectoryStore, DiskStore
from aiokv.testing import ScriptedStore
from tests.harness.windows import WINDOWS, Windowed

PROMPT = list(range(20))  # 10 blocks
LONGER = [*PROMPT, 7]  # may hit all of them
NEEDED = {"near": 1, "far": 3}  # window blocks of a hit

pytestmark = pytest.mark.asyncio


def windowed(*stores: Any, **config: Any) -> Windowed:
    sizes = {"host_windows": 40, "host_blocks": 60, "device_blocks": 60}
    return Windowed(stores=stores, **{**sizes, **config})


async def filled(*prompts: list[int], **config: Any) -> ScriptedStore:
    """Return a store of another process that has served the prompts."""
    store = ScriptedStore()
    async with windowed(store, **config) as model:
        for tokens in prompts:
            await model.serve(tokens)
            await model.engine.drain()
    return ScriptedStore(objects=store.objects)


async def from_stores(model: Windowed, tokens: list[int]) -> int:
    return await model.serve(tokens, wait_store=math.inf)


def fetched(model: Windowed) -> dict[str, int]:
    groups = model.engine.statistics().groups
    return {name: groups[name].fetched_blocks for name in model.engine.config.windows}


@pytest.mark.parametrize("kind", [DiskStore, DirectoryStore])
async def test_restart_continues_from_windows_on_disk(kind, tmp_path):
    def store() -> Any:
        return kind(tmp_path / "kv", bytes="64MiB")

    async with windowed(store()) as model:
        assert await from_stores(model, PROMPT) == 0
    async with windowed(store()) as model:
        assert await from_stores(model, LONGER) == 20
        assert model.engine.statistics().attention.fetched_blocks == 10
        assert fetched(model) == NEEDED
        groups = [store.group for store in model.engine.statistics().stores]
        assert groups == ["attention", *WINDOWS]
        worker = model.engine.statistics().worker
        assert [worker.groups[name].fetch.done for name in WINDOWS] == [1, 1]
        assert await from_stores(model, LONGER) == 20
        assert fetched(model) == NEEDED


async def test_sink_is_fetched_with_the_window():
    sinks = {"near": 3, "far": 1}
    async with windowed(await filled(PROMPT, sinks=sinks), sinks=sinks) as model:
        assert await from_stores(model, LONGER) == 20
        assert fetched(model) == {"near": 3, "far": 4}


async def test_windows_are_fetched_alone_when_the_blocks_are_cached():
    async with windowed(store := ScriptedStore(), host_windows=12) as model:
        await model.serve(PROMPT)
        await model.engine.drain()
        for first in (100, 200, 300):
            await model.serve(list(range(first, first + 20)))
            await model.engine.drain()
        async with model.engine.match(LONGER) as lease:
            assert lease.hit.total == 0, "both tiers have dropped the windows"
        loads = store.calls["load"]
        assert await from_stores(model, LONGER) == 20
        assert store.calls["load"] == loads, "no block was missing"
        assert fetched(model) == NEEDED


async def test_wrong_window_block_makes_the_hit_shorter():
    """Block 7 of the window of a hit of 10 blocks, the first of three, is wrong."""
    async with windowed(store := await filled(PROMPT)) as model:
        store.parts["far"].corrupt("load", block=0)
        cached = await from_stores(model, LONGER)
        assert cached < 20
        assert model.engine.statistics().groups["far"].unfetched_blocks > 0


async def test_store_has_only_the_beginning_of_a_window():
    async with windowed(store := await filled(PROMPT)) as model:
        store.parts["far"].answer("lookup", results=[1] * 6 + [0] * 4)
        assert await from_stores(model, LONGER) == 12


async def test_window_without_host_blocks_keeps_all_out_of_the_stores():
    async with windowed(store := ScriptedStore(), host_windows=0) as model:
        assert await from_stores(model, PROMPT) == 0
    assert store.objects == {}
    assert store.parts == {}


async def test_windows_of_other_weights_are_not_found():
    async with windowed(ScriptedStore(), weights_version="1") as model:
        await model.serve(PROMPT)
        await model.engine.drain()
        async with model.engine.updating_weights(version="2"):
            model.weights = 2
        assert await from_stores(model, LONGER) == 0
        await model.engine.drain()
        async with model.engine.updating_weights(version="1"):
            model.weights = 0
        assert await from_stores(model, LONGER) == 20


@pytest.mark.parametrize("policy", ["write_through", "nth_use:2", "write_back"])
async def test_window_blocks_are_saved_by_the_policy(policy):
    async with windowed(ScriptedStore(), store_policy=policy, host_windows=16) as model:
        await model.serve(PROMPT)
        await model.engine.drain()
        first = model.engine.statistics().groups["far"].saved_blocks
        assert (first > 0) == (policy == "write_through")
        await model.serve(LONGER)
        await model.serve([*range(100, 120)])
        await model.engine.drain()
        assert model.engine.statistics().groups["far"].saved_blocks > first
