"""Defects of waiting, of failures, of control requests and of counters."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Item
from aiokv.errors import (
    AllocateTimeout,
    ControlTimeout,
    RequestTooLarge,
    TransferError,
    TransferTimeout,
)
from aiokv.testing import running_clock, spin
from tests.drill.drill import BLOCK_TOKENS, Drill, prompt

A, B, C = (prompt(seed, 2) for seed in range(1, 4))
LONG = prompt(4, 6)

pytestmark = pytest.mark.asyncio


async def test_hit_time_does_not_grow_with_the_cache():
    """Defect: Each matched node is searched in a heap, which is then rebuilt."""

    async def seconds_of_100_hits(device_blocks: int) -> float:
        best = float("inf")
        config = CacheConfig(block_tokens=1, device_blocks=device_blocks)
        async with CacheEngine(config) as engine:
            for first in range(device_blocks // 200):
                async with engine.match(np.arange(100, dtype=np.int32) + 1000 * first) as lease:
                    await lease.allocate(100)
                    lease.commit(100)
            for _ in range(5):
                begin = time.thread_time()
                for _ in range(100):
                    async with engine.match(np.arange(101, dtype=np.int32)) as lease:
                        await lease.allocate(101)
                        assert lease.cached_tokens == 100
                best = min(best, time.thread_time() - begin)
        return best

    assert await seconds_of_100_hits(100_000) < 8 * await seconds_of_100_hits(1_000)


async def test_slow_swap_blocks_no_other_request():
    """Defect: One lock is held during swaps: a slow swap stops all scheduling and all releases."""
    async with Drill(device_blocks=16, host_blocks=16, write_policy="none") as drill:
        swapped, other = await drill.serve(A), await drill.serve(B)
        gate = drill.device.hold("offload")
        swapping = asyncio.create_task(swapped.preempt(swap=True))
        await drill.running("offload")
        other.release()
        (await drill.serve(C)).release()
        assert not swapping.done()
        gate.open()
        await swapping
        swapped.release()
        await drill.nothing_lost()


@pytest.mark.clock
async def test_every_wait_ends_at_its_deadline():
    """Defect: Waits for swaps have no timeout, or loop forever."""
    clock = running_clock()
    async with Drill(device_blocks=6) as drill:
        await drill.to_host(A)
        drill.device.hold("onload")
        engine, stuck = drill.engine, drill.engine.match(A, owner="stuck")
        await stuck.allocate(9)
        waiter = engine.match(LONG)
        waits = {
            "layer": stuck.layers.wait(0, timeout=30.0),
            "layers": stuck.layers.wait_all(timeout=30.0),
            "capacity": waiter.allocate(24, timeout=30.0),
            "reset": engine.reset(timeout=30.0),
            "drain": engine.drain(timeout=30.0),
        }
        tasks = {name: asyncio.create_task(wait) for name, wait in waits.items()}
        await clock.advance(29.0)
        assert [name for name, task in tasks.items() if task.done()] == []
        await clock.advance(2.0)
        kinds = {name: type(task.exception()) for name, task in tasks.items()}
        assert kinds == {
            "layer": TransferTimeout,
            "layers": TransferTimeout,
            "capacity": AllocateTimeout,
            "reset": ControlTimeout,
            "drain": ControlTimeout,
        }
        for verb in (engine.quiesce, engine.sleep):
            trying = asyncio.create_task(verb(timeout=30.0))
            await clock.advance(31.0)
            assert isinstance(trying.exception(), ControlTimeout), verb
        updating = asyncio.create_task(engine.updating_weights(30.0).__aenter__())
        await clock.advance(31.0)
        assert isinstance(updating.exception(), ControlTimeout)
        trying = asyncio.create_task(engine.resize(1, timeout=30.0))
        await clock.advance(31.0)
        assert isinstance(trying.exception(), ControlTimeout)
        waiter.release()
        stuck.release()


async def test_report_that_raises_does_not_stop_later_transfers(loop_errors, monkeypatch):
    """Defect: The thread that takes results ends without an error, and every later swap hangs."""
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(A)
        scheduler = drill.engine.inspect.parts.scheduler
        complete = scheduler.complete

        def fail(report: object) -> None:
            monkeypatch.setattr(scheduler, "complete", complete)
            complete(report)  # type: ignore[arg-type]
            raise ZeroDivisionError

        monkeypatch.setattr(scheduler, "complete", fail)
        await drill.fill(B)
        await drill.engine.drain()
        assert [type(error["exception"]) for error in loop_errors] == [ZeroDivisionError]
        loop_errors.clear()
        lease = await drill.serve(A)
        assert lease.cached_tokens == 8
        lease.release()


async def test_block_table_and_cached_tokens_agree_after_a_failed_onload():
    """Defect: Blocks of a failed swap are left out of the block table, but their tokens are
    counted.
    """
    async with Drill(device_blocks=16, host_blocks=16) as drill:
        await drill.to_host(LONG)
        drill.device.fail("onload", 0, block=3)
        lease = drill.engine.match(LONG)
        await lease.allocate(len(LONG))
        table = lease.block_table.tolist()
        with pytest.raises(TransferError) as caught:
            await lease.layers.wait_all()
        assert lease.cached_tokens == caught.value.first_bad_token == 3 * BLOCK_TOKENS
        assert lease.block_table.tolist() == table
        assert lease.recompute_from() == 3 * BLOCK_TOKENS
        drill.check(lease, LONG)
        drill.compute(lease, LONG)
        lease.release()
        assert drill.hit(LONG) == (6, 0)
        (await drill.serve(LONG)).release()


async def test_victim_in_use_can_be_evicted_later():
    """Defect: A victim that is popped from the heap while in use never returns to it."""
    async with Drill(device_blocks=4, host_blocks=8) as drill:
        gate = drill.device.hold("offload", 0)
        await drill.fill(A)
        for _ in range(3):
            assert await drill.engine.evict(2) == 0, "the copy still reads them"
        gate.open()
        await drill.engine.drain()
        assert await drill.engine.evict(2) == 2
        await drill.nothing_lost()


async def test_blocks_released_during_a_reset_return_to_the_pool():
    """Defect: Blocks that are released while the tree is cleared are lost."""
    async with Drill(device_blocks=16) as drill:
        backup = drill.device.hold("offload")
        lease = await drill.serve(A)
        await drill.running("offload")
        resetting = asyncio.create_task(drill.engine.reset())
        await spin(3)
        assert not resetting.done()
        lease.release()
        lease.release()
        backup.open()
        await resetting
        assert drill.statistics.attention.device.free == 16
        await drill.nothing_lost()


async def test_nodes_are_reused():
    """Defect: Node ids come from a list that becomes empty; all roots share one default list."""
    async with CacheEngine(CacheConfig(block_tokens=1, device_blocks=20)) as engine:
        sizes = []
        for seed in range(3000):
            async with engine.match([seed, seed + 1, seed], salt=f"{seed % 7}") as lease:
                await lease.allocate(3)
                lease.commit(3)
            sizes.append(engine.statistics().index_bytes)
        assert engine.statistics().nodes <= 20 + 8
        assert sizes[-1] == sizes[100]
        assert engine.check_invariants() == []


async def test_generated_tokens_are_keyed_with_the_images_of_the_prompt():
    """Defect: Blocks of an answer are keyed without the images of its prompt."""
    async with Drill(device_blocks=32, host_blocks=0) as drill:
        prompt_tokens, answer = [7] * 8, list(range(100, 108))
        for name in (b"cat", b"dog"):
            lease = drill.engine.match(prompt_tokens, items=[Item(name, 2, 3)])
            await lease.allocate(16)
            lease.append(answer)
            lease.commit(16)
            if name == b"cat":
                lease.release()
        whole = [*prompt_tokens, *answer, 1]
        async with drill.engine.match(whole, items=[Item(b"owl", 2, 3)]) as owl:
            assert owl.hit.total == 0
        cat = drill.engine.match(whole, items=[Item(b"cat", 2, 3)])
        assert cat.hit.total == 16
        await cat.allocate(len(whole))
        assert not set(cat.block_table[:4]) & set(lease.block_table)
        cat.release()
        lease.release()


async def test_request_too_large_evicts_nothing():
    """Defect: Room is made for a request that can never fit, and all hot blocks are evicted."""
    async with Drill(device_blocks=8, host_blocks=8, reserve_blocks=1) as drill:
        await drill.fill(A, B)
        await drill.engine.drain()
        before = [drill.hit(tokens) for tokens in (A, B)]
        lease = drill.engine.match(prompt(7, 8))
        with pytest.raises(RequestTooLarge, match="9 blocks"):
            await lease.allocate(9 * BLOCK_TOKENS)
        assert [drill.hit(tokens) for tokens in (A, B)] == before == [(2, 0), (2, 0)]
        lease.release()


async def test_counters_begin_at_zero_and_never_decrease():
    """Defect: Rates divide by zero before the first request; counts restart after ten thousand."""
    async with Drill(device_blocks=16) as drill:
        empty = drill.engine.statistics()
        assert (empty.hit_tokens, empty.prompt_tokens, empty.grants) == (0, 0, 0)
        drill.engine.statistics()
        assert drill.engine.statistics().poller.cpu_share == 0.0
        counters = [
            name
            for name in type(empty).__struct_fields__
            if name.endswith(("_tokens", "ed_blocks", "grants")) and name != "evictable_blocks"
        ]
        assert len(counters) > 8
        last = empty
        for tokens in (A, B, A, LONG):
            await drill.fill(tokens)
            await drill.engine.drain()
            await drill.engine.evict(3)
            await drill.engine.reset()
            now = drill.engine.statistics()
            fallen = [name for name in counters if getattr(now, name) < getattr(last, name)]
            assert fallen == []
            last = now
        assert last.grants == 4
