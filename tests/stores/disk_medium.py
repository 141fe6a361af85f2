"""Small disk stores for tests, and objects whose bytes follow from their key."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from aiokv.stores.base import KEY_BYTES, Result, split_keys
from aiokv.stores.disk import DiskStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import Blocks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from aiokv.stores.disk.volume import Volume

PAYLOAD_BYTES = 4_096 - 64  # a slot is one page


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def keys_of(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key_of, numbers))


def write_object(blocks: Blocks, block: int, key: bytes) -> None:
    """Write bytes that depend on the key all over the object."""
    blocks.memory.object(block)[:] = expected(key, blocks.memory.object_bytes)


def expected(key: bytes, num_bytes: int) -> bytes:
    return (key * (num_bytes // KEY_BYTES + 1))[:num_bytes]


def is_right(blocks: Blocks, block: int, key: bytes) -> bool:
    return blocks.read(block) == expected(key, blocks.memory.object_bytes)


def small_store(path: Path, *, slots: int = 64, volume: Volume | None = None, **options):
    """Return a store of ``slots`` slots of one page."""
    return DiskStore(path, bytes=slots * 4_096, min_free_bytes=0, volume=volume, **options)


@asynccontextmanager
async def opened(store: DiskStore, blocks: Blocks) -> AsyncIterator[DiskStore]:
    try:
        await store.open(blocks.memory)
        yield store
    finally:
        await store.aclose()


async def save(store: DiskStore, blocks: Blocks, numbers: Iterable[int]) -> list[int]:
    """Save objects from blocks 0, 1, ...; return the results."""
    numbers = list(numbers)
    for block, number in enumerate(numbers):
        write_object(blocks, block, key_of(number))
    results = await store.save(keys_of(numbers), np.arange(len(numbers), dtype=np.int32))
    return results.tolist()


async def load(store: DiskStore, blocks: Blocks, numbers: Iterable[int]) -> list[int]:
    """Load objects to blocks 0, 1, ...; return the numbers that were found, all with right bytes.

    Blocks are filled before, so that a load that writes nothing is detected.
    """
    numbers = list(numbers)
    found = []
    for begin in range(0, len(numbers), blocks.memory.num_blocks):
        part = numbers[begin : begin + blocks.memory.num_blocks]
        blocks.fill(0xEE)
        keys = keys_of(part)
        results = await store.load(keys, np.arange(len(part), dtype=np.int32))
        for block, (key, result) in enumerate(zip(split_keys(keys), results, strict=True)):
            assert result in (Result.DONE, Result.MISSING), f"{part[block]}: {Result(result)!r}"
            if result == Result.DONE:
                assert is_right(blocks, block, key), f"{part[block]} has wrong bytes"
                found.append(part[block])
    return found


def small_blocks(num_blocks: int = 32) -> Blocks:
    return Blocks(num_blocks, PAYLOAD_BYTES)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)
