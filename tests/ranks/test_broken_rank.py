"""An exception that leaves the state of a rank unknown: the rank leaves and reports no more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiokv import Hit
from aiokv.errors import BrokenEngineError, TransferError
from aiokv.ranks.rank import Rank
from aiokv.testing import run_until_idle
from aiokv.worker.poller import EventPoller
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio

A = [1, 2, 3, 4, 5, 6, 7]


def fail_once_behind(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, rank: Any) -> None:
    """Raise MemoryError at the end of the next call of a method of ``owner`` for one object."""
    method = getattr(owner, name)
    failed = []

    def failing(self: Any, *args: Any) -> None:
        method(self, *args)
        if self is rank and not failed:
            failed.append(True)
            raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("place", ["message", "pass"])
async def test_memory_error_breaks_the_rank_which_can_be_restarted(
    tmp_path, monkeypatch, loop_errors, place
):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        broken = ranked.shards[1]
        lease = ranked.engine.match(A)
        if place == "message":
            fail_once_behind(monkeypatch, Rank, "_on_batch", broken.worker)
        await lease.allocate(7)
        if place == "pass":
            await ranked.copies()
            fail_once_behind(monkeypatch, EventPoller, "_pass", broken.worker._poller)
        ranked.shards[0].complete_all()
        broken.complete_all()
        await run_until_idle(lambda: ranked.group.failure is not None)
        with pytest.raises(TransferError, match="rank 1 is lost"):
            await lease.layers.wait_all()
        assert [type(context["exception"]) for context in loop_errors] == [MemoryError]
        loop_errors.clear()
        with pytest.raises(BrokenEngineError, match="rank 1 is broken: MemoryError"):
            broken.worker.step(ranked.engine.open_step)
        assert "MemoryError" in await broken.worker.closed()
        with pytest.raises(BrokenEngineError, match="rank 1 is lost"):
            ranked.engine.match(A)
        lease.release()
        await broken.leave()
        broken.fresh()
        await ranked.restart(1)
        assert ranked.engine.match(A).hit == Hit(0, 0)
        assert await ranked.serve(A) == 0
        await ranked.to_host(A)
        serving = asyncio.create_task(ranked.serve(A))
        await ranked.copies()
        for shard in ranked.shards:
            shard.complete_all()
        assert await serving == 6  # compared, byte for byte
        await ranked.finish()
