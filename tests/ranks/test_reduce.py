"""Results of one plan on several ranks, without a loop: the minimum over the ranks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from aiokv.base.plan import ONLOAD, SAVE, TransferPlan, TransferReport
from aiokv.errors import TransferError
from aiokv.ranks.messages import Reports
from aiokv.ranks.reduce import GroupTransfer
from aiokv.stores.base import Result
from aiokv.testing import run_until_idle
from aiokv.wire.frames import ProtocolError
from aiokv.worker.device.base import CopyError
from aiokv.worker.layers import LayerDoneCounter
from tests.ranks.loopback import Ranked

A = [1, 2, 3, 4, 5, 6, 7]
BLOCKS = np.arange(4, dtype="<i4").tobytes()
PLAN = TransferPlan(transfer_id=1, route=ONLOAD, source_blocks=BLOCKS, target_blocks=BLOCKS)


DONE = TransferReport(transfer_id=1, outcome="done")


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
    assert transfer.reduced() == CopyError(expected, "rank 1: a bad page", 1)
    assert counter.pending_layers == [0, 1]


@pytest.mark.asyncio
async def test_last_layer_waits_for_the_reports_of_all_ranks():
    counter = LayerDoneCounter(2, transfer_id=1, direction="onload")
    transfer = GroupTransfer(PLAN, counter, num_ranks=2, num_bytes=1, since=0.0)
    transfer.arrive(0, [0, 1])
    assert counter.pending_layers == [0, 1]
    transfer.arrive(1, [1])
    assert counter.pending_layers == [0]
    transfer.arrive(1, [0])
    assert counter.pending_layers == [0]
    assert not transfer.end(0, DONE)
    assert counter.pending_layers == [0]
    assert transfer.end(1, DONE)
    assert transfer.reduced() is None
    assert counter.pending_layers == []


@pytest.mark.asyncio
async def test_report_of_a_rank_stands_for_all_its_layers():
    counter = LayerDoneCounter(4, transfer_id=1, direction="onload")
    transfer = GroupTransfer(PLAN, counter, num_ranks=2, num_bytes=1, since=0.0)
    transfer.arrive(0, [0])
    transfer.arrive(1, [0, 1])
    assert counter.pending_layers == [1, 2, 3]
    assert not transfer.end(0, DONE)
    assert counter.pending_layers == [2, 3]
    transfer.arrive(1, [0, 3])
    assert counter.pending_layers == [2]


@pytest.mark.asyncio
async def test_no_layer_arrives_after_a_transfer_was_given_up():
    counter = LayerDoneCounter(2, transfer_id=1, direction="onload")
    transfer = GroupTransfer(PLAN, counter, num_ranks=2, num_bytes=1, since=0.0)
    transfer.arrive(0, [0])
    transfer.give_up(CopyError(0, "rank 1 is lost", 1))
    transfer.arrive(1, [0])
    assert counter.pending_layers == [0, 1]
    transfer.give_up(CopyError(2, "rank 0 is lost", 0))
    transfer.end(0, DONE)
    transfer.end(1, DONE)
    assert transfer.reduced() == CopyError(0, "rank 1 is lost", 1)
    assert counter.pending_layers == [0, 1]


@pytest.mark.asyncio
@pytest.mark.parametrize("layer", [-1, 2])
async def test_layer_that_does_not_exist_is_refused(layer):
    counter = LayerDoneCounter(2, transfer_id=1, direction="onload")
    transfer = GroupTransfer(PLAN, counter, num_ranks=2, num_bytes=1, since=0.0)
    with pytest.raises(ProtocolError, match=r"rank 1 reports layer"):
        transfer.arrive(1, [layer])


SAVED, REFUSED, BAD = (bytes([result]) for result in (Result.DONE, Result.REFUSED, Result.FAILED))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (SAVED * 4, SAVED * 4),
        (SAVED + REFUSED + BAD + SAVED, SAVED + REFUSED + BAD + SAVED),
        (SAVED * 3, BAD * 4),
    ],
)
async def test_block_is_stored_when_all_ranks_have_stored_it(results, expected):
    plan = TransferPlan(transfer_id=1, route=SAVE, source_blocks=BLOCKS, target_blocks=BLOCKS)
    counter = LayerDoneCounter(1, transfer_id=1, direction="save")
    transfer = GroupTransfer(plan, counter, num_ranks=2, num_bytes=1, since=0.0)
    assert not transfer.end(0, TransferReport(transfer_id=1, outcome="done", results=results))
    assert transfer.end(1, TransferReport(transfer_id=1, outcome="done", results=SAVED * 4))
    assert transfer.reduced() is None
    assert transfer.results == expected


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
        await run_until_idle(lambda: ranked.group.plans.get(transfer_id).work.owing == {1})
        ranked.group._membership.on_message(state, ranks)
        with pytest.raises(TransferError, match="rank 1: somewhere"):
            await waiting
        assert lease.recompute_from() == lease.cached_tokens == good_tokens
        lease.release()
        second.complete_all()
        await ranked.finish()
        ranked.step()
