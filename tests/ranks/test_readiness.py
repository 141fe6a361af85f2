"""Health and readiness of an engine with ranks."""

from __future__ import annotations

import msgspec
import pytest

from aiokv.observe.asgi import failed_checks
from aiokv.observe.snapshot import snapshot
from aiokv.testing import run_until_idle, spin
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


async def test_ranks_with_unpinned_memory_are_not_ready(tmp_path):
    async with Ranked(tmp_path) as ranked:
        assert failed_checks(ranked.engine) == {}
        for shard, unpinned in zip(ranked.shards, (4096, 1024), strict=True):
            shard.device.unpinned_bytes = unpinned
        ranked.pass_time(0.1)  # a heartbeat
        await run_until_idle(lambda: ranked.engine.health().unpinned_bytes == 5120)
        assert failed_checks(ranked.engine) == {
            "pinned": "5120 bytes of host memory are not page-locked yet"
        }
        for shard in ranked.shards:
            shard.device.unpinned_bytes = 0
        ranked.pass_time(0.1)
        await run_until_idle(lambda: ranked.engine.health().unpinned_bytes == 0)
        assert failed_checks(ranked.engine) == {}


async def test_the_loss_of_a_rank_is_named_and_its_leases_are_listed(tmp_path):
    async with Ranked(tmp_path) as ranked:
        lease = ranked.engine.match(A, owner="reader")
        await lease.allocate(7)
        await ranked.lose(1)
        await spin(2)
        assert "rank 1 is lost" in ranked.engine.health().failure
        assert "rank 1 is lost" in failed_checks(ranked.engine)["working"]
        (listed,) = ranked.engine.inspect.leases()
        assert (listed.owner, listed.state, listed.blocks) == ("reader", "lost", 0)
        msgspec.json.encode(snapshot(ranked.engine))
        lease.release()
        await ranked.restart(1)
        assert failed_checks(ranked.engine) == {}
