"""Slots in device memory: their trailers are those of the CPU, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import _native
from aiokv.errors import UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.layout.regions import Regions
from aiokv.worker.device.cuda import slice_layout
from aiokv.worker.device.cuda_slots import CudaSlots, DeviceArena

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

NUM_SLOTS, NUM_BLOCKS, LAYERS = 300, 320, 3
DONE, WRONG = 0, 2

# Bytes of a block in each region: one chunk, many units, a unit and a part, parts of chunks.
SIZES = [[4096], [65536, 65536], [12288, 4096], [131072], [4096, 576], [64], [1024 + 80], [33024]]


class Slots:
    """Device blocks and slots with random bytes."""

    def __init__(self, sizes: list[int], *, bulk: bool, ctas: int = 8) -> None:
        import cupy

        self.cupy = cupy
        self.random = np.random.default_rng(sum(sizes))
        self.regions = Regions(num_layers=LAYERS)
        self.tensors: list[list[Any]] = []
        for index, size in enumerate(sizes):
            tensors = [
                cupy.asarray(self.random.integers(0, 256, (NUM_BLOCKS, size), np.uint8))
                for _ in range(LAYERS)
            ]
            self.tensors.append(tensors)
            self.regions.add(f"r{index}", layers=tensors)
        self.payload = self.regions.payload_bytes
        self.arena = DeviceArena(0, num_blocks=NUM_SLOTS, pitch_bytes=self.payload + TRAILER_BYTES)
        memory = cupy.cuda.UnownedMemory(self.arena.pointer, self.arena.nbytes, self.arena)
        self.view = cupy.ndarray(
            (NUM_SLOTS, self.arena.pitch_bytes), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)
        )
        self.view[:] = cupy.asarray(self.random.integers(0, 256, self.view.shape, np.uint8))
        self.slots = CudaSlots(
            cupy, self.regions, slice_layout(self.regions), self.arena, ctas=ctas, bulk=bulk
        )
        cupy.cuda.Device().synchronize()

    def close(self) -> None:
        self.slots.close()
        del self.view
        self.arena.close()

    def ids(self, count: int, limit: int) -> NDArray[np.int32]:
        return self.random.permutation(limit)[:count].astype(np.int32)

    def keys(self, count: int) -> bytes:
        return self.random.bytes(32 * count)

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The host blocks of device blocks, with zeros between the pieces."""
        rows = np.zeros((len(ids), self.arena.pitch_bytes), np.uint8)
        for index, tensors in enumerate(self.tensors):
            for layer, tensor in enumerate(tensors):
                offset = self.regions.host_offset(layer, f"r{index}")
                rows[:, offset : offset + tensor.shape[1]] = tensor.get()[ids]
        return rows

    def sealed(self, rows: NDArray[np.uint8], keys: bytes) -> NDArray[np.uint8]:
        """The rows with the trailers of the CPU."""
        rows = np.ascontiguousarray(rows)
        count, pitch = rows.shape
        _native.seal_blocks(
            rows.ctypes.data,
            pitch,
            self.payload,
            np.arange(count, dtype=np.int32),
            keys,
            num_blocks=count,
        )
        return rows


@pytest.fixture(params=[True, False], ids=["bulk", "registers"])
def bulk(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=SIZES, ids=str)
def slots(request: pytest.FixtureRequest, bulk: bool) -> Iterator[Slots]:
    slots = Slots(request.param, bulk=bulk)
    yield slots
    slots.close()


@pytest.mark.parametrize("count", [1, 257, NUM_SLOTS])
def test_a_gather_seals_as_the_cpu_does(slots: Slots, count: int) -> None:
    device_ids, ids = slots.ids(count, NUM_BLOCKS), slots.ids(count, NUM_SLOTS)
    keys = slots.keys(count)
    before = slots.view.get()
    slots.slots.gather(device_ids, ids, keys).layer_events[0].synchronize()
    found = slots.view.get()
    np.testing.assert_array_equal(found[ids], slots.sealed(slots.rows(device_ids), keys))
    others = np.setdiff1d(np.arange(NUM_SLOTS), ids)
    np.testing.assert_array_equal(found[others], before[others])


def test_slots_that_the_cpu_sealed_are_right(slots: Slots) -> None:
    ids, keys = slots.ids(100, NUM_SLOTS), slots.keys(100)
    rows = slots.sealed(slots.random.integers(0, 256, (100, slots.view.shape[1]), np.uint8), keys)
    slots.view[slots.cupy.asarray(ids)] = slots.cupy.asarray(rows)
    slots.cupy.cuda.Device().synchronize()
    work = slots.slots.verify(ids, keys)
    work.layer_events[0].synchronize()
    assert set(work.results) == {DONE}
    np.testing.assert_array_equal(slots.view.get()[ids], rows)


def test_one_changed_bit_is_noticed(slots: Slots) -> None:
    keys = slots.keys(NUM_SLOTS)
    ids = slots.ids(NUM_SLOTS, NUM_SLOTS)
    rows = slots.sealed(
        slots.random.integers(0, 256, (NUM_SLOTS, slots.view.shape[1]), np.uint8), keys
    )
    changed = set(range(0, NUM_SLOTS, 3))
    for row in changed:
        byte = int(slots.random.integers(0, slots.payload + TRAILER_BYTES))
        rows[row, byte] ^= 1 << int(slots.random.integers(0, 8))
    slots.view[slots.cupy.asarray(ids)] = slots.cupy.asarray(rows)
    slots.cupy.cuda.Device().synchronize()
    for _ in range(2):  # the second pass finds the counters of the first
        work = slots.slots.verify(ids, keys)
        work.layer_events[0].synchronize()
        results = work.results
        assert {row for row in range(NUM_SLOTS) if results[row] == WRONG} == changed
    work = slots.slots.verify(ids[:5], keys[32 : 6 * 32])  # keys of other slots
    work.layer_events[0].synchronize()
    assert set(work.results) == {WRONG}


def test_a_scatter_copies_what_a_gather_wrote(slots: Slots) -> None:
    count = 100
    device_ids = slots.ids(2 * count, NUM_BLOCKS)
    sources, targets = device_ids[:count], device_ids[count:]
    ids, keys = slots.ids(count, NUM_SLOTS), slots.keys(count)
    slots.slots.gather(sources, ids, keys).layer_events[0].synchronize()
    wanted = slots.rows(np.arange(NUM_BLOCKS, dtype=np.int32))
    wanted[targets] = wanted[sources]
    work = slots.slots.scatter_verified(ids, targets, keys)
    work.layer_events[0].synchronize()
    assert work.results == bytes(count)
    np.testing.assert_array_equal(slots.rows(np.arange(NUM_BLOCKS, dtype=np.int32)), wanted)


def test_bad_arguments_submit_nothing(slots: Slots) -> None:
    before = slots.view.get()
    one = np.array([1], np.int32)
    for device_ids, ids, keys in (
        (one, one, bytes(31)),
        (one, np.array([NUM_SLOTS], np.int32), bytes(32)),
        (np.array([NUM_BLOCKS], np.int32), one, bytes(32)),
        (np.array([1, 2], np.int32), np.array([1, 1], np.int32), bytes(64)),
        (np.array([1, 2], np.int32), one, bytes(32)),
    ):
        with pytest.raises(UsageError):
            slots.slots.gather(device_ids, ids, keys)
    np.testing.assert_array_equal(slots.view.get(), before)
