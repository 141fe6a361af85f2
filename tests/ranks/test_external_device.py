"""Device blocks of a server, on several ranks: the ids are the same on each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import Hit, Regions
from aiokv.errors import LeaseError, TransferError
from aiokv.testing import run_until_idle, spin
from tests.ranks.loopback import LAYERS, Ranked

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from aiokv import Lease

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


async def stored(ranked: Ranked) -> None:
    """Cache the full blocks of a prompt in the host memory of every rank."""
    lease = ranked.engine.match(A)
    await lease.allocate(7)
    lease.assign([0, 1, 2, 3])
    ranked.compute(lease, A)
    assert lease.commit(7) == 3
    lease.release()
    assert not lease.is_idle
    ranked.step()
    await ranked.finish()
    await lease.idle()
    assert ranked.engine.would_hit(A) == Hit(0, 6)


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_every_rank_copies_its_part_of_a_block(tmp_path, num_ranks):
    async with Ranked(
        tmp_path, num_ranks=num_ranks, new_device=None, external_device=True
    ) as ranked:
        await stored(ranked)
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            lease.assign([4, 5, 6, 7], computed_tokens=0)
            assert lease.transfer_ids == lease.layers.transfer_ids
            await lease.layers.wait_all()
            ranked.check(lease, A)
            assert lease.cached_tokens == 6
        await lease.idle()


async def test_a_lease_is_idle_when_no_rank_writes_its_blocks(tmp_path):
    async with Ranked(tmp_path, external_device=True) as ranked:
        await stored(ranked)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        lease.assign([4, 5, 6, 7])
        waiting = asyncio.create_task(lease.layers.wait_all())
        first, second = await ranked.copies()
        first.fail_all(block=1)
        await spin(50)
        assert not lease.is_idle
        second.complete_all()
        with pytest.raises(TransferError) as caught:
            await waiting
        assert caught.value.first_bad_token == 2
        await lease.idle()
        assert lease.recompute_from() == 2
        lease.release()


async def completing(ranked: Ranked, verb: Awaitable[object]) -> None:
    task = asyncio.ensure_future(verb)
    while not task.done():
        for shard in ranked.shards:
            shard.complete_all()
        await asyncio.sleep(0)
    await task


async def saving(ranked: Ranked) -> Lease:
    """Return a released lease whose blocks each rank is saving."""
    lease = ranked.engine.match(A)
    await lease.allocate(7)
    lease.assign([0, 1, 2, 3])
    ranked.compute(lease, A)
    lease.commit(7)
    lease.release()
    ranked.step()
    await ranked.copies(onload=False)
    return lease


@pytest.mark.parametrize("verb", ["reset", "weights"])
async def test_saves_of_all_ranks_end_before_a_reset_or_new_weights(tmp_path, verb):
    async with Ranked(tmp_path, external_device=True) as ranked:
        lease = await saving(ranked)
        granted = ranked.engine.match([9, *A])
        await granted.allocate(8)
        first, second = await ranked.copies(onload=False)
        updating = ranked.engine.updating_weights()
        waiting = asyncio.ensure_future(
            ranked.engine.reset() if verb == "reset" else updating.__aenter__()
        )
        first.complete_all()
        await spin(50)
        assert not waiting.done()
        assert not lease.is_idle
        second.complete_all()
        await waiting
        if verb == "weights":
            await updating.__aexit__(None, None, None)
        assert lease.is_idle
        assert ranked.engine.would_hit(A) == Hit(0, 0)
        granted.assign([4, 5, 6, 7])
        ranked.compute(granted, [9, *A])
        assert granted.commit(8) == 0  # of the time before
        granted.release()
        ranked.step()
        await ranked.finish()
        await stored(ranked)


async def test_a_hit_of_old_weights_is_not_copied_on_any_rank(tmp_path):
    async with Ranked(tmp_path, external_device=True) as ranked:
        await stored(ranked)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        assert lease.cached_tokens == 6
        async with ranked.engine.updating_weights():
            pass
        with pytest.raises(LeaseError, match="dropped after the lease was allocated"):
            lease.assign([4, 5, 6, 7])
        await lease.preempt()
        await lease.allocate(7)
        assert lease.cached_tokens == 0
        lease.release()
        assert not any(shard.device.copies for shard in ranked.shards)


async def test_all_ranks_sleep_after_their_saves_and_onload_into_new_tensors(tmp_path):
    async with Ranked(tmp_path, external_device=True) as ranked:
        lease = await saving(ranked)
        first, second = await ranked.copies(onload=False)
        sleeping = asyncio.ensure_future(ranked.engine.sleep(["device"]))
        second.complete_all()
        await spin(50)
        assert not sleeping.done()
        first.complete_all()
        await sleeping
        assert lease.is_idle
        waiting = ranked.engine.match(A)
        granting = asyncio.ensure_future(waiting.allocate(7))
        for shard in ranked.shards:
            shard.kv = [np.zeros_like(array) for array in shard.kv]
            shard.worker.regions = Regions(num_layers=LAYERS)
            shard.worker.regions.add("kv", layers=shard.kv)
        await spin(50)
        assert not granting.done()
        await ranked.engine.wake_up()
        await granting
        waiting.assign([4, 5, 6, 7])
        await run_until_idle(lambda: all(shard.device.onloads for shard in ranked.shards))
        await completing(ranked, waiting.layers.wait_all())
        assert waiting.cached_tokens == 6
        ranked.check(waiting, A)
        waiting.release()
        await completing(ranked, ranked.engine.sleep(["host"]))
        await completing(ranked, ranked.engine.wake_up())
        assert ranked.engine.would_hit(A) == Hit(0, 0)
        await stored(ranked)
