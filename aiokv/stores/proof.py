"""Proof: seals objects before they are saved, and verifies them after they were loaded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from aiokv._native import derive_keys, seal_blocks, verify_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.stores.accesses import Accesses
    from aiokv.stores.base import StoreMemory

T = TypeVar("T")

__all__ = ["Proof", "derive_keys", "seal_blocks", "verify_blocks"]

INLINE_BYTES: Final = 256 << 10  # fewer bytes are read on the loop, which is faster than a thread


class Proof:
    """Seals and verifies blocks of the arena: in threads, or on the loop if they are few bytes.

    Args:
        memory: the arena; not accessed after ``close``.
    """

    def __init__(self, memory: StoreMemory) -> None:
        self._memory = memory
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="aiokv-proof")

    async def seal(
        self, keys: bytes, blocks: NDArray[np.int32], accesses: Accesses | None = None
    ) -> None:
        """Write the trailer of each block.

        Args:
            keys: one per block.
            blocks: host blocks.
            accesses: gets the work of the thread.

        Cancellation: trailers may still be written; see ``accesses`` for the end.
        """
        await self._run(seal_blocks, keys, blocks, accesses)

    async def verify(
        self, keys: bytes, blocks: NDArray[np.int32], accesses: Accesses | None = None
    ) -> NDArray[np.uint8]:
        """Return for each block ``DONE`` if the length, the key and the checksum of its object are
        right; otherwise ``WRONG``.

        Args:
            keys: one per block.
            blocks: host blocks.
            accesses: gets the work of the thread.

        Cancellation: blocks may still be read; see ``accesses`` for the end.
        """
        return await self._run(verify_blocks, keys, blocks, accesses)

    async def _run(
        self,
        function: Callable[..., T],
        keys: bytes,
        blocks: NDArray[np.int32],
        accesses: Accesses | None,
    ) -> T:
        memory = self._memory
        call = partial(
            function,
            memory.address,
            memory.pitch_bytes,
            memory.payload_bytes,
            blocks,
            keys,
            num_blocks=memory.num_blocks,
        )
        if len(blocks) * memory.payload_bytes < INLINE_BYTES:
            return call()
        work = asyncio.get_running_loop().run_in_executor(self._threads, call)
        if accesses is not None:
            accesses.add(work)
        # If the future were cancelled, it would not report the thread's end.
        return await asyncio.shield(work)

    def close(self) -> None:
        """Wait until no thread accesses the memory. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
