"""CacheController over the manual device: order, ends, failures (I3, I4)."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.base.plan import Priority, TransferReport
from aiokv.errors import ClosedError, DeviceError, TransferError, UsageError
from aiokv.testing import ManualDevice, ManualEvent, spin
from aiokv.testing.manual import ManualStream
from aiokv.worker import lanes
from aiokv.worker.device_transfers import MAX_SUBMITTED
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from aiokv.base.statistics import RouteStatistics
    from tests.unit.conftest import Worker

pytestmark = pytest.mark.asyncio


def outcomes(worker: Worker) -> dict[int, str]:
    return {report.transfer_id: report.outcome for report in worker.reports}


async def test_every_transfer_has_its_own_counter(new_worker: type[Worker]) -> None:
    """Offloads have a counter as well."""
    async with new_worker(ManualDevice()) as worker:
        counters = [
            worker.submit("onload", [1], [1]),
            worker.submit("onload", [2], [2]),
            worker.submit("offload", [3], [3]),
        ]
        assert len(set(map(id, counters))) == 3
        assert [counter.transfer_id for counter in counters] == [1, 2, 3]
        assert not any(counter.is_done for counter in counters)


async def test_transfer_is_reported_once_after_all_layers_arrived(
    new_worker: type[Worker],
) -> None:
    """I4: the report is sent neither at submission nor after some of the layers."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit()
        copy = device.onloads[0]
        await worker.settle()
        assert worker.reports == []
        copy.complete(2)
        copy.complete(0)
        await worker.settle()
        assert counter.pending_layers == [1]
        assert worker.reports == []
        copy.complete(1)
        assert worker.reports == []
        await worker.settle()
        assert worker.reports == [TransferReport(transfer_id=1, outcome="done")]
        await LayerView([counter]).wait_all()
        await worker.settle()
        assert len(worker.reports) == 1


@pytest.mark.parametrize(
    ("device_ids", "host_ids", "message"),
    [
        ([], [], "no blocks"),
        ([1, 2], [1], "1 source ids, 2 target ids"),
        ([12], [1], r"device block 12 at index 0 is not in \[0, 12\)"),
        ([1, 2], [3, 16], r"host block 16 at index 1 is not in \[0, 16\)"),
        ([-1], [1], "device block -1"),
        ([5, 5], [1, 2], "duplicate destination: device block 5"),
    ],
)
async def test_bad_plans_are_refused_and_change_nothing(
    new_worker: type[Worker],
    same_bytes: Any,
    device_ids: list[int],
    host_ids: list[int],
    message: str,
) -> None:
    """A bad plan raises immediately instead of returning a counter that never ends."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        before = worker.contents()
        with pytest.raises(UsageError, match=message):
            worker.submit("onload", device_ids, host_ids)
        await worker.settle()
        assert (worker.reports, device.copies) == ([], [])
        assert same_bytes(worker.contents(), before)
        worker.submit("onload", [1], [1], transfer_id=1)
        with pytest.raises(UsageError, match="transfer 1 is in flight already"):
            worker.submit("onload", [2], [2], transfer_id=1)


async def test_each_direction_has_two_slots_and_the_next_is_chosen_by_priority(
    new_worker: type[Worker],
) -> None:
    """Directions do not wait for each other, demand goes before backup."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        for i in range(4):
            worker.submit("onload", [i], [i], priority=Priority.BACKUP)
        worker.submit("onload", [5], [5], priority=Priority.DEMAND)
        worker.submit("offload", [6], [6])
        assert len(device.onloads) == MAX_SUBMITTED == 2
        assert len(device.offloads) == 1
        statistics = worker.controller.statistics()
        assert (statistics.attention.onload.queued, statistics.attention.onload.submitted) == (3, 2)
        device.onloads[1].complete_all()  # the younger one first: transfers may end in any order
        await worker.settle()
        assert [copy.host_ids.tolist() for copy in device.onloads] == [[0], [5]]
        device.complete_all()
        await worker.settle()
        device.complete_all()
        await worker.settle()
        onloads = [number for number in outcomes(worker) if number != 6]
        assert onloads == [2, 1, 5, 3, 4]


async def test_the_real_bytes_move_layer_by_layer(
    new_worker: type[Worker], same_bytes: Any
) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        before = worker.contents()
        wanted = worker.after_plain_copy(before, "onload", [7, 0, 11], [15, 2, 2])
        worker.submit("onload", [7, 0, 11], [15, 2, 2])
        assert same_bytes(worker.contents(), before)
        device.onloads[0].complete(1)
        now = worker.contents()
        for name, array in now.items():
            expected = wanted if name in ("k1", "v1", "extra1") else before
            assert (array == expected[name]).all()
        device.complete_all()
        assert same_bytes(worker.contents(), wanted)


async def test_a_failed_layer_fails_the_transfer_at_its_first_bad_block(
    new_worker: type[Worker],
) -> None:
    """The report has the reason, and the counter ends too."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit("onload", [1, 2, 3], [1, 2, 3])
        waiter = asyncio.create_task(LayerView([counter]).wait(1))
        copy = device.onloads[0]
        copy.fail(1, block=2, reason="page 7 is poisoned")
        await worker.settle()
        assert worker.reports == []  # two layers still write into the blocks
        copy.fail(0, block=1)
        copy.complete(2)
        await worker.settle()
        (report,) = worker.reports
        assert (report.outcome, report.first_bad_block) == ("failed", 1)
        with pytest.raises(TransferError, match="failed by the test"):
            await waiter
        assert worker.controller.statistics().attention.onload.failed == 1


async def test_a_device_that_refuses_is_a_failed_transfer(new_worker: type[Worker]) -> None:
    """`submit()` does not raise, so a batch is not split; the slot is free again."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        device.refuse = DeviceError("out of ring slots")
        counter = worker.submit()
        assert worker.reports == []
        with pytest.raises(TransferError, match="out of ring slots"):
            await LayerView([counter]).wait(0)
        await worker.settle()
        assert outcomes(worker) == {1: "failed"}
        worker.submit()
        device.complete_all()
        await worker.settle()
        assert outcomes(worker) == {1: "failed", 2: "done"}


async def test_failed_event_query_fails_the_transfer(new_worker: type[Worker]) -> None:
    """A sticky device error reaches the scheduler, once."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit()
        for event in device.onloads[0].layer_events:
            event.query_error = RuntimeError("unspecified launch failure")
        await worker.settle()
        assert [report.outcome for report in worker.reports] == ["failed"]
        assert "unspecified launch failure" in worker.reports[0].reason
        with pytest.raises(TransferError):
            await LayerView([counter]).wait_all()


async def test_cancel_removes_only_unsubmitted_transfers(
    new_worker: type[Worker], same_bytes: Any
) -> None:
    """I3: bytes in flight arrive and are reported with their real outcome."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        before = worker.contents()
        counters = [worker.submit("onload", [i], [i]) for i in range(3)]
        held = worker.submit("onload", [4], [4], after_step=1)
        assert worker.controller.plans.cancel(1) == "too late"
        assert worker.controller.plans.cancel(3) == "at once"
        assert worker.controller.plans.cancel(held.transfer_id) == "at once"
        assert worker.controller.plans.cancel(3) == "too late"
        assert worker.controller.plans.cancel(99) == "too late"
        await worker.settle()
        assert worker.reports == []  # the caller has cancelled it
        for counter in (counters[2], held):
            with pytest.raises(TransferError, match="cancelled before it was submitted"):
                await LayerView([counter]).wait(0)
        device.complete_all()
        await worker.settle()
        assert outcomes(worker) == {1: "done", 2: "done"}
        assert len(worker.reports) == 2
        wanted = worker.after_plain_copy(before, "onload", [0, 1], [0, 1])
        assert same_bytes(worker.contents(), wanted)
        worker.controller.plans.cancel(1)


async def test_cancelling_a_waiter_leaves_the_transfer_alone(new_worker: type[Worker]) -> None:
    """I7: the transfer continues."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit()
        waiter = asyncio.create_task(LayerView([counter]).wait_all())
        await spin()
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        device.complete_all()
        await worker.settle()
        assert outcomes(worker) == {1: "done"}


@pytest.mark.parametrize("held", [False, True])
async def test_a_raised_priority_counts_for_queued_and_held_transfers(
    new_worker: type[Worker], held: bool
) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        for i in range(5):
            priority = Priority.DEMAND if i < 2 else Priority.PREFETCH
            worker.submit("onload", [i], [i], priority=priority, after_step=int(held))
        worker.controller.plans.raise_priority(5, Priority.DEMAND)
        worker.controller.plans.raise_priority(5, Priority.BACKUP)  # less urgent: without effect
        worker.controller.plans.raise_priority(
            1, Priority.DEMAND
        )  # it may already be in the device
        worker.controller.plans.raise_priority(99, Priority.DEMAND)  # unknown
        if held:
            worker.controller.steps.close(1, None)
        assert [copy.host_ids.tolist() for copy in device.onloads] == [[0], [1]]
        device.complete_all()
        await worker.settle()
        assert [copy.host_ids.tolist() for copy in device.onloads] == [[4], [2]]


async def test_layers_are_announced_one_by_one_while_later_ones_move(
    new_worker: type[Worker],
) -> None:
    """Waiters, callbacks and times of a layer do not wait for the end of the transfer."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit()
        called: list[int] = []
        counter.add_callback(called.append)
        waiting = [asyncio.create_task(LayerView([counter]).wait(layer)) for layer in range(3)]
        for layer in range(3):
            device.onloads[0].complete(layer)
            await worker.settle(3)
            assert called == list(range(layer + 1))
            assert [task.done() for task in waiting] == [i <= layer for i in range(3)]
            assert counter.pending_layers == list(range(layer + 1, 3))
            assert (counter.layer_done_seconds(layer) is None) is False
            assert bool(worker.reports) is (layer == 2)


async def test_no_report_is_sent_from_inside_a_call(new_worker: type[Worker]) -> None:
    """Plans that are done, refused or without bytes are reported in a later callback."""
    for layers in (0, 1):
        device = ManualDevice()
        async with new_worker(device, layers=layers) as worker:
            inside = False
            calls: list[bool] = []
            worker.on_report = lambda report: calls.append(inside)  # noqa: B023
            for refused in (None, DeviceError("no")):
                inside = True
                device.refuse = refused
                worker.submit("offload", [1], [1])
                held = worker.submit("onload", [1], [1], after_step=9)
                assert worker.controller.plans.cancel(held.transfer_id) == "at once"
                inside = False
                device.complete_all()
                await worker.settle()
                assert worker.reports
            assert calls == [False] * 2  # a queued plan that is cancelled is not reported


async def test_a_failed_native_call_frees_its_place_in_the_device(
    new_worker: type[Worker],
) -> None:
    """The lane continues after more refusals than there are slots."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        for i in range(MAX_SUBMITTED + 2):
            device.refuse = DeviceError("no memory")
            counter = worker.submit("onload", [i], [i])
            with pytest.raises(TransferError, match="no memory"):
                LayerView([counter]).gpu_wait(0, ManualStream())
            await worker.settle()
        assert set(outcomes(worker).values()) == {"failed"}
        statistics = worker.controller.statistics().attention.onload
        assert (statistics.submitted, statistics.queued, statistics.failed) == (
            0,
            0,
            MAX_SUBMITTED + 2,
        )
        worker.submit("onload", [1], [1])
        assert len(device.onloads) == 1


async def test_a_report_that_raises_does_not_stop_queued_transfers(
    new_worker: type[Worker], loop_errors: list[dict[str, Any]]
) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:

        def raise_once(report: TransferReport) -> None:
            if report.transfer_id == 1:
                raise ValueError("report")

        worker.on_report = raise_once
        first, second = worker.submit("onload", [1], [1]), worker.submit("onload", [2], [2])
        waiting = asyncio.create_task(worker.controller.plans.drain())
        await spin()
        device.complete_all()
        await worker.settle()
        await asyncio.gather(LayerView([first, second]).wait_all(), waiting)
        assert outcomes(worker) == {2: "done"}
        assert [str(context["exception"]) for context in loop_errors] == ["report"]
        loop_errors.clear()


async def test_a_closed_poller_refuses_plans_and_steps(new_worker: type[Worker]) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        worker.poller.close()
        with pytest.raises(ClosedError):
            worker.submit()
        with pytest.raises(ClosedError):
            worker.controller.steps.close(1, None)
        assert device.copies == []


async def test_plans_wait_for_their_step_and_then_for_its_event(new_worker: type[Worker]) -> None:
    """Design section 5: what a commit publishes may still be being written."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        worker.submit("offload", [1], [1], after_step=1)
        worker.submit("offload", [2], [2], after_step=2)
        worker.submit("offload", [3], [3])
        assert [copy.host_ids.tolist() for copy in device.offloads] == [[3]]
        assert worker.controller.statistics().held == 2
        event = ManualEvent()
        worker.controller.steps.close(1, event)
        copy = device.offloads[1]
        assert copy.after is event
        with pytest.raises(UsageError, match="comes after is not done"):
            copy.complete(0)
        event.complete()
        device.complete_all()
        await worker.settle()
        assert outcomes(worker) == {3: "done", 1: "done"}
        worker.controller.steps.close(2, None)
        assert device.offloads[0].after is None
        with pytest.raises(UsageError, match="step 2 is closed already"):
            worker.controller.steps.close(2, None)


class NoSynchronize:
    done = False


@pytest.mark.parametrize("refused", ["text", 7, NoSynchronize(), asyncio.Future])
async def test_a_refused_event_leaves_the_step_open(new_worker: type[Worker], refused: Any) -> None:
    """A future counts as one: its ``done`` is a method, which is always true as an attribute."""
    if refused is asyncio.Future:
        refused = asyncio.get_running_loop().create_future()
        refused.synchronize = lambda: None
    device = ManualDevice()
    async with new_worker(device) as worker:
        worker.submit("offload", [1], [1], after_step=1)
        for call in (
            worker.controller.steps.check_event,
            lambda e: worker.controller.steps.close(1, e),
        ):
            with pytest.raises(UsageError, match="is not an event"):
                call(refused)
        assert (worker.controller.statistics().held, device.copies) == (1, [])
        worker.controller.steps.check_event(None)
        event = ManualEvent()
        worker.controller.steps.check_event(event)
        assert event.queries == 0
        worker.controller.steps.close(1, event)
        assert device.offloads[0].after is event
        event.complete()


async def test_a_plan_after_a_closed_step_waits_for_its_event_only_while_that_runs(
    new_worker: type[Worker],
) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        event = ManualEvent()
        worker.controller.steps.close(3, event)
        worker.submit("onload", [1], [1], after_step=2)
        event.complete()
        await worker.settle()
        worker.submit("onload", [2], [2], after_step=3)
        assert [copy.after for copy in device.onloads] == [event, None]


async def test_gpu_wait_from_the_runners_thread(new_worker: type[Worker]) -> None:
    """Design section 8: it blocks until the layer is submitted, then only the stream waits."""
    device = ManualDevice()
    device.delayed_layers = frozenset({1})
    async with new_worker(device) as worker:
        counter = worker.submit("onload", [1], [1], after_step=1)
        stream = ManualStream()
        passed: list[int] = []

        def runner() -> None:
            for layer in range(3):
                LayerView([counter]).gpu_wait(layer, stream)
                passed.append(layer)

        thread = threading.Thread(target=runner)
        thread.start()
        await spin(5)
        assert passed == []
        worker.controller.steps.close(1, None)
        copy = device.onloads[0]
        while passed != [0]:
            await spin()
        copy.submit(1)
        thread.join()
        assert stream.waits == [(copy, 0), (copy, 1), (copy, 2)]
        assert worker.reports == []


async def test_gpu_wait_on_the_loops_thread_submits_out_of_order(new_worker: type[Worker]) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        for i in range(2):
            worker.submit("onload", [i], [i])
        waiting = worker.submit("onload", [2], [2], priority=Priority.BACKUP)
        held = worker.submit("onload", [3], [3], after_step=1)
        stream = ManualStream()
        LayerView([waiting]).gpu_wait(0, stream)
        assert stream.waits == [(device.onloads[2], 0)]
        with pytest.raises(UsageError, match="close the step"):
            LayerView([held]).gpu_wait(0, stream)
        worker.controller.steps.close(1, None)
        assert len(device.onloads) == 3
        device.complete_all()
        await worker.settle()
        device.complete_all()
        await worker.settle()
        assert set(outcomes(worker).values()) == {"done"}


async def test_report_that_raises_reaches_the_loop_and_the_worker_continues(
    new_worker: type[Worker], loop_errors: list[dict[str, Any]]
) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        worker.controller.plans._on_report = lambda report: 1 // 0
        worker.submit()
        device.complete_all()
        await worker.settle()
        assert [type(context["exception"]) for context in loop_errors] == [ZeroDivisionError]
        loop_errors.clear()
        await worker.controller.plans.drain()
        worker.controller.plans._on_report = worker.reports.append
        worker.submit()
        device.complete_all()
        await worker.settle()
        assert outcomes(worker) == {2: "done"}


async def test_drain_waits_for_all_transfers_and_can_be_cancelled(new_worker: type[Worker]) -> None:
    device = ManualDevice()
    async with new_worker(device) as worker:
        await worker.controller.plans.drain()
        for i in range(3):
            worker.submit("onload", [i], [i])
        first, second = (asyncio.create_task(worker.controller.plans.drain()) for _ in range(2))
        await spin()
        first.cancel()
        device.complete_all()
        await worker.settle()
        assert not second.done()
        device.complete_all()
        await worker.settle()
        await second
        assert first.cancelled()
        assert len(worker.reports) == 3


async def test_close_cancels_queued_transfers_and_frees_no_memory_under_a_copy(
    new_worker: type[Worker],
) -> None:
    """I8: close waits for all that is in flight."""
    device = ManualDevice()
    async with new_worker(device) as worker:
        for i in range(3):
            worker.submit("onload", [i], [i])
        closing = asyncio.create_task(worker.controller.aclose())
        await worker.settle()
        assert outcomes(worker) == {3: "cancelled"}
        assert not device.closed
        with pytest.raises(ClosedError):
            worker.submit("onload", [4], [4])
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert worker.controller.memory.arena.blocks.shape[0] == 16
        closing = asyncio.create_task(worker.controller.aclose())
        device.complete_all()
        await worker.settle()
        await closing
        assert device.closed
        with pytest.raises(ClosedError):
            _ = worker.controller.memory.arena.blocks
        await worker.controller.aclose()


async def test_a_cache_of_no_bytes_is_done_in_the_next_pass(new_worker: type[Worker]) -> None:
    """A cache without tensors, as in index-only use."""
    async with new_worker(ManualDevice(), layers=0) as worker:
        counter = worker.submit("onload", [10_000], [1])
        seen: list[str] = []
        waiting = asyncio.create_task(LayerView([counter]).wait_all())
        waiting.add_done_callback(lambda _: seen.append("waiter"))
        worker.on_report = lambda report: seen.append("report")
        assert not counter.is_done
        await worker.settle()
        assert seen == ["report", "waiter"]
        assert counter.is_done
        assert outcomes(worker) == {1: "done"}


async def test_statistics_count_bytes_and_learn_the_bandwidth(
    new_worker: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small transfers are mostly latency: the bandwidth is not learned from them."""
    device = ManualDevice()
    async with new_worker(device) as worker:

        async def move() -> RouteStatistics:
            worker.submit("onload", [1, 2], [1, 2])
            device.complete_all()
            await worker.settle()
            return worker.controller.statistics().attention.onload

        lane = await move()
        assert lane.moved_bytes == 2 * worker.regions.block_bytes == 2 * (3 * 55 + 5)
        assert lane.bytes_per_second == 0.0
        monkeypatch.setattr(lanes, "LEARN_BYTES", 1)
        lane = await move()
        assert lane.bytes_per_second > 0
        assert (lane.done, lane.submitted) == (2, 0)


async def test_bandwidth_is_measured_by_the_devices_clock(
    new_worker: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late query must not make transfers seem slow, or the poller would sleep ever longer."""
    monkeypatch.setattr(lanes, "LEARN_BYTES", 1)
    device = ManualDevice()
    async with new_worker(device) as worker:
        counter = worker.submit()
        assert counter.started_seconds is not None
        last_layer = device.onloads[0].layer_events[-1]
        device.complete_all()
        last_layer.finished_seconds = counter.started_seconds + 2.0
        await worker.settle()
        lane = worker.controller.statistics().attention.onload
        assert lane.bytes_per_second == pytest.approx(lane.moved_bytes / 2.0)
        assert lane.busy_seconds == pytest.approx(2.0)
