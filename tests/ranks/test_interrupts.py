"""An interrupt in a callback that sends messages: the rest is sent in the next pass."""

from __future__ import annotations

from typing import Any

import pytest

from aiokv.base.plan import TransferReport
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
            controller.raise_priority = lambda number, priority: raised.append((number, priority))
        broadcast = ranked.engine.worker._transfers
        broadcast._transfers[77] = None  # in flight, as far as this call checks
        ranked.engine.worker.raise_priority(77, 0)
        ranked.engine.worker.raise_priority(78, 0)  # not in flight
        del broadcast._transfers[77]
        await run_until_idle(lambda: len(raised) == len(ranked.shards))
        assert set(raised) == {(77, 0)}
