"""Both tiers of a model's cache on a GPU, and id lists like those of a real cache.

32 layers, K and V, ``slice_bytes`` a block and region: 128 KiB are 64 tokens of 8 heads of 128 in
bf16, 4 KiB are 16 tokens of one head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.layout.regions import Regions
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

GIB = 1 << 30
LAYERS = 32
HISTOGRAM = Path(__file__).with_name("results") / "host_runs.json"


class GpuPools:
    """Device pool and pinned host pool, both twice as large as a transfer."""

    def __init__(self, slice_bytes: int, transfer_bytes: int = 2 * GIB, **options: Any) -> None:
        import cupy

        self.slice_bytes = slice_bytes
        self.transfer_bytes = transfer_bytes
        self.num_blocks = transfer_bytes // (LAYERS * 2 * slice_bytes)
        pool = 2 * self.num_blocks
        self.regions = Regions(num_layers=LAYERS)
        self.tensors = {
            name: [cupy.empty((pool, slice_bytes), cupy.uint8) for _ in range(LAYERS)]
            for name in ("k", "v")
        }
        for name, tensors in self.tensors.items():
            self.regions.add(name, layers=tensors)
        self.arena = HostArena(num_blocks=pool, pitch_bytes=self.regions.payload_bytes)
        self.device = CudaDevice(options=CudaOptions(**options))
        self.device.attach(self.regions, self.arena)
        self.device.wait_pinned()

    def close(self) -> None:
        import cupy

        self.device.close()
        self.arena.close()
        self.tensors.clear()
        self.regions = Regions(num_layers=LAYERS)
        cupy.get_default_memory_pool().free_all_blocks()

    def device_ids(self, seed: int) -> NDArray[np.int32]:
        random = np.random.default_rng(seed)
        return random.permutation(2 * self.num_blocks)[: self.num_blocks].astype(np.int32)

    def host_ids(self, layout: str, seed: int) -> NDArray[np.int32]:
        """Ids of a transfer: ``random``, ``runs64``, or ``replay`` (run lengths of the replay)."""
        random = np.random.default_rng(seed)
        pool = 2 * self.num_blocks
        if layout == "random":
            return (2 * random.permutation(self.num_blocks)).astype(np.int32)  # no adjacent ids
        lengths = np.full(pool // 65, 64) if layout == "runs64" else _replay_lengths(pool, random)
        # Runs one block apart, so that they stay runs, taken in random order until enough.
        starts = np.cumsum(lengths + 1) - lengths - 1
        ids = np.concatenate(
            [np.arange(starts[i], starts[i] + lengths[i]) for i in random.permutation(len(lengths))]
        )
        return ids[: self.num_blocks].astype(np.int32)


def _replay_lengths(pool: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return run lengths drawn from those of the replay's transfers, weighted by blocks."""
    histogram = json.loads(HISTOGRAM.read_text())["benches"]["host_runs"]["blocks_by_run_length"]
    lengths = np.array([int(length) for length in histogram])
    # A run of length n appears once for every n of its blocks.
    weights = np.array([blocks / int(length) for length, blocks in histogram.items()])
    drawn = random.choice(lengths, size=pool, p=weights / weights.sum())
    drawn = np.minimum(drawn, pool // 8)  # the longest run must fit in a small pool
    return drawn[np.cumsum(drawn + 1) <= pool]
