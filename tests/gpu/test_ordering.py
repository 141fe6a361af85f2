"""Transfers and compute wait for each other on the device; without the wait each test fails."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from aiokv import _native
from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import DeviceError

from .pools import Pools, finish

_cuda: Any = getattr(_native, "cuda", None)  # absent when aiokv was built without a CUDA compiler

SPIN_CYCLES = 100_000_000  # 50 to 80 ms: transfers here take well under one
IDS = np.arange(8, dtype=np.int32)

SOURCE = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.fixture(scope="module")
def spin():
    """Return ``spin(stream)``, which keeps a stream busy."""
    import cupy

    kernel = cupy.RawKernel(SOURCE, "spin")

    def run(stream):
        with stream:
            kernel((1,), (1,), (SPIN_CYCLES,))

    kernel((1,), (1,), (1,))
    cupy.cuda.Device().synchronize()
    return run


def new_stream():
    import cupy

    return cupy.cuda.Stream(non_blocking=True)


def record(stream):
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


@pytest.mark.parametrize("waits", [True, False])
def test_an_offload_waits_for_the_step_that_writes(spin, waits):
    with Pools(sizes=(4096,), layers=2) as pools:
        pools.device.wait_pinned()
        stream = new_stream()
        before = [tensor[IDS].get() for tensor in pools.tensors[0]]
        spin(stream)
        with stream:
            for tensor in pools.tensors[0]:
                tensor[:8] = 77
        event = record(stream)
        finish(pools.device.copy(OFFLOAD, IDS, IDS, event if waits else None))
        saw_new = all(
            (pools.arena.blocks[:8, pools.window(0, layer)] == 77).all() for layer in range(2)
        )
        stream.synchronize()
        assert saw_new == waits
        if not waits:  # then it copied the old bytes
            np.testing.assert_array_equal(pools.arena.blocks[:8, pools.window(0, 0)], before[0])


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("waits", [True, False])
def test_an_onload_waits_for_the_step_that_reads(spin, waits, path):
    with Pools(sizes=(4096,), layers=2, path=path) as pools:
        pools.device.wait_pinned()
        stream = new_stream()
        old = pools.tensors[0][0][:8].get()
        spin(stream)
        with stream:
            out = pools.tensors[0][0][:8].copy()
        event = record(stream)
        finish(pools.device.copy(ONLOAD, IDS, IDS, event if waits else None))
        stream.synchronize()
        assert np.array_equal(out.get(), old) == waits


def test_gpu_wait_orders_and_does_not_block(spin):
    """The transfer is delayed on the device, and the stream still reads its bytes."""
    with Pools(sizes=(4096,), layers=2) as pools:
        pools.device.wait_pinned()
        late, stream = new_stream(), new_stream()
        spin(late)
        copy = pools.device.copy(ONLOAD, IDS, IDS, record(late))
        copy.stream_wait(0, stream)
        assert not copy.layer_events[0].done
        with stream:
            out = pools.tensors[0][0][:8].copy()
        assert not stream.done
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), pools.host[:8, pools.window(0, 0)])
        finish(copy)


def test_gpu_wait_blocks_until_the_layer_is_submitted():
    onload = _cuda.Direction.ONLOAD
    with Pools(sizes=(4096,), layers=2) as pools:
        engine = pools.device._engines["attention", "host"]
        engine.hold(onload, True)
        copy = pools.device.copy(ONLOAD, IDS, IDS, None)
        stream, out, entered = new_stream(), [], threading.Event()

        def runner():
            entered.set()
            copy.stream_wait(0, stream)
            with stream:
                out.append(pools.tensors[0][0][:8].copy())

        thread = threading.Thread(target=runner)
        thread.start()
        entered.wait()
        thread.join(0.2)
        held_back = thread.is_alive() and not copy.layer_events[0].done
        engine.hold(onload, False)
        thread.join()
        stream.synchronize()
        assert held_back
        np.testing.assert_array_equal(out[0].get(), pools.host[:8, pools.window(0, 0)])
        finish(copy)


def test_layers_arrive_in_order_and_report_their_times():
    with Pools(sizes=(65536,), layers=8, device_blocks=128, host_blocks=128, timing=True) as pools:
        ids = np.arange(128, dtype=np.int32)
        copy = pools.device.copy(ONLOAD, ids, ids, None)
        assert len(copy.layer_events) == 8
        finish(copy)
        times = copy.layer_seconds()
        assert all(time is not None and time > 0 for time in times)
        assert times == sorted(times)
        assert times[0] < times[-1] / 2
        assert [first for first, _, _ in copy.group_paths()] == [0, 1, 2, 4]


def test_a_failure_at_the_last_layer():
    """A failure of the last layer invalidates the block."""
    onload = _cuda.Direction.ONLOAD
    with Pools(sizes=(65536,), layers=2, device_blocks=40, host_blocks=40) as pools:
        pools.device.wait_pinned()
        ids = np.arange(40, dtype=np.int32)
        engine = pools.device._engines["attention", "host"]
        engine.fail_at(onload, 1, 1)
        copy = pools.device.copy(ONLOAD, ids, ids[::-1], None)
        copy.layer_events[-1].synchronize()
        assert all(event.done for event in copy.layer_events)
        error = copy.error()
        assert error is not None
        assert error.first_bad_block == 0
        assert "cudaErrorInvalidValue" in error.reason
        with pytest.raises(DeviceError, match="will not arrive") as caught:
            copy.wait_submitted(1)
        assert caught.value.cuda_code == 1
        assert pools.device.failure is None  # the context is intact
        finish(pools.device.copy(ONLOAD, ids, ids, None))
        pools.expect("onload", ids, ids)
        pools.check()
