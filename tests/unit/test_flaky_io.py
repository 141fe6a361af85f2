"""FlakyIo: each fault does to the file and to the results what the script says."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio

from aiokv.stores.disk.io import DiskIo
from aiokv.testing import spin
from tests.harness.flaky_io import FlakyIo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BLOCK = 1024


class Fixture:
    """Four blocks of memory and of a file."""

    def __init__(self, path: Path, io: FlakyIo) -> None:
        self.io = io
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT)
        self.memory = np.ones((4, BLOCK), np.uint8)
        self.offsets = np.arange(4, dtype=np.uint64) * BLOCK
        self.addresses = self.memory.ctypes.data + self.offsets
        self.lengths = np.full(4, BLOCK, np.uint32)

    async def write(self) -> list[int]:
        results = await self.io.write(self.fd, self.addresses, self.lengths, self.offsets)
        return results.tolist()

    async def read(self) -> list[int]:
        results = await self.io.read(self.fd, self.addresses, self.lengths, self.offsets)
        return results.tolist()

    def ones(self) -> list[int]:
        """Return for each block the bytes that reached the file."""
        content = self.path.read_bytes().ljust(4 * BLOCK, b"\0")
        return [sum(content[i * BLOCK : (i + 1) * BLOCK]) for i in range(4)]


@pytest_asyncio.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Fixture]:
    io = FlakyIo(DiskIo(backend="threads"))
    io.register_buffer(0, BLOCK)
    found = Fixture(tmp_path / "file", io)
    yield found
    await io.aclose()
    os.close(found.fd)


@pytest.mark.asyncio
async def test_without_faults_all_bytes_move(disk: Fixture) -> None:
    assert disk.io.backend == "threads"
    assert await disk.write() == [BLOCK] * 4
    assert disk.ones() == [BLOCK] * 4
    disk.memory[:] = 0
    assert await disk.read() == [BLOCK] * 4
    assert (disk.memory == 1).all()
    assert await disk.io.flush(disk.fd) == 0
    assert disk.io.faults == 0


@pytest.mark.asyncio
async def test_failed_requests_move_nothing(disk: Fixture) -> None:
    disk.io.fail("write", errno.ENOSPC, times=2)
    assert await disk.write() == [-errno.ENOSPC, -errno.ENOSPC, BLOCK, BLOCK]
    assert disk.ones() == [0, 0, BLOCK, BLOCK]
    assert await disk.write() == [BLOCK] * 4
    assert disk.io.faults == 2


@pytest.mark.asyncio
async def test_fault_covers_the_requests_that_it_chooses(disk: Fixture) -> None:
    disk.io.fail("read", times=1, covers=lambda request: request.offset == 2 * BLOCK)
    assert await disk.write() == [BLOCK] * 4
    assert await disk.read() == [BLOCK, BLOCK, -errno.EIO, BLOCK]
    assert await disk.read() == [BLOCK] * 4


@pytest.mark.asyncio
async def test_cut_requests_move_their_first_bytes(disk: Fixture) -> None:
    disk.io.cut("write", 10, times=1)
    disk.io.cut("write", 20, times=1, acknowledge=True)
    disk.io.cut("write", 30, times=1, error=errno.EIO)
    assert await disk.write() == [10, BLOCK, -errno.EIO, BLOCK]
    assert disk.ones() == [10, 20, 30, BLOCK]
    disk.io.cut("read", 8)
    disk.memory[:] = 5
    assert await disk.read() == [8] * 4
    assert (disk.memory[:, 8:] == 5).all()


@pytest.mark.asyncio
async def test_held_calls_wait_for_their_gate(disk: Fixture) -> None:
    gate = disk.io.hold("write")
    call = asyncio.create_task(disk.write())
    cancelled = asyncio.create_task(disk.write())
    await spin(3)
    assert disk.io.held == 2
    assert disk.ones() == [0] * 4
    assert await disk.io.flush(disk.fd) == 0
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    gate.open()
    assert await call == [BLOCK] * 4
    assert await disk.write() == [BLOCK] * 4
    assert disk.io.held == 0


@pytest.mark.asyncio
async def test_flush_fails_once(disk: Fixture) -> None:
    disk.io.fail("flush", times=1)
    assert await disk.io.flush(disk.fd) == -errno.EIO
    assert await disk.io.flush(disk.fd) == 0


@pytest.mark.asyncio
async def test_heal_and_close_end_all_faults(disk: Fixture) -> None:
    disk.io.fail("write")
    assert await disk.write() == [-errno.EIO] * 4
    disk.io.hold("write")
    call = asyncio.create_task(disk.write())
    await spin(3)
    disk.io.heal()
    assert await call == [BLOCK] * 4
    assert await disk.write() == [BLOCK] * 4


@pytest.mark.asyncio
async def test_error_of_the_file_is_not_hidden_by_a_fault(disk: Fixture) -> None:
    disk.io.cut("write", 8, acknowledge=True)
    fd, disk.fd = disk.fd, 999_999
    assert await disk.write() == [-errno.EBADF] * 4
    disk.fd = fd
