"""Common parts of the demo's models on the cpu, which compute in the calling thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.worker.device.cpu import CpuDevice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv import Regions
    from aiokv.worker.device.base import Event


class ThreadStream:
    """The runner's thread as a stream: it works in order, and to make it wait is to block it."""

    def wait_event(self, event: Event) -> None:
        """Block, without the GIL, until the layer's bytes are there."""
        event.synchronize()

    def record(self) -> None:
        """Return None: the work has finished when the call returns."""


class BlockBytes:
    """The bytes of a cache's blocks, read where the regions are."""

    def __init__(self, regions: Regions) -> None:
        self._views = [piece.view() for piece in regions.pieces()]

    def read(self, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy whole blocks, ``[blocks, block_bytes]``."""
        return np.concatenate([view[blocks] for view in self._views], axis=1)


class CpuModel:
    """A model whose forward pass has finished when it returns."""

    stream = ThreadStream()

    def new_device(self) -> CpuDevice:
        return CpuDevice()
