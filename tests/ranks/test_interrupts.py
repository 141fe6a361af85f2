"""An interrupt in a callback that sends messages: the rest is sent in the next pass."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.base.plan import ONLOAD, TransferPlan, TransferReport
from aiokv.ranks.outbox import Outbox
from aiokv.testing import run_until_idle, spin
from tests.ranks.loopback import Ranked

pytestmark = pytest.mark.asyncio


async def test_interrupted_outbox_sends_the_rest_in_the_next_pass() -> None:
    sent: list[Any] = []

    def interrupt(message: object) -> None:
        outbox._send = sent.append
        raise KeyboardInterrupt

    outbox = Outbox(interrupt, lambda: 0)
    outbox.begin(1)
    outbox.note_end(TransferReport(transfer_id=7, outcome="done"))
    with pytest.raises(KeyboardInterrupt):
        outbox.flush()
    await spin(2)
    assert [report.transfer_id for report in sent[0].ended] == [7]


async def test_plans_of_an_interrupted_flush_leave_in_the_next_pass(tmp_path: Any) -> None:
    async with Ranked(tmp_path) as ranked:
        broadcast = ranked.engine.worker._transfers
        flush = broadcast._flush

        def interrupt() -> None:
            broadcast._flush = flush
            raise KeyboardInterrupt

        broadcast._flush = interrupt
        with pytest.raises(KeyboardInterrupt):
            broadcast.flush()
        assert broadcast._flush_scheduled
        await spin(2)
        assert not broadcast._flush_scheduled


async def test_a_raised_priority_reaches_the_ranks(tmp_path: Any) -> None:
    async with Ranked(tmp_path) as ranked:
        raised: list[tuple[int, int]] = []
        for shard in ranked.shards:
            controller = shard.worker._controller
            controller.plans.raise_priority = lambda *arguments: raised.append(arguments)
        plans = ranked.engine.worker.plans
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
