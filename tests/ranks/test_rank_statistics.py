"""Numbers of the ranks reach the manager with their answers to heartbeats."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.base.statistics import GroupTransferStatistics
from aiokv.observe.metrics import families
from aiokv.ranks.messages import RankCounts
from aiokv.ranks.rank_state import RankState
from aiokv.testing import run_until_idle
from aiokv.worker.lanes import IDLE
from aiokv.worker.poller import IDLE as IDLE_POLLER
from tests.ranks.loopback import PATIENT, Ranked

A = [1, 2, 3, 4, 5, 6, 7]


def counts(queue_seconds: float) -> RankCounts:
    onload = msgspec.structs.replace(IDLE.attention.onload, queue_seconds=queue_seconds)
    groups = {"attention": GroupTransferStatistics(onload=onload)}
    worker = msgspec.structs.replace(IDLE, groups=groups)
    return RankCounts(worker=worker, poller=IDLE_POLLER)


def samples(ranked: Ranked, name: str) -> dict[str, float]:
    """Return the values of a metric by rank."""
    (family,) = (f for f in families(ranked.engine) if f.name == name)
    return {s.labels["rank"]: s.value for s in family.samples if s.suffix in ("", "_count")}


@pytest.mark.asyncio
async def test_the_manager_shows_queues_and_pollers_of_its_ranks(tmp_path):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        async with ranked.engine.match(A) as lease:
            await lease.allocate(7)
            await ranked.finish()
        group, shards = ranked.group, ranked.shards
        assert group.statistics().attention.onload.queue_seconds == 0.0
        ranked.pass_time(PATIENT.silence - 1)
        await run_until_idle(lambda: all(r.poller.events for r in group.inspect().ranks))
        waited = [shard.worker.statistics().attention.onload.queue_seconds for shard in shards]
        assert all(seconds > 0 for seconds in waited)
        assert group.statistics().attention.onload.queue_seconds == sum(waited) / 2
        events = {r.rank: r.poller.events for r in group.inspect().ranks}
        assert samples(ranked, "aiokv_poller_events_total") == {
            "": 0, "0": events[0], "1": events[1],
        }  # fmt: skip
        assert samples(ranked, "aiokv_poller_latency_seconds") == {
            "": 0, "0": events[0], "1": events[1],
        }  # fmt: skip
        assert samples(ranked, "aiokv_rank_connected") == {"0": 1, "1": 1}
        await ranked.lose(1)
        assert samples(ranked, "aiokv_rank_connected") == {"0": 1, "1": 0}
        silent = samples(ranked, "aiokv_rank_silent_seconds")["1"]
        ranked.now += 5
        assert samples(ranked, "aiokv_rank_silent_seconds")["1"] == silent + 5
        await ranked.restart(1)
        assert samples(ranked, "aiokv_rank_connected") == {"0": 1, "1": 1}


@pytest.mark.asyncio
async def test_a_block_has_the_bytes_of_all_ranks(tmp_path):
    async with Ranked(tmp_path) as ranked:
        (size,) = ranked.engine.statistics().worker.block_sizes.values()
        parts = [shard.worker.statistics().block_sizes["attention"] for shard in ranked.shards]
        assert size.device == sum(part.device for part in parts) > 0
        assert size.host == sum(part.host for part in parts) >= size.device


@pytest.mark.asyncio
async def test_leases_that_lost_their_blocks_with_a_rank_are_counted(tmp_path):
    async with Ranked(tmp_path) as ranked:
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        assert ranked.engine.statistics().lost_leases == 0
        await ranked.lose(1)
        assert ranked.engine.statistics().lost_leases == 1
        assert ranked.engine.statistics().preemptions == 0
        await ranked.restart(1)
        assert ranked.engine.statistics().lost_leases == 1
        lease.release()


def test_the_time_in_queues_does_not_fall_when_a_rank_starts_again():
    state = RankState(0)
    for seconds, total in ((2.0, 2.0), (5.0, 5.0), (5.0, 5.0), (1.0, 6.0), (3.0, 8.0)):
        state.note_statistics(counts(seconds))
        assert state.queue_seconds["attention", "onload"] == total
        assert state.queue_seconds["attention", "offload"] == 0.0
