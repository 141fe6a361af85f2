"""Sleep and wake-up: memory is freed and reallocated with transfers and requests waiting."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Regions
from aiokv.errors import AllocateTimeout, ClosedError, ControlTimeout, LayoutError, UsageError
from aiokv.testing import ScriptedStore, running_clock, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.harness.cache import BLOCK_TOKENS, Cache, prompt
from tests.harness.closing import complete_during
from tests.harness.memory import Memory

if TYPE_CHECKING:
    from aiokv.stores.base import StoreMemory

A, B, C = (prompt(seed, 2) for seed in range(1, 4))
BOTH = ("device", "host")

pytestmark = pytest.mark.asyncio


def new_memory(cache: Cache, blocks: int = 8) -> Regions:
    """Make new, empty tensors in place of the freed ones."""
    weights = cache.memory.weights
    cache.memory = Memory(blocks, BLOCK_TOKENS)
    cache.memory.weights = weights
    return cache.memory.regions


async def serve_and_release(cache: Cache, tokens):
    lease = await cache.serve(tokens)
    lease.release()
    return lease


@pytest.mark.parametrize(
    ("tags", "left"),
    [(BOTH, (0, 0)), (("device",), (0, 2)), (("host",), (2, 0))],
    ids=["both", "device", "host"],
)
async def test_sleep_of_one_tier_keeps_the_blocks_of_the_other(tags, left):
    async with Cache() as cache:
        await cache.fill(A)
        sleeping = asyncio.create_task(cache.engine.sleep(tags))
        await spin(3)
        assert not sleeping.done(), "the backup is in flight"
        cache.device.complete_all()
        await sleeping
        assert cache.engine.asleep == set(tags)
        assert cache.engine.inspect.dump()["asleep"] == sorted(tags)
        assert cache.hit(A) == left
        assert cache.engine.check_invariants() == []
        regions = new_memory(cache) if "device" in tags else None
        await cache.engine.wake_up(tags, regions=regions)
        assert cache.engine.asleep == set()
        assert cache.hit(A) == left
        serving = asyncio.create_task(serve_and_release(cache, A))  # compares the bytes
        while not serving.done():
            cache.device.complete_all()
            await spin()
        await serving
        await cache.finish()


async def test_sleep_waits_for_leases_and_holds_requests_back():
    async with Cache() as cache:
        lease = await cache.serve(A)
        sleeping = asyncio.create_task(cache.engine.sleep(timeout=PATIENCE_SECONDS))
        waiting = asyncio.create_task(serve_and_release(cache, B))
        await spin(3)
        assert not sleeping.done()
        lease.release()
        await spin(3)
        cache.device.complete_all()
        await sleeping
        late = cache.engine.match(C)
        assert not late.try_allocate(len(C))
        with pytest.raises(AllocateTimeout, match="admission is paused"):
            await late.allocate(len(C), timeout=0.0)
        late.release()
        assert not waiting.done()
        await cache.engine.wake_up(regions=new_memory(cache))
        await waiting
        await cache.finish()
        assert cache.hit(B) == (2, 0)


@pytest.mark.clock
@pytest.mark.parametrize("tags", [BOTH, ("device",), ("host",)], ids="+".join)
async def test_sleep_that_times_out_names_owners_and_changes_nothing(tags):
    clock = running_clock()
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        lease = cache.engine.match(B, owner="req-7")
        await lease.allocate(len(B))
        with pytest.raises(ControlTimeout, match="req-7") as caught:
            await cache.engine.sleep(tags, timeout=0.0)
        assert caught.value.owners == ("req-7",)
        sleeping = asyncio.create_task(cache.engine.sleep(tags, timeout=30.0))
        await clock.advance(29.0)
        assert not sleeping.done()
        await clock.advance(2.0)
        assert isinstance(sleeping.exception(), ControlTimeout)
        assert cache.engine.asleep == set()
        assert cache.hit(A) == (2, 0)
        (await cache.serve(A)).release()
        lease.release()


async def test_a_swapped_table_keeps_the_host_awake_only():
    async with Cache() as cache:
        lease = cache.engine.match(A, owner="swapped")
        await lease.allocate(len(A))
        cache.compute(lease, A)
        swapping = asyncio.create_task(lease.preempt(swap=True))
        while not swapping.done():
            cache.device.complete_all()
            await spin()
        with pytest.raises(ControlTimeout, match="swapped") as caught:
            await cache.engine.sleep(("host",), timeout=0.001)
        assert caught.value.owners == ("swapped",)
        await cache.engine.sleep(("device",), timeout=PATIENCE_SECONDS)
        await cache.engine.wake_up(regions=new_memory(cache))
        resuming = asyncio.create_task(lease.resume(len(A)))
        await resuming
        cache.device.complete_all()
        await lease.layers.wait_all()
        assert lease.cached_tokens == len(A)
        cache.memory.check(lease.block_table[:2], cache.memory.words(A, "", 0), "after sleep")
        lease.release()


@pytest.mark.parametrize("passes", range(12))
async def test_cancelled_sleep_can_be_repeated_and_woken(passes):
    async with Cache() as cache:
        await cache.fill(A)
        sleeping = asyncio.create_task(cache.engine.sleep())
        for _ in range(passes):
            await spin()
            if passes > 5:
                cache.device.complete_all()
        sleeping.cancel()
        await asyncio.wait([sleeping])
        assert cache.engine.check_invariants() == []
        again = asyncio.create_task(cache.engine.sleep(timeout=PATIENCE_SECONDS))
        while not again.done():
            cache.device.complete_all()
            await spin()
        await again
        await cache.engine.sleep(timeout=0.0)
        assert cache.engine.asleep == set(BOTH)
        regions = new_memory(cache)
        waking = asyncio.create_task(cache.engine.wake_up(regions=regions))
        for _ in range(passes % 3):
            await spin()
        waking.cancel()
        await asyncio.wait([waking])
        await cache.engine.wake_up(regions=regions)
        await cache.engine.wake_up(regions=regions)
        assert cache.engine.asleep == set()
        (await cache.serve(A)).release()


async def test_tiers_sleep_and_wake_one_by_one():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.engine.sleep(("host",))
        assert cache.hit(A) == (2, 0)
        await cache.engine.sleep(BOTH)
        assert cache.hit(A) == (0, 0)
        await cache.engine.wake_up(("device",), regions=new_memory(cache))
        assert cache.engine.asleep == {"host"}
        async with cache.engine.match(B) as lease:
            assert not lease.try_allocate(1)
        await cache.engine.wake_up(("host",))
        (await cache.serve(B)).release()


@pytest.mark.parametrize("policy", ["write_back", "nth_use:2"])
async def test_unsaved_device_blocks_are_saved_before_sleep(policy: str):
    async with Cache(write_policy=policy, device_blocks=8, host_blocks=3) as cache:
        await cache.fill(A, B)
        assert cache.statistics.attention.host.cached == 0
        sleeping = asyncio.create_task(cache.engine.sleep(("device",)))
        while not sleeping.done():
            cache.device.complete_all()
            await spin()
        await sleeping
        assert cache.statistics.attention.host.cached == 3, "as many as fit"
        await cache.engine.wake_up(regions=new_memory(cache))
        assert cache.hit(A)[1] + cache.hit(B)[1] == 3


async def test_blocks_that_found_no_host_room_at_commit_are_saved_before_sleep():
    async with Cache(write_policy="write_through", device_blocks=8, host_blocks=2) as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.fill(B)
        await cache.finish()
        assert await cache.engine.evict(2) == await cache.engine.evict(2, "host") == 2
        assert (cache.hit(A), cache.hit(B)) == ((0, 0), (2, 0))
        await complete_during(cache.engine.sleep(("device",)), cache.device)
        await cache.engine.wake_up(regions=new_memory(cache))
        assert cache.hit(B) == (0, 2)


async def test_weight_update_while_asleep_clears_the_index():
    async with Cache() as cache:
        await cache.fill(A)
        await cache.finish()
        await cache.engine.sleep(("device",))
        async with cache.engine.updating_weights(PATIENCE_SECONDS):
            cache.memory.weights += 1
        assert cache.engine.asleep == {"device"}
        assert cache.hit(A) == (0, 0), "the host copies are of the old weights"
        await cache.engine.wake_up(regions=new_memory(cache))
        (await cache.serve(A)).release()


def layout(**change):
    """Return regions that differ from those of Memory in one property."""
    shape = {"layers": 2, "blocks": 8, "words": 3, "names": ("k", "v")} | change
    regions = Regions(num_layers=shape["layers"])
    for name in shape["names"]:
        sizes = shape["blocks"], BLOCK_TOKENS, shape["words"]
        tensors = [np.zeros(sizes, np.uint64) for _ in range(2)]
        regions.add(name, layers=tensors, layer_indices=range(2))
    return regions


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (None, "needs its tensors"),
        (layout(layers=3), "3 layers, not 2"),
        (layout(words=4), "128 bytes on cpu, not of 96 bytes"),
        (layout(names=("k",)), r"\['k'\], not \['k', 'v'\]"),
        (layout(blocks=7), "7 blocks; they must hold at least the 8 blocks"),
    ],
    ids=["none", "layers", "bytes", "names", "blocks"],
)
async def test_other_tensors_are_refused_with_the_numbers(regions, message):
    async with Cache() as cache:
        await cache.engine.sleep()
        with pytest.raises(LayoutError, match=message):
            await cache.engine.wake_up(regions=regions)
        assert cache.engine.asleep == set(BOTH)
        await cache.engine.wake_up(regions=new_memory(cache, blocks=9))
        (await cache.serve(A)).release()


async def test_sleep_frees_device_and_host_memory():
    """The memory is freed on the cpu device, whose threads reference the memory during copies."""
    tensors = [np.zeros((8, 24), np.uint8) for _ in range(2)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    regions = Regions(num_layers=2)
    regions.add("kv", layers=tensors)
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=8, host_blocks=8)
    async with CacheEngine(config, regions) as engine:
        async with engine.match(A) as lease:
            await lease.allocate(len(A))
            lease.commit(len(A))
        await engine.drain()
        await engine.evict(8)
        await engine.prefetch(A)  # both directions have worked
        arena = engine.inspect.parts.worker.memory.arena
        await engine.sleep()
        del regions, tensors, lease
        gc.collect()
        assert [tensor() for tensor in gone] == [None, None]
        with pytest.raises(ClosedError):
            _ = arena.blocks
        assert arena._map.closed
        again = Regions(num_layers=2)
        again.add("kv", layers=[np.zeros((8, 24), np.uint8) for _ in range(2)])
        await engine.wake_up(regions=again)
        async with engine.match(A) as lease:
            await lease.allocate(len(A))
            lease.commit(len(A))
        await engine.drain()
        assert engine.statistics().attention.host.cached == 2


async def test_close_of_an_engine_that_is_asleep_or_falling_asleep():
    cache = Cache()
    await cache.engine.__aenter__()
    await cache.engine.sleep()
    waiting = asyncio.create_task(cache.serve(A))
    await spin(2)
    await cache.engine.aclose()
    with pytest.raises(ClosedError):
        await waiting
    for verb in (cache.engine.sleep, cache.engine.wake_up):
        with pytest.raises(ClosedError):
            await verb()

    cache = Cache()
    await cache.engine.__aenter__()
    lease = await cache.serve(A)
    sleeping = asyncio.create_task(cache.engine.sleep())
    await spin(2)
    closing = asyncio.create_task(cache.engine.aclose())
    await spin(2)
    lease.release()
    while not closing.done():
        cache.device.complete_all()
        await spin()
    with pytest.raises(ClosedError):
        await sleeping


async def test_unknown_tags_are_refused():
    async with Cache() as cache:
        for verb in (cache.engine.sleep, cache.engine.wake_up):
            with pytest.raises(UsageError, match="kv_cache"):
                await verb(("kv_cache",))
        await cache.engine.sleep(())
        await cache.engine.wake_up()
        (await cache.serve(A)).release()


async def test_engine_without_tensors_sleeps_and_wakes_up():
    async with CacheEngine(CacheConfig(device_blocks=4, host_blocks=4)) as engine:
        await engine.sleep()
        await engine.wake_up()
        async with engine.match([1]) as lease:
            await lease.allocate(1)


async def test_device_that_refuses_the_new_memory_leaves_the_engine_asleep():
    async with Cache() as cache:
        await cache.engine.sleep()
        regions = new_memory(cache)
        attach = cache.device.attach

        def fail(*_: object) -> None:
            raise LayoutError("elsewhere")

        cache.device.attach = fail  # type: ignore[method-assign]
        with pytest.raises(LayoutError, match="elsewhere"):
            await cache.engine.wake_up(regions=regions)
        cache.device.attach = attach  # type: ignore[method-assign]
        assert cache.engine.asleep == set(BOTH)
        await cache.engine.wake_up(regions=regions)
        (await cache.serve(A)).release()


class SlowStore(ScriptedStore):
    """A store that opens when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def open(self, memory: StoreMemory) -> None:
        await self.may_open.wait()
        await super().open(memory)


def engine_with(store: ScriptedStore) -> CacheEngine:
    regions = Regions(num_layers=1)
    regions.add("kv", layers=[np.zeros((8, BLOCK_TOKENS, 2), np.float32)])
    config = CacheConfig(block_tokens=BLOCK_TOKENS, device_blocks=8, host_blocks=8, model="m")
    return CacheEngine(config, regions, stores=[store])


async def test_close_during_a_wake_up_leaves_no_store_open():
    """A store that opened behind the end of the engine would keep memory that is freed."""
    store = SlowStore()
    engine = engine_with(store)
    async with engine:
        await engine.sleep(["host"])
        assert not store.is_open
        store.may_open.clear()
        waking = asyncio.create_task(engine.wake_up(["host"]))
        await spin(5)
        closing = asyncio.create_task(engine.aclose(0.0))
        await spin(5)
        assert not closing.done()
        store.may_open.set()
        await closing
        with pytest.raises(ClosedError):
            await waking
    assert not store.is_open


async def test_a_wake_up_that_waits_for_a_close_opens_nothing():
    store = SlowStore()
    engine = engine_with(store)
    async with engine:
        await engine.sleep(["host"])
        opened = store.opened
        await engine.inspect.parts.worker.aclose()
        await engine.inspect.parts.worker.wake_up(frozenset({"host"}))
        assert store.opened == opened
    assert not store.is_open
