"""Priorities of transfers that were raised reach the ranks."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.base.plan import ONLOAD, TransferPlan, TransferReport
from aiokv.testing import run_until_idle
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio


async def test_a_raised_priority_reaches_the_ranks(tmp_path: Any) -> None:
    async with Ranked(tmp_path) as ranked:
        raised: list[tuple[int, int]] = []
        for shard in ranked.shards:
            controller = shard.worker._controller
            controller.plans.raise_priority = lambda *arguments: raised.append(arguments)
        plans = ranked.engine.inspect.parts.worker.plans
        reports: list[TransferReport] = []
        plans._on_report = reports.append  # the scheduler does not know the plan
        block = bytes(4)
        plans.submit(
            TransferPlan(
                transfer_id=77,
                route=ONLOAD,
                source_blocks=block,
                target_blocks=block,
                priority=3,
                after_step=ranked.engine.open_step,
            )
        )
        for transfer_id, priority in ((77, 0), (77, 1), (78, 0)):  # raised, not raised, unknown
            plans.raise_priority(transfer_id, priority)
        await run_until_idle(lambda: len(raised) == len(ranked.shards))
        assert set(raised) == {(77, 0)}
        assert plans.cancel(77) == "asked"
        await run_until_idle(lambda: bool(reports))
        assert reports[0].outcome == "cancelled"
