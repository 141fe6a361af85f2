"""Forks: n samples of one prompt share its full blocks and nothing else."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Hit
from aiokv.errors import LeaseError, WouldBlock
from aiokv.testing import ManualEvent, spin
from tests.harness.served import Served, computed, held, resumed, swapped_out

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3, 4, 5, 6, 7]


def decode(served: Served, lease, tokens: list[int], token: int) -> None:
    """Append one position; the KV of a partial block is its tokens."""
    served.engine.extend([lease], 1)
    tokens.append(token)
    lease.append([token])
    if len(tokens) % 2 == 0:
        served.compute(lease, tokens, len(tokens) - 2)
    else:
        for array in served.kv:
            array[lease.block_table[-1]] = token
    lease.commit(len(tokens))


@pytest.mark.parametrize("policy", ["none", "write_through"])
async def test_samples_diverge(policy):
    async with Served(device_blocks=20, host_blocks=32, write_policy=policy) as served:
        parent = await computed(served, A)
        before = held(served, parent)
        samples = [parent, *(parent.fork(owner=f"sample-{i}") for i in range(3))]
        assert [sample.owner for sample in samples[1:]] == ["sample-0", "sample-1", "sample-2"]
        tables = [sample.block_table.tolist() for sample in samples]
        assert all(table[:3] == tables[0][:3] for table in tables)
        assert len({table[3] for table in tables}) == 4
        for sample in samples:
            assert np.array_equal(held(served, sample), before)
            assert sample.cached_tokens == sample.num_tokens == 7 or sample is parent
        tokens = [list(A) for _ in samples]
        for position in range(4):
            for i, sample in enumerate(samples):
                decode(served, sample, tokens[i], 10 * i + position)
        for sample, named in zip(samples, tokens, strict=True):
            served.check(sample, named, 10)
            assert np.array_equal(held(served, sample, 3), before[:, :3])
        for sample, named in zip(samples, tokens, strict=True):
            assert served.engine.match(named).hit == Hit(10, 0)
            sample.release()
            assert served.engine.check_invariants() == []
        await served.complete_offloads()
        assert served.engine.statistics().attention.device.leased == 0
        for named in tokens:
            async with served.engine.match(named) as lease:
                await lease.allocate(len(named))
                served.check(lease, named, 10)


async def test_the_same_continuation_is_indexed_once():
    async with Served(device_blocks=12) as served:
        parent = await computed(served, A)
        child = parent.fork()
        both = list(A), list(A)
        decode(served, parent, both[0], 8)
        decode(served, child, both[1], 8)
        assert parent.block_table[3] != child.block_table[3]  # granted ids never change
        assert served.engine.statistics().published_blocks == 4
        parent.release()
        grandchild = child.fork()  # shares the copy of the index
        served.check(grandchild, [*A, 8], 8)
        assert grandchild.block_table[3] != child.block_table[3]
        child.release()
        served.check(grandchild, [*A, 8], 8)
        grandchild.release()
        await served.complete_offloads()


async def test_fork_of_a_fork_remains_valid_after_both_are_released():
    async with Served(write_policy="none") as served:
        parent = await computed(served, A)
        before = held(served, parent)
        child = parent.fork()
        parent.release()
        grandchild = child.fork()
        child.release()
        assert np.array_equal(held(served, grandchild), before)
        assert await served.engine.evict(8) == 0
        grandchild.release()
        assert await served.engine.evict(8) == 3


async def test_fork_copies_blocks_that_are_not_indexed():
    async with Served(write_policy="none") as served:
        parent = await computed(served, A[:6], write=False)
        before = held(served, parent)
        child = parent.fork()
        assert not set(parent.block_table.tolist()) & set(child.block_table.tolist())
        for array in served.kv:
            array[parent.block_table] = 0
        assert np.array_equal(held(served, child), before)
        assert child.commit(6) == 0  # write=False is inherited
        parent.release()
        child.release()


async def test_fork_does_not_copy_uncomputed_positions():
    async with Served(write_policy="none") as served:
        parent = served.engine.match(A)
        await parent.allocate(9)
        served.compute(parent, A)
        parent.commit(4)
        for array in served.kv:
            array[array.shape[0] - 1] = 55
        child = parent.fork()
        assert child.cached_tokens == 4
        assert child.num_tokens == 9
        parent.release()
        served.compute(child, A, 4)
        assert child.commit(6) == 1
        served.check(child, A, 6)
        child.release()


async def test_fork_without_free_blocks_changes_nothing():
    async with Served(device_blocks=4, write_policy="none") as served:
        parent = await computed(served, A)
        before = served.engine.inspect.dump()
        with pytest.raises(WouldBlock, match="fork"):
            parent.fork()
        assert served.engine.inspect.dump() == before
        parent.truncate(6)
        child = parent.fork()  # needs no block at all
        assert child.block_table.tolist() == parent.block_table.tolist()
        child.release()
        parent.release()


async def test_a_fork_evicts_cached_blocks_but_not_its_parent():
    async with Served(device_blocks=7, write_policy="none") as served:
        parent = await computed(served, A)
        await served.serve([21, 22, 23, 24, 25, 26])
        child = parent.fork()
        assert served.engine.match([21, 22, 23, 24, 25, 26, 27]).hit == Hit(4, 0)
        assert np.array_equal(held(served, child), held(served, parent))
        child.release()
        parent.release()


async def test_fork_of_a_lease_without_valid_blocks_is_refused():
    async with Served() as served:
        lease = served.engine.match(A)
        with pytest.raises(LeaseError):
            lease.fork()
        lease.release()
        await served.to_host(A)
        lease = served.engine.match(A)
        await lease.allocate(7)
        with pytest.raises(LeaseError):
            lease.fork()  # its blocks are being onloaded
        served.device.complete_all()
        await served.settle()
        lease.fork().release()
        lease.release()
        with pytest.raises(LeaseError):
            lease.fork()


async def test_forks_are_swapped_out_and_resumed():
    async with Served(device_blocks=12, write_policy="none") as served:
        parent = await computed(served, A)
        child = parent.fork()
        tokens = list(A), list(A)
        decode(served, parent, tokens[0], 8)
        decode(served, child, tokens[1], 9)
        await swapped_out(served, parent)
        await swapped_out(served, child)
        assert served.engine.statistics().attention.device.leased == 0
        await served.engine.evict(12)
        assert await served.engine.evict(16, tier="host") == 0
        for array in served.kv:
            array[:] = 0
        await resumed(served, child, 8)
        await resumed(served, parent, 8)
        served.check(parent, tokens[0], 8)
        served.check(child, tokens[1], 8)
        parent.release()
        child.release()


async def test_a_fork_that_fails_leaves_nothing(monkeypatch):
    async with Served(write_policy="none") as served:
        parent = await computed(served, A)

        def fail(*args):
            raise MemoryError

        monkeypatch.setattr("aiokv.worker.steps.clone_rows", fail)
        with pytest.raises(MemoryError):
            parent.fork()
        assert served.engine.statistics().leases == 1
        assert served.engine.statistics().attention.device.free == 4
        parent.release()


async def test_a_swap_of_a_fork_waits_for_the_step_that_copied_its_tail():
    """On a device that computes in streams, the copy is not done when fork returns."""
    served = Served(write_policy="none")
    served.device.computes_in_stream = True
    async with served:
        parent = await computed(served, A)
        served.engine.step()
        child = parent.fork()
        task = asyncio.ensure_future(child.preempt(swap=True))
        await spin(3)
        assert served.device.offloads == []  # the step is open
        event = ManualEvent()
        served.engine.step(event)
        await spin(2)
        (copy,) = served.device.offloads
        assert copy.after is event
        event.complete()
        await served.complete_offloads()
        await task
        child.release()
        parent.release()


async def test_blocks_of_a_swap_stay_with_the_step_that_still_reads_them():
    served = Served(write_policy="none", device_blocks=4)
    served.device.computes_in_stream = True
    async with served:
        lease = served.engine.match(A)
        await lease.allocate(7)
        served.compute(lease, A)
        lease.commit(6)
        first = ManualEvent()
        served.engine.step(first)
        # This step writes into the last block and does not commit it.
        task = asyncio.ensure_future(lease.preempt(swap=True))
        await spin(3)
        first.complete()
        served.device.complete_all()
        await task
        await served.engine.evict(4)
        assert lease.cached_tokens <= 6
        await lease.resume(7)
        assert served.device.onloads == []  # would overwrite blocks that the open step reads
        second = ManualEvent()
        served.engine.step(second)
        second.complete()
        await spin(2)
        served.device.complete_all()
        await lease.layers.wait_all()
        served.check(lease, A, 6)
        lease.release()
