"""Ranks that fail, are slow, unresponsive or lost: named, not trusted, not waited for."""

from __future__ import annotations

import asyncio

import pytest

from aiokv import Hit
from aiokv.errors import (
    BrokenEngineError,
    DeviceError,
    LeaseError,
    RankLost,
    TransferError,
    UsageError,
)
from aiokv.ranks import RankTimeouts
from aiokv.testing import ManualEvent, run_until_idle, running_clock, spin
from tests.ranks.loopback import PATIENT, Ranked
from tests.ranks.raw import pause

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]
RESPONSIVE = RankTimeouts(heartbeat=1.0, silence=3.0)
SILENT_HEARTBEATS = 3
LATE = PATIENT.transfer + 1  # later than any transfer here may be


async def test_slow_rank_is_named_and_its_late_report_is_ignored(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        waiting = asyncio.create_task(lease.layers.wait_all())
        first, second = await ranked.copies()
        first.complete_all()
        await spin(50)
        ranked.pass_time(LATE)
        with pytest.raises(TransferError, match="rank 1 has not finished it") as caught:
            await waiting
        assert caught.value.rank == 1
        with pytest.raises(LeaseError, match="may still write"):
            lease.recompute_from()
        lease.release()
        in_flight = ranked.engine.statistics().attention.device.in_flight
        assert in_flight == 3  # ids that the second rank writes are not reallocated
        second.complete_all()  # too late
        await run_until_idle(lambda: ranked.engine.statistics().attention.device.in_flight == 0)
        assert ranked.engine.match(A).hit == Hit(0, 0)
        assert ranked.group.failure is None
        assert ranked.group.group_statistics().given_up == 1
        assert ranked.engine.check_invariants() == []
        ranked.step()
        assert await ranked.serve(A) == 0
        await ranked.finish()


async def test_progress_on_anything_moves_the_deadline(tmp_path):
    async with Ranked(tmp_path, device_blocks=16) as ranked:
        for tokens in (A, [8, 8, 8]):
            await ranked.to_host(tokens)
        leases = [ranked.engine.match(tokens) for tokens in (A, [8, 8, 8])]
        for lease in leases:
            await lease.allocate(3)
        await ranked.copies()
        for _ in range(3):
            ranked.pass_time(LATE / 2)
            for shard in ranked.shards:
                shard.device.onloads[-1].complete(shard.device.onloads[-1].pending_layers[0])
            await ranked.wait_for_reports()
        assert ranked.group.group_statistics().given_up == 0
        for lease in leases:
            lease.release()
        await ranked.finish()
        ranked.step()


async def test_transfer_of_an_open_step_has_no_deadline(tmp_path):
    async with Ranked(tmp_path) as ranked:
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            ranked.compute(lease, A)
            lease.commit(7)
            ranked.engine.step()
            await spin(20)
            ranked.pass_time(LATE)
            assert ranked.group.group_statistics().given_up == 0
            for shard in ranked.shards:
                shard.worker.step(1)
        await ranked.finish()


async def test_a_rank_that_never_ends_a_transfer_is_lost(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        first, _ = await ranked.copies()
        first.complete_all()
        await spin(50)
        ranked.pass_time(LATE)
        ranked.pass_time(LATE)
        assert ranked.group.failure is not None
        assert ranked.group.failure.rank == 1
        lease.release()
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)
        assert await ranked.serve(A) == 0
        await ranked.finish()


async def test_loss_of_a_rank_clears_the_index(tmp_path):
    B = [11, 12, 13, 14, 15]
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        reader, writer, waiter = (ranked.engine.match(t, owner="x") for t in (A, B, [5] * 9))
        await writer.allocate(5)
        ranked.compute(writer, B)
        writer.commit(5)
        await reader.allocate(7)
        onload = asyncio.create_task(reader.layers.wait(1))
        in_line = asyncio.create_task(waiter.allocate(9))
        first, _ = await ranked.copies()
        await ranked.lose(1)
        with pytest.raises(
            TransferError, match=r"rank 1 is lost: the (other side closed the )?connection"
        ):
            await onload
        with pytest.raises(BrokenEngineError, match="rank 1 is lost"):
            await in_line
        with pytest.raises(BrokenEngineError):
            ranked.engine.match(A)
        with pytest.raises(LeaseError):
            writer.commit(5)
        with pytest.raises(LeaseError, match="has lost its blocks: rank 1 is lost"):
            writer.block_table  # noqa: B018
        assert first.pending_layers == [0, 1]  # the other rank still writes: I3
        assert ranked.engine.statistics().attention.device.in_flight == 3
        await ranked.restart(1)
        assert ranked.engine.statistics().attention.device.in_flight == 0
        assert ranked.engine.check_invariants() == []
        assert ranked.engine.match(A).hit == Hit(0, 0)
        await writer.resume(5)
        assert writer.cached_tokens == 0
        ranked.compute(writer, B)
        writer.commit(5)
        ranked.step()
        for lease in (reader, writer, waiter):
            lease.release()
        assert await ranked.serve(B) == 4
        assert await ranked.serve(A) == 0
        await ranked.finish()
        assert await ranked.serve(A) == 6
        await ranked.to_host(A)
        assert await asyncio.gather(ranked.serve(A), ranked.finish()) == [6, None]
        assert ranked.group.group_statistics().generation == 2


async def test_loss_of_an_idle_rank_is_detected(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.serve(A)
        await ranked.finish()
        pin = await ranked.engine.pin(A)
        assert pin.tokens == 6
        await ranked.lose(0)
        assert pin.released
        away, there = ranked.engine.inspect.dump()["statistics"]["ranks"]
        assert "connection" in away["state"]
        assert there["state"] == "ready"
        with pytest.raises(BrokenEngineError, match="rank 0"):
            ranked.engine.match(A)
        await ranked.restart(0)
        assert ranked.engine.match(A).hit == Hit(0, 0)


async def test_loss_of_all_ranks_is_handled(tmp_path):
    async with Ranked(tmp_path, num_ranks=3) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        await ranked.copies()
        for rank in (2, 0, 1):
            await ranked.lose(rank)
        assert ranked.group.failure.rank == 2
        await ranked.restart(0, 1, 2)
        assert ranked.engine.statistics().attention.device.in_flight == 0
        await lease.resume(7)
        assert lease.cached_tokens == 0
        lease.release()
        ranked.step()


async def test_rank_loss_during_a_swap_ends_it(tmp_path):
    async with Ranked(tmp_path) as ranked:
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        ranked.compute(lease, A)
        lease.commit(7)
        swap = asyncio.create_task(lease.preempt(swap=True))
        await spin(2)
        ranked.step()
        await ranked.copies(onload=False)
        await ranked.lose(0)
        await ranked.restart(0)
        await swap  # the lease holds no blocks, as after a preemption
        with pytest.raises(LeaseError, match="rank 0 is lost"):
            lease.recompute_from()
        await lease.resume(7)
        assert lease.cached_tokens == 0
        lease.release()
        ranked.step()


async def test_rank_loss_ends_waits_for_its_open_step(tmp_path):
    async with Ranked(tmp_path) as ranked:
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        ranked.compute(lease, A)
        lease.commit(7)
        swap = asyncio.create_task(lease.preempt(swap=True))
        await spin(5)
        await ranked.lose(1)
        await swap  # without a restart
        with pytest.raises(LeaseError, match="rank 1 is lost"):
            lease.block_table  # noqa: B018
        assert ranked.engine.check_invariants() == []
        lease.release()
        await ranked.restart(1)
        assert await ranked.serve(A) == 0
        await ranked.finish()


@pytest.mark.clock
async def test_unresponsive_rank_is_lost(tmp_path):
    async with Ranked(tmp_path, timeouts=RESPONSIVE) as ranked:
        for _ in range(2 * SILENT_HEARTBEATS):
            await heartbeat(ranked, [0, 1])
        assert ranked.group.failure is None
        pause(ranked.shards[1].worker._connection)
        for _ in range(SILENT_HEARTBEATS):  # the rank has answered in the first one
            await heartbeat(ranked, [0])
            assert ranked.group.failure is None
        await heartbeat(ranked, [0])
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert ranked.group.failure.rank == 1
        assert "sent nothing for 3.0 s" in str(ranked.group.failure)
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


async def heartbeat(ranked: Ranked, ranks: list[int]) -> None:
    """Let a heartbeat pass, and these ranks answer."""
    connections = [ranked.group._membership.ranks[rank].connection for rank in ranks]
    received = [connection.received_bytes for connection in connections]
    await running_clock().advance(RESPONSIVE.heartbeat)
    await run_until_idle(
        lambda: all(
            connection.received_bytes > before
            for connection, before in zip(connections, received, strict=True)
        )
    )


async def test_blocked_manager_reports_no_rank_as_slow(tmp_path):
    async with Ranked(tmp_path) as ranked:
        ranked.pass_time(3 * PATIENT.heartbeat)
        assert ranked.group.failure is None
        await spin(2)


@pytest.mark.clock
async def test_repeatedly_blocked_manager_detects_an_unresponsive_rank(tmp_path):
    async with Ranked(tmp_path, timeouts=RESPONSIVE) as ranked:
        blocked = 3 * RESPONSIVE.silence  # longer than any rank may be silent
        for _ in range(2 * SILENT_HEARTBEATS):
            running_clock().now += blocked  # all timers expire at once
            await heartbeat(ranked, [0, 1])
        assert ranked.group.failure is None
        pause(ranked.shards[1].worker._connection)
        heartbeats = 0
        while ranked.group.failure is None:
            running_clock().now += blocked
            await heartbeat(ranked, [0])
            heartbeats += 1
        assert 1 < heartbeats <= SILENT_HEARTBEATS + 1
        assert ranked.group.failure.rank == 1
        assert "sent nothing" in str(ranked.group.failure)
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


async def test_blocked_manager_reads_reports_before_it_names_slow_ranks(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        await ranked.copies()
        waiting = asyncio.create_task(lease.layers.wait_all())
        ranked.pass_time(3 * PATIENT.heartbeat)  # reports may wait in the sockets
        assert ranked.group.group_statistics().given_up == 0
        await spin(20)
        ranked.pass_time(3 * PATIENT.heartbeat)  # none did
        assert ranked.group.group_statistics().given_up == 1
        with pytest.raises(TransferError, match="rank 0 has not finished it"):
            await waiting
        lease.release()
        await ranked.finish()
        ranked.step()


async def test_a_rank_whose_device_breaks_is_lost(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        bad = ranked.shards[1].device
        bad.refuse = bad.failure = DeviceError("an illegal address")
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        with pytest.raises(TransferError, match=r"rank 1: an illegal address|rank 1 is lost"):
            await asyncio.gather(lease.layers.wait_all(), _complete(ranked))
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert "illegal address" in str(ranked.group.failure)
        lease.release()
        await ranked.shards[1].leave()
        ranked.shards[1].fresh()
        await ranked.restart(1)


async def _complete(ranked):
    await run_until_idle(lambda: ranked.shards[0].device.onloads != [])
    ranked.shards[0].complete_all()


async def test_step_still_running_on_a_remaining_rank_is_waited_for(tmp_path):
    async with Ranked(tmp_path) as ranked:
        event = ManualEvent()
        ranked.shards[0].worker.step(ranked.engine.open_step, event)
        ranked.engine.step()
        await ranked.lose(1)
        restarting = asyncio.create_task(ranked.restart(1))
        await run_until_idle(lambda: ranked.group._membership.ranks[1].ready)
        await spin(50)
        assert not restarting.done()
        event.complete()
        await restarting
        assert await ranked.serve(A) == 0
        await ranked.finish()


@pytest.mark.clock
async def test_a_restart_that_fails_can_be_tried_again(tmp_path):
    timeouts = RankTimeouts(start=0.2, heartbeat=1000.0)
    async with Ranked(tmp_path, timeouts=timeouts) as ranked:
        with pytest.raises(UsageError, match="no rank is lost"):
            await ranked.engine.restart_ranks()
        await ranked.serve(A)
        await ranked.lose(1)
        failing = asyncio.create_task(ranked.engine.restart_ranks())
        await running_clock().advance(0.3)
        with pytest.raises(RankLost, match=r"rank 1: .* after 0.2 s"):
            await failing
        with pytest.raises(BrokenEngineError):
            ranked.engine.match(A)
        cancelled = asyncio.create_task(ranked.engine.restart_ranks())
        await spin(5)
        with pytest.raises(UsageError, match="a restart is running already"):
            await ranked.engine.restart_ranks()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await ranked.restart(1)
        assert await ranked.serve(A) == 0
        await ranked.finish()


async def test_closing_while_a_rank_is_lost(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        await ranked.copies()
        await ranked.lose(0)
        ranked.shards[0].worker = ranked.shards[1].worker
        lease.release()


async def test_rank_that_its_process_closes_has_left(tmp_path, caplog):
    caplog.set_level("INFO", logger="aiokv")
    async with Ranked(tmp_path) as ranked:
        await ranked.serve(A)
        await ranked.shards[1].leave()
        await run_until_idle(lambda: ranked.group.failure is not None)
        assert ranked.group.failure.has_left
        with pytest.raises(BrokenEngineError, match="rank 1 is lost: its process has closed it"):
            ranked.engine.match(A)
        messages = [(record.levelname, record.getMessage()) for record in caplog.records]
        assert ("INFO", "rank.left rank=1") in messages
        assert ("INFO", "engine.rank_left rank=1") in messages
        assert "ERROR" not in dict(messages)
        ranked.shards[1].fresh()
        await ranked.restart(1)
        await ranked.lose(1)
        assert not ranked.group.failure.has_left
        assert "rank.lost" in caplog.text
        await ranked.restart(1)
        await ranked.finish()


async def test_rank_that_ignores_the_close_is_disconnected(tmp_path, caplog):
    timeouts = RankTimeouts(close=0.05, heartbeat=1000.0)
    ranked = Ranked(tmp_path, timeouts=timeouts)
    await ranked.__aenter__()
    await ranked.shards[1].worker.aclose()
    await ranked.engine.aclose(0)
    assert "ranks.cut_off" in caplog.text
    assert await ranked.shards[0].worker.closed() == "the group is closing"
    await ranked.shards[0].leave()
    assert not (tmp_path / "ranks").exists()
