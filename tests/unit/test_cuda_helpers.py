"""Helpers of the cuda device that need no GPU: handles of foreign objects, and NUMA placement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import UsageError
from aiokv.layout.regions import Regions
from aiokv.worker.device.cuda import CudaDevice
from aiokv.worker.device.cuda_handles import event_handle, stream_handle
from aiokv.worker.device.cuda_numa import Placement, placement
from aiokv.worker.device.cuda_state import Rows, merge_rows

if TYPE_CHECKING:
    from pathlib import Path


class Protocol:
    def __cuda_stream__(self):
        return (0, 77)


@pytest.mark.parametrize(
    "stream",
    [
        77,
        SimpleNamespace(ptr=77),  # CuPy
        SimpleNamespace(cuda_stream=77),  # PyTorch
        SimpleNamespace(stream_base=SimpleNamespace(cuda_stream=77)),  # Paddle
        SimpleNamespace(handle=SimpleNamespace(value=77)),  # Numba
        Protocol(),
    ],
)
def test_streams_of_every_library_have_a_handle(stream):
    assert stream_handle(stream) == 77


def test_events_of_every_library_have_a_handle():
    assert event_handle(SimpleNamespace(ptr=5)) == 5
    assert event_handle(SimpleNamespace(cuda_event=5)) == 5
    assert event_handle(SimpleNamespace(event_base=SimpleNamespace(cuda_event=5))) == 5


class CupyEvent:
    """Attributes that the device reads of ``cupy.cuda.Event``."""

    done = False

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def synchronize(self) -> None: ...


def test_device_checks_that_an_event_can_be_queried_and_was_recorded():
    device = object.__new__(CudaDevice)  # needs no GPU for that
    device.check_event(CupyEvent(5))
    with pytest.raises(UsageError, match="never recorded"):
        device.check_event(CupyEvent(0))
    for refused in ("text", 5):
        with pytest.raises(UsageError, match="is not an event"):
            device.check_event(refused)


def test_an_event_that_was_never_recorded_is_refused():
    with pytest.raises(UsageError, match="never recorded"):
        event_handle(SimpleNamespace(cuda_event=0))


def test_other_objects_are_refused():
    with pytest.raises(UsageError, match=r"stream is a builtins\.str; it must be a CUDA stream"):
        stream_handle("0")


def sysfs(root: Path, *, nodes: int, gpu_node: int, free_kib: int = 1 << 20) -> Path:
    for node in range(nodes):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(f"Node {node} MemFree:  {free_kib} kB\n")
    gpu = root / "bus/pci/devices/0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{gpu_node}\n")
    return root


def test_the_arena_is_bound_to_the_node_of_the_gpu_when_it_has_enough_memory(tmp_path):
    root = sysfs(tmp_path, nodes=2, gpu_node=1)
    assert placement("0000:3B:00.0", 1 << 20, root) == Placement(1, strict=True)
    assert placement("0000:3B:00.0", 1 << 40, root) == Placement(1, strict=False)


def test_arena_is_not_bound_on_one_node_or_for_an_unknown_gpu(tmp_path):
    root = sysfs(tmp_path / "one", nodes=1, gpu_node=0)
    assert placement("0000:3b:00.0", 1, root) == Placement(-1, strict=False)
    root = sysfs(tmp_path / "two", nodes=2, gpu_node=-1)
    assert placement("0000:3b:00.0", 1, root) == Placement(-1, strict=False)
    assert placement("0000:99:00.0", 1, root) == Placement(-1, strict=False)


def test_equally_spaced_state_rows_are_one_copy():
    whole = np.zeros((3, 4, 2, 8), np.float32)  # [layers, slots, ...]
    lone = np.zeros((4, 5), np.float32)
    regions = Regions(num_layers=4)
    regions.add_state("ssm", layers=list(whole), layer_indices=[0, 1, 3])
    regions.add_state("conv", layers=[lone], layer_indices=[2])
    base, apart = whole.ctypes.data, lone.ctypes.data
    assert merge_rows(regions.state_pieces) == [
        Rows(base, 64, 64, 3, 256),
        Rows(apart, 20, 20, 1, 20),
    ]
    backwards = Regions(num_layers=2)
    backwards.add_state("ssm", layers=[whole[1], whole[0]])
    assert [rows.num_tensors for rows in merge_rows(backwards.state_pieces)] == [1, 1]
