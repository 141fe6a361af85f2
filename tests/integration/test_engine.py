"""CacheEngine end to end: leases, tiers and fairness."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from array import array

import numpy as np
import pytest

from aiokv import CacheConfig, CacheEngine, Hit
from aiokv.errors import (
    AllocateTimeout,
    LeaseError,
    RequestTooLarge,
    UnreleasedLeaseWarning,
    UsageError,
    WouldBlock,
)
from aiokv.testing import ManualEvent, spin
from tests.harness.served import Served

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]
B = [1, 2, 3, 4, 8, 9, 9]


@pytest.mark.parametrize("manual", [False])
async def test_many_requests_on_the_cpu_device_get_their_own_kv(manual):
    """Real copies under eviction pressure: every hit is compared byte for byte (I4)."""
    random = np.random.default_rng(0)
    async with Served(device_blocks=6, host_blocks=12, manual=manual) as served:
        for _ in range(60):
            await served.serve(random.integers(0, 2, random.integers(1, 12)).tolist())
            await served.engine.drain()
        statistics = served.engine.statistics()
        assert statistics.attention.onloaded_blocks > 0
        assert statistics.hit_device_tokens > 0
        assert statistics.attention.device.evicted_blocks > 0
        assert statistics.leases == 0


async def test_a_commit_that_is_refused_leaves_the_step_open():
    async with Served() as served, served.engine.match(A) as lease:
        await lease.allocate(len(A))
        step = served.engine.open_step
        with pytest.raises(LeaseError):
            lease.commit(1_000, ready=ManualEvent())
        assert served.engine.open_step == step
        event = ManualEvent()
        event.complete()
        assert lease.commit(len(A), ready=event) == len(A) // 2
        assert served.engine.open_step == step + 1


async def test_lease_is_matched_granted_committed_and_released():
    async with Served() as served, served.engine.match(A, owner="a") as lease:
        assert lease.hit == Hit(0, 0)
        await lease.allocate(len(A))
        assert len(lease.block_table) == 4
        assert not lease.block_table.flags.writeable
        assert lease.cached_tokens == 0
        assert lease.layers.is_done
        assert lease.recompute_from() is None
        table = lease.block_table.tolist()
        served.engine.extend([lease], 1)
        lease.append([8])
        served.engine.extend([lease], 2)
        assert lease.block_table.tolist()[:4] == table
        assert lease.num_tokens == 10
        lease.truncate(8)
        assert lease.commit(8) == 4
        assert lease.commit(8) == 0
        assert served.engine.match([*A, 8, 9]).hit == Hit(8, 0)


@pytest.mark.parametrize("tokens", [[8], [np.int64(8)], (8,), np.array([8]), array("q", [8])])
async def test_tokens_of_every_kind_are_appended(tokens):
    async with Served() as served, served.engine.match(A) as lease:
        await lease.allocate(8)
        lease.append(tokens)
        lease.commit(8)
        assert served.engine.match([*A, 8, 9]).hit == Hit(8, 0)


async def test_host_blocks_are_onloaded_and_joined():
    """One transfer serves two leases; the second one needs only its first blocks."""
    async with Served() as served:
        await served.to_host(A)
        async with served.engine.match(A) as first, served.engine.match(B) as second:
            assert first.hit == Hit(0, 6)
            await first.allocate(7)
            await second.allocate(7)
            (copy,) = served.device.onloads
            assert second.block_table.tolist()[:2] == first.block_table.tolist()[:2]
            waits = [asyncio.create_task(x.layers.wait(0)) for x in (first, second)]
            await spin(3)
            assert not any(task.done() for task in waits)
            copy.complete(0)
            await asyncio.gather(*waits)
            assert not first.layers.is_done
            copy.complete(1)
            await first.layers.wait_all()
            served.check(first, A, 6)
            served.check(second, B, 4)
        await served.settle()


async def test_backups_of_a_pass_are_one_transfer():
    """write_through: what one pass commits is one offload; clean blocks are evicted for free."""
    async with Served(device_blocks=8) as served:
        for tokens in ([1, 1, 1], [2, 2, 2], [3, 3, 3]):
            await served.serve(tokens)
        await spin(2)
        (copy,) = served.device.offloads
        assert len(copy.host_ids) == 3
        await served.complete_offloads()
        assert await served.engine.evict(3) == 3
        assert served.device.copies == []
        assert served.engine.match([2, 2, 2]).hit == Hit(0, 2)


async def test_prefetch_brings_host_blocks():
    async with Served() as served:
        await served.to_host(A)
        task = asyncio.create_task(served.engine.prefetch(A))
        await spin(2)
        served.device.complete_all()
        assert await task == Hit(6, 0)
        assert served.engine.match(A).hit == Hit(6, 0)


async def test_requests_wait_in_order():
    """Requests are granted by priority, then arrival; a waiting request holds no blocks."""
    async with Served(device_blocks=4) as served:
        engine = served.engine
        holder = engine.match([1])
        await holder.allocate(8)
        order: list[str] = []

        async def request(name: str, num_tokens: int, priority: int) -> None:
            async with engine.match([9]) as lease:
                await lease.allocate(num_tokens, priority=priority)
                order.append(name)

        tasks = [
            asyncio.create_task(request(*args))
            for args in (("large", 8, 0), ("small", 1, 0), ("urgent", 2, -1))
        ]
        await spin(2)
        assert engine.statistics().waiting == 3
        holder.truncate(2)  # the small request would fit, but is not first
        await spin(2)
        assert order == ["urgent"]
        assert not engine.match([5]).try_allocate(1)
        holder.release()
        await asyncio.gather(*tasks)
        assert order == ["urgent", "large", "small"]


async def test_deadlines_and_impossible_requests():
    async with Served(device_blocks=4) as served:
        engine = served.engine
        async with engine.match([1]) as holder, engine.match([2]) as waiter:
            await holder.allocate(8)
            with pytest.raises(AllocateTimeout, match="device_blocks") as caught:
                await waiter.allocate(3, timeout=0)
            assert isinstance(caught.value, TimeoutError)
            assert (caught.value.owner, caught.value.lease_id) == (hex(waiter.id), waiter.id)
            assert f"lease '{waiter.id:#x}': allocate timed out" in str(caught.value)
            assert f"; '{holder.id:#x}' holds 4 blocks" in str(caught.value)
            queued = asyncio.create_task(waiter.allocate(1))
            await spin(2)
            async with engine.match([3]) as large:
                with pytest.raises(RequestTooLarge, match="10 positions need 5 blocks"):
                    await large.allocate(10)  # at once, though others wait
                with pytest.raises(LeaseError):
                    await large.allocate(0)
            with pytest.raises(WouldBlock):
                engine.extend([holder], 1)
            assert holder.num_tokens == 8
            holder.release()
            await queued


async def test_bad_input_changes_nothing():
    async with Served() as served:
        engine = served.engine
        before = engine.statistics()
        for tokens in (
            [],
            [2**31],
            [-(2**31) - 1],
            [[1, 2]],
            [1.5],
            [True],
            "ab",
            [2**70],
            [[1], 2],
        ):
            with pytest.raises(UsageError):
                engine.match(tokens)
        assert engine.statistics() == before
        async with engine.match(np.array([1, 2, 3], np.uint64)) as lease:
            for call in (lambda: lease.commit(0), lambda: lease.truncate(0)):
                with pytest.raises(LeaseError):
                    call()
            await lease.allocate(3)
            for call in (
                lambda: lease.commit(4),
                lambda: lease.commit(-1),
                lambda: lease.append([1]),
                lambda: lease.truncate(4),
                lambda: engine.extend([lease, lease], 1),
                lambda: engine.extend([lease], -1),
                lambda: lease.try_allocate(3),
            ):
                with pytest.raises(LeaseError):
                    call()
            assert lease.num_tokens == 3
        with pytest.raises(UsageError):
            await engine.evict(-1)
        with pytest.raises(UsageError):
            await engine.evict(1, "disk")


async def test_released_and_foreign_leases_are_refused():
    async with Served() as one, Served() as two:
        first, second = one.engine.match([1]), two.engine.match([1])
        await first.allocate(1)
        await second.allocate(1)
        with pytest.raises(LeaseError, match="another engine"):
            one.engine.extend([second], 5)  # the same number as `first`
        assert first.num_tokens == second.num_tokens == 1
        first.release()
        first.release()
        with pytest.raises(LeaseError, match=r"released at .*test_engine\.py"):
            first.commit(1)
        second.release()
        assert one.engine.statistics().attention.device.free == 8


@pytest.mark.parametrize("how", ["async with", "exit stack", "release"])
async def test_released_lease_names_the_line_of_the_caller(how):
    async with Served() as served:
        if how == "async with":
            async with served.engine.match([1]) as lease:
                pass
        elif how == "exit stack":
            async with contextlib.AsyncExitStack() as stack:
                lease = await stack.enter_async_context(served.engine.match([1]))
        else:
            lease = served.engine.match([1])
            lease.release()
        assert re.search(r"released at .*tests/integration/test_engine\.py:\d+>", repr(lease))


async def test_timeout_names_the_largest_holders():
    async with Served(device_blocks=16) as served:
        sizes = {"a": 2, "b": 5, "c": 4, "d": 3}
        leases = [served.engine.match([number], owner=o) for number, o in enumerate(sizes)]
        for lease, blocks in zip(leases, sizes.values(), strict=True):
            await lease.allocate(2 * blocks)
        waiter = served.engine.match(range(100, 106), owner="waiter")
        with pytest.raises(AllocateTimeout) as caught:
            await waiter.allocate(6, timeout=0)
        assert "lease 'waiter': allocate timed out" in str(caught.value)
        assert (
            "'b' holds 5 blocks; 'c' holds 4 blocks; 'd' holds 3 blocks; 1 more leases hold blocks"
        ) in str(caught.value)
        for lease in [*leases, waiter]:
            lease.release()


async def test_a_collected_lease_frees_itself():
    async with Served() as served:
        lease = served.engine.match([1, 2, 3], owner="req-1")
        await lease.allocate(3)
        with pytest.warns(UnreleasedLeaseWarning, match="req-1"):
            del lease
        await spin(1)
        assert served.engine.statistics().leases == 0
        assert served.engine.statistics().attention.device.free == 8
        lease = served.engine.match([1])
        del lease  # held nothing: no warning
        await spin(1)
        assert served.engine.statistics().leases == 0


async def test_other_threads_and_loops_are_refused():
    async with Served() as served:
        lease = served.engine.match([1])
        await lease.allocate(1)
        errors: list[Exception] = []

        def elsewhere() -> None:
            for call in (
                lambda: served.engine.match([1]),
                lambda: lease.commit(1),
                lambda: served.engine.extend([lease], 1),
                lease.release,
                served.engine.step,
            ):
                try:
                    call()
                except UsageError as error:
                    errors.append(error)
            assert len(lease.block_table) == 1  # any thread may call this

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(errors) == 5
        assert lease.num_tokens == 1
        lease.release()


async def test_an_engine_is_used_inside_async_with():
    engine = CacheEngine(CacheConfig(device_blocks=2))
    with pytest.raises(UsageError):
        engine.match([1])
    async with engine:
        with pytest.raises(UsageError):
            await engine.__aenter__()
    with pytest.raises(UsageError):
        engine.match([1])


async def test_errors_of_the_core_name_the_owner_of_the_lease() -> None:
    async with CacheEngine(CacheConfig(device_blocks=4, block_tokens=4)) as engine:
        lease, unnamed = engine.match([1, 2, 3], owner="r1"), engine.match([1, 2, 3])
        with pytest.raises(LeaseError, match=r"lease 'r1': commit: .* \(hint: ") as error:
            lease.commit(1)
        assert (error.value.owner, error.value.lease_id) == ("r1", lease.id)
        with pytest.raises(LeaseError, match=f"lease '{unnamed.id:#x}': extend: "):
            engine.extend([unnamed], 1)
        with pytest.raises(RequestTooLarge, match="lease 'r1': ") as too_large:
            await lease.allocate(17)
        assert too_large.value.config_field == "device_blocks"
        await lease.allocate(3)
        for call in (lease.try_allocate, lease.can_allocate, lease.truncate):
            with pytest.raises(LeaseError, match="lease 'r1': "):
                call(9)
        lease.release()
        unnamed.release()
