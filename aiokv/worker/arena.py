"""HostArena: the memory of the host tier, one block-first pool.

A device that has to register host memory does it in ``attach`` with ``pointer`` and ``nbytes``, and
undoes it in ``close``: the controller frees the arena only after that.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

HUGE_PAGE_BYTES: Final = 2 << 20


class HostArena:
    """Anonymous memory, advised to huge pages and aligned to them; zeroed, not touched yet.

    Args:
        num_blocks: capacity of the host tier.
        pitch_bytes: distance from one block to the next.

    Raises:
        ConfigError: the system has not that much memory.
    """

    def __init__(self, *, num_blocks: int, pitch_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.pitch_bytes = pitch_bytes
        self.nbytes = num_blocks * pitch_bytes
        self._map = _reserve(self.nbytes)
        raw = np.frombuffer(self._map, dtype=np.uint8)
        skip = -raw.ctypes.data % HUGE_PAGE_BYTES
        self._blocks: NDArray[np.uint8] | None = raw[skip : skip + self.nbytes].reshape(
            num_blocks, pitch_bytes
        )
        self.pointer = raw.ctypes.data + skip

    @property
    def blocks(self) -> NDArray[np.uint8]:
        """``[num_blocks, pitch_bytes]`` uint8, not copied.

        Raises:
            ClosedError: the arena was freed.
        """
        if self._blocks is None:
            raise ClosedError("the host arena is closed")
        return self._blocks

    def close(self) -> None:
        """Free the memory; it is freed with the last view of it. Idempotent."""
        self._blocks = None
        try:
            self._map.close()
        except BufferError:
            return  # the last view frees the memory


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        region = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE)
    except OSError as error:
        raise ConfigError(
            f"cannot reserve {nbytes} bytes for the host tier: {error}", hint="lower host_blocks"
        ) from error
    if nbytes >= HUGE_PAGE_BYTES:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return region  # a kernel without huge pages: slower, but correct
    return region
