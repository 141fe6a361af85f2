"""Every path moves the same bytes as a plain copy, and touches no other."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.errors import LayoutError, UsageError
from aiokv.layout.regions import Regions
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cuda import CudaDevice

from .pools import Pools, finish, id_list

KINDS = ("random", "consecutive", "reversed", "single", "runs", "full")
SIZES = ((16384, 16384), (4096, 512), (1000, 24), (1001, 3), (70_000,))


def ids_of(kind: str, pools: Pools) -> tuple[np.ndarray, np.ndarray]:
    count = 24 if kind != "full" else min(pools.device_blocks, pools.host_blocks)
    host_ids = id_list(kind, count, pools.host_blocks, pools.random)[:count]
    device_ids = id_list("random", len(host_ids), pools.device_blocks, pools.random)
    return host_ids, device_ids


def copy(device, direction, host_ids, device_ids):
    if direction == "onload":
        return device.copy(ONLOAD, host_ids, device_ids, None)
    return device.copy(OFFLOAD, device_ids, host_ids, None)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("path", ["auto", "staged", "direct"])
def test_bytes_of_every_path_and_id_list(sizes, path):
    with Pools(sizes=sizes, path=path, seed=hash(sizes) % 1000) as pools:
        for kind in KINDS:
            for direction in ("onload", "offload"):
                host_ids, device_ids = ids_of(kind, pools)
                finish(copy(pools.device, direction, host_ids, device_ids))
                pools.expect(direction, host_ids, device_ids)
        pools.check()


@pytest.mark.parametrize("gap", [8, 7])
@pytest.mark.parametrize("path", ["staged", "direct"])
def test_strided_and_unaligned_blocks_are_copied(gap, path):
    with Pools(sizes=(1000, 4096), gap=gap, path=path) as pools:
        host_ids, device_ids = ids_of("random", pools)
        finish(pools.device.copy(ONLOAD, host_ids, device_ids, None))
        pools.expect("onload", host_ids, device_ids)
        finish(pools.device.copy(OFFLOAD, device_ids, host_ids[::-1], None))
        pools.expect("offload", host_ids[::-1], device_ids)
        pools.check()


def test_both_directions_at_once():
    with Pools(sizes=(65536, 65536), layers=8, device_blocks=64, host_blocks=64) as pools:
        halves = np.arange(64, dtype=np.int32).reshape(2, 32)
        for _ in range(5):
            copies = (
                pools.device.copy(ONLOAD, halves[0], halves[0][::-1], None),
                pools.device.copy(OFFLOAD, halves[1][::-1], halves[1], None),
            )
            finish(*copies)
        pools.expect("onload", halves[0], halves[0][::-1])
        pools.expect("offload", halves[1], halves[1][::-1])
        pools.check()


def test_a_layer_larger_than_a_slot():
    with Pools(sizes=(3 << 20,), layers=2, device_blocks=4, host_blocks=6) as pools:
        host_ids, device_ids = np.array([5, 0, 3], np.int32), np.array([1, 2, 0], np.int32)
        finish(pools.device.copy(ONLOAD, host_ids, device_ids, None))
        pools.expect("onload", host_ids, device_ids)
        finish(pools.device.copy(OFFLOAD, device_ids[::-1], host_ids, None))
        pools.expect("offload", host_ids, device_ids[::-1])
        pools.check()


def test_one_source_to_many_destinations():
    with Pools(sizes=(4096,)) as pools:
        same, distinct = np.full(8, 5, np.int32), np.arange(8, dtype=np.int32)
        finish(pools.device.copy(ONLOAD, same, distinct, None))
        pools.expect("onload", same, distinct)
        finish(pools.device.copy(OFFLOAD, same, distinct, None))
        pools.expect("offload", distinct, same)
        pools.check()


@pytest.mark.parametrize(
    ("direction", "host_ids", "device_ids", "message"),
    [
        ("onload", [0, 1], [3, 3], "duplicate destination"),
        ("offload", [3, 3], [0, 1], "duplicate destination"),
        ("onload", [60], [0], r"not in \[0, 60\)"),
        ("onload", [0], [-1], r"not in \[0, 40\)"),
        ("offload", [0, 1], [0], "2 host blocks for 1"),
    ],
)
def test_wrong_ids_are_refused_before_the_first_byte(direction, host_ids, device_ids, message):
    with Pools(sizes=(4096,)) as pools:
        with pytest.raises(UsageError, match=message):
            copy(
                pools.device,
                direction,
                np.array(host_ids, np.int32),
                np.array(device_ids, np.int32),
            )
        pools.check()


def test_an_empty_transfer_ends():
    with Pools(sizes=(4096,)) as pools:
        none = np.zeros(0, np.int32)
        finish(
            pools.device.copy(ONLOAD, none, none, None),
            pools.device.copy(OFFLOAD, none, none, None),
        )
        pools.check()


def test_layers_without_a_region():
    import cupy

    regions = Regions(num_layers=4)
    tensors = [cupy.zeros((4, 100), cupy.uint8) for _ in range(2)]
    regions.add("k", layers=tensors, layer_indices=[1, 3])
    arena = HostArena(num_blocks=4, pitch_bytes=regions.payload_bytes)
    arena.blocks[:] = 7
    device = CudaDevice()
    device.attach(regions, arena)
    ids = np.arange(4, dtype=np.int32)
    finish(device.copy(ONLOAD, ids, ids, None))
    assert all(int(tensor.min()) == 7 for tensor in tensors)
    device.close()
    arena.close()


@pytest.mark.parametrize("library", ["torch", "dlpack", "interface"])
def test_tensors_of_other_libraries(library):
    import cupy

    if library == "torch":
        torch = pytest.importorskip("torch")
        tensors = [torch.zeros((6, 16, 2, 64), dtype=torch.bfloat16, device="cuda")]
    else:
        torch = None
        tensors = [cupy.zeros((6, 16, 2, 64), cupy.float16)]
    given = tensors
    if library == "dlpack":
        given = [_OnlyDlpack(tensors[0])]
    regions = Regions(num_layers=1)
    regions.add("k", layers=given)
    arena = HostArena(num_blocks=6, pitch_bytes=regions.payload_bytes)
    arena.blocks[:] = np.random.default_rng(1).integers(0, 256, arena.blocks.shape, np.uint8)
    device = CudaDevice()
    device.attach(regions, arena)
    ids = np.arange(6, dtype=np.int32)
    finish(device.copy(ONLOAD, ids, ids[::-1], None))
    raw = tensors[0].view(torch.uint8).cpu().numpy() if torch else tensors[0].view(cupy.uint8).get()
    np.testing.assert_array_equal(raw.reshape(6, -1)[::-1], arena.blocks[:, : raw[0].size])
    device.close()
    arena.close()


class _OnlyDlpack:
    def __init__(self, array: object) -> None:
        self._array = array

    def __dlpack__(self, **kwargs: object) -> object:
        return self._array.__dlpack__(**kwargs)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> object:
        return self._array.__dlpack_device__()  # type: ignore[attr-defined]


def test_tensors_on_the_cpu_are_refused():
    regions = Regions(num_layers=1)
    regions.add("k", layers=[np.zeros((4, 16), np.uint8)])
    arena = HostArena(num_blocks=4, pitch_bytes=regions.payload_bytes)
    with pytest.raises(LayoutError, match="copies tensors on a GPU"):
        CudaDevice().attach(regions, arena)
    arena.close()


def test_two_devices():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU in this machine")
    with cupy.cuda.Device(1):
        tensor = cupy.zeros((4, 4096), cupy.uint8)
    regions = Regions(num_layers=1)
    regions.add("k", layers=[tensor])
    arena = HostArena(num_blocks=4, pitch_bytes=regions.payload_bytes)
    arena.blocks[:] = 9
    with pytest.raises(LayoutError, match="is on cuda:1"):
        CudaDevice(0).attach(regions, arena)
    device = CudaDevice(1)
    device.attach(regions, arena)
    ids = np.arange(4, dtype=np.int32)
    finish(device.copy(ONLOAD, ids, ids, None))
    assert cupy.cuda.Device().id == 0
    with cupy.cuda.Device(1):  # where its kernels have to run
        assert int(tensor.min()) == 9
    device.close()
    arena.close()
