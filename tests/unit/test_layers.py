"""LayerDoneCounter and LayerView, driven by hand."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from aiokv.errors import TransferError, TransferTimeout, UsageError
from aiokv.testing import ManualEvent, spin
from aiokv.worker.device.base import CopyError
from aiokv.worker.layer_waits import LayerWaits
from aiokv.worker.layers import LayerDoneCounter
from aiokv.worker.thread_waits import Deadline
from aiokv.worker.views import DONE, LayerView, done_view

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.asyncio


class Copy:
    """Minimal copy for a counter."""

    def __init__(self, num_layers: int) -> None:
        self.layer_events: Sequence[ManualEvent] = [ManualEvent() for _ in range(num_layers)]
        self.submitted = threading.Event()
        self.failure: CopyError | None = None

    def wait_submitted(self, layer: int, timeout: float | None = None) -> bool:
        return self.submitted.wait(timeout)

    def stream_wait(self, layer: int, stream: list[int]) -> None:
        assert self.submitted.is_set()
        stream.append(layer)

    def error(self) -> CopyError | None:
        return self.failure


async def in_thread(function: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    """Run a call on its own thread; the list gets the result or the exception."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function(*args))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


async def test_every_layer_of_a_new_counter_is_pending() -> None:
    counter = LayerDoneCounter(3)
    assert counter.pending_layers == [0, 1, 2]
    assert not counter.is_done
    assert counter.layer_times() == [None, None, None]


async def test_mark_counts_each_layer_once_and_reports_the_last() -> None:
    counter = LayerDoneCounter(2)
    assert counter.mark_layer_done(1) is False
    assert counter.mark_layer_done(1) is False
    assert counter.pending_layers == [0]
    assert counter.mark_layer_done(0) is True
    assert counter.is_done
    assert counter.mark_layer_done(0) is False


async def test_callbacks_get_every_layer_and_a_raising_one_is_reported(
    loop_errors: list[dict[str, Any]],
) -> None:
    counter = LayerDoneCounter(2)
    seen: list[int] = []
    counter.add_callback(lambda layer: 1 // 0)
    counter.add_callback(seen.append)
    counter.mark_layer_done(1)
    counter.mark_layer_done(0)
    assert seen == [1, 0]
    assert [type(context["exception"]) for context in loop_errors] == [ZeroDivisionError] * 2
    loop_errors.clear()


async def test_waiting_for_an_arrived_layer_does_not_suspend() -> None:
    counter = LayerDoneCounter(2)
    counter.mark_layer_done(0)
    with pytest.raises(StopIteration):
        LayerView([counter]).wait(0).send(None)


async def test_a_mark_releases_the_waiters_of_that_layer_only() -> None:
    counter = LayerDoneCounter(2)
    tasks = [asyncio.create_task(LayerView([counter]).wait(layer)) for layer in (0, 1, 1)]
    await spin()
    counter.mark_layer_done(1)
    await spin(2)
    assert [task.done() for task in tasks] == [False, True, True]
    counter.mark_layer_done(0)
    await tasks[0]


async def test_timeouts_name_the_layer() -> None:
    """A timeout is honoured, never ignored."""
    counter = LayerDoneCounter(2)
    view = LayerView([counter])
    with pytest.raises(TimeoutError, match="layer 1 did not arrive"):
        await view.wait(1, timeout=0.001)
    with pytest.raises(TimeoutError, match="the last layer"):
        await view.wait_all(timeout=0.001)
    counter.mark_layer_done(0)
    counter.mark_layer_done(1)
    await view.wait_all(timeout=0.001)


async def test_counter_without_layers_is_done_immediately() -> None:
    """A counter without layers and without a transfer."""
    assert DONE.is_done
    await DONE.wait_all()
    assert [layer async for layer in DONE] == []


async def test_a_transfer_without_layers_ends_with_its_report() -> None:
    counter = LayerDoneCounter(0)
    view = LayerView([counter])
    assert [layer async for layer in view] == []
    waiting = asyncio.create_task(view.wait_all())
    counter.attach(Copy(0))
    await spin(2)
    assert not counter.is_done
    assert not waiting.done()
    counter.finish()
    await waiting
    assert counter.is_done


async def test_wait_all_and_iteration() -> None:
    """Layers are iterated in ascending order, independent of the order of arrival."""
    counter = LayerDoneCounter(3)
    view = LayerView([counter])
    seen: list[int] = []

    async def collect() -> None:
        async for layer in view:
            seen.append(layer)  # noqa: PERF401 - the order is what is tested

    tasks = [asyncio.create_task(collect()), asyncio.create_task(view.wait_all())]
    await spin()
    counter.mark_layer_done(1)
    await spin(3)
    assert seen == []
    counter.mark_layer_done(0)
    await spin(3)
    assert seen == [0, 1]
    assert not tasks[1].done()
    counter.mark_layer_done(2)
    await asyncio.gather(*tasks)
    assert seen == [0, 1, 2]


async def test_layer_times_come_from_the_device_where_available() -> None:
    counter = LayerDoneCounter(2)
    assert counter.layer_done_seconds(0) is None
    elapsed = counter.elapsed_seconds
    assert counter.elapsed_seconds >= elapsed >= 0
    counter.mark_layer_done(0, 123.5)
    before = time.monotonic()
    counter.mark_layer_done(1)
    assert counter.layer_done_seconds(0) == 123.5
    times = counter.layer_times()
    assert times[1] is not None
    assert times[1] >= before
    times[0] = None
    assert counter.layer_done_seconds(0) == 123.5
    assert counter.elapsed_seconds == counter.elapsed_seconds


async def test_a_transfer_has_arrived_with_the_layer_that_finished_last() -> None:
    counter = LayerDoneCounter(3)
    for layer, finished_seconds in ((0, 4.0), (1, 5.0), (2, 3.0)):
        assert counter.arrived_seconds is None
        counter.mark_layer_done(layer, finished_seconds)
    assert counter.arrived_seconds == 5.0
    assert LayerDoneCounter(0).arrived_seconds is None


@pytest.mark.parametrize("layer", [-1, 2])
async def test_layers_out_of_range_change_nothing(layer: int) -> None:
    """Layers out of range raise an error."""
    counter = LayerDoneCounter(2)
    view = LayerView([counter])
    with pytest.raises(UsageError, match=r"must be in \[0, 2\)"):
        counter.mark_layer_done(layer)
    if layer >= 0:
        with pytest.raises(UsageError):
            await view.wait(layer)
    with pytest.raises(UsageError):
        view.gpu_wait(layer, [])
    assert counter.pending_layers == [0, 1]


async def test_events_are_freed_with_their_counter() -> None:
    """Events are not freed before their last user."""
    copy, counter = Copy(1), LayerDoneCounter(1)
    counter.attach(copy)
    event = weakref.ref(copy.layer_events[0])
    del copy
    counter.mark_layer_done(0)
    gc.collect()
    assert event() is not None
    del counter
    gc.collect()
    assert event() is None


async def test_layer_is_done_at_its_event_not_at_submission() -> None:
    """A submitted copy has not arrived; an arrived one is done before the first query."""
    copy, counter = Copy(2), LayerDoneCounter(2)
    counter.attach(copy)
    assert not counter.is_done
    copy.layer_events[0].complete()
    assert not counter.is_done
    copy.layer_events[1].complete()
    assert counter.is_done
    assert counter.pending_layers == [0, 1]  # the loop has not seen them yet


async def test_a_cancelled_waiter_is_only_detached() -> None:
    """I7, also when the mark and the cancellation happen in one pass."""
    counter = LayerDoneCounter(1)
    early, late, stays = (asyncio.create_task(LayerView([counter]).wait(0)) for _ in range(3))
    await spin()
    early.cancel()
    await spin(2)
    counter.mark_layer_done(0)
    late.cancel()
    results = await asyncio.gather(early, late, stays, return_exceptions=True)
    assert [type(result) for result in results] == [
        asyncio.CancelledError,
        asyncio.CancelledError,
        type(None),
    ]
    assert counter._waiters == {0: []}


async def test_failure_is_raised_after_all_copies_ended() -> None:
    """A failed layer is never marked done, and its waiters do not hang."""
    copy, counter = Copy(3), LayerDoneCounter(3, transfer_id=7)
    counter.attach(copy)
    seen: list[int] = []
    counter.add_callback(seen.append)
    counter.mark_layer_done(0)
    waiters = [asyncio.create_task(LayerView([counter]).wait(layer)) for layer in (1, 2)]
    await spin()
    copy.failure = CopyError(4, "bad page")
    counter.mark_layer_done(1)
    late = asyncio.create_task(LayerView([counter]).wait(1))
    await spin(2)
    assert not any(task.done() for task in (*waiters, late))
    with pytest.raises(TransferError, match="onload 7 failed at block 4: bad page"):
        counter.raise_for_error()
    counter.mark_layer_done(2)
    for task in (*waiters, late):
        with pytest.raises(TransferError, match="bad page"):
            await task
    with pytest.raises(TransferError):
        await LayerView([counter]).wait(0)
    assert seen == [0]
    assert counter.failure == CopyError(4, "bad page")


async def test_gpu_wait_blocks_until_the_layer_is_submitted() -> None:
    """CUDA treats an unrecorded event as done, so the runner would read too early."""
    copy, counter, stream = Copy(2), LayerDoneCounter(2), list[int]()
    thread, result = await in_thread(LayerView([counter]).gpu_wait, 1, stream)
    await spin(3)
    assert stream == []
    counter.attach(copy)
    await spin(3)
    assert stream == []
    copy.submitted.set()
    thread.join()
    assert (result, stream) == ([None], [1])


async def test_gpu_wait_of_an_arrived_layer_needs_no_stream() -> None:
    counter = LayerDoneCounter(2)
    counter.mark_layer_done(0)
    LayerView([counter]).gpu_wait(0, [])


async def test_gpu_wait_all_waits_for_every_layer() -> None:
    copy, counter, stream = Copy(3), LayerDoneCounter(3), list[int]()
    copy.submitted.set()
    counter.attach(copy)
    counter.mark_layer_done(1)
    LayerView([counter]).gpu_wait_all(stream)
    assert stream == [0, 2]


async def test_gpu_wait_raises_when_the_transfer_is_never_submitted() -> None:
    counter = LayerDoneCounter(2)
    thread, result = await in_thread(LayerView([counter]).gpu_wait, 0, [])
    counter.finish(CopyError(0, "cancelled"))
    thread.join()
    assert isinstance(result[0], TransferError)


async def test_gpu_wait_on_the_loops_thread_expedites_or_refuses() -> None:
    copy, stream = Copy(1), list[int]()
    copy.submitted.set()
    counter = LayerDoneCounter(1, expedite=lambda: counter.attach(copy) is None)
    LayerView([counter]).gpu_wait(0, stream)
    assert stream == [0]
    with pytest.raises(UsageError, match="never return"):
        LayerView([LayerDoneCounter(1, expedite=lambda: False)]).gpu_wait(0, stream)


async def test_is_done_from_another_thread() -> None:
    counter = LayerDoneCounter(1)
    thread, result = await in_thread(lambda: counter.is_done)
    thread.join()
    assert result == [False]


async def test_a_view_waits_for_all_its_transfers() -> None:
    """Each transfer has its own counter; nothing is overwritten by the next."""
    own, joined = LayerDoneCounter(2), LayerDoneCounter(2)
    view = LayerView([own, joined])
    task = asyncio.create_task(view.wait(0))
    await spin()
    own.mark_layer_done(0)
    await spin(3)
    assert not task.done()
    assert view.pending_layers == [0, 1]
    joined.mark_layer_done(0)
    await task
    assert view.pending_layers == [1]
    with pytest.raises(TimeoutError, match="the last layer did not arrive"):
        await view.wait_all(timeout=0.001)
    own.mark_layer_done(1)
    joined.mark_layer_done(1)
    await view.wait_all()
    assert view.is_done
    assert [layer async for layer in view] == [0, 1]


async def test_view_reports_the_first_token_to_recompute() -> None:
    first, second = LayerDoneCounter(1, transfer_id=1), LayerDoneCounter(1, transfer_id=2)
    view = LayerView([first, second], locate=lambda transfer, block: 1000 // transfer + 16 * block)
    first.finish(CopyError(0, "late"))
    second.finish(CopyError(2, "early"))
    with pytest.raises(TransferError, match="onload 2 failed at block 2: early") as caught:
        await view.wait(0)
    assert caught.value.first_bad_token == 532


async def test_a_view_of_nothing_is_shared_and_costs_nothing() -> None:
    """A full device hit has nothing to wait for."""
    assert done_view(4) is done_view(4)
    assert DONE is done_view(0)
    view = done_view(4)
    assert view.is_done
    assert view.pending_layers == []
    with pytest.raises(StopIteration):
        view.wait(3).send(None)
    view.gpu_wait(2, stream="the stream")
    view.gpu_wait_all(stream="the stream")
    for wait in (partial(view.gpu_wait, 2), view.gpu_wait_all):
        with pytest.raises(UsageError, match=r"stream is None.*host_wait"):
            wait(None)  # refused although there is nothing to wait for
    assert [layer async for layer in view] == [0, 1, 2, 3]


async def test_a_transfer_that_was_not_submitted_never_counts_as_ordered() -> None:
    """The worker has no record of the transfer or of its outcome."""
    counter = LayerDoneCounter(1, expedite=lambda: True)
    view = LayerView([counter])
    for gpu_wait in (lambda: view.gpu_wait(0, []), lambda: view.gpu_wait_all([])):
        with pytest.raises(TransferError, match="was not submitted"):
            gpu_wait()


async def test_threads_wait_for_a_layer_all_layers_and_the_end() -> None:
    counter = LayerDoneCounter(2)
    view = LayerView([counter])
    first, first_end = await in_thread(view.host_wait, 0)
    last, last_end = await in_thread(view.host_wait_all)
    rest, rest_end = await in_thread(counter.rest, Deadline(None))
    counter.mark_layer_done(0)
    first.join()
    assert first_end == [None]
    view.host_wait(0)  # it has arrived: no wait, also on the loop's thread
    counter.mark_layer_done(1)
    last.join()
    rest.join()
    assert (last_end, rest_end) == ([None], [None])


async def test_a_thread_gets_the_failure_when_no_byte_moves_any_more() -> None:
    counter, copy = LayerDoneCounter(2), Copy(2)
    counter.attach(copy)
    counter.mark_layer_done(0)
    copy.failure = CopyError(1, "broken")
    waiting, end = await in_thread(LayerView([counter]).host_wait, 0)
    counter.mark_layer_done(1)
    waiting.join()
    assert isinstance(end[0], TransferError)


async def test_a_thread_that_waits_for_the_end_waits_behind_a_slow_rank() -> None:
    counter = LayerDoneCounter(1)
    waiting, end = await in_thread(counter.rest, Deadline(None))
    counter.give_up(CopyError(0, "rank 1 is slow"))
    thread, failed = await in_thread(LayerView([counter]).host_wait, 0)
    thread.join()
    assert isinstance(failed[0], TransferError)
    assert end == []
    counter.finish()
    waiting.join()
    assert end == [None]


async def test_an_abandoned_counter_releases_all_threads() -> None:
    counter = LayerDoneCounter(1)
    view = LayerView([counter])
    threads = [
        await in_thread(call)
        for call in (
            lambda: counter.rest(Deadline(None)),
            view.host_wait_all,
            lambda: view.gpu_wait(0, []),
        )
    ]
    counter.abandon(CopyError(0, "the loop has ended"))
    for thread, end in threads:
        thread.join()
        assert isinstance(end[0], TransferError)
    assert not counter.at_rest


@pytest.mark.parametrize("layer", [-3, -2, -1, 2])
async def test_waits_for_a_layer_that_does_not_exist_are_refused(layer: int) -> None:
    """A negative number is no layer from the end: a runner would read blocks too early."""
    counter = LayerDoneCounter(2)
    view = LayerView([counter])
    with pytest.raises(UsageError, match=f"layer is {layer}"):
        await view.wait(layer, 0)
    for call, *args in ((view.host_wait, layer, 0), (view.gpu_wait, layer, [], 0)):
        thread, end = await in_thread(call, *args)
        thread.join()
        assert isinstance(end[0], UsageError)
        assert f"layer is {layer}" in str(end[0])


async def test_threads_stop_waiting_at_the_deadline() -> None:
    counter = LayerDoneCounter(2, transfer_id=7)
    view = LayerView([counter])
    for call, message in (
        (lambda: view.host_wait(1, 0), "onload 7: layer 1 did not arrive within 0"),
        (lambda: view.host_wait_all(0), "onload 7: the last layer did not arrive"),
        (lambda: view.gpu_wait(0, [], 0), "onload 7: the transfer was not submitted"),
        (lambda: view.gpu_wait_all([], 0), "onload 7: the transfer was not submitted"),
        (lambda: view.host_wait(0, "soon"), "timeout"),
    ):
        thread, end = await in_thread(call)
        thread.join()
        expected = UsageError if message == "timeout" else TransferTimeout
        assert isinstance(end[0], expected)
        assert message in str(end[0])
    counter.attach(Copy(2))
    with pytest.raises(TransferTimeout, match="layer 1 was not submitted"):
        view.gpu_wait(1, [], 0)
    with pytest.raises(TransferTimeout):
        await view.wait(1, 0)


async def test_a_host_wait_on_the_thread_of_the_loop_is_refused() -> None:
    counter = LayerDoneCounter(1)
    view = LayerView([counter])
    with pytest.raises(UsageError, match=r"host_wait on the loop's thread.*await wait"):
        view.host_wait(0)
    with pytest.raises(UsageError, match="layer is 1"):
        view.host_wait(1)


async def test_a_view_waits_in_a_thread_for_every_transfer() -> None:
    one, two = LayerDoneCounter(2, transfer_id=1), LayerDoneCounter(2, transfer_id=2)
    view = LayerView([one, two], locate=lambda transfer_id, block: 10 * transfer_id + block)
    layer, layer_end = await in_thread(view.host_wait, 1)
    every, every_end = await in_thread(view.host_wait_all)
    one.mark_layer_done(1)
    two.mark_layer_done(1)
    layer.join()
    assert layer_end == [None]
    one.mark_layer_done(0)
    two.finish(CopyError(3, "broken"))
    every.join()
    assert isinstance(every_end[0], TransferError)
    assert every_end[0].first_bad_token == 23
    done_view(3).host_wait(2)
    done_view(3).host_wait_all(0)
    with pytest.raises(UsageError, match="layer"):
        done_view(3).host_wait(3)


async def test_a_view_counts_the_waits_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(100, 3)
    waits = LayerWaits()
    counter = LayerDoneCounter(3)
    monkeypatch.setattr("aiokv.worker.views.time.monotonic", lambda: next(times))
    view = LayerView([counter], waits=waits)
    assert view.wait_seconds(1) == 0
    with pytest.raises(TransferTimeout):
        await view.wait(1, 0)
    first = view.wait_seconds(1)
    assert first > 0
    thread, end = await in_thread(view.host_wait, 1, 0)
    thread.join()
    assert isinstance(end[0], TransferTimeout)
    assert view.wait_seconds(1) > first
    thread, end = await in_thread(view.gpu_wait_all, [], 0)
    thread.join()
    assert view.wait_seconds(2) > 0, "a wait for all layers counts for the last one"
    assert view.wait_seconds(0) == 0
    for layer in range(3):
        counter.mark_layer_done(layer)
    await view.wait_all()
    view.host_wait(0)
    view.gpu_wait(1, [])
    statistics = waits.statistics()
    assert statistics.waits.count == 3, "layers that have arrived are not waited for"
    assert statistics.layer_seconds == [view.wait_seconds(layer) for layer in range(3)]
    assert statistics.waits.sum_seconds == pytest.approx(sum(statistics.layer_seconds))
    batch = LayerView.of_batch([view])
    assert batch is not None
    assert batch.waits is waits
    with pytest.raises(UsageError, match="layer"):
        view.wait_seconds(3)


async def test_threads_that_note_waits_at_once_lose_none() -> None:
    waits = LayerWaits()

    def note() -> None:
        for _ in range(500):
            waits.note(1, 2, 1.0)

    threads = [(await in_thread(note))[0] for _ in range(4)]
    for thread in threads:
        thread.join()
    assert waits.statistics().layer_seconds == [0.0, 2000.0]
    assert waits.statistics().waits.count == 2000


async def test_first_start_of_a_transfer_is_kept() -> None:
    counter = LayerDoneCounter(1)
    counter.note_start(5.0)
    counter.note_start(7.0)
    assert counter.started_seconds == 5.0
