"""Results of one plan on several ranks, without a loop: the minimum over the ranks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv import TransferError
from aiokv.plan import ONLOAD, TransferPlan, TransferReport
from aiokv.ranks.messages import Reports
from aiokv.ranks.reduce import GroupTransfer
from aiokv.testing import run_until_idle
from aiokv.worker.layers import LayerDoneCounter
from tests.ranks.loopback import Ranked

A = [1, 2, 3, 4, 5, 6, 7]
BLOCKS = np.arange(4, dtype="<i4").tobytes()
PLAN = TransferPlan(transfer_id=1, route=ONLOAD, source_blocks=BLOCKS, target_blocks=BLOCKS)


def failed(first_bad_block: int) -> TransferReport:
    return TransferReport(
        transfer_id=1, outcome="failed", first_bad_block=first_bad_block, reason="a bad page"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("bad_block", "expected"),
    [(-1, 0), (-(1 << 40), 0), (4, 0), (1 << 40, 0), (0, 0), (1, 1), (3, 3)],
)
async def test_failure_outside_the_plan_leaves_no_block_valid(bad_block, expected):
    counter = LayerDoneCounter(2, transfer_id=1, direction="onload")
    transfer = GroupTransfer(PLAN, counter, num_ranks=2, num_bytes=1, since=0.0)
    assert not transfer.end(0, TransferReport(transfer_id=1, outcome="done"))
    assert transfer.end(1, failed(bad_block))
    report = transfer.report()
    assert (report.outcome, report.first_bad_block) == ("failed", expected)
    assert report.reason == "rank 1: a bad page"


@pytest.mark.asyncio
@pytest.mark.parametrize(("bad_block", "good_tokens"), [(-1, 0), (99, 0), (2, 4)])
async def test_rank_failure_without_a_block_leaves_no_block_valid(tmp_path, bad_block, good_tokens):
    async with Ranked(tmp_path) as ranked:
        await ranked.to_host(A)
        lease = ranked.engine.match(A)
        await lease.allocate(7)
        (transfer_id,) = lease.layers.transfer_ids
        first, second = await ranked.copies()
        first.complete_all()
        report = TransferReport(
            transfer_id=transfer_id, outcome="failed", first_bad_block=bad_block, reason="somewhere"
        )
        state = ranked.group._membership.ranks[1]
        ranks = Reports(generation=1, arrived=[], ended=[report], finished_step=0)
        waiting = asyncio.create_task(lease.layers.wait_all())
        await run_until_idle(lambda: ranked.group._transfers._transfers[transfer_id].owing == {1})
        ranked.group._membership.on_message(state, ranks)
        with pytest.raises(TransferError, match="rank 1: somewhere"):
            await waiting
        assert lease.recompute_from() == lease.cached_tokens == good_tokens
        lease.release()
        second.complete_all()
        await ranked.finish()
        ranked.step()
