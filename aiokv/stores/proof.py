"""Proof: seals objects before they are saved, and verifies them after they were loaded."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np

from aiokv.stores.base import KEY_BYTES, Result

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aiokv.stores.base import StoreMemory

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


# --- the native functions, in Python --------------------------------------------------------------

_MAGIC: Final = b"aiokv\x00ob"
_TRAILER: Final = struct.Struct("<8sIQ32sQ4x")


def _buffer(address: int, num_bytes: int) -> memoryview:
    import ctypes

    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def _trailer(payload: memoryview, key: bytes) -> bytes:
    return _TRAILER.pack(_MAGIC, 1, len(payload), key, zlib.crc32(payload, zlib.crc32(key)))


def seal_blocks(
    address: int, pitch_bytes: int, payload_bytes: int, blocks: NDArray[np.int32], keys: bytes
) -> None:
    """Write the trailers of blocks behind their payloads."""
    for i, block in enumerate(blocks.tolist()):
        key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        whole = _buffer(address + block * pitch_bytes, payload_bytes + _TRAILER.size)
        whole[payload_bytes:] = _trailer(whole[:payload_bytes], key)


def verify_blocks(
    address: int, pitch_bytes: int, payload_bytes: int, blocks: NDArray[np.int32], keys: bytes
) -> NDArray[np.uint8]:
    """Compare the trailers of blocks with their payloads and keys."""
    results = np.full(len(blocks), Result.WRONG, np.uint8)
    for i, block in enumerate(blocks.tolist()):
        key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
        whole = _buffer(address + block * pitch_bytes, payload_bytes + _TRAILER.size)
        if whole[payload_bytes:] == _trailer(whole[:payload_bytes], key):
            results[i] = Result.DONE
    return results


def derive_keys(fingerprint: bytes, digests: bytes) -> bytes:
    """Return the keys of blocks in stores, as bytes of ``N * KEY_BYTES``."""
    return b"".join(
        hashlib.sha256(fingerprint + digests[i : i + KEY_BYTES]).digest()
        for i in range(0, len(digests), KEY_BYTES)
    )
