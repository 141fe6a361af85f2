"""An engine with stores: blocks survive restarts, and a failing store costs no request."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.base.plan import FETCH, TransferPlan, id_bytes
from aiokv.engine.fetches import MOST_PROBE_PAUSE_SECONDS
from aiokv.errors import (
    ClosedError,
    ConfigError,
    ControlTimeout,
    LeaseError,
    RequestTooLarge,
    UsageError,
)
from aiokv.scheduler.reader import CacheReader
from aiokv.stores import StoreUse
from aiokv.stores.base import KEY_BYTES
from aiokv.testing import ScriptedDevice, ScriptedStore, run_until_idle, running_clock, spin
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt

if TYPE_CHECKING:
    from aiokv import Lease

pytestmark = [pytest.mark.asyncio, pytest.mark.clock]

A, B, C = prompt(1, 4), prompt(2, 4), prompt(4, 4)
LONG = prompt(3, 6)


class StoreCache(Cache):
    """Cache whose test fails without waiting for what it has held or delayed."""

    def __init__(self, *stores: Any, **config: Any) -> None:
        super().__init__(device=ScriptedDevice(), stores=stores, **config)
        self.stores = stores

    async def __aexit__(self, exc_type: object, exc: object, traceback: object) -> None:
        leaving = asyncio.create_task(super().__aexit__(exc_type, exc, traceback))
        while exc is not None and not leaving.done():
            for store in self.stores:
                store.end_script()
            await running_clock().advance(1.0)
        await leaving

    async def serve_from_stores(self, tokens: np.ndarray) -> Lease:
        """As ``serve``, with at most ten fetches, and without an advance of the clock."""
        limit = self.statistics.fetches + 10
        serving = asyncio.create_task(self.serve(tokens, wait_store=math.inf))
        await run_until_idle(lambda: serving.done() or self.statistics.fetches > limit)
        if not serving.done():
            serving.cancel()
        return await serving


def cache(*stores: Any, **config: Any) -> StoreCache:
    return StoreCache(*stores, **config)


async def filled(*prompts: np.ndarray, **config: Any) -> dict[bytes, bytes]:
    """Return the objects of a store after an engine has served the prompts and was closed."""
    store = ScriptedStore()
    async with cache(store, **config) as c:
        await c.fill(*prompts)
    return store.objects


async def restarted(*prompts: np.ndarray) -> ScriptedStore:
    """Return a store that an earlier engine has filled."""
    return ScriptedStore(objects=await filled(*prompts, device_blocks=16, host_blocks=16))


# --- the ways down and up -------------------------------------------------------------------------


async def test_closing_saves_what_was_committed_and_a_restart_finds_it():
    store = await restarted(A)
    assert len(store.objects) == 4
    async with cache(store) as c:
        assert c.hit(A) == (0, 0)
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 4 * BLOCK_TOKENS
        usage = lease.usage
        lease.release()
        assert (usage.cached_host_tokens, usage.fetched_tokens) == (16, 16)
        assert usage.store_wait_seconds is not None
        statistics = c.statistics
        assert (statistics.fetches, statistics.attention.fetched_blocks) == (1, 4)
        assert statistics.hit_store_tokens == 16
        assert c.hit(A) == (4, 0)


class PrefixStore(ScriptedStore):
    """A store that is told which blocks are consecutive, and that looks up prefixes."""

    finds_prefixes = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.chains: list[list[bool]] = []
        self.prefixes: list[int] = []

    async def save_chains(self, keys: bytes, blocks: Any, follows: Any) -> Any:
        self.chains.append(follows.tolist())
        return await self.save(keys, blocks)

    async def lookup_prefix(self, keys: bytes) -> Any:
        self.prefixes.append(len(keys) // KEY_BYTES)
        return await self.lookup(keys)


async def served_from_stores(cache: StoreCache, tokens: np.ndarray) -> None:
    lease = await cache.serve(tokens, wait_store=math.inf)
    assert lease.cached_tokens == 4 * BLOCK_TOKENS
    lease.release()


async def test_store_is_told_which_blocks_are_consecutive_and_asked_for_prefixes_last():
    chains, disk = PrefixStore(), ScriptedStore("disk")
    async with cache(chains, device_blocks=16, host_blocks=16) as c:
        await c.fill(A, B)
        await c.fill(np.concatenate([A[: 2 * BLOCK_TOKENS], B[:BLOCK_TOKENS], [9]]))  # a branch
    saved = [follows for batch in chains.chains for follows in batch]
    assert saved == [False, True, True, True] * 2 + [False]
    disk.objects |= dict(list(chains.objects.items())[:4])  # those of A
    again = PrefixStore(objects=chains.objects)
    async with cache(again, disk) as c:
        await served_from_stores(c, A)
        assert again.prefixes == [4]  # asked for whole prompts, as the first store in order
    behind = PrefixStore(objects=chains.objects)
    async with cache(disk, behind) as c:
        await served_from_stores(c, A)
        assert behind.prefixes == []  # the disk has all of it
        await served_from_stores(c, B)
        assert behind.prefixes == [4]


@pytest.mark.parametrize("verb", ["aclose", "drain"])
@pytest.mark.parametrize("passes", range(6))
async def test_blocks_that_were_committed_just_before_are_saved(verb, passes):
    """Also those whose backup or save is in flight."""
    store = ScriptedStore()
    c = await cache(store).__aenter__()
    lease = c.engine.match(A)
    await lease.allocate(len(A))
    c.compute(lease, A)
    lease.release()
    await spin(passes)
    await getattr(c.engine, verb)()
    assert len(store.objects) == 4
    await c.engine.aclose()


@pytest.mark.parametrize("passes", [0, 3])
async def test_drain_waits_for_more_saves_than_run_at_a_time(passes):
    store = ScriptedStore()
    tokens = prompt(1, 1500)  # 6 saves, 4 of which run at a time
    async with cache(store, device_blocks=1600, host_blocks=1600) as c:
        lease = c.engine.match(tokens)
        await lease.allocate(len(tokens))
        c.compute(lease, tokens)
        lease.release()
        await spin(passes)
        draining = asyncio.create_task(c.engine.drain())
        await spin(200)
        assert draining.done()
        assert len(store.objects) == 1500
        assert store.calls["save"] == 6


async def test_close_saves_blocks_whose_backup_is_in_flight():
    store = ScriptedStore()
    c = await cache(store).__aenter__()
    backup = c.device.hold("offload", copy=0)
    lease = await c.serve(A)
    lease.release()
    c.engine.step()
    await spin(20)
    assert c.statistics.attention.host.in_flight == 4
    closing = asyncio.create_task(c.engine.aclose())
    await spin(20)
    backup.open()
    await closing
    assert len(store.objects) == 4


async def test_without_wait_store_no_store_is_asked():
    store = await restarted(A)
    async with cache(store) as c:
        lease = await c.serve(A)
        assert lease.cached_tokens == 0
        assert lease.usage.store_wait_seconds is None
        lease.release()
        lease = await c.serve(A, wait_store=0.0)
        lease.release()
        assert store.calls["lookup"] == 0


async def test_full_hit_asks_no_store():
    store = await restarted(A)
    async with cache(store) as c:
        (await c.serve(A, wait_store=1.0)).release()
        calls = store.calls.copy()
        (await c.serve(A, wait_store=1.0)).release()
        assert store.calls["lookup"] == calls["lookup"]


async def test_longer_prompt_is_fetched_behind_its_cached_prefix():
    store = ScriptedStore(objects=await filled(LONG))
    async with cache(store, device_blocks=16, host_blocks=16) as c:
        await c.fill(LONG[: 2 * BLOCK_TOKENS + 1])
        lease = await c.serve(LONG, wait_store=math.inf)
        assert lease.cached_tokens == 6 * BLOCK_TOKENS
        lease.release()
        assert c.statistics.attention.fetched_blocks == 4


async def test_generated_blocks_are_saved_and_fetched_with_their_prompt():
    store = ScriptedStore()
    whole = prompt(4, 6)
    async with cache(store) as c:
        lease = await c.serve(whole[: 4 * BLOCK_TOKENS])
        c.engine.extend([lease], 2 * BLOCK_TOKENS)
        lease.append(whole[4 * BLOCK_TOKENS : 6 * BLOCK_TOKENS])
        c.compute(lease, whole[: 6 * BLOCK_TOKENS], first=4)
        lease.release()
        await spin(2)
    assert len(store.objects) == 6
    async with cache(store) as c:
        lease = await c.serve(whole, wait_store=math.inf)
        assert lease.cached_tokens == 6 * BLOCK_TOKENS
        lease.release()


@pytest.fixture
def parts_of_two_blocks(monkeypatch):
    """Let a lookup ask for two blocks at most."""
    whole = CacheReader.missing

    def part(read: CacheReader, lease_id: int, blocks: int = 2) -> tuple[int, bytes]:
        return whole(read, lease_id, blocks)

    monkeypatch.setattr(CacheReader, "missing", part)


@pytest.mark.usefixtures("parts_of_two_blocks")
@pytest.mark.parametrize(("stored", "parts"), [(6, 3), (3, 2), (2, 1)])
async def test_long_prompt_is_fetched_part_by_part(stored, parts):
    store = await restarted(LONG[: stored * BLOCK_TOKENS + 1])
    async with cache(store, device_blocks=16, host_blocks=16) as c:
        lease = await c.serve(LONG, wait_store=math.inf)
        assert lease.cached_tokens == stored * BLOCK_TOKENS
        lease.release()
        assert (c.statistics.fetches, c.statistics.attention.fetched_blocks) == (parts, stored)


async def test_request_whose_prompt_no_store_has_does_not_wait():
    store = ScriptedStore()
    store.remember_missing_seconds = 5.0
    async with cache(store) as c:
        for num_lookups in (1, 1):
            async with c.engine.match(A) as lease:
                await lease.allocate(len(A), wait_store=math.inf)
            assert store.calls["lookup"] == num_lookups
        async with c.engine.match(A) as lease:
            granted = lease.allocate(len(A), wait_store=math.inf)
            with pytest.raises(StopIteration):  # not suspended
                granted.send(None)
        assert c.engine.statistics().stores[0].spared_lookups == 2


async def test_two_leases_share_one_fetch():
    store = await restarted(A)
    async with cache(store) as c:
        gate = store.hold("load")
        first = asyncio.create_task(c.serve(A, wait_store=math.inf))
        second = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await spin(20)
        gate.open()
        for lease in await asyncio.gather(first, second):
            assert lease.cached_tokens == 16
            lease.release()
        assert (store.calls["load"], c.statistics.fetches) == (1, 1)


async def test_deadline_serves_the_lease_and_late_blocks_are_cached():
    store = await restarted(A)
    async with cache(store) as c:
        store.delay("load", seconds=3.0)
        lease = c.engine.match(A)
        serving = asyncio.create_task(lease.allocate(len(A), wait_store=1.0))
        await running_clock().advance(0.9)
        assert not serving.done()
        await running_clock().advance(0.2)
        await serving
        assert lease.cached_tokens == 0
        lease.release()
        await running_clock().advance(3.0)
        assert c.hit(A) == (0, 4)


async def test_others_pass_a_lease_that_waits_for_a_store():
    store = await restarted(A)
    async with cache(store) as c:
        gate = store.hold("load")
        waiting = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await spin(20)
        (await c.serve(B)).release()
        assert not waiting.done()
        gate.open()
        (await waiting).release()


async def test_allocate_timeout_covers_the_wait_for_the_store():
    store = await restarted(A)
    async with cache(store) as c:
        store.hold("load")
        lease = c.engine.match(A)
        serving = asyncio.create_task(lease.allocate(len(A), timeout=1.0, wait_store=math.inf))
        await running_clock().advance(1.1)
        with pytest.raises(TimeoutError):
            await serving
        lease.release()
        store.end_script()
        await spin(10)


async def test_impossible_request_is_refused_without_waiting():
    store = await restarted(A)
    async with cache(store) as c:
        store.hold("lookup")
        lease = c.engine.match(A)
        with pytest.raises(RequestTooLarge):
            await lease.allocate(10_000, wait_store=math.inf)
        await lease.allocate(4)
        with pytest.raises(LeaseError):
            await lease.allocate(4, wait_store=math.inf)
        lease.release()


async def test_fetched_blocks_are_not_compared_with_checksums_of_earlier_host_blocks():
    """A fetch reuses host blocks whose earlier bytes were recorded by ``verify="checksum"``."""
    store = ScriptedStore(objects=await filled(A, host_blocks=4))
    async with cache(store, host_blocks=4, verify="checksum") as c:
        await c.fill(B)
        await c.engine.drain()
        await c.engine.reset()
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 4 * BLOCK_TOKENS
        lease.release()


# --- cancellation and the end ---------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["lookup", "load"])
async def test_cancelled_wait_leaves_nothing_behind(operation):
    store = await restarted(A)
    async with cache(store) as c:
        gate = store.hold(operation)
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await spin(20)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert c.statistics.waiting == 0
        gate.open()
        await spin(20)
        assert c.hit(A) == ((0, 4) if operation == "load" else (0, 0))
        assert c.engine.check_invariants() == []


@pytest.mark.parametrize("operation", ["lookup", "load"])
async def test_released_lease_ends_its_wait(operation):
    store = await restarted(A)
    async with cache(store) as c:
        store.hold(operation)
        lease = c.engine.match(A)
        serving = asyncio.create_task(lease.allocate(len(A), wait_store=math.inf))
        await spin(20)
        lease.release()
        with pytest.raises(LeaseError):
            await serving
        store.end_script()
        await spin(20)


@pytest.mark.parametrize("operation", ["lookup", "load"])
async def test_close_ends_waits_for_stores(operation):
    store = await restarted(A)
    c = await cache(store).__aenter__()
    store.hold(operation)
    lease = c.engine.match(A)
    serving = asyncio.create_task(lease.allocate(len(A), wait_store=math.inf))
    await spin(20)
    closing = asyncio.create_task(c.engine.aclose(0.0))
    await spin(20)
    with pytest.raises(ClosedError):
        await serving
    store.end_script()
    await running_clock().advance(6)
    await closing
    assert not store.is_open


async def test_close_ends_a_prefetch_with_an_error_of_the_engine():
    store = await restarted(A)
    second = ScriptedStore("second")
    c = await cache(store, second).__aenter__()
    store.hold("lookup")
    prefetch = asyncio.create_task(c.engine.prefetch(A))
    await spin(20)
    closing = asyncio.create_task(c.engine.aclose(0.0))
    await running_clock().advance(0.1)
    store.end_script()
    with pytest.raises(ClosedError):
        await prefetch
    await closing


async def test_closing_a_paused_engine_saves_what_was_committed():
    store = ScriptedStore()
    async with cache(store) as c:
        await c.fill(A)
        await c.engine.quiesce()
    assert len(store.objects) == 4


async def test_close_does_not_wait_for_a_stuck_store_for_ever(caplog):
    store = await restarted(A)
    c = await cache(store).__aenter__()
    store.hold("load")
    lease = c.engine.match(A)
    serving = asyncio.create_task(lease.allocate(len(A), wait_store=1.0))
    await running_clock().advance(1.1)
    await serving
    lease.release()
    closing = asyncio.create_task(c.engine.aclose())
    await running_clock().advance(60)
    await closing
    assert "store.stuck" in [r.event for r in caplog.records]
    store.end_script()
    await spin(20)


@pytest.mark.parametrize("drain_timeout", [0.0, 0.1])
async def test_close_with_a_short_timeout_keeps_memory_that_a_stuck_store_accesses(
    drain_timeout, caplog
):
    store = await restarted(A)
    c = await cache(store).__aenter__()
    store.hold("load")
    lease = c.engine.match(A)
    serving = asyncio.create_task(lease.allocate(len(A), wait_store=1.0))
    await running_clock().advance(1.1)
    await serving
    lease.release()
    closing = asyncio.create_task(c.engine.aclose(drain_timeout))
    await running_clock().advance(19.5)
    assert not closing.done()
    await running_clock().advance(0.5 + drain_timeout)
    await closing
    assert "store.stuck" in [r.event for r in caplog.records]
    store.end_script()  # the load writes into its blocks
    await spin(20)
    assert not any(store.in_use.values())


# --- failing stores -------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["lookup", "load", "save"])
async def test_failing_store_costs_no_request(operation):
    store = await restarted(A)
    async with cache(store) as c:
        store.fail(operation, error=OSError(5, "EIO"))
        for tokens in (A, B, A):
            (await c.serve_from_stores(tokens)).release()
        await c.finish()
        assert c.engine.check_invariants() == []


async def test_wrong_blocks_end_the_fetch_before_them():
    store = await restarted(A)
    async with cache(store) as c:
        store.corrupt("load", block=2)
        lease = await c.serve_from_stores(A)
        assert lease.cached_tokens == 2 * BLOCK_TOKENS
        lease.release()
        assert c.engine.statistics().stores[0].wrong_blocks == 1


async def test_fetched_block_is_not_compared_with_the_earlier_owner_of_its_host_block():
    store = await restarted(A)
    async with cache(store, host_blocks=4, verify="checksum") as c:
        await c.fill(B)  # its checksums are recorded for all host blocks
        await c.finish()
        await c.engine.evict(8, "device")
        await c.engine.evict(8, "host")
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 4 * BLOCK_TOKENS
        lease.release()
        assert c.statistics.failed_blocks == 0


async def test_blocks_of_an_overdue_load_are_not_reused_before_it_ends():
    store = await restarted(A)
    async with cache(store, host_blocks=4) as c:
        gate = store.hold("load")
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await running_clock().advance(5.1)
        lease = await serving
        assert lease.cached_tokens == 0
        lease.release()
        assert c.statistics.attention.host.in_flight == 4  # still the transfer's
        await c.fill(B)
        assert c.engine.check_invariants() == []
        gate.open()
        await spin(20)
        assert c.statistics.attention.host.in_flight == 0


@pytest.mark.parametrize("operation", ["load", "save"])
async def test_blocks_stay_owned_when_all_tasks_are_cancelled(operation):
    store = await restarted(A)
    async with cache(store) as c:
        gate = store.hold(operation)
        prompt_served = A if operation == "load" else B
        serving = asyncio.create_task(c.serve(prompt_served, wait_store=math.inf))
        await spin(20)
        if operation == "save":
            (await serving).release()
            await spin(20)
        assert len(store.in_use) == 4
        for task in asyncio.all_tasks() - {asyncio.current_task()}:  # as servers do at their end
            task.cancel()
        await spin(20)
        before = c.statistics
        gate.open()
        await spin(20)
        after = c.statistics
        # No report before the store has ended: the host blocks stay the transfer's.
        assert before.attention.host.in_flight == (4 if operation == "load" else 0)
        assert before.attention.unsaved_by_cause["failed"] == 0
        assert after.attention.host.in_flight == 0
        assert after.attention.unsaved_by_cause["failed"] == (4 if operation == "save" else 0)
        assert c.engine.check_invariants() == []


async def test_engine_closes_when_all_tasks_are_cancelled_and_the_store_is_stuck(caplog):
    store = await restarted(A)
    c = await cache(store).__aenter__()
    store.hold("load")
    serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
    await spin(20)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    closing = asyncio.create_task(c.engine.aclose())
    await running_clock().advance(60)
    await closing
    assert "store.stuck" in [r.event for r in caplog.records]
    store.end_script()
    await spin(20)


async def test_dead_store_is_waited_for_once_and_then_costs_nothing():
    store = await restarted(A)
    async with cache(store) as c:
        store.hold("lookup")
        for _ in range(3):
            serving = asyncio.create_task(c.serve(B, wait_store=math.inf))
            await running_clock().advance(0.3)
            (await serving).release()
            await c.engine.reset()
        assert c.engine.statistics().stores[0].reading == "open"
        for _ in range(20):
            (await c.serve(B, wait_store=math.inf)).release()  # the clock stands still
            await c.engine.reset()
        store.end_script()
        await running_clock().advance(1)


# --- fetch or compute -----------------------------------------------------------------------------


@pytest.mark.parametrize("known", [100.0, None])
async def test_prefix_that_the_model_computes_sooner_is_not_fetched(known):
    store = await restarted(A, B)
    async with cache(store, device_blocks=16, prefill_tokens_per_second=known) as c:
        if known is None:
            c.engine.note_prefill(6_400, 64.0)
        store.delay("load", seconds=1.0)  # 16 tokens take 0.16 s to compute
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await running_clock().advance(1.1)
        (await serving).release()  # fetched: nothing was known about the store
        assert c.statistics.fetches == 1
        serving = asyncio.create_task(c.serve(B, wait_store=math.inf))
        await run_until_idle(lambda: serving.done() or c.statistics.fetches > 1)
        assert c.statistics.fetches == 1
        (await serving).release()  # the clock stands still
        hit = asyncio.create_task(c.engine.prefetch(prompt(2, 4)))
        await running_clock().advance(1.1)
        assert (await hit).device_tokens == 16


async def test_parts_before_a_late_part_are_a_hit():
    store = await restarted(LONG)
    async with cache(store, device_blocks=16, prefill_tokens_per_second=400.0) as c:
        store.delay("load", seconds=0.001)
        late = store.hold("load", call=1)
        serving = asyncio.create_task(c.serve(LONG, wait_store=math.inf))
        await running_clock().advance(0.02)
        assert not serving.done()  # the store may be late by half of what computing takes
        await running_clock().advance(0.05)
        assert serving.done()
        lease = await serving
        assert (lease.cached_tokens, lease.usage.fetched_tokens) == (8, 8)  # the first part
        lease.release()
        assert c.engine.statistics().requests.late_fetches == 1
        late.open()
        await running_clock().advance(0.01)


async def served(c: StoreCache, tokens: np.ndarray, seconds: float, **allocate: Any) -> Lease:
    """Return a lease that is served within ``seconds``."""
    serving = asyncio.create_task(c.serve(tokens, wait_store=math.inf, **allocate))
    await running_clock().advance(seconds)
    assert serving.done()
    return await serving


async def measured(c: StoreCache, tokens: np.ndarray, seconds: float) -> None:
    """Fetch a prompt from the store at any price, with loads of ``seconds``."""
    c.stores[0].delay("load", seconds=seconds)
    fetching = asyncio.create_task(c.engine.prefetch(tokens))
    await running_clock().advance(seconds + 0.1)
    assert (await fetching).total == 16


async def test_slow_store_fetches_blocks_that_arrive_before_the_model_is_free():
    store = await restarted(A, B)
    async with cache(store, device_blocks=16, prefill_tokens_per_second=100.0) as c:
        await measured(c, A, 0.5)
        for queued, fetched in ((30, 0), (40, 16)):  # 16 tokens take 0.16 s to compute
            lease = await served(c, B, 1.0, queued_tokens=queued)
            assert lease.usage.fetched_tokens == fetched
            lease.release()
            await c.finish()
            await c.engine.reset()
        assert c.engine.statistics().requests.declined_fetches == 1


async def test_fetches_of_earlier_requests_count_in_the_comparison():
    store = await restarted(A, B, C)
    async with cache(store, device_blocks=24, prefill_tokens_per_second=20.0) as c:
        await measured(c, A, 0.5)
        first = asyncio.create_task(c.serve(B, wait_store=math.inf))  # 0.5 s instead of 0.8 s
        await running_clock().advance(0.1)
        second = await served(c, C, 0.1)  # 0.4 s for the first one, and 0.5 s
        assert second.usage.fetched_tokens == 0
        second.release()
        await running_clock().advance(1.0)
        lease = await first
        assert lease.usage.fetched_tokens == 16
        lease.release()


async def test_slow_store_is_measured_again_and_used_after_it_becomes_fast():
    store = await restarted(A, B)
    async with cache(store, device_blocks=16, prefill_tokens_per_second=100.0) as c:
        await measured(c, A, 1.0)
        store.end_script()
        store.delay("load", seconds=0.01)
        fetched: list[int] = []
        while 16 not in fetched and len(fetched) < 20:
            fetches = c.statistics.fetches
            lease = await served(c, B, 1.0)
            fetched.append(lease.usage.fetched_tokens)
            lease.release()
            assert c.statistics.fetches == fetches + 1  # with or without a request that waits
            await c.finish()
            await c.engine.reset()
            await running_clock().advance(1.0)
        assert fetched[0] == 0
        assert fetched[-1] == 16


async def test_store_is_used_soon_after_one_load_has_hung():
    store = await restarted(A, B, C)
    async with cache(store, device_blocks=24, prefill_tokens_per_second=100.0) as c:
        stuck = store.hold("load")
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await running_clock().advance(5.1)  # longer than the deadline
        lease = await serving
        assert lease.cached_tokens == 0
        lease.release()
        stuck.open()
        store.end_script()
        await running_clock().advance(MOST_PROBE_PAUSE_SECONDS)
        for tokens, fetched in ((B, 0), (C, 16)):  # a fetch of B measures the store again
            lease = await served(c, tokens, 0.1)
            assert lease.usage.fetched_tokens == fetched
            lease.release()


async def test_next_store_serves_prompts_while_the_loads_of_the_first_hang():
    first = await restarted(A, B)
    second = ScriptedStore("second", objects=dict(first.objects))
    async with cache(first, second, device_blocks=16, prefill_tokens_per_second=100.0) as c:
        first.hold("load")
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await running_clock().advance(0.05)
        assert not serving.done()  # the first part is late after 1.5 times 0.04 s
        await running_clock().advance(0.02)
        await run_until_idle(serving.done)  # the clock stands still
        lease = await serving
        assert lease.usage.fetched_tokens == 16
        assert c.engine.statistics().requests.late_fetches == 1
        lease.release()
        (await c.serve_from_stores(A)).release()
        lease = await c.serve_from_stores(B)
        assert lease.usage.fetched_tokens == 16
        lease.release()
        assert first.calls["load"] == 1
        first.end_script()
        await spin(20)
        assert c.engine.check_invariants() == []


async def test_late_store_that_is_the_only_one_is_not_asked_twice():
    store = await restarted(A)
    async with cache(store, device_blocks=16, prefill_tokens_per_second=100.0) as c:
        store.hold("load")
        lease = await served(c, A, 1.0)
        assert (lease.cached_tokens, store.calls["load"]) == (0, 1)
        lease.release()
        store.end_script()


# --- prefetch and pin -----------------------------------------------------------------------------


async def test_prefetch_and_pin_bring_blocks_from_stores():
    store = await restarted(A, B)
    async with cache(store, device_blocks=16, host_blocks=16) as c:
        assert (await c.engine.prefetch(A, timeout=0)).device_tokens == 0
        assert (await c.engine.prefetch(A)).device_tokens == 16
        pin = await c.engine.pin(B)
        assert pin.tokens == 16
        pin.release()


async def test_prefetch_ends_at_its_timeout():
    store = await restarted(A)
    async with cache(store) as c:
        store.delay("load", seconds=3.0)
        prefetch = asyncio.create_task(c.engine.prefetch(A, timeout=1.0))
        await running_clock().advance(1.1)
        assert (await prefetch).device_tokens == 0
        await running_clock().advance(3.0)
        assert c.hit(A) == (0, 4)


async def test_cancelled_prefetch_leaves_no_lease():
    store = await restarted(A)
    async with cache(store) as c:
        store.hold("lookup")
        prefetch = asyncio.create_task(c.engine.prefetch(A))
        await spin(20)
        prefetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await prefetch
        store.end_script()
        await spin(20)


# --- fingerprints, sleep, weights -----------------------------------------------------------------


@pytest.mark.parametrize("other", [{"model": "other"}, {"weights_version": "2"}])
async def test_other_models_and_versions_find_nothing(other):
    store = await restarted(A)
    async with cache(store, **other) as c:
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()


async def test_updated_weights_find_blocks_of_their_version_only():
    store = await restarted(A)
    async with cache(store) as c:
        async with c.engine.updating_weights(version="2"):
            c.memory.weights += 1
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()
        await c.finish()
        assert len(store.objects) == 8
        async with c.engine.updating_weights(version=""):
            c.memory.weights -= 1
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()
        async with c.engine.updating_weights():
            c.memory.weights += 5
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()


async def test_failed_update_finds_no_block_of_either_version():
    store = await restarted(A)
    async with cache(store) as c:
        update = c.engine.updating_weights(version="")
        await update.__aenter__()
        c.memory.weights += 1
        error = ValueError("half way")
        assert not await update.__aexit__(ValueError, error, None)
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 0
        lease.release()


async def test_nothing_is_saved_while_the_weights_are_updated():
    store = ScriptedStore()
    async with cache(store) as c:
        lease = c.engine.match(A)
        await lease.allocate(len(A))
        async with c.engine.updating_weights(version="2"):
            c.compute(lease, A)
            await c.engine.drain()
            assert not store.objects
        lease.release()
        await c.finish()
        assert not store.objects


async def test_stores_follow_the_host_tier_to_sleep_and_back():
    store = ScriptedStore()
    async with cache(store) as c:
        await c.fill(A)
        await c.finish()
        await c.engine.sleep(["host"])
        assert not store.is_open
        await c.engine.wake_up(["host"])
        assert (store.is_open, store.opened) == (True, 2)
        await c.engine.reset()
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()


@pytest.mark.parametrize("tags", [("host",), ("device", "host")], ids="+".join)
async def test_sleep_that_times_out_while_a_store_closes_can_be_woken(tags):
    store = ScriptedStore()
    async with cache(store) as c:
        await c.fill(A)
        await c.finish()
        gate = store.hold("aclose")
        sleeping = asyncio.create_task(c.engine.sleep(tags, timeout=1.0))
        await running_clock().advance(1.1)
        with pytest.raises(ControlTimeout, match=r"are asleep already: .*'host'.*wake_up"):
            await sleeping
        assert c.engine.asleep == set(tags)
        assert c.engine.check_invariants() == []
        if "device" in tags:
            c.memory.take(len(c.memory.tensors[0]))  # the old tensors may be freed by now
        waking = asyncio.create_task(c.engine.wake_up(tags, regions=c.memory.regions))
        await spin(10)
        assert not waking.done()
        gate.open()
        await waking
        assert (store.is_open, store.opened) == (True, 2)
        await c.engine.reset()
        lease = await c.serve(A, wait_store=math.inf)
        assert lease.cached_tokens == 16
        lease.release()


async def test_blocks_that_are_queued_are_saved_before_the_host_tier_sleeps():
    store = ScriptedStore()
    async with cache(store, device_blocks=16, host_blocks=16) as c:
        lease = c.engine.match(A)
        await lease.allocate(len(A))
        sleeping = asyncio.create_task(c.engine.sleep(["host"]))
        await spin(20)
        c.compute(lease, A)  # admission is held by now
        lease.release()
        await sleeping
        assert len(store.objects) == 4
        await c.engine.wake_up(["host"])


async def test_saves_that_sleep_has_no_time_for_are_counted():
    store = ScriptedStore()
    tokens = prompt(1, 600)  # 3 saves
    use = StoreUse(store, deadline_seconds=25.0)
    async with cache(use, device_blocks=700, host_blocks=700) as c:
        store.delay("save", seconds=20.0)
        lease = c.engine.match(tokens)
        await lease.allocate(len(tokens))
        sleeping = asyncio.create_task(c.engine.sleep(["host"]))
        await spin(20)
        c.compute(lease, tokens)
        lease.release()
        await running_clock().advance(60)
        await sleeping
        statistics = c.statistics
        assert (
            statistics.attention.saved_blocks,
            statistics.attention.unsaved_by_cause["dropped"],
        ) == (512, 88)
        assert c.engine.check_invariants() == []
        await c.engine.wake_up(["host"])


async def test_no_block_is_saved_before_sleep_while_the_weights_are_updated():
    store = ScriptedStore()
    async with cache(store, device_blocks=16, host_blocks=16) as c:
        lease = c.engine.match(A)
        await lease.allocate(len(A))
        async with c.engine.updating_weights(version="2"):
            c.compute(lease, A)
            lease.release()
            await c.engine.sleep(["host"])
            assert not store.objects
        await c.engine.wake_up(["host"])


async def test_reset_during_a_fetch_drops_what_it_brings():
    store = await restarted(A)
    async with cache(store) as c:
        gate = store.hold("load")
        serving = asyncio.create_task(c.serve(A, wait_store=math.inf))
        await spin(20)
        resetting = asyncio.create_task(c.engine.reset())
        await spin(5)
        gate.open()
        await resetting
        (await serving).release()
        assert c.engine.check_invariants() == []


# --- what is shown, what is refused ---------------------------------------------------------------


async def test_statistics_and_dump_show_the_stores():
    store = await restarted(A)
    async with cache(store) as c:
        (await c.serve(A, wait_store=math.inf)).release()
        await c.finish()
        (shown,) = c.engine.inspect.dump()["statistics"]["stores"]  # type: ignore[index]
        assert (shown["url"], shown["loaded_blocks"], shown["reading"]) == (
            "scripted:memory", 4, "closed",
        )  # fmt: skip
        assert c.engine.statistics().worker.attention.fetch.done == 1
        assert c.engine.statistics().worker.attention.fetch.moved_bytes == shown["loaded_bytes"]


async def test_blocks_that_a_store_has_move_no_bytes_when_they_are_saved_again():
    objects: dict[bytes, bytes] = {}
    for written in (4, 0):
        store = ScriptedStore(keeps_objects=True, objects=objects)
        async with cache(store, device_blocks=16, store_policy="write_through") as c:
            await c.fill(A)
            await c.finish()
            (shown,) = c.engine.statistics().stores
            assert (shown.saved_blocks, shown.present_blocks) == (written, 4 - written)
            assert c.engine.statistics().worker.attention.save.moved_bytes == shown.saved_bytes
            assert (
                c.statistics.attention.saved_blocks == 4
            )  # the engine knows that the store has them


async def test_stores_that_cannot_be_opened_leave_nothing_open():
    first, second = ScriptedStore("a"), ScriptedStore("b")
    second.fail("open", error=ConfigError("another process uses the path"))
    c = cache(first, second)
    with pytest.raises(ConfigError, match="another process"):
        await c.engine.__aenter__()
    assert not first.is_open


async def test_wrong_configurations_are_refused():
    store = ScriptedStore()
    sizes = {"device_blocks": 8, "host_blocks": 8}
    for config, stores, message in [
        (CacheConfig(**sizes), [store], "model is empty"),
        (CacheConfig(device_blocks=8, model="m"), [store], "host_blocks is 0"),
        (CacheConfig(**sizes, model="m"), "disk:/x", "must be a sequence"),
        (CacheConfig(**sizes, model="m"), [5], "must be a Store"),
        (CacheConfig(**sizes, model="m"), [store, StoreUse(store)], "listed twice"),
        (CacheConfig(**sizes, model="m"), ["ftp://x"], "scheme 'ftp'.*'disk'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            CacheEngine(config, stores=stores)


@pytest.mark.parametrize("digests", [b"", bytes(32), bytes(65), bytes(96)])
async def test_plan_without_one_digest_per_block_is_refused(digests):
    blocks = id_bytes([0, 1])
    plan = TransferPlan(
        transfer_id=99, route=FETCH, source_blocks=blocks, target_blocks=blocks, digests=digests
    )
    store = ScriptedStore()
    async with cache(store) as c:
        with pytest.raises(UsageError, match=f"digests has {len(digests)} bytes"):
            c.engine.inspect.parts.worker.plans.submit(plan)
        await spin(5)
        assert store.calls["load"] == 0


async def test_wait_store_is_checked():
    async with cache(ScriptedStore()) as c:
        lease = c.engine.match(A)
        for value in ("1", float("nan"), None):
            with pytest.raises(UsageError, match="wait_store"):
                await lease.allocate(4, wait_store=value)
        lease.release()
    async with Cache() as c:
        (await c.serve(A, wait_store=5.0)).release()  # no stores: nothing to wait for
