"""Bandwidth of the cpu device: GB/s of one thread per direction, compared with plain memcpy.

``memcpy`` copies the same bytes in one call of the C library, in the same run, alternating with the
transfers; ``ratio`` is transfer / memcpy. ``contiguous``: one layer of consecutive blocks, merged
into one run. ``random_*``: 8 layers of K and V pieces of that size, random ids on both sides.
``both`` moves the bytes in and out at once, on two streams. The best of the
rounds counts: other processes of the machine disturbed the others.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.base.plan import OFFLOAD, ONLOAD
from aiokv.layout.regions import Regions
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.worker.device.cpu import CpuCopy

MIB = 1 << 20
LAYERS = 8

_memcpy = ctypes.CDLL(None).memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Pools:
    """Both tiers, touched, and the ids of one transfer of all blocks."""

    def __init__(self, *, layers: int, regions: int, piece_bytes: int, num_bytes: int) -> None:
        self.num_blocks = num_bytes // (layers * regions * piece_bytes)
        self.num_bytes = self.num_blocks * layers * regions * piece_bytes
        self.regions = Regions(num_layers=layers)
        for region in range(regions):
            tensors = [np.ones((self.num_blocks, piece_bytes), np.uint8) for _ in range(layers)]
            self.regions.add(f"r{region}", layers=tensors)
        self.arena = HostArena(num_blocks=self.num_blocks, pitch_bytes=self.regions.payload_bytes)
        self.arena.blocks[:] = 2
        self.device = CpuDevice()
        self.device.attach(self.regions, self.arena)

    def close(self) -> None:
        self.device.close()
        self.arena.close()


def run(quick: bool) -> dict[str, Any]:
    num_bytes = (64 if quick else 256) * MIB
    rounds = 5 if quick else 9
    results = {"contiguous": _measure(num_bytes, rounds, layers=1, regions=1, piece_bytes=MIB)}
    for kib in (4, 16, 128):
        results[f"random_{kib}_kib"] = _measure(
            num_bytes, rounds, layers=LAYERS, regions=2, piece_bytes=kib << 10, shuffle=True
        )
    return results


def _measure(
    num_bytes: int,
    rounds: int,
    *,
    layers: int,
    regions: int,
    piece_bytes: int,
    shuffle: bool = False,
) -> dict[str, float]:
    pools = Pools(layers=layers, regions=regions, piece_bytes=piece_bytes, num_bytes=num_bytes)
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    random = np.random.default_rng(0)
    host_ids = np.arange(pools.num_blocks, dtype=np.int32)
    device_ids = host_ids.copy()
    if shuffle:
        random.shuffle(host_ids)
        random.shuffle(device_ids)
    device = pools.device
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first round warms up
        for name, function in (
            ("memcpy", lambda: _memcpy(target.ctypes.data, source.ctypes.data, num_bytes)),
            ("onload", lambda: _finish(device.copy(ONLOAD, host_ids, device_ids, None))),
            ("offload", lambda: _finish(device.copy(OFFLOAD, device_ids, host_ids, None))),
            (
                "both",
                lambda: _finish(
                    device.copy(ONLOAD, host_ids, device_ids, None),
                    device.copy(OFFLOAD, device_ids, host_ids, None),
                ),
            ),
        ):
            seconds.setdefault(name, []).append(_seconds(function))
    pools.close()
    rates = {
        name: pools.num_bytes * (2 if name == "both" else 1) / min(times[1:]) / 1e9
        for name, times in seconds.items()
    }
    found = {f"{name}_gbps": rate for name, rate in rates.items()}
    found["onload_ratio"] = rates["onload"] / rates["memcpy"]
    found["offload_ratio"] = rates["offload"] / rates["memcpy"]
    return found


def _finish(*copies: CpuCopy) -> None:
    for copy in copies:
        copy.layer_events[-1].synchronize()
        if (error := copy.error()) is not None:
            raise RuntimeError(error.reason)


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
