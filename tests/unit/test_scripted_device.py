"""The scripted device fails, delays and reorders exactly the scripted copies, with real bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from aiokv.testing import End, ScriptedDevice, run_until_idle, running_clock, spin
from aiokv.testing.manual import GARBAGE

if TYPE_CHECKING:
    from tests.unit.conftest import Worker

pytestmark = pytest.mark.asyncio


async def test_without_a_script_copies_complete_on_their_own(
    new_worker: type[Worker], same_bytes: Any
):
    async with new_worker(ScriptedDevice()) as worker:
        wanted = worker.after_plain_copy(worker.contents(), "onload", (1, 2), (3, 4))
        wanted = worker.after_plain_copy(wanted, "offload", (5, 6), (7, 8))
        worker.submit("onload", (1, 2), (3, 4))
        worker.submit("offload", (5, 6), (7, 8))
        await worker.controller.plans.drain()
        assert same_bytes(worker.contents(), wanted)
        assert {report.outcome for report in worker.reports} == {"done"}


async def test_one_layer_of_one_copy_fails_and_leaves_garbage(new_worker: type[Worker]):
    device = ScriptedDevice()
    device.fail("onload", copy=1, layer=2, block=1)
    async with new_worker(device) as worker:
        for device_ids in ((0, 1), (2, 3), (4, 5)):
            worker.submit("onload", device_ids, (3, 4))
        worker.submit("offload", (6, 7), (8, 9))
        await worker.controller.plans.drain()
        assert [end for end in device.ends if end.failed] == [End("onload", 1, 2, failed=True)]
        outcomes = {report.transfer_id: report for report in worker.reports}
        assert [outcomes[i].outcome for i in (1, 2, 3, 4)] == ["done", "failed", "done", "done"]
        assert outcomes[2].first_bad_block == 1
        for piece in worker.regions.pieces():
            corrupted = (piece.view()[3] == GARBAGE).all()
            assert corrupted == (piece.layer == 2)
            assert not (piece.view()[2] == GARBAGE).all()


async def test_a_rejected_copy_counts_and_moves_nothing(new_worker: type[Worker], same_bytes: Any):
    device = ScriptedDevice()
    device.reject("offload", copy=0, reason="no more")
    async with new_worker(device) as worker:
        before = worker.contents()
        worker.submit("offload")
        await worker.controller.plans.drain()
        assert same_bytes(worker.contents(), before)
        assert (worker.reports[0].outcome, worker.reports[0].reason) == ("failed", "no more")
        worker.submit("offload")
        await worker.controller.plans.drain()
        assert {end.copy for end in device.ends} == {1}


async def test_layers_and_copies_end_in_the_order_of_the_script(new_worker: type[Worker]):
    device = ScriptedDevice()
    device.reorder("onload", copy=0, layers=[2, 0, 1])
    device.behind("onload", copy=0, other=("offload", 0))
    held = device.hold("offload", copy=0, layer=1)
    async with new_worker(device) as worker:
        worker.submit("onload")
        worker.submit("offload", (5, 6), (7, 8))
        await spin(5)
        assert device.ends == [End("offload", 0, layer, failed=False) for layer in (0, 2)]
        assert (device.running("onload"), device.running("offload")) == ([0], [0])
        held.open()
        await worker.controller.plans.drain()
        assert [end.layer for end in device.ends] == [0, 2, 1, 2, 0, 1]


@pytest.mark.clock
async def test_a_delay_is_by_the_loops_clock(new_worker: type[Worker]):
    device, clock = ScriptedDevice(), running_clock()
    device.delay("onload", copy=0, seconds=5.0)
    device.delay("onload", copy=0, layer=1, seconds=60.0)
    async with new_worker(device) as worker:
        worker.submit("onload")
        await clock.advance(4.9)
        assert device.ends == []
        await clock.advance(0.2)
        assert [end.layer for end in device.ends] == [0, 2]
        await clock.advance(60)
        await worker.controller.plans.drain()
        assert worker.reports[0].outcome == "done"
        assert clock.timers == 0


async def test_end_of_the_script_completes_all_copies(new_worker: type[Worker]):
    device = ScriptedDevice()
    device.hold("onload")
    device.fail("onload")
    async with new_worker(device) as worker:
        for _ in range(3):
            worker.submit("onload")
        await spin(3)
        device.end_script()
        await run_until_idle(lambda: len(worker.reports) == 3)
        assert {report.outcome for report in worker.reports} == {"done"}
