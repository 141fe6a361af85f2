"""Batch methods have the effects of the single-lease methods, for many leases."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Hit
from aiokv.errors import LeaseError, TransferError, UsageError, WouldBlock
from aiokv.testing import spin
from tests.harness.served import Served

pytestmark = [pytest.mark.asyncio, pytest.mark.loop("asyncio")]

A = [1, 2, 3, 4, 5, 6, 7]
B = [11, 12, 13, 14, 15]


async def test_a_batch_from_match_to_release():
    async with Served(device_blocks=16) as served:
        engine = served.engine
        leases = [engine.match(tokens, salt="t") for tokens in (A, np.array(B, np.int32))]
        assert [lease.try_allocate(n) for lease, n in zip(leases, (7, 5), strict=True)] == [
            True,
            True,
        ]
        served.compute(leases[0], A)
        served.compute(leases[1], B)
        assert [lease.commit(n) for lease, n in zip(leases, (7, 5), strict=True)] == [3, 2]
        engine.extend(leases, 3)
        assert [lease.num_tokens for lease in leases] == [10, 8]
        for lease in leases:
            lease.release()
        hits = [engine.match(tokens, salt="t").hit for tokens in (A, B)]
        assert hits == [Hit(6, 0), Hit(4, 0)]
        assert [engine.match(tokens).hit.total for tokens in (A, B)] == [0, 0]
        await served.complete_offloads()


async def test_leases_of_another_engine_are_refused():
    async with Served() as served, Served() as other:
        mine = await served.engine.match(A).allocate(7)
        theirs = await other.engine.match(A).allocate(7)
        for call in (
            lambda: served.engine.extend([mine, theirs], 1),
            lambda: served.engine.block_tables([mine, theirs]),
        ):
            with pytest.raises(LeaseError, match="another engine"):
                call()
        assert mine.num_tokens == theirs.num_tokens == 7
        assert served.engine.statistics().published_blocks == 0
        mine.release()
        theirs.release()


async def test_extend_takes_all_or_none():
    async with Served(device_blocks=7, write_policy="none") as served:
        leases = [served.engine.match(tokens) for tokens in (A, B)]
        for lease, tokens in zip(leases, (A, B), strict=True):
            await lease.allocate(len(tokens) - 1)
        with pytest.raises(WouldBlock):
            served.engine.extend(leases, 3)
        assert [lease.num_tokens for lease in leases] == [6, 4]
        served.engine.extend(leases, 2)
        assert [len(lease.block_table) for lease in leases] == [4, 3]
        with pytest.raises(LeaseError, match="listed more than once"):
            served.engine.extend([leases[0], leases[0]], 0)
        for lease in leases:
            lease.release()


async def test_block_tables_are_padded_rows():
    async with Served(device_blocks=16) as served:
        leases = [*[served.engine.match(tokens) for tokens in (A, B)], served.engine.match([9])]
        for lease, n in zip(leases[:2], (7, 5), strict=True):
            await lease.allocate(n)
        tables = served.engine.block_tables(leases)
        assert tables.shape == (3, 4)
        assert tables.dtype == np.int32
        assert tables[0].tolist() == leases[0].block_table.tolist()
        assert tables[1].tolist() == [*leases[1].block_table.tolist(), -1]
        assert tables[2].tolist() == [-1] * 4  # holds nothing yet
        out = np.full((5, 6), 77, np.int32)
        assert served.engine.block_tables(leases, out, fill=0) is out
        assert np.array_equal(out[:3, :4], np.where(tables < 0, 0, tables))
        assert not out[3:].any()
        assert not out[:, 4:].any()
        assert served.engine.block_tables([]).shape == (0, 0)
        served.engine.block_tables([], out[:2])
        assert (out[:2] == -1).all()
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (0, 9)])
async def test_a_buffer_that_is_too_small_is_not_written(shape):
    async with Served(device_blocks=16) as served:
        leases = [served.engine.match(tokens) for tokens in (A, B)]
        for lease, n in zip(leases, (7, 5), strict=True):
            await lease.allocate(n)
        out = np.full(shape, 77, np.int32)
        with pytest.raises(UsageError):
            served.engine.block_tables(leases, out)
        assert (out == 77).all()
        wrong = [np.zeros((4, 4), np.int64), np.zeros((4, 8), np.int32)[:, ::2], np.zeros(16, "i4")]
        for out in wrong:
            with pytest.raises(UsageError, match="out is"):
                served.engine.block_tables(leases, out)
        for lease in leases:
            lease.release()
        with pytest.raises(LeaseError):
            served.engine.block_tables(leases)


async def test_one_counter_waits_for_the_transfers_of_a_batch():
    async with Served(device_blocks=16) as served:
        await served.to_host(A)
        await served.to_host(B)
        leases = [served.engine.match(tokens) for tokens in (A, A, B, [50, 51])]
        for lease, n in zip(leases, (7, 7, 5, 2), strict=True):
            await lease.allocate(n)
        layers = served.engine.layers(leases)
        assert len(layers.counters) == 2  # the second lease joined
        waiting = asyncio.create_task(layers.wait(0))
        first, second = served.device.onloads
        first.complete(0)
        await spin(20)
        assert not waiting.done()
        second.complete(0)
        await waiting
        assert layers.pending_layers == [1]
        second.complete(1)
        first.fail(1, block=1)
        await served.settle()
        with pytest.raises(TransferError):
            await layers.wait_all()
        assert [lease.recompute_from() for lease in leases] == [2, 2, None, None]
        served.check(leases[0], A, 2)
        served.check(leases[2], B, 4)
        assert served.engine.layers([leases[3]]).is_done
        await served.engine.layers([]).wait_all()
        for lease in leases:
            lease.release()
