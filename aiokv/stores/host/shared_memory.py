"""SharedMemory: slots of one size and a filter of their keys, mapped by several processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv import _native
from aiokv.errors import StoreError
from aiokv.stores.base import SharedFilter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """A mapping of slots. The pages of a slot exist once it was accessed.

    The size is sealed: no process can end another one by making the memory shorter.

    Args:
        descriptor: descriptor of the memory, which the mapping duplicates.
        num_slots: number of slots.
        payload_bytes: payload of an object.
        pitch_bytes: distance between slots, a multiple of the page size.
        num_counters: size of the filter, in bytes, behind the slots.

    Attributes:
        counters: the filter; see ``_native.SlotTable.publish``.
        shared_filter: where other processes map it.

    Raises:
        StoreError: the memory is shorter, is not sealed, or cannot be mapped.
    """

    def __init__(
        self,
        descriptor: int,
        num_slots: int,
        payload_bytes: int,
        pitch_bytes: int,
        num_counters: int,
    ) -> None:
        size = num_slots * pitch_bytes + num_counters
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if seals & _SIZE_SEALS != _SIZE_SEALS or os.fstat(descriptor).st_size != size:
                raise StoreError(f"shared memory does not have {size} bytes, or is not sealed")
            self._map = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            raise StoreError(f"{size} bytes of shared memory cannot be mapped: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.counters = self._bytes[num_slots * pitch_bytes :]
        kept = os.dup(descriptor)
        weakref.finalize(self, os.close, kept)
        path = f"/proc/{os.getpid()}/fd/{kept}"
        status = os.fstat(kept)
        self.shared_filter = SharedFilter(
            path, num_slots * pitch_bytes, num_counters, (status.st_dev, status.st_ino)
        )
        self._layout = (self._bytes.ctypes.data, pitch_bytes, num_slots)
        self._payload_bytes = payload_bytes
        self._pitch_bytes = pitch_bytes

    @classmethod
    def create(
        cls, num_slots: int, payload_bytes: int, pitch_bytes: int, num_counters: int
    ) -> tuple[SharedMemory, int]:
        """Return new memory of the kernel without a name, and its descriptor.

        Raises:
            StoreError: the memory cannot be mapped.
        """
        descriptor = os.memfd_create("aiokv-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_slots * pitch_bytes + num_counters)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            memory = cls(descriptor, num_slots, payload_bytes, pitch_bytes, num_counters)
            return memory, descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def load(
        self,
        keys: bytes,
        slots: NDArray[np.int32],
        memory: StoreMemory,
        blocks: NDArray[np.int32],
    ) -> NDArray[np.uint8]:
        """Copy objects from slots to blocks, and verify the copies.

        Returns ``[N]`` uint8 ``Result``. Blocks, and releases the GIL.
        """
        return self._copied(self._layout, slots, _layout(memory), blocks, keys)

    def save(
        self,
        keys: bytes,
        slots: NDArray[np.int32],
        memory: StoreMemory,
        blocks: NDArray[np.int32],
    ) -> NDArray[np.uint8]:
        """Copy objects from blocks to slots; see ``load``."""
        return self._copied(_layout(memory), blocks, self._layout, slots, keys)

    def _copied(
        self,
        source: tuple[int, int, int],
        source_blocks: NDArray[np.int32],
        target: tuple[int, int, int],
        target_blocks: NDArray[np.int32],
        keys: bytes,
    ) -> NDArray[np.uint8]:
        return _native.copy_objects(
            source,
            source_blocks,
            target,
            target_blocks,
            payload_bytes=self._payload_bytes,
            keys=keys,
        )

    def touch(self, slots: NDArray[np.int32]) -> None:
        """Let the pages of slots exist, without changing their bytes. Blocks."""
        for slot in slots.tolist():
            begin = slot * self._pitch_bytes
            self._bytes[begin : begin + self._pitch_bytes : mmap.PAGESIZE].max()

    def drop(self, slots: NDArray[np.int32]) -> None:
        """Return the pages of slots to the kernel; their bytes are lost."""
        for slot in slots.tolist():
            self._map.madvise(mmap.MADV_REMOVE, slot * self._pitch_bytes, self._pitch_bytes)


def _layout(memory: StoreMemory) -> tuple[int, int, int]:
    return memory.address, memory.pitch_bytes, memory.num_blocks
