"""Proof: seals objects before they are saved, and verifies them after they were loaded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from aiokv._native import derive_keys, seal_blocks, verify_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory

__all__ = ["Proof", "derive_keys", "seal_blocks", "verify_blocks"]

INLINE_BYTES: Final = 256 << 10  # fewer bytes are read on the loop: a thread would take longer


class Proof:
    """Seals and verifies blocks of the arena, in a thread of its own.

    Args:
        memory: the arena; not accessed after ``close``.
    """

    def __init__(self, memory: StoreMemory) -> None:
        self._memory = memory
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="aiokv-proof")

    async def seal(self, keys: bytes, blocks: NDArray[np.int32]) -> None:
        """Write the trailer of each block.

        Cancellation: trailers may still be written until ``close`` has returned.
        """
        memory = self._memory
        arguments = (memory.address, memory.pitch_bytes, memory.payload_bytes, blocks, keys)
        if len(blocks) * memory.payload_bytes < INLINE_BYTES:
            seal_blocks(*arguments)
        else:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, seal_blocks, *arguments)

    async def verify(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return ``DONE`` or ``WRONG`` for each block: the length, the key and the checksum of its
        object are right, or not.

        Cancellation: blocks may still be read until ``close`` has returned.
        """
        memory = self._memory
        arguments = (memory.address, memory.pitch_bytes, memory.payload_bytes, blocks, keys)
        if len(blocks) * memory.payload_bytes < INLINE_BYTES:
            return verify_blocks(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, verify_blocks, *arguments)

    def close(self) -> None:
        """Wait until no thread accesses the memory. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
