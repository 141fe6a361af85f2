"""Device blocks of a server, on several ranks: the ids are the same on each."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import Hit, TransferError
from aiokv.testing import spin
from tests.ranks.loopback import Ranked

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
        tmp_path, num_ranks=num_ranks, new_device=None, foreign_device=True
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
    async with Ranked(tmp_path, foreign_device=True) as ranked:
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
