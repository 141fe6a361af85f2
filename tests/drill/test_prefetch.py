"""Defects of prefetching, and of bytes that arrive from another tier.

Tiers below the host do not exist here, so neither do their defects: see tests/PARITY.md.
"""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from aiokv.errors import TransferError
from tests.drill.drill import BLOCK_TOKENS, Drill, prompt

A, B = (prompt(seed, 2) for seed in range(1, 3))
LONG = prompt(4, 6)

pytestmark = pytest.mark.asyncio


async def test_prefetched_blocks_are_indexed_behind_their_prefix():
    """Defect: Prefetched blocks are inserted below the root: their prompt misses them, and another
    prompt hits them.
    """
    async with Drill(device_blocks=16, host_blocks=16) as drill:
        await drill.to_host(LONG)
        await drill.fill(prompt(4, 3))
        assert (await drill.engine.prefetch(LONG)).device_tokens == 6 * BLOCK_TOKENS
        assert drill.hit(LONG) == (6, 0)
        assert drill.hit(LONG[3 * BLOCK_TOKENS :]) == (0, 0)
        (await drill.serve(LONG)).release()


async def test_prefetched_blocks_are_evictable():
    """Defect: The refs of a prefetch are never dropped: its blocks are never evicted."""
    async with Drill(device_blocks=16) as drill:
        await drill.to_host(LONG)
        await drill.engine.prefetch(LONG)
        assert drill.statistics.leases == 0
        assert await drill.engine.evict(16) == 6
        await drill.nothing_lost()


async def test_failed_prefetch_frees_its_own_blocks_only():
    """Defect: The abort of a prefetch releases blocks of other requests that have the same id in
    another tier.
    """
    async with Drill(device_blocks=16, host_blocks=16) as drill:
        await drill.to_host(A, B)
        (await drill.serve(B)).release()
        drill.device.fail("onload", 1, block=1)
        with pytest.raises(TransferError):
            await drill.engine.prefetch(A)
        assert (drill.hit(A), drill.hit(B)) == ((1, 0), (2, 0))
        for tokens in (A, B):
            (await drill.serve(tokens)).release()
        await drill.nothing_lost()


async def test_prefetch_evicts_when_no_block_is_free():
    """Defect: A prefetch uses free blocks only: in a warm cache it brings nothing."""
    async with Drill(device_blocks=4, host_blocks=16) as drill:
        await drill.to_host(A)
        await drill.fill(prompt(5, 3))
        assert drill.statistics.attention.device.free == 1
        await drill.engine.drain()
        assert (await drill.engine.prefetch(A)).device_tokens == 8


async def test_torn_bytes_are_detected():
    """Defect: No checksum and no length: a half-written block is accepted."""
    async with Drill(verify="checksum") as drill:
        await drill.to_host(A)
        drill.engine.inspect.parts.worker.memory.arena.blocks[:, 5] ^= 0xFF
        with pytest.raises(TransferError, match="checksum"):
            await drill.serve(A)
        assert drill.hit(A) == (0, 0)


async def test_other_users_cannot_open_the_memory_of_the_cache():
    """Defect: Shared memory is writable by every user, under a path made of an address."""

    def open_things() -> set[str]:
        names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the descriptor that lists the directory
                names.add(os.readlink(f"/proc/self/fd/{number}"))
        return {name for name in names if name.startswith(("/dev/shm/", "socket:"))}

    before = open_things()
    async with Drill() as drill:
        await drill.fill(A)
        await drill.engine.drain()
        assert open_things() <= before
