"""Both tiers with known bytes, and a plain copy of them to compare with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from aiokv.layout.regions import Regions
from aiokv.worker.arena import HostArena
from aiokv.worker.device.cuda import CudaDevice, CudaOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.worker.device.cuda import CudaCopy

SMALL_SLOT_BYTES = 1 << 20  # many pieces, so that the ring is reused
SMALL_CHUNK_BYTES = 4 << 20  # registration boundaries inside the pool


class Pools:
    """Random bytes everywhere; ``expect_*`` do to a copy what the device should do.

    Args:
        sizes: bytes of a block in each region.
        gap: bytes between device blocks.
    """

    def __init__(
        self,
        *,
        sizes: Sequence[int],
        layers: int = 3,
        device_blocks: int = 40,
        host_blocks: int = 60,
        gap: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        import cupy

        self.random = np.random.default_rng(seed)
        self.layers = layers
        self.device_blocks, self.host_blocks = device_blocks, host_blocks
        self.regions = Regions(num_layers=layers)
        self.tensors: list[list[Any]] = []
        for index, size in enumerate(sizes):
            whole = [
                cupy.asarray(self.random.integers(0, 256, (device_blocks, size + gap), np.uint8))
                for _ in range(layers)
            ]
            self.tensors.append([tensor[:, :size] for tensor in whole])
            self.regions.add(f"r{index}", layers=self.tensors[-1])
        self.arena = HostArena(num_blocks=host_blocks, pitch_bytes=self.regions.payload_bytes)
        self.arena.blocks[:] = self.random.integers(0, 256, self.arena.blocks.shape, np.uint8)
        options.setdefault("slot_bytes", SMALL_SLOT_BYTES)
        options.setdefault("register_chunk_bytes", SMALL_CHUNK_BYTES)
        self.device = CudaDevice(options=CudaOptions(**options))
        self.device.attach(self.regions, self.arena)
        self.host = self.arena.blocks.copy()
        self.blocks = self.read_device()
        cupy.cuda.Device().synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.close()
        self.arena.close()

    def read_device(self) -> list[list[NDArray[np.uint8]]]:
        return [[tensor.get() for tensor in region] for region in self.tensors]

    def window(self, region: int, layer: int) -> slice:
        offset = self.regions.host_offset(layer, f"r{region}")
        return slice(offset, offset + self.tensors[region][layer].shape[1])

    def expect(self, direction: str, host_ids: NDArray[np.int32], ids: NDArray[np.int32]) -> None:
        """The plain copy."""
        for region in range(len(self.tensors)):
            for layer in range(self.layers):
                window = self.window(region, layer)
                if direction == "onload":
                    self.blocks[region][layer][ids] = self.host[host_ids, window]
                else:
                    self.host[host_ids, window] = self.blocks[region][layer][ids]

    def check(self) -> None:
        """Compare all bytes of both tiers, also untouched ones; padding may have become zero."""
        for region, wanted in enumerate(self.blocks):
            for layer, found in enumerate(self.read_device()[region]):
                np.testing.assert_array_equal(found, wanted[layer])
                window = self.window(region, layer)
                np.testing.assert_array_equal(self.arena.blocks[:, window], self.host[:, window])


def finish(*copies: CudaCopy) -> None:
    for copy in copies:
        copy.layer_events[-1].synchronize()
        assert copy.layer_events[-1].done
        assert copy.error() is None


def id_list(kind: str, count: int, limit: int, random: np.random.Generator) -> NDArray[np.int32]:
    if kind == "random":
        ids = random.permutation(limit)[:count]
    elif kind == "consecutive":
        ids = np.arange(limit - count, limit)
    elif kind == "reversed":
        ids = np.arange(count)[::-1]
    elif kind == "single":
        ids = np.array([limit - 1])
    elif kind == "runs":
        ids = np.concatenate([np.arange(start, start + 3) for start in range(0, limit - 3, 5)])
        ids = ids[:count]
    else:
        ids = np.arange(limit)
    return ids.astype(np.int32)
