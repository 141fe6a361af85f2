"""Tiers of all ranks sleep and wake up together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import Regions
from aiokv.errors import ControlTimeout, RankLost, UsageError
from aiokv.testing import ScriptedStore, run_until_idle, running_clock
from tests.ranks.loopback import LAYERS, Ranked
from tests.ranks.raw import pause, resume

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


async def test_all_ranks_sleep_and_wake_up_with_their_own_tensors(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await ranked.to_host(A)
        await ranked.engine.sleep(["device"])
        assert all(p.owner is None for s in ranked.shards for p in s.worker.regions.pieces())
        with pytest.raises(UsageError, match=r"rank 0: .*tensors.*rank 1: "):
            await ranked.engine.wake_up()
        for shard in ranked.shards:
            shard.kv = [np.zeros_like(array) for array in shard.kv]
            shard.worker.regions = Regions(num_layers=LAYERS)
            shard.worker.regions.add("kv", layers=shard.kv)
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 6
        await ranked.engine.sleep(["host"])
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 6


async def test_tensors_with_too_few_blocks_do_not_wake_up(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await ranked.to_host(A)
        await ranked.engine.sleep(["device"])
        assert all(shard.worker.is_asleep for shard in ranked.shards)
        blocks = len(ranked.shards[0].kv[0])
        for few in (1, 0):
            for number, shard in enumerate(ranked.shards):
                shape = (blocks - few * number, *shard.kv[0].shape[1:])
                shard.kv = [np.zeros(shape, shard.kv[0].dtype) for _ in shard.kv]
                shard.worker.regions = Regions(num_layers=LAYERS)
                shard.worker.regions.add("kv", layers=shard.kv)
            if few:
                with pytest.raises(
                    UsageError, match=rf"rank 1: .*hold {blocks - 1} blocks; .*{blocks}"
                ):
                    await ranked.engine.wake_up()
                assert ranked.shards[1].worker.is_asleep
        await ranked.engine.wake_up()
        assert not any(shard.worker.is_asleep for shard in ranked.shards)
        assert await ranked.serve(A) == 6


async def test_rank_lost_while_asleep_is_restarted_asleep(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await ranked.engine.sleep(["host"])
        await ranked.lose(1)
        with pytest.raises(RankLost):
            await ranked.group.sleep(frozenset({"host"}))
        await ranked.restart(1)
        assert ranked.shards[1].worker._controller.memory.asleep == {"host"}
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 0


async def test_restart_during_a_sleep_binds_no_old_tensors(tmp_path):
    stores = [ScriptedStore("rank 0"), ScriptedStore("rank 1")]
    async with Ranked(tmp_path, new_device=None, stores=stores, model="tests") as ranked:
        await ranked.serve(A)
        await ranked.finish()
        closing = stores[0].hold("aclose")
        sleeping = asyncio.create_task(ranked.engine.sleep())
        await run_until_idle(lambda: stores[0].calls["aclose"] > 0)
        await ranked.lose(1)
        with pytest.raises(RankLost):
            await sleeping
        restarting = asyncio.create_task(ranked.restart(1))
        await run_until_idle(lambda: ranked.group.group_statistics().generation == 2)
        closing.open()
        await restarting
        assert ranked.engine.asleep == {"device", "host"}
        with pytest.raises(UsageError, match=r"rank 0: .*tensors"):
            await ranked.engine.wake_up()
        shard = ranked.shards[0]
        shard.kv = [np.zeros_like(array) for array in shard.kv]
        shard.worker.regions = Regions(num_layers=LAYERS)
        shard.worker.regions.add("kv", layers=shard.kv)
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 0
        assert await ranked.serve(A) == 6


async def test_rank_lost_during_a_control_request_is_named(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        shard = ranked.shards[0]
        pause(shard.worker._connection)
        asking = asyncio.create_task(ranked.engine.sleep(["host"]))
        await run_until_idle(lambda: ranked.group._control.silent_ranks)
        await ranked.lose(0)
        with pytest.raises(RankLost, match="rank 0"):
            await asking
        await ranked.restart(0)
        await ranked.engine.wake_up()
        assert await ranked.serve(A) == 0


@pytest.mark.clock
async def test_a_rank_that_does_not_answer_in_time_is_named(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        connection = ranked.shards[1].worker._connection

        async def answers_of_the_others(asking: asyncio.Task[None]) -> None:
            """Let the time of a request pass when rank 1 alone has not answered."""
            await run_until_idle(lambda: ranked.group._control.silent_ranks == [1])
            await running_clock().advance(1.0)
            await asking

        pause(connection)
        with pytest.raises(ControlTimeout, match=r"did not answer: \[1\]") as caught:
            await answers_of_the_others(asyncio.create_task(ranked.engine.sleep(timeout=0.5)))
        assert caught.value.ranks == (1,)
        assert ranked.engine.asleep == {"device", "host"}, "the others may have freed theirs"
        resume(connection)
        await ranked.engine.sleep(timeout=10.0)
        for shard in ranked.shards:
            shard.kv = [np.zeros_like(array) for array in shard.kv]
            shard.worker.regions = Regions(num_layers=LAYERS)
            shard.worker.regions.add("kv", layers=shard.kv)
        pause(connection)
        with pytest.raises(ControlTimeout, match=r"did not answer: \[1\]"):
            await answers_of_the_others(asyncio.create_task(ranked.engine.wake_up(timeout=0.5)))
        assert ranked.engine.asleep == {"device", "host"}
        resume(connection)
        await ranked.engine.wake_up(timeout=10.0)
        assert await ranked.serve(A) == 0
        assert await ranked.serve(A) == 6


async def test_new_weights_and_resets_reach_all_ranks(tmp_path):
    async with Ranked(tmp_path, new_device=None) as ranked:
        await ranked.serve(A)
        async with ranked.engine.updating_weights(10.0):
            ranked.engine.match(A).release()
        assert await ranked.serve(A) == 0, "nothing of before is served"
        await ranked.engine.reset(10.0)
        assert await ranked.serve(A) == 0
        assert await ranked.serve(A) == 6
