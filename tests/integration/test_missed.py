"""``Lease.missed`` and the counters of missed tokens, through the public API."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from aiokv import CacheConfig, CacheEngine, Item, WindowGroup
from aiokv.statistics import MissedRange
from aiokv.sync import SyncEngine
from aiokv.testing import running_clock
from tests.harness.cache import prompt
from tests.integration.test_stored_windows import filled, windowed
from tests.integration.test_stores import StoreCache, restarted

OPTIONS = {"device_blocks": 4, "block_tokens": 4, "strict": False}
PROMPT = list(range(13))
WINDOW = WindowGroup(window_tokens=4, device_blocks=8)


def make_engine(history: int = 16, **options: Any) -> CacheEngine:
    return CacheEngine(CacheConfig(miss_history_blocks=history, **OPTIONS, **options))


async def serve(engine: CacheEngine, tokens: list[int], **match: Any) -> list[MissedRange]:
    async with await engine.match(tokens, **match) as lease:
        await lease.allocate(len(tokens))
        missed = lease.missed
        lease.commit(len(tokens))
    return list(missed)


@pytest.mark.asyncio
async def test_evicted_blocks_name_the_lease_that_needed_the_room() -> None:
    async with make_engine() as engine:
        assert [m.cause for m in await serve(engine, PROMPT)] == ["never_seen"]
        other = await engine.match([50] * 13)
        await other.allocate(13)
        demand = other.id
        other.release()
        (missed,) = await serve(engine, PROMPT)
        counts = engine.statistics().missed_tokens_by_cause
    assert (missed.first_token, missed.num_tokens, missed.cause) == (0, 12, "evicted")
    assert (missed.tier, missed.eviction_cause, missed.lease_id) == ("device", "capacity", demand)
    assert missed.evicted_seconds is not None
    assert missed.evicted_seconds >= 0
    assert counts["evicted"] == 12
    assert counts["never_seen"] == 24


@pytest.mark.asyncio
async def test_eviction_by_request_has_no_lease() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        await engine.evict(1)
        (missed,) = await serve(engine, PROMPT)
    assert (missed.first_token, missed.num_tokens) == (8, 4)
    assert (missed.eviction_cause, missed.lease_id) == ("request", None)


@pytest.mark.asyncio
async def test_diverged_prompt_names_position_and_both_tokens() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        (missed,) = await serve(engine, [*PROMPT[:6], 99, *PROMPT[7:]])
    assert (missed.cause, missed.first_token, missed.num_tokens) == ("diverged", 4, 8)
    assert (missed.diverged_at, missed.token, missed.known_token) == (6, 99, 6)


@pytest.mark.asyncio
async def test_tokens_of_another_salt_name_the_salt() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT, salt="other")
        (missed,) = await serve(engine, PROMPT, salt="mine")
    assert (missed.cause, missed.salt, missed.adapter) == ("other_context", "other", "")


@pytest.mark.asyncio
@pytest.mark.parametrize("evicted", [0, 2])
async def test_tokens_with_another_image_name_the_items(evicted: int) -> None:
    first, second = (Item(content, 5, 2) for content in (b"a", b"b"))
    async with make_engine() as engine:
        await serve(engine, PROMPT, items=[first])
        assert await engine.evict(evicted) == evicted
        (missed,) = await serve(engine, PROMPT, items=[second])
        assert (missed.cause, missed.first_token, missed.num_tokens) == ("other_items", 4, 8)
        await engine.evict(4)
        again = await serve(engine, PROMPT, items=[first])
        assert {missed.cause for missed in again} == {"evicted"}
        assert engine.statistics().missed_tokens_by_cause["other_items"] == 8


@pytest.mark.asyncio
@pytest.mark.clock
@pytest.mark.parametrize(
    ("loads", "options", "wait_store", "missed"),
    [
        ("held", {}, 1.0, (0, 16, "late")),
        ("held", {"prefill_tokens_per_second": 100.0}, math.inf, (0, 16, "late")),
        ("slow", {"prefill_tokens_per_second": 100.0}, math.inf, (0, 16, "declined")),
        ("wrong", {}, math.inf, (8, 8, "failed")),
    ],
)
async def test_blocks_that_a_store_has_say_why_they_were_not_fetched(
    loads: str, options: dict[str, Any], wait_store: float, missed: tuple[int, int, str]
) -> None:
    tokens, other = prompt(1, 4), prompt(2, 4)
    store = await restarted(tokens, other)
    async with StoreCache(store, miss_history_blocks=16, device_blocks=16, **options) as c:
        if loads == "held":
            store.hold("load")
        elif loads == "wrong":
            store.corrupt("load", block=2)
        else:
            store.delay("load", seconds=1.0)
            measuring = asyncio.create_task(c.engine.prefetch(other))
            await running_clock().advance(1.1)
            await measuring
        serving = asyncio.create_task(c.serve(tokens, wait_store=wait_store))
        await running_clock().advance(10.0)
        lease = await serving
        assert [(m.first_token, m.num_tokens, m.store) for m in lease.missed] == [missed]
        assert {m.cause for m in lease.missed} == {"in_store"}
        lease.release()
        assert c.engine.statistics().missed_tokens_by_cause["in_store"] == missed[1]
        store.end_script()
        await running_clock().advance(1.0)


@pytest.mark.asyncio
async def test_block_that_another_lease_computes_is_pending() -> None:
    async with (
        make_engine() as engine,
        await engine.match(PROMPT[:5]) as owner,
        await engine.match([*PROMPT[:4], 9, 9]) as lease,
    ):
        await owner.allocate(5)
        await lease.allocate(6)
        (missed,) = lease.missed
        assert (missed.cause, missed.lease_id) == ("pending", owner.id)


@pytest.mark.asyncio
async def test_forgotten_tokens_were_evicted_by_request() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT)
        engine.forget(PROMPT)
        (missed,) = await serve(engine, PROMPT)
    assert (missed.cause, missed.eviction_cause) == ("evicted", "request")


@pytest.mark.asyncio
async def test_purge_forgets_evicted_tokens() -> None:
    async with make_engine() as engine:
        await serve(engine, PROMPT, salt="left")
        await engine.evict(2)
        await engine.purge("left")
        for salt in ("left", "other"):
            (missed,) = await serve(engine, PROMPT, salt=salt)
            assert missed.cause == "never_seen"
            await engine.reset()


@pytest.mark.asyncio
@pytest.mark.parametrize("windows", [{}, {"local": WINDOW}])  # with one, a reset visits each block
async def test_reset_forgets_evicted_tokens(windows: dict[str, WindowGroup]) -> None:
    async with make_engine(windows=windows) as engine, await engine.match([7, 7]) as open_lease:
        await open_lease.allocate(2)
        await serve(engine, PROMPT[:9])
        assert await engine.evict(2) == 2
        await engine.reset()
        (missed,) = await serve(engine, PROMPT[:9])
    assert missed.cause == "never_seen"


@pytest.mark.asyncio
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("options", [{}, {"windows": {"local": WINDOW}}, {"host_blocks": 8}])
async def test_blocks_of_other_weights(is_held: bool, options: dict[str, Any]) -> None:
    items = [Item(b"a", 5, 2)]
    async with make_engine(64, **options) as engine:
        await serve(engine, PROMPT, items=items)
        await serve(engine, [*PROMPT[:8], 50, 51, 52, 53, 54], items=items)
        await engine.drain()
        lease = await engine.match(PROMPT[:9], items=items)
        await lease.allocate(9)
        if not is_held:
            lease.release()
        async with engine.updating_weights():
            pass
        lease.release()
        (missed,) = await serve(engine, PROMPT, items=items)
        assert (missed.num_tokens, missed.cause) == (12, "other_weights")
        (missed,) = await serve(engine, [*PROMPT[:8], 50, 51, 52, 53, 54], items=items)
        assert (missed.first_token, missed.num_tokens, missed.cause) == (8, 4, "other_weights")
        for tier in ("device", "host"):
            await engine.evict(8, tier)
        assert {m.cause for m in await serve(engine, PROMPT, items=items)} == {"evicted"}


@pytest.mark.asyncio
async def test_without_history_nothing_is_explained() -> None:
    async with make_engine(history=0) as engine:
        assert await serve(engine, PROMPT) == []
        assert set(engine.statistics().missed_tokens_by_cause.values()) == {0}


def test_missed_in_a_thread() -> None:
    with SyncEngine(CacheConfig(miss_history_blocks=16, **OPTIONS)) as engine:
        lease = engine.match(PROMPT)
        lease.allocate(13).result()
        (missed,) = lease.missed
        lease.release()
    assert missed == MissedRange(first_token=0, num_tokens=12, cause="never_seen")


@pytest.mark.asyncio
@pytest.mark.clock
@pytest.mark.parametrize(
    ("loads", "options", "wait_store", "why"),
    [
        ("held", {}, 1.0, "late"),
        ("held", {"prefill_tokens_per_second": 100.0}, math.inf, "late"),
        ("slow", {"prefill_tokens_per_second": 100.0}, math.inf, "declined"),
        ("wrong", {}, math.inf, "failed"),
    ],
)
async def test_windows_that_a_store_has_say_why_they_were_not_fetched(
    loads: str, options: dict[str, Any], wait_store: float, why: str
) -> None:
    tokens, other = [*range(21)], [*range(100, 121)]
    store = await filled(tokens, other)
    async with windowed(store, miss_history_blocks=16, **options) as model:
        if loads == "held":
            store.hold("load")
        elif loads == "wrong":
            store.parts["far"].corrupt("load", block=0)
        else:
            store.delay("load", seconds=1.0)
            measuring = asyncio.create_task(model.engine.prefetch(other))
            await running_clock().advance(5.0)
            await measuring
        lease = await model.engine.match(tokens)
        granted = asyncio.create_task(lease.allocate(21, wait_store=wait_store))
        await running_clock().advance(10.0)
        await granted
        assert lease.cached_tokens < 20
        (missed,) = lease.missed
        assert (missed.first_token, missed.cause, missed.store) == (
            lease.cached_tokens,
            "in_store",
            why,
        )
        assert missed.num_tokens == 20 - missed.first_token
        lease.release()
        store.end_script()
        await running_clock().advance(1.0)
