"""The cpu device really copies: bytes, order, both directions."""

from __future__ import annotations

import select
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import _native
from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import LayoutError, UsageError
from aiokv.layout.regions import Regions
from aiokv.testing import ManualEvent, run_until_idle
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cpu import CpuDevice, CpuEvent, CpuStream
from aiokv.worker.views import LayerView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Worker

RANDOM = np.random.default_rng(3)
IDS = {
    "single": ([7], [3]),
    "consecutive": (list(range(2, 9)), list(range(5, 12))),
    "reversed": (list(range(8, 1, -1)), list(range(5, 12))),
    "full range": (list(range(12)), list(range(12))),
    "random": (RANDOM.permutation(12)[:9].tolist(), RANDOM.permutation(16)[:9].tolist()),
}


@pytest.fixture
def stream() -> Iterator[CpuStream]:
    stream = CpuStream("aiokv-test")
    yield stream
    stream.abort()


@pytest.mark.asyncio
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("direction", ["onload", "offload"])
async def test_copied_bytes_arrive_and_others_do_not_change(
    new_worker: type[Worker],
    same_bytes: Any,
    direction: str,
    ids: tuple[list[int], list[int]],
) -> None:
    """Copy every region of every layer, with odd block sizes, and check the adjacent bytes."""
    async with new_worker(CpuDevice()) as worker:
        wanted = worker.after_plain_copy(worker.contents(), direction, *ids)
        await LayerView([worker.submit(direction, *ids)]).wait_all()
        assert same_bytes(worker.contents(), wanted)
        await run_until_idle(lambda: bool(worker.reports))
        assert worker.reports[0].outcome == "done"


@pytest.mark.asyncio
async def test_both_directions_at_once(new_worker: type[Worker], same_bytes: Any) -> None:
    async with new_worker(CpuDevice()) as worker:
        wanted = worker.after_plain_copy(worker.contents(), "onload", [0, 1, 2], [0, 1, 2])
        wanted = worker.after_plain_copy(wanted, "offload", [5, 6, 7], [9, 8, 7])
        for _ in range(10):
            worker.submit("onload", [0, 1, 2], [0, 1, 2])
            worker.submit("offload", [5, 6, 7], [9, 8, 7])
        await worker.controller.plans.drain()
        assert same_bytes(worker.contents(), wanted)
        assert {report.outcome for report in worker.reports} == {"done"}
        assert len(worker.reports) == 20


@pytest.mark.asyncio
async def test_copy_waits_on_the_device_for_its_step(
    new_worker: type[Worker], same_bytes: Any, stream: CpuStream
) -> None:
    """Order comes from events on explicit streams."""
    async with new_worker(CpuDevice()) as worker:
        before = worker.contents()
        gate, step = CpuEvent(), CpuEvent()
        gate.begin()
        stream.wait_event(gate)
        stream.record(step)
        worker.controller.steps.close(1, step)
        counter = worker.submit("onload", [1], [1], after_step=1)
        assert not counter.is_done
        assert same_bytes(worker.contents(), before)
        gate.finish()
        await LayerView([counter]).wait_all()
        wanted = worker.after_plain_copy(before, "onload", [1], [1])
        assert same_bytes(worker.contents(), wanted)


@pytest.mark.asyncio
async def test_a_compute_stream_waits_for_a_layer(
    new_worker: type[Worker], stream: CpuStream
) -> None:
    """`gpu_wait` orders the stream; the host does not wait."""
    async with new_worker(CpuDevice()) as worker:
        counter = worker.submit()
        LayerView([counter]).gpu_wait_all(stream)
        behind = CpuEvent()
        stream.record(behind)
        behind.synchronize()
        assert counter.is_done
        counter.raise_for_error()


@pytest.mark.asyncio
async def test_stream_of_another_device_is_refused(new_worker: type[Worker]) -> None:
    async with new_worker(CpuDevice()) as worker:
        counter = worker.submit()
        with pytest.raises(UsageError, match=r"stream is a int; the cpu device takes a CpuStream"):
            LayerView([counter]).gpu_wait(0, 7)


@pytest.mark.asyncio
async def test_an_event_of_another_device_is_refused(new_worker: type[Worker]) -> None:
    async with new_worker(CpuDevice()) as worker:
        counter = worker.submit(after_step=1)
        for refused in ("text", ManualEvent()):
            with pytest.raises(UsageError, match="cannot wait for a"):
                worker.controller.steps.close(1, refused)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="never recorded"):
            worker.controller.steps.close(1, CpuEvent())
        assert worker.controller.statistics().held == 1  # the step is still open
        event = CpuEvent()
        event.begin()
        worker.controller.steps.close(1, event)
        event.finish()
        await LayerView([counter]).wait_all()


def test_host_events_begin_and_finish() -> None:
    """A runner in a Python thread closes its steps with these."""
    event = CpuEvent()
    assert (event.done, event.recorded, event.generation) == (False, False, 0)
    event.begin()
    assert (event.done, event.recorded, event.finished_seconds) == (False, True, None)
    event.finish()
    assert (event.done, event.error) == (True, None)
    assert event.finished_seconds is not None
    event.begin()
    assert not event.done
    event.finish("no memory")
    assert (event.done, event.error, event.generation) == (True, "no memory", 2)


def test_wait_for_an_unrecorded_event_is_refused(stream: CpuStream) -> None:
    """CUDA treats an unrecorded event as done; here it is an error."""
    with pytest.raises(UsageError, match="never recorded"):
        CpuEvent().synchronize()
    with pytest.raises(UsageError, match="never recorded"):
        stream.wait_event(CpuEvent())


def test_synchronize_releases_the_gil(stream: CpuStream) -> None:
    gate, behind = CpuEvent(), CpuEvent()
    gate.begin()
    stream.wait_event(gate)
    stream.record(behind)
    waiting = threading.Thread(target=behind.synchronize)
    waiting.start()
    assert (behind.done, stream.depth) != (True, 0)
    gate.finish()
    waiting.join()
    assert behind.done


def test_streams_wait_for_each_other(stream: CpuStream) -> None:
    other = CpuStream("aiokv-other")
    gate, first, second = CpuEvent(), CpuEvent(), CpuEvent()
    gate.begin()
    stream.wait_event(gate)
    stream.record(first)
    other.wait_event(first)
    other.record(second)
    assert not second.done
    gate.finish()
    other.synchronize()
    assert first.done
    assert second.done
    other.close()
    with pytest.raises(UsageError, match="aiokv-other is closed"):
        other.record(second)


@pytest.fixture
def attached() -> Iterator[tuple[CpuDevice, Regions, HostArena]]:
    regions = Regions(num_layers=2)
    regions.add("k", layers=[np.zeros((8, 1000), np.uint8) for _ in range(2)])
    arena = HostArena(num_blocks=8, pitch_bytes=regions.payload_bytes)
    arena.blocks[:] = 5
    device = CpuDevice()
    device.attach(regions, arena)
    yield device, regions, arena
    device.close()
    arena.close()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_onload_has_one_event_per_layer_and_offload_has_one(
    attached: tuple[CpuDevice, Regions, HostArena],
) -> None:
    """Streams of the two directions are different ones."""
    device, _, _ = attached
    onload, offload = (
        device.copy(ONLOAD, ids(1), ids(2), None),
        device.copy(OFFLOAD, ids(4), ids(3), None),
    )
    assert len(set(map(id, onload.layer_events))) == 2
    assert len(set(map(id, offload.layer_events))) == 1
    assert len(offload.layer_events) == 2
    onload.wait_submitted(1)
    device.close()
    assert all(event.done for event in (*onload.layer_events, *offload.layer_events))
    assert onload.error() is None


def test_a_failed_step_fails_the_copy_behind_it(
    attached: tuple[CpuDevice, Regions, HostArena],
) -> None:
    """I4: what a failed step wrote is not backed up as if it were KV."""
    device, _, arena = attached
    step = CpuEvent()
    step.begin()
    copy = device.copy(OFFLOAD, ids(2), ids(1), step)
    step.finish("the model raised")
    copy.layer_events[0].synchronize()
    error = copy.error()
    assert error is not None
    assert error.first_bad_block == 0
    assert "the model raised" in error.reason
    assert (arena.blocks == 5).all()


def test_memory_is_kept_while_a_dropped_device_copies() -> None:
    """No memory is freed under a copy, even without close()."""
    regions = Regions(num_layers=1)
    regions.add("k", layers=[np.zeros((4, 1 << 20), np.uint8)])
    arena = HostArena(num_blocks=4, pitch_bytes=regions.payload_bytes)
    device = CpuDevice()
    device.attach(regions, arena)
    gate = CpuEvent()
    gate.begin()
    copy = device.copy(ONLOAD, ids(0, 1, 2, 3), ids(3, 2, 1, 0), gate)
    del device, regions, arena
    assert copy.layer_events[0].done  # the streams were aborted and joined
    assert copy.error() is not None
    gate.finish()


def test_use_before_attach_and_unsupported_memory_are_refused() -> None:
    device = CpuDevice()
    with pytest.raises(UsageError, match="attach"):
        device.copy(ONLOAD, ids(1), ids(1), None)
    interface = {"shape": (4, 8), "typestr": "|u1", "data": (4096, False), "version": 3}
    regions = Regions(num_layers=1)
    regions.add("k", layers=[SimpleNamespace(__cuda_array_interface__=interface)])
    with pytest.raises(LayoutError, match="the tensors are on cuda; the cpu device"):
        device.attach(regions, HostArena(num_blocks=1, pitch_bytes=64))
    device.close()


def test_pieces_that_do_not_fit_are_refused() -> None:
    """A host pool of another layout is an error, not an overrun."""
    with pytest.raises(LayoutError, match="65 bytes at offset 0 do not fit host blocks of 64"):
        _native.BlockMap(1, [(0, 4096, 65, 65, 0)], 4096, 64, 8, 8)
    with pytest.raises(LayoutError, match="layer 1"):
        _native.BlockMap(1, [(1, 4096, 64, 64, 0)], 4096, 64, 8, 8)


def test_timers_expire_once_and_can_be_armed_again() -> None:
    timer = _native.TimerFd()
    timer.arm(0.0)
    poll = select.poll()
    poll.register(timer.fileno(), select.POLLIN)
    assert poll.poll(1000)
    timer.drain()
    assert not poll.poll(0)
    timer.arm(3600.0)
    assert not poll.poll(0)
    timer.arm(0.0)
    assert poll.poll(1000)
    timer.close()
    timer.close()
    assert timer.fileno() == -1
