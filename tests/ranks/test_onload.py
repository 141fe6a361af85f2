"""A block is VALID when all ranks have it."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import CacheConfig, CacheEngine, Hit
from aiokv.base.plan import TransferReport
from aiokv.errors import LeaseError, TransferError, UsageError
from aiokv.testing import ManualEvent, run_until_idle, spin
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_bytes_are_restored_on_every_rank(tmp_path, num_ranks):
    async with Ranked(tmp_path, num_ranks=num_ranks, new_device=None) as ranked:
        await ranked.to_host(A)
        assert ranked.engine.match(A).hit == Hit(0, 6)
        assert await ranked.serve(A) == 6
        await ranked.finish()
        assert ranked.engine.statistics().worker.attention.onload.done == 1
        assert ranked.engine.statistics().worker.attention.onload.moved_bytes == 3 * 16 * num_ranks


async def test_restart_without_a_lost_rank_is_refused(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        with pytest.raises(UsageError, match="no rank is lost"):
            await ranked.engine.restart_ranks()
        assert ranked.engine.match(A).hit == Hit(0, 6)
    async with CacheEngine(CacheConfig(device_blocks=4)) as engine:
        with pytest.raises(UsageError, match="no rank is lost"):
            await engine.restart_ranks()


async def test_a_layer_has_arrived_when_all_ranks_have_it(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            layers = [asyncio.create_task(lease.layers.wait(layer)) for layer in (0, 1)]
            first, second = await ranked.copies()
            first.complete(0)
            second.complete(1)
            await spin(50)
            assert not any(task.done() for task in layers)
            second.complete(0)
            await layers[0]
            assert not layers[1].done()
            assert lease.layers.pending_layers == [1]
            first.complete(1)
            await layers[1]
            ranked.check(lease, A)
            ranked.step()


async def test_the_hit_is_the_minimum_over_the_ranks(tmp_path):
    async with Ranked(tmp_path, num_ranks=3) as ranked:
        await ranked.to_host(A)
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            waiting = asyncio.create_task(lease.layers.wait_all())
            first, second, third = await ranked.copies()
            second.fail_all(block=2)
            first.fail_all(block=1, reason="a bad page")
            await spin(50)
            assert not waiting.done()  # the third still writes
            third.complete_all()
            with pytest.raises(TransferError, match="at block 1: rank 0: a bad page") as caught:
                await waiting
            assert (caught.value.rank, caught.value.first_bad_token) == (0, 2)
            assert lease.cached_tokens == lease.recompute_from() == 2
            assert ranked.engine.match(A).hit == Hit(2, 0)
            ranked.compute(lease, A, 2)
            assert lease.commit(7) == 2
            ranked.check(lease, A)
            ranked.step()
        await ranked.finish()


async def test_a_backup_waits_on_each_rank_for_its_own_step(tmp_path):
    async with Ranked(tmp_path) as ranked:
        slow, quick = ranked.shards
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            ranked.compute(lease, A)
            lease.commit(7)
            number = ranked.engine.open_step
            ranked.engine.step()
            quick.worker.step(number)
            await run_until_idle(lambda: quick.device.offloads != [])
            assert slow.device.offloads == []
            assert ranked.engine.statistics().worker.held == 1
            assert ranked.engine.statistics().attention.host.in_flight == 3
            slow.worker.step(number)
        await ranked.finish()
        assert ranked.engine.statistics().worker.attention.offload.done == 1


async def test_abandoned_onload_is_cancelled_on_every_rank(tmp_path):
    B = [11, 12, 13, 14, 15]
    C = [21, 22, 23, 24, 25]
    async with Ranked(tmp_path, device_blocks=16) as ranked:
        for tokens in (A, B, C):
            await ranked.to_host(tokens)
        leases = [ranked.engine.match(tokens) for tokens in (A, B, C)]
        for lease, tokens in zip(leases, (A, B, C), strict=True):
            await lease.allocate(len(tokens))
        assert ranked.engine.statistics().worker.attention.onload.submitted == 3
        await run_until_idle(lambda: all(len(s.device.onloads) == 2 for s in ranked.shards))
        leases[2].release()  # its plan waits behind two others
        await run_until_idle(
            lambda: ranked.engine.statistics().worker.attention.onload.cancelled == 1
        )
        leases[0].release()
        leases[1].release()
        await ranked.finish()
        assert ranked.engine.match(C).hit == Hit(0, 4)
        ranked.step()


async def test_plan_cancelled_on_one_rank_only_is_not_valid(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        (transfer_id,) = lease.layers.transfer_ids
        first, second = await ranked.copies()
        # As if the cancellation had found the plan still queued on the first rank.
        report = ranked.group.plans.get(transfer_id).work
        report.end(0, TransferReport(transfer_id=transfer_id, outcome="cancelled"))
        lease.release()
        first.complete_all()
        second.complete_all()
        await ranked.finish()
        assert ranked.engine.match(A).hit == Hit(0, 6)


async def test_a_runner_waits_for_the_layers_of_its_own_rank(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            early, late = ranked.shards
            views = [
                asyncio.create_task(s.worker.layers(lease.layers.transfer_ids))
                for s in ranked.shards
            ]
            first, second = await ranked.copies()
            here = await views[0]
            waiting = asyncio.create_task(here.wait(0))
            await spin(5)
            assert not waiting.done()
            first.complete_all()
            await waiting
            await here.wait_all()
            assert not (await views[1]).is_done
            assert not lease.layers.is_done
            second.complete_all()
            await lease.layers.wait_all()
            again = await late.worker.layers(lease.layers.transfer_ids)  # ended, but still recorded
            await again.wait_all()
            assert (await early.worker.layers([])).is_done
            ranked.step()


async def test_steps_are_numbered_by_the_engine(tmp_path):
    async with Ranked(tmp_path) as ranked:
        assert ranked.engine.open_step == 1
        ranked.step()
        assert ranked.engine.open_step == 2
        with pytest.raises(UsageError, match="own events"):
            ranked.engine.step(ManualEvent())
        with pytest.raises(UsageError, match="closed"):
            ranked.shards[0].worker.step(1)


async def test_a_fork_with_a_partial_block_is_refused(tmp_path):
    async with Ranked(tmp_path) as ranked:
        async with ranked.engine.match([1, 2, 3]) as lease:
            await lease.allocate(3)
            lease.commit(3)
            with pytest.raises(UsageError, match="within their devices"):
                lease.fork()
            lease.truncate(2)
            lease.fork().release()
            ranked.step()
        with pytest.raises(LeaseError):
            lease.fork()
