"""KV events in the process: schema, snapshot, changes, slow subscribers, end of the engine."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Item
from aiokv.errors import ClosedError, UsageError
from aiokv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from aiokv.events.schema import BatchEncoder
from aiokv.stores import StoreUse
from aiokv.testing import (
    ScriptedStore,
    TransitionLog,
    record,
    replay_transitions,
    run_until_idle,
    spin,
)
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt
from tests.harness.closing import complete_during
from tests.models.kv_events import View, decode, index_of
from tests.models.prompt_digests import block_digests

if TYPE_CHECKING:
    from pathlib import Path

    from aiokv.engine.events import KVEvents


def config(**more: Any) -> CacheConfig:
    return CacheConfig(
        **{"block_tokens": BLOCK_TOKENS, "device_blocks": 64, "host_blocks": 64, **more}
    )


async def compute(engine: CacheEngine, tokens: np.ndarray, **context: Any) -> None:
    async with engine.match(tokens, **context) as lease:
        await lease.allocate(len(tokens))
        lease.commit(len(tokens))
        engine.step()


def take_all(events: KVEvents, view: View | None = None) -> list[Any]:
    """Take all events that are due, decoded with vLLM's records."""
    found: list[Any] = []
    while (batch := events.take()) is not None:
        decoded = decode(BatchEncoder("map").encode(batch))
        if view is not None:
            view.apply(decoded)
        found += decoded.events
    assert events.is_current
    return found


def names(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


@pytest.mark.asyncio
async def test_stored_blocks_have_the_fields_and_digests_that_are_documented():
    tokens = np.arange(17, dtype=np.int32)
    async with CacheEngine(config()) as engine, engine.kv_events(hashes="bytes") as events:
        await compute(engine, tokens, salt="tenant", adapter="lora")
        digests = block_digests(4, "6:tenantlora", tokens.tolist())
        batch = events.take()
        assert batch is not None
        assert batch.events == [
            BlockStored(
                block_hashes=digests[:4],
                parent_block_hash=None,
                token_ids=list(range(16)),
                block_size=4,
                lora_id=None,
                medium="GPU",
                lora_name="lora",
                extra_keys=[("lora", "tenant"), ("lora",), ("lora",), ("lora",)],
            )
        ]
        await engine.drain()
        (stored,) = take_all(events)
        assert (stored.medium, stored.block_hashes) == ("CPU", digests[:4])
        await compute(engine, np.append(tokens[:16], tokens), salt="tenant", adapter="lora")
        (stored,) = take_all(events)
        assert stored.parent_block_hash == digests[3]
        assert stored.token_ids == tokens[:16].tolist()
        assert stored.extra_keys == [("lora",)] * 4


@pytest.mark.asyncio
async def test_hashes_are_the_last_eight_bytes_by_default():
    tokens = np.arange(9, dtype=np.int32)
    async with CacheEngine(config()) as engine, engine.kv_events() as events:
        await compute(engine, tokens)
        (stored,) = take_all(events)
    digests = block_digests(4, "", tokens.tolist())
    assert stored.block_hashes == [int.from_bytes(digest[-8:], "big") for digest in digests]
    assert (stored.lora_name, stored.extra_keys) == (None, None)


@pytest.mark.asyncio
async def test_items_are_extra_keys_and_part_of_the_digest():
    tokens = np.full(13, 7, np.int32)
    items = [Item(b"cat", 2, 4), Item(b"dog", 9, 2)]
    async with CacheEngine(config()) as engine, engine.kv_events(hashes="bytes") as events:
        await compute(engine, tokens, items=items, salt="a")
        (stored,) = take_all(events)
    assert stored.extra_keys == [
        (["636174", 2], "a"),
        (["636174", -2],),
        (["646f67", 1],),
    ]
    triples = [(item.content_hash, item.offset, item.length) for item in items]
    assert stored.block_hashes == block_digests(4, "1:a", tokens.tolist(), triples)


def test_encoding_is_the_one_that_is_documented():
    removed = BlockRemoved(block_hashes=[1], medium="CPU")
    stored = BlockStored(
        block_hashes=[2],
        parent_block_hash=1,
        token_ids=[3],
        block_size=1,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    batch = KVEventBatch(1.5, [removed, stored, AllBlocksCleared()], 0)
    assert msgspec.msgpack.decode(BatchEncoder("map").encode(batch)) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"},
            {
                "type": "BlockStored",
                "block_hashes": [2],
                "parent_block_hash": 1,
                "token_ids": [3],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    array = BatchEncoder("array").encode(batch)
    assert msgspec.msgpack.decode(array) == [
        1.5,
        [
            ["BlockRemoved", [1], "CPU"],
            ["BlockStored", [2], 1, [3], 1, None, "GPU", None, None],
            ["AllBlocksCleared"],
        ],
        0,
    ]
    decoded = decode(array, "array")
    assert names(decoded.events) == ["BlockRemoved", "BlockStored", "AllBlocksCleared"]
    assert decoded.events[1].parent_block_hash == 1


@pytest.mark.asyncio
async def test_a_new_subscriber_gets_the_content_and_then_the_changes():
    async with Cache(device_blocks=6, host_blocks=4, write_policy="write_through") as cache:
        engine = cache.engine
        await cache.fill(prompt(1, 3))
        await cache.finish()
        async with engine.kv_events() as events:
            view = View()
            assert not events.is_current
            take_all(events, view)
            assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
            assert {medium: len(found) for medium, found in view.media.items()} == {
                "GPU": 3,
                "CPU": 3,
            }
            await complete_during(cache.fill(prompt(2, 3), prompt(3, 3)), cache.device)
            await cache.finish()
            assert "BlockRemoved" in names(take_all(events, view))
            assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
            await complete_during(engine.sleep(["device"]), cache.device)
            take_all(events, view)
            assert not view.media["GPU"]
            assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
            await engine.wake_up(regions=cache.memory.regions)
            await engine.reset()
            assert names(take_all(events, view)) == ["AllBlocksCleared"]


@pytest.mark.asyncio
async def test_failed_offload_is_not_reported():
    async with Cache(write_policy="write_through") as cache, cache.engine.kv_events() as events:
        await cache.fill(prompt(1, 3))
        assert {event.medium for event in take_all(events)} == {"GPU"}
        cache.device.copies[-1].fail_all()
        await cache.finish()
        assert take_all(events) == []


@pytest.mark.asyncio
async def test_blocks_of_a_failed_onload_are_removed():
    view = View()
    async with Cache(write_policy="write_through") as cache, cache.engine.kv_events() as events:
        engine = cache.engine
        await cache.fill(prompt(1, 3))
        await cache.finish()
        await engine.evict(3)
        take_all(events, view)
        assert [len(view.media[medium]) for medium in ("GPU", "CPU")] == [0, 3]
        lease = engine.match(prompt(1, 3))
        await lease.allocate(13)
        cache.device.copies[-1].fail_all()
        await spin(3)
        take_all(events, view)
        assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
        assert not view.media["CPU"]
        lease.release()


@pytest.mark.asyncio
async def test_a_waiting_subscriber_is_woken_by_each_kind_of_transition():
    seen: list[str] = []

    async def watch(events: KVEvents) -> None:
        async for batch in events:
            seen.extend(names(batch.events))

    sizes = config(device_blocks=8, host_blocks=0)
    async with CacheEngine(sizes) as engine, engine.kv_events() as events:
        task = asyncio.create_task(watch(events))
        await spin(2)
        await compute(engine, prompt(1, 7))
        await spin(3)
        assert seen == ["BlockStored"]
        async with engine.match(prompt(2, 7)) as lease:  # a grant that only evicts
            await lease.allocate(29)
            await spin(3)
            assert seen == ["BlockStored", "BlockRemoved"]
            lease.release()
            async with engine.match(prompt(3, 3)) as other:
                await other.allocate(13)
        await spin(3)
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.asyncio
async def test_one_batch_per_pass_has_the_changes_of_all_leases():
    async with CacheEngine(config(host_blocks=0)) as engine, engine.kv_events() as events:
        waiting = asyncio.ensure_future(anext(events))
        await spin(2)
        await compute(engine, prompt(1, 3))
        await compute(engine, prompt(2, 3))
        batch = await waiting
        assert sum(len(event.block_hashes) for event in batch.events) == 6


@pytest.mark.asyncio
async def test_slow_subscriber_gets_all_blocks_again_and_counts_what_was_dropped(caplog):
    view = View()
    async with CacheEngine(config(device_blocks=1500, host_blocks=0)) as engine:
        events = engine.kv_events(max_queued_blocks=1024)
        assert (events.dropped_blocks, events.restarts) == (0, 0)
        async with events:
            take_all(events, view)
            await compute(engine, prompt(1, 500))
            await compute(engine, prompt(2, 500))
            await compute(engine, prompt(3, 100))
            assert (events.dropped_blocks, events.restarts) == (1025, 1)
            assert names(take_all(events, view))[0] == "AllBlocksCleared"
            assert [record.getMessage() for record in caplog.records] == [
                "events.dropped dropped_blocks=1025"
            ]
            assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
            assert len(view.media["GPU"]) == 1100
        assert (events.dropped_blocks, events.restarts) == (1025, 1)


@pytest.mark.asyncio
async def test_prompt_longer_than_the_queue_is_reported():
    view = View()
    engine = CacheEngine(config(device_blocks=2000, host_blocks=0))
    async with engine, engine.kv_events(max_queued_blocks=1024) as events:
        await compute(engine, prompt(1, 1500))
        take_all(events, view)
        assert len(view.media["GPU"]) == 1500
        await compute(engine, prompt(1, 1501))
        take_all(events, view)
        assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
        assert events.restarts == 0


@pytest.mark.asyncio
async def test_changes_during_a_snapshot_are_not_lost():
    """The index is larger than a batch, and changes between two batches."""
    view = View()
    rng = np.random.default_rng(3)
    async with CacheEngine(config(device_blocks=4000, host_blocks=0)) as engine:
        for seed in range(300):
            await compute(engine, prompt(seed, 10))
        async with engine.kv_events() as events:
            for _ in range(30):
                if (batch := events.take()) is not None:
                    view.apply(decode(BatchEncoder("map").encode(batch)))
                await compute(engine, prompt(int(rng.integers(1000)), 40))
                await engine.evict(int(rng.integers(60)))
            take_all(events, view)
            assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
            assert view.clears == 0


@pytest.mark.asyncio
async def test_repeat_reports_all_blocks_to_receivers_that_know_them_or_not():
    old, new = View(), View()
    sizes = config(device_blocks=40, host_blocks=0)
    async with CacheEngine(sizes) as engine, engine.kv_events() as events:
        await compute(engine, prompt(1, 5))
        take_all(events, old)
        events.repeat()
        await compute(engine, prompt(2, 5))
        await engine.evict(2)
        while (batch := events.take()) is not None:
            for view in (old, new):
                view.apply(decode(BatchEncoder("map").encode(batch)))
        assert old.contents() == new.contents() == index_of(engine.inspect.parts.scheduler.read)
        assert old.clears == 0


@pytest.mark.asyncio
async def test_two_subscribers_do_not_affect_each_other():
    views = [View(), View()]
    async with CacheEngine(config()) as engine, engine.kv_events() as first:
        await compute(engine, prompt(1, 5))
        take_all(first, views[0])
        async with engine.kv_events(hashes="bytes") as second:
            await compute(engine, prompt(2, 5))
            take_all(second, views[1])
        await engine.reset()
        take_all(first, views[0])
        assert views[0].contents() == index_of(engine.inspect.parts.scheduler.read)
        assert len(views[1].media["GPU"]) == 10


@pytest.mark.asyncio
async def test_the_iteration_ends_with_the_engine():
    engine = CacheEngine(config())
    found: list[str] = []

    async def watch() -> None:
        async with engine.kv_events() as events:
            async for batch in events:
                found.extend(names(batch.events))
            assert events.take() is None

    async with engine:
        task = asyncio.create_task(watch())
        await compute(engine, prompt(1, 3))
        await spin(3)
    await asyncio.wait_for(task, PATIENCE_SECONDS)
    assert found[-1] == "AllBlocksCleared"
    assert found.count("AllBlocksCleared") == 1
    with pytest.raises(ClosedError):
        async with engine.kv_events():
            pass


@pytest.mark.asyncio
async def test_cancelled_wait_loses_no_event():
    async with CacheEngine(config(host_blocks=0)) as engine, engine.kv_events() as events:
        waiting = asyncio.ensure_future(anext(events))
        await spin(2)
        await compute(engine, prompt(1, 3))
        waiting.cancel()  # in the pass in which its wait has ended
        await asyncio.wait([waiting])
        if waiting.cancelled():
            assert names(take_all(events)) == ["BlockStored"]
        else:
            assert names(waiting.result().events) == ["BlockStored"]


@pytest.mark.asyncio
async def test_misuse_is_refused():
    async with CacheEngine(config()) as engine:
        events = engine.kv_events()
        with pytest.raises(UsageError, match="entered with 'async with'"):
            await anext(events)
        with pytest.raises(UsageError, match="entered with 'async with'"):
            events.repeat()
        async with events:
            waiting = asyncio.ensure_future(anext(events))
            await spin(2)
            with pytest.raises(UsageError, match="another task"):
                await anext(events)
            waiting.cancel()
            await asyncio.wait([waiting])
        with pytest.raises(UsageError, match="can be entered once"):
            await events.__aenter__()
        for wrong, message in (
            ({"hashes": "sha"}, "hashes is 'sha'.*'int64', 'bytes'"),
            ({"max_queued_blocks": 5}, "max_queued_blocks is 5.*between 1024"),
            ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
        ):
            with pytest.raises(UsageError, match=message):
                engine.kv_events(**wrong)


@pytest.mark.asyncio
async def test_subscription_changes_no_decision(tmp_path: Path):
    """The transitions of an engine with a subscriber give the same results without one (I9)."""
    engine = CacheEngine(config(device_blocks=12, host_blocks=6))
    with record(engine, tmp_path / "log"):
        async with engine, engine.kv_events() as events:
            for seed in range(12):
                await compute(engine, prompt(seed % 5, 2 + seed % 3))
                if seed % 4 == 0:
                    take_all(events)
            await engine.drain()
    assert replay_transitions(TransitionLog.load(tmp_path / "log")) > 40


def media_of(events: list[Any]) -> list[tuple[str, str | None, int]]:
    """Return name, medium and number of blocks of each event."""
    return [
        (name, getattr(event, "medium", None), len(getattr(event, "block_hashes", ())))
        for name, event in zip(names(events), events, strict=True)
    ]


@pytest.mark.asyncio
@pytest.mark.clock
async def test_blocks_of_stores_are_reported_after_the_end_of_a_save_or_of_a_fetch():
    tokens, store, view = prompt(1, 4), ScriptedStore(), View()
    held = store.hold("save")
    engine = CacheEngine(config(model="tests"), stores=[store])
    async with engine, engine.kv_events(stores=True) as events:
        await compute(engine, tokens)
        await run_until_idle(lambda: store.calls["save"] == 1)
        found = media_of(take_all(events, view))
        assert sorted(found) == [("BlockStored", "CPU", 4), ("BlockStored", "GPU", 4)]
        held.open()
        await engine.drain()
        assert media_of(take_all(events, view)) == [("BlockStored", "STORAGE", 4)]
        assert len(store.objects) == 4
        await engine.evict(4, tier="device")
        await engine.evict(4, tier="host")
        found = media_of(take_all(events, view))
        assert sorted(found) == [("BlockRemoved", "CPU", 4), ("BlockRemoved", "GPU", 4)]
        assert len(view.media["STORAGE"]) == 4
        async with engine.match(tokens) as lease:
            await lease.allocate(len(tokens), wait_store=math.inf)
            assert lease.cached_tokens == 16
            found = media_of(take_all(events, view))
        assert {event for event in found if event[1] != "GPU"} == {
            ("BlockStored", "CPU", 4), ("BlockStored", "STORAGE", 4)
        }  # fmt: skip
        async with engine.kv_events(stores=True) as later, engine.kv_events() as without:
            assert {event.medium for event in take_all(later)} == {"GPU", "CPU", "STORAGE"}
            assert {event.medium for event in take_all(without)} == {"GPU", "CPU"}


@pytest.mark.asyncio
async def test_refused_and_failed_saves_are_not_reported():
    store = ScriptedStore(capacity_blocks=2)
    engine = CacheEngine(config(model="tests"), stores=[store])
    async with engine, engine.kv_events(stores=True) as events:
        await compute(engine, prompt(1, 4))
        await engine.drain()
        saved = [event for event in take_all(events) if event.medium == "STORAGE"]
        assert sum(len(event.block_hashes) for event in saved) == 2
        store.fail("save")
        await compute(engine, prompt(2, 4))
        await engine.drain()
        assert {event.medium for event in take_all(events)} == {"GPU", "CPU"}


@pytest.mark.asyncio
async def test_after_a_purge_no_block_of_the_salt_is_reported_as_stored():
    store, view = ScriptedStore(), View()
    engine = CacheEngine(config(model="tests"), stores=[store])
    async with engine, engine.kv_events(stores=True) as events, engine.kv_events() as without:
        for salt in ("kept", "gone"):
            await compute(engine, prompt(1, 4), salt=salt)
        await engine.drain()
        take_all(events, view)
        take_all(without)
        assert len(view.media["STORAGE"]) == 8
        await engine.evict(4, tier="device")  # blocks that the index does not know any more
        await engine.evict(4, tier="host")
        assert await engine.purge("gone") == 4
        take_all(events, view)
        assert view.clears == 1
        assert {salt for salt, _, _ in view.blocks.values()} <= {"kept"}
        assert view.contents() == index_of(engine.inspect.parts.scheduler.read)
        assert "AllBlocksCleared" not in names(take_all(without))


@pytest.mark.asyncio
@pytest.mark.clock
@pytest.mark.parametrize("knows", [True, False])  # the store knows without a lookup what it lacks
@pytest.mark.parametrize("other", [False, True])  # a store that is not read has the block, too
@pytest.mark.parametrize("place", [0, 2])  # of the block that the store lacks
async def test_stored_block_is_removed_when_a_request_finds_that_the_stores_lack_it(
    monkeypatch: pytest.MonkeyPatch, knows: bool, other: bool, place: int
):
    tokens, store, view = prompt(1, 4), ScriptedStore(), View()
    if knows:
        monkeypatch.setattr(store, "may_have_any", lambda keys: keys[:32] in store.objects)
    use = StoreUse(store, remember_missing_seconds=0.0 if knows else 5.0)
    written = [StoreUse(ScriptedStore("other"), read=False)] if other else []
    engine = CacheEngine(config(model="tests"), stores=[use, *written])
    async with engine, engine.kv_events(stores=True) as events:
        await compute(engine, tokens)
        await engine.drain()
        take_all(events, view)
        await engine.evict(4, tier="device")
        await engine.evict(4, tier="host")
        take_all(events, view)
        stored = [view.blocks[one][2] for one in view.media["STORAGE"]]
        assert len(stored) == 4
        lost = list(store.objects)[place]
        del store.objects[lost]  # the store has evicted it
        async with engine.match(tokens) as lease:
            await lease.allocate(len(tokens), wait_store=math.inf)
            assert lease.cached_tokens == place * BLOCK_TOKENS
            removed = [e for e in take_all(events, view) if type(e).__name__ == "BlockRemoved"]
            assert media_of(removed) == ([] if other else [("BlockRemoved", "STORAGE", 1)])
            left = {view.blocks[one][2] for one in view.media["STORAGE"]}
            lengths = {len(text) // 4 // BLOCK_TOKENS for text in left}
            assert lengths == {1, 2, 3, 4} - ({place + 1} if not other else set())
            lease.commit(len(tokens))
            engine.step()
        await engine.drain()
        take_all(events, view)
        assert len(view.media["STORAGE"]) == 4  # it was saved again
        async with engine.match(prompt(2, 4)) as lease:  # was never reported
            await lease.allocate(len(tokens), wait_store=math.inf)
            assert media_of(take_all(events, view)) == []


@pytest.mark.asyncio
@pytest.mark.clock
async def test_blocks_of_a_store_that_fails_stay_reported():
    tokens, store, view = prompt(1, 4), ScriptedStore(), View()
    engine = CacheEngine(config(model="tests"), stores=[store])
    async with engine, engine.kv_events(stores=True) as events:
        await compute(engine, tokens)
        await engine.drain()
        take_all(events, view)
        await engine.evict(4, tier="device")
        await engine.evict(4, tier="host")
        store.fail("lookup")
        async with engine.match(tokens) as lease:
            await lease.allocate(len(tokens), wait_store=math.inf)
            assert lease.cached_tokens == 0
        take_all(events, view)
        assert len(view.media["STORAGE"]) == 4
