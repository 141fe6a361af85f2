"""Engines with peers whose blocks are on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from aiokv import Regions
from aiokv.worker.device.cuda import CudaDevice, CudaOptions
from tests.harness.side_memory import SideMemory
from tests.peers.engines import Side

if TYPE_CHECKING:
    import numpy as np

    from aiokv import Lease


class GpuMemory(SideMemory):
    """Tensors on a GPU; ``tensors`` are copies of them in host memory, made by ``check``."""

    def __init__(self, device_blocks: int, block_tokens: int, gpu: int) -> None:
        self._gpu = gpu
        super().__init__(device_blocks, block_tokens, windows={})

    def take(self, device_blocks: int) -> None:
        super().take(device_blocks)
        with cupy.cuda.Device(self._gpu):
            self._on_gpu = [cupy.asarray(tensor) for tensor in self.tensors]
            cupy.cuda.Device().synchronize()
        self.regions = Regions(num_layers=self.layers)
        for number, name in enumerate(self.names):
            layers = self._on_gpu[number :: len(self.names)]
            self.regions.add(name, layers=layers, axes=("tokens", "dim"))

    def write(self, ids: Any, words: np.ndarray) -> None:
        with cupy.cuda.Device(self._gpu):
            places = tuple(cupy.asarray(each) for each in ids)
            for index, tensor in enumerate(self._on_gpu):
                tensor[places] = cupy.asarray(self._bytes(index, words))
            cupy.cuda.Device().synchronize()

    def check(self, ids: Any, words: np.ndarray, reader: str = "") -> None:
        with cupy.cuda.Device(self._gpu):
            self.tensors = [tensor.get() for tensor in self._on_gpu]
        super().check(ids, words, reader)


class GpuSide(Side):
    """As ``Side``, with slots in the memory of a GPU; it closes a step behind all work.

    Args:
        gpu: its number.
        options: of ``Side``.
    """

    default_transport = "cuda_ipc"

    def __init__(self, *, gpu: int, **options: Any) -> None:
        self.gpu = gpu
        small = CudaOptions(slot_bytes=1 << 20, register_chunk_bytes=4 << 20)
        super().__init__(CudaDevice(gpu, options=small), **options)

    def new_memory(self, device_blocks: int, block_tokens: int, **sides: Any) -> GpuMemory:
        return GpuMemory(device_blocks, block_tokens, self.gpu)

    def compute(self, lease: Lease, tokens: np.ndarray, first: int, end: int) -> None:
        super().compute(lease, tokens, first, end)
        self.engine.step()

    async def granted(self, tokens: np.ndarray, **names: Any) -> Lease:
        self.engine.step()  # blocks that were released in the open step cannot be taken
        return await super().granted(tokens, **names)

    def is_at_rest(self) -> bool:
        self.engine.step()
        return super().is_at_rest()
