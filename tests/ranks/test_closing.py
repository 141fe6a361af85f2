"""Closing of a group with peers and cancellations, and rare failures."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from aiokv import CacheConfig, CacheEngine
from aiokv.errors import ConfigError, DeviceError, RankLost, TransferError, UsageError
from aiokv.ranks import Rank, RankGroup
from aiokv.ranks.__main__ import find
from aiokv.ranks.counters import Counters
from aiokv.testing import run_until_idle, spin
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.ranks.loopback import Ranked
from tests.ranks.test_protocol import Peer, regions_of

if TYPE_CHECKING:
    from aiokv.ranks.messages import Begin

A = [1, 2, 3, 4, 5, 6, 7]


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.clock  # no time limit passes
@pytest.mark.asyncio
async def test_unauthenticated_peer_during_close_does_not_delay_it(tmp_path):
    async with Ranked(tmp_path) as ranked:
        closing = asyncio.create_task(ranked.engine.aclose())
        await run_until_idle(lambda: ranked.group._membership.closing)
        peer = await Peer().connect(ranked)
        for shard in ranked.shards:
            await shard.leave()
        await run_until_idle(closing.done)
        await closing
        await peer.ended()


@pytest.mark.asyncio
async def test_closing_may_be_cancelled_at_its_last_await(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        waiting = asyncio.create_task(lease.layers.wait_all())
        await ranked.copies()
        membership = ranked.group._membership
        closing = asyncio.create_task(ranked.group.aclose())
        await run_until_idle(lambda: membership.closing)
        stuck = asyncio.get_running_loop().create_future()
        membership._socket._listener._tasks.add(stuck)
        for shard in ranked.shards:
            shard.worker._connection.abort("killed")
        await run_until_idle(lambda: not ranked.group.path.exists())
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        stuck.cancel()
        await ranked.group.aclose()
        with pytest.raises(TransferError):
            await waiting
        assert not ranked.group.plans
        lease.release()
        for shard in ranked.shards:
            await shard.leave()


# --- unexpected failures --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_error_message_that_ends_in_a_colon_is_reported(tmp_path, monkeypatch):
    async with Ranked(tmp_path) as ranked:
        controller = ranked.shards[1].worker._controller

        async def wake_up(*_: object) -> None:
            raise DeviceError("no memory: ")

        await ranked.engine.sleep(["host"])
        with monkeypatch.context() as patch:
            patch.setattr(controller, "wake_up", wake_up)
            with pytest.raises(UsageError, match="rank 1: no memory"):
                await ranked.engine.wake_up(["host"])
        assert ranked.engine.asleep == {"host"}
        await ranked.engine.wake_up(["host"])


@pytest.mark.asyncio
async def test_any_exception_of_a_rank_in_wake_up_is_its_reply(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.engine.sleep(["device"])
        for shard in ranked.shards:
            shard.worker.regions = shard.regions
        ranked.shards[1].worker.regions = object()
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(UsageError, match=r"rank 1: AttributeError: 'object'"):
                await ranked.engine.wake_up(["device"])
        ranked.shards[1].worker.regions = ranked.shards[1].regions
        await ranked.engine.wake_up(["device"])
        assert await ranked.serve(A) == 0


@pytest.mark.clock  # no time limit passes
@pytest.mark.asyncio
async def test_any_exception_of_a_rank_at_its_start_is_reported_immediately(tmp_path, monkeypatch):
    ranked = Ranked(tmp_path)

    def no_memory(begin: Begin) -> None:
        raise MemoryError(f"{begin.host_blocks} blocks")

    monkeypatch.setattr(ranked.shards[1].worker, "_open", no_memory)
    opening = asyncio.create_task(ranked.engine.__aenter__())
    entering = asyncio.gather(
        *(shard.worker.__aenter__() for shard in ranked.shards), return_exceptions=True
    )
    await run_until_idle(entering.done)
    for shard in ranked.shards:
        await shard.leave()
    await run_until_idle(opening.done)
    with pytest.raises(RankLost, match="rank 1: MemoryError: 16 blocks"):
        await opening


@pytest.mark.asyncio
async def test_counters_keep_no_reference_to_cancelled_waiters():
    counters = Counters()
    for transfer_id in range(100):
        asking = asyncio.create_task(counters.get(transfer_id))
        await spin(1)
        asking.cancel()
        await asyncio.wait((asking,))
    assert not counters._expected


# --- error messages -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_socket_creation_failure_names_the_field_to_change(tmp_path):
    long = tmp_path / ("s" * 120)
    for path, why in (
        (tmp_path / "nowhere" / "s", "nowhere does not exist"),
        (long, rf"{len(str(long))} bytes long; .* at most 107"),
    ):
        group = RankGroup(1, path=path)
        with pytest.raises(ConfigError, match=why):
            await CacheEngine(CacheConfig(device_blocks=4), ranks=group).__aenter__()
    with pytest.raises(ConfigError, match="at most 107"):
        await Rank(long, 0, regions_of(8)).__aenter__()


@pytest.mark.asyncio
async def test_rank_that_finds_no_manager_names_the_path(tmp_path):
    with pytest.raises(TimeoutError, match=r"rank 3: no group listens at .*/s after 0.02 s"):
        await Rank(tmp_path / "s", 3, regions_of(8), connect_timeout=0.02).__aenter__()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("nowhere.at_all:main", "no module 'nowhere' in"),
        ("tests.ranks.nowhere:main", "no module 'tests.ranks.nowhere' in"),
        ("tests.ranks.process_rank:missing", "process_rank has no `async def missing"),
        ("tests.ranks.process_rank:tensors", "process_rank has no `async def tensors"),
    ],
)
def test_an_entry_that_names_no_coroutine_is_explained(entry, why):
    with pytest.raises(SystemExit, match=why):
        find(entry)
