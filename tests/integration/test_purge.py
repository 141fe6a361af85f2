"""Purges of a salt: no block of it is found afterwards, in memory or in a store."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import ControlTimeout, StoreError, UsageError
from aiokv.stores import StoreUse
from aiokv.stores.labels import label
from aiokv.testing import ScriptedStore, run_until_idle, running_clock, spin
from tests.harness.cache import prompt
from tests.integration.test_stores import StoreCache

if TYPE_CHECKING:
    import numpy as np

    from aiokv import Lease

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

A, B = prompt(1, 4), prompt(2, 4)


def cache(*stores: Any, **config: Any) -> StoreCache:
    return StoreCache(*stores, device_blocks=24, host_blocks=24, **config)


async def serve(c: StoreCache, tokens: np.ndarray, salt: str, **allocate: Any) -> Lease:
    """Serve a prompt under a salt; the bytes of its blocks do not depend on the salt."""
    lease = c.engine.match(tokens, salt=salt)
    await lease.allocate(len(tokens), **allocate)
    await lease.layers.wait_all()
    c.check(lease, tokens)
    c.compute(lease, tokens)
    return lease


async def fill(c: StoreCache, *salts: str) -> None:
    for salt in salts:
        (await serve(c, A, salt)).release()
    await c.engine.drain()


def stored(store: ScriptedStore, salt: str) -> int:
    return sum(key.endswith(label("salt", salt)) for key in store.objects)


def hit(c: StoreCache, salt: str) -> int:
    assert c.engine.check_invariants() == []
    return c.engine.would_hit(A, salt=salt).total


async def test_purged_salt_is_found_in_no_tier_and_no_store_and_others_are():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a", "b", "")
        assert [stored(store, salt) for salt in ("a", "b", "")] == [4, 4, 4]
        assert await c.engine.purge("a") == 4
        assert [hit(c, salt) for salt in ("a", "b", "")] == [0, 16, 16]
        assert [stored(store, salt) for salt in ("a", "b", "")] == [0, 4, 4]
        lease = await serve(c, A, "a", wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()
        await c.engine.drain()
        assert (hit(c, "a"), stored(store, "a")) == (16, 4), "the salt is cached again afterwards"


async def test_restart_finds_no_block_of_a_purged_salt():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a", "b")
    async with cache(store) as c:
        assert await c.engine.purge("a") == 4
        for salt, cached in (("a", 0), ("b", 16)):
            lease = await serve(c, A, salt, wait_store=math.inf)
            assert lease.cached_tokens == cached
            lease.release()


async def test_adapters_of_a_salt_are_purged_and_equal_adapters_of_others_are_not():
    async with cache(ScriptedStore()) as c:
        for salt in ("a", "b"):
            lease = c.engine.match(A, salt=salt, adapter="lora")
            await lease.allocate(len(A))
            c.compute(lease, A)
            lease.release()
        await c.engine.drain()
        assert await c.engine.purge("a") == 4
        assert c.engine.would_hit(A, salt="a", adapter="lora").total == 0
        assert c.engine.would_hit(A, salt="b", adapter="lora").total == 16


async def test_open_lease_publishes_nothing_after_a_purge():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a")
        lease = c.engine.match(A, salt="a")
        await lease.allocate(len(A))
        matched = c.engine.match(B, salt="a")
        await c.engine.purge("a")
        c.compute(lease, A)
        lease.release()
        await matched.allocate(len(B))
        c.compute(matched, B)
        matched.release()
        await c.engine.drain()
        assert hit(c, "a") == stored(store, "a") == 0
        assert c.engine.would_hit(B, salt="a").total == 0


async def test_preempted_lease_of_a_purged_salt_goes_on():
    async with cache(ScriptedStore()) as c:
        lease = await serve(c, A, "a")
        await lease.preempt(swap=True)
        await c.engine.purge("a")
        await lease.allocate(len(A))
        assert lease.cached_tokens == 0
        c.compute(lease, A)
        lease.release()
        assert hit(c, "a") == 0


async def test_purge_waits_for_a_save_in_flight_and_removes_what_it_stores():
    store = ScriptedStore()
    async with cache(store) as c:
        gate = store.hold("save")
        (await serve(c, A, "a")).release()
        await run_until_idle(lambda: store.calls["save"] == 1)
        purging = asyncio.create_task(c.engine.purge("a"))
        await spin(20)
        assert not purging.done()
        gate.open()
        assert await purging > 0
        await c.engine.drain()
        assert hit(c, "a") == stored(store, "a") == 0


async def test_load_in_flight_brings_no_block_of_a_purged_salt():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a")
    async with cache(store) as c:
        gate = store.hold("load")
        serving = asyncio.create_task(serve(c, A, "a", wait_store=math.inf))
        await run_until_idle(lambda: store.calls["load"] == 1)
        purging = asyncio.create_task(c.engine.purge("a"))
        await spin(20)
        gate.open()
        lease = await serving
        assert (lease.cached_tokens, await purging) == (0, 4)
        lease.release()
        await c.engine.drain()
        assert hit(c, "a") == stored(store, "a") == 0


async def test_leases_made_during_a_purge_do_not_use_the_cache():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a", "b")
        gate = store.hold("remove")
        purging = asyncio.create_task(c.engine.purge("a"))
        await run_until_idle(lambda: store.calls["remove"] == 1)
        lease = await serve(c, A, "a", wait_store=math.inf)
        assert (lease.cached_tokens, store.calls["load"]) == (0, 0)
        lease.release()
        other = await serve(c, A, "b")
        assert other.cached_tokens == 16
        other.release()
        gate.open()
        await purging
        await c.engine.drain()
        assert hit(c, "a") == stored(store, "a") == 0


async def test_engines_that_share_a_store_hold_the_salt_until_all_have_stopped_using_it():
    """Each engine has the blocks in memory, and would save those of a later eviction again."""
    first, second = ScriptedStore("first"), ScriptedStore("second")
    second.objects = first.objects
    async with cache(first) as one, cache(second) as two:
        await fill(one, "a")
        await fill(two, "a")
        gate = second.hold("save")  # a save of the second engine is in flight
        (await serve(two, B, "a")).release()
        await run_until_idle(lambda: second.calls["save"] == 2)
        purges = [asyncio.create_task(one.engine.purge("a", hold_seconds=10.0))]
        await spin(20)
        assert not purges[0].done(), "the other engine may still save blocks"
        lease = await serve(two, A, "a", wait_store=math.inf)  # not called yet: it still hits
        assert lease.cached_tokens == 16
        lease.release()
        purges.append(asyncio.create_task(two.engine.purge("a", hold_seconds=10.0)))
        await spin(20)
        gate.open()
        await running_clock().advance(11.0)
        await asyncio.gather(*purges)
        await asyncio.gather(one.engine.drain(), two.engine.drain())
        assert hit(one, "a") == hit(two, "a") == stored(first, "a") == 0
        for c in (one, two):
            assert c.engine.would_hit(B, salt="a").total == 0


async def test_store_that_fails_is_named_and_a_second_purge_removes_the_rest():
    bad, good = ScriptedStore("bad"), ScriptedStore("good")
    async with cache(bad, good) as c:
        await fill(c, "a")
        bad.fail("remove")
        with pytest.raises(StoreError, match="scripted:bad was not purged"):
            await c.engine.purge("a")
        assert (hit(c, "a"), stored(bad, "a"), stored(good, "a")) == (0, 4, 0)
        bad.end_script()
        assert await c.engine.purge("a") == 4
        assert stored(bad, "a") == 0


async def test_store_that_the_engine_may_not_change_is_named():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a")
    async with cache(StoreUse(store, save=False)) as c:
        with pytest.raises(StoreError, match="used with save=False"):
            await c.engine.purge("a")


async def test_purge_ends_at_its_timeout_and_the_salt_is_cached_afterwards():
    store = ScriptedStore()
    async with cache(store) as c:
        await fill(c, "a")
        store.delay("remove", seconds=1000.0)
        purging = asyncio.create_task(c.engine.purge("a", timeout=3.0))
        await spin(20)
        await running_clock().advance(4.0)
        with pytest.raises(ControlTimeout, match=r"purge timed out after 3\.0 s"):
            await purging
        store.end_script()
        await fill(c, "a")
        assert hit(c, "a") == 16


async def test_pins_of_a_purged_salt_end():
    async with cache(ScriptedStore()) as c:
        await fill(c, "a", "b")
        pins = [await c.engine.pin(A, salt=salt) for salt in ("a", "b")]
        await c.engine.purge("a")
        assert [pin.release_reason for pin in pins] == ["its salt was purged", ""]
        pins[1].release()


async def test_bad_arguments_change_nothing():
    async with cache(ScriptedStore()) as c:
        await fill(c, "a")
        with pytest.raises(UsageError, match="hold_seconds"):
            await c.engine.purge("a", hold_seconds=-1.0)
        with pytest.raises(UsageError, match="salt"):
            await c.engine.purge(7)  # type: ignore[arg-type]
        assert hit(c, "a") == 16


async def test_engine_without_stores_purges_its_memory():
    async with cache() as c:
        await fill(c, "a", "b")
        assert await c.engine.purge("a") == 0
        assert [hit(c, salt) for salt in ("a", "b")] == [0, 16]
