"""Stores that cannot be opened: the engine starts without them, and uses them later."""

from __future__ import annotations

import asyncio
import math

import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.observe.asgi import failed_checks
from aiokv.observe.metrics import exposition
from aiokv.stores import StoreUse
from aiokv.stores.breaker import FIRST_PAUSE_SECONDS
from aiokv.stores.use import RETRY_SECONDS
from aiokv.testing import ScriptedStore, running_clock, spin
from tests.harness.cache import prompt
from tests.harness.recurrence import Hybrid
from tests.integration.test_stores import StoreCache, restarted

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

A, B = prompt(1, 4), prompt(2, 4)


def failing(*calls: int, objects: dict[bytes, bytes] | None = None) -> ScriptedStore:
    """Return a store whose openings with these numbers fail."""
    store = ScriptedStore(objects=objects)
    for call in calls:
        store.fail("open", call=call, error=StoreError("no disk"))
    return store


async def test_engine_starts_without_a_store_that_fails_and_uses_it_later(caplog):
    store = failing(0, 1)
    async with StoreCache(store) as c:
        assert c.engine.health().unavailable_stores == ["scripted:memory"]
        assert failed_checks(c.engine) == {"stores": "unavailable: scripted:memory"}
        (shown,) = c.engine.statistics().stores
        assert (shown.reading, shown.saving, shown.failure) == ("open", "open", "no disk")
        states = [
            line
            for line in exposition({"e": c.engine}).splitlines()
            if line.startswith("aiokv_store_breaker_state") and line.endswith(" 1")
        ]
        assert len(states) == 2
        assert all('state="open"' in line for line in states)
        (await c.serve(A, wait_store=math.inf)).release()
        await c.finish()
        assert not store.objects
        await running_clock().advance(3 * FIRST_PAUSE_SECONDS)
        assert c.engine.health().unavailable_stores == []
        assert failed_checks(c.engine) == {}
        assert c.engine.statistics().stores[0].failure == ""
        await c.fill(B)
        await c.finish()
        await c.engine.reset()
        lease = await c.serve(B, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()
    assert [record.event for record in caplog.records] == ["store.not_opened", "store.available"]


async def test_blocks_of_an_earlier_process_are_found_when_the_store_opens_late():
    objects = (await restarted(A)).objects
    async with StoreCache(failing(0, objects=objects)) as c:
        lease = await c.serve(A[:4], wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()


@pytest.mark.parametrize("use", [{"required": True}, {}], ids=["required", "configuration"])
async def test_failures_that_end_the_start_leave_nothing_open(use):
    first, second = ScriptedStore("a"), ScriptedStore("b")
    error = StoreError("no disk") if use else ConfigError("in use by process 7")
    second.fail("open", error=error)
    c = StoreCache(first, StoreUse(second, **use))
    with pytest.raises(type(error), match=str(error)):
        await c.engine.__aenter__()
    assert not first.is_open
    await running_clock().advance(RETRY_SECONDS)
    assert second.calls["open"] == 1


async def test_store_that_fails_after_a_sleep_is_used_on_the_new_memory_later():
    store = failing(1, 2)
    async with StoreCache(store) as c:
        await c.fill(A)
        await c.finish()
        await c.engine.sleep(["host"])
        assert c.engine.health().unavailable_stores == []
        await c.engine.wake_up(["host"])
        assert c.engine.health().unavailable_stores == ["scripted:memory"]
        await running_clock().advance(3 * FIRST_PAUSE_SECONDS)
        assert store.opened == 2
        await c.engine.reset()
        lease = await c.serve(A, wait_store=math.inf)  # checks the bytes
        assert lease.cached_tokens == 16
        lease.release()


async def test_attempts_end_before_the_host_memory_sleeps():
    store = failing(*range(100))
    async with StoreCache(store) as c:
        for _ in range(3):
            await c.engine.sleep(["host"])
            calls = store.calls["open"]
            await running_clock().advance(RETRY_SECONDS)
            assert store.calls["open"] == calls
            await c.engine.wake_up(["host"])
            assert store.calls["open"] == calls + 1


async def test_close_ends_the_attempts():
    store = failing(*range(100))
    async with StoreCache(store) as c:
        await c.fill(A)
    calls = store.calls["open"]
    await running_clock().advance(10 * RETRY_SECONDS)
    assert store.calls["open"] == calls


async def test_engine_starts_while_a_store_hangs_and_closes_it():
    store = ScriptedStore()
    gate = store.hold("open")
    c = StoreCache(StoreUse(store, deadline_seconds=2.0))
    c.stores = (store,)
    entering = asyncio.create_task(c.engine.__aenter__())
    await running_clock().advance(2.1)
    await entering
    assert c.engine.health().unavailable_stores == ["scripted:memory"]
    closing = asyncio.create_task(c.engine.aclose())
    await spin(20)
    gate.open()
    await closing
    assert not store.is_open


async def test_wake_up_with_a_short_timeout_succeeds_when_the_limit_of_the_openings_has_passed():
    stores = ScriptedStore("a"), ScriptedStore("b")
    async with StoreCache(*(StoreUse(store, deadline_seconds=2.0) for store in stores)) as c:
        await c.engine.sleep(["host"])
        for store in stores:
            store.hold("open", call=1)
        for seconds, fails in ((1.5, True), (0.6, False)):
            waking = asyncio.create_task(c.engine.wake_up(["host"], timeout=1.5))
            await running_clock().advance(seconds)
            await spin(20)
            assert waking.done()
            error = str(waking.exception() or "")
            assert ("these stores are unavailable: ['scripted:a', 'scripted:b']" in error) == fails
        assert len(c.engine.health().unavailable_stores) == 2
        for store in stores:
            store.end_script()


@pytest.mark.parametrize("failing", ["attention", "state"])
async def test_group_whose_part_of_a_store_fails_is_used_later(failing):
    store = ScriptedStore()
    state = ScriptedStore("state", objects=store.objects)
    store.for_group = lambda group: state  # type: ignore[method-assign]
    {"attention": store, "state": state}[failing].fail("open", call=0)
    tokens = [5, 6, 7, 8, 9, 10, 11]
    sizes = {"state_slots": 4, "host_state_slots": 4, "host_blocks": 32}
    async with Hybrid(stores=[store], **sizes) as model:
        await model.serve(tokens)
        states = {s.group: s.reading for s in model.engine.statistics().stores}
        assert states == {"attention": "closed", "state": "closed", failing: "open"}
        await running_clock().advance(FIRST_PAUSE_SECONDS)
        await model.engine.reset()
        await model.serve(tokens)
        await model.engine.drain()
        await model.engine.reset()
        assert await model.serve(tokens, wait_store=math.inf) == 6
