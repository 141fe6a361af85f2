"""Priorities of transfers that were raised reach the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.testing import run_until_idle
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio


async def test_a_raised_priority_reaches_the_ranks(tmp_path: Any) -> None:
    async with Ranked(tmp_path) as ranked:
        raised: list[tuple[int, int]] = []
        for shard in ranked.shards:
            controller = shard.worker._controller
            controller.raise_priority = lambda number, priority: raised.append((number, priority))
        broadcast = ranked.engine.worker._transfers
        broadcast._transfers[77] = None  # in flight, as far as this call checks
        ranked.engine.worker.raise_priority(77, 0)
        ranked.engine.worker.raise_priority(78, 0)  # not in flight
        del broadcast._transfers[77]
        await run_until_idle(lambda: len(raised) == len(ranked.shards))
        assert set(raised) == {(77, 0)}
