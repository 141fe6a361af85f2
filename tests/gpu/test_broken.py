"""A fault on the device wakes every waiter, and later calls are refused."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = r"""
import threading
import cupy, numpy as np
from aiokv.base.plan import ONLOAD
from aiokv import _native
from aiokv.errors import DeviceError
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cuda import CudaDevice
from aiokv.layout.regions import Regions

regions = Regions(num_layers=2)
regions.add("k", layers=[cupy.zeros((8, 4096), cupy.uint8) for _ in range(2)])
arena = HostArena(num_blocks=8, pitch_bytes=regions.payload_bytes)
device = CudaDevice()
device.attach(regions, arena)
device.wait_pinned()
ids = np.arange(8, dtype=np.int32)
onload = _native.cuda.Direction.ONLOAD
device._engines["attention", "host"].hold(onload, True)
copies = [device.copy(ONLOAD, ids, ids, None) for _ in range(3)]
woken = []
def wait(copy):
    try:
        copy.layer_events[-1].synchronize()
    finally:
        woken.append(copy)
threads = [threading.Thread(target=wait, args=(copy,)) for copy in copies]
for thread in threads: thread.start()
fault = cupy.RawKernel('extern "C" __global__ void fault(char* at) { *at = 1; }', "fault")
fault((1,), (1,), (np.uint64(8),))
try:
    cupy.cuda.runtime.deviceSynchronize()
except cupy.cuda.runtime.CUDARuntimeError:
    pass
device._engines["attention", "host"].hold(onload, False)
for thread in threads: thread.join()
assert len(woken) == 3
assert all(event.done for copy in copies for event in copy.layer_events)
assert all(copy.error() is not None for copy in copies)
failure = device.failure
assert failure is not None and failure.cuda_code == 700, failure
assert "cudaErrorIllegalAddress" in str(failure)
try:
    device.copy(ONLOAD, ids, ids, None)
except DeviceError as error:
    assert error.cuda_code == 700
else:
    raise AssertionError("a broken device took a transfer")
print("engine broken", flush=True)
import os
os._exit(0)  # CuPy cannot clean up in a lost context
"""


def test_device_fault_wakes_all_waiters_and_refuses_later_calls():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert "engine broken" in done.stdout, done.stdout + done.stderr
