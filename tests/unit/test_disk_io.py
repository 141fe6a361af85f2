"""DiskIo on both backends and both loops: bytes, errors, cancellation, close, forks."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import mmap
import os
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import _native
from aiokv.errors import ConfigError, LayoutError, UsageError
from aiokv.stores.disk.io import BACKEND_VARIABLE, CALL_REQUESTS, DiskIo
from aiokv.testing import run_until_idle, spin
from tests.harness.patience import PROGRAM_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from numpy.typing import NDArray

PAGE = 4096
PROGRAM = Path(__file__).with_name("disk_io_program.py")


def refusal() -> str:
    """Return why io_uring cannot be used here, or an empty string."""
    try:
        _native.IoQueue(1, "io_uring").close()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "io_uring" and (reason := refusal()):
        pytest.skip(reason)
    return request.param


class Blocks:
    """Pages of memory, and a file that has one block per page, in another order."""

    def __init__(self, path: Path, count: int, *, flags: int = os.O_DIRECT) -> None:
        self.count = count
        self._memory = mmap.mmap(-1, count * PAGE)
        self.bytes = np.frombuffer(self._memory, np.uint8).reshape(count, PAGE)
        self.address = self.bytes.ctypes.data
        self.num_bytes = count * PAGE
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
        self.addresses = self.address + np.arange(count, dtype=np.uint64) * PAGE
        self.lengths = np.full(count, PAGE, np.uint32)
        self.offsets = np.random.default_rng(2).permutation(count).astype(np.uint64) * PAGE

    def fill(self, seed: int) -> NDArray[np.uint8]:
        """Fill the memory at random, and return a copy."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.shape, np.uint8)
        return self.bytes.copy()

    def arguments(self, first: int = 0, last: int | None = None) -> tuple:
        part = slice(first, last)
        return self.fd, self.addresses[part], self.lengths[part], self.offsets[part]

    def close(self) -> None:
        os.close(self.fd)


@contextmanager
def blocks_at(path: Path, count: int, *, flags: int = os.O_DIRECT) -> Iterator[Blocks]:
    blocks = Blocks(path, count, flags=flags)
    try:
        yield blocks
    finally:
        blocks.close()


@asynccontextmanager
async def opened(backend: str, entries: int = 16) -> AsyncIterator[DiskIo]:
    io = DiskIo(entries=entries, backend=backend)
    try:
        yield io
    finally:
        await io.aclose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.parametrize("registers", [True, False], ids=["registered", "plain"])
@pytest.mark.parametrize("flags", [os.O_DIRECT, 0], ids=["direct", "buffered"])
async def test_bytes_of_thousands_of_requests_arrive(
    backend: str, path: Path, flags: int, registers: bool
) -> None:
    with blocks_at(path, 3000, flags=flags) as blocks:
        async with opened(backend) as io:
            assert io.backend == backend
            if registers:
                io.register_buffer(blocks.address, blocks.num_bytes)
            wanted = blocks.fill(1)
            assert ((await io.write(*blocks.arguments())) == PAGE).all()
            assert await io.flush(blocks.fd) == 0
            blocks.bytes[:] = 0
            assert ((await io.read(*blocks.arguments())) == PAGE).all()
            assert (blocks.bytes == wanted).all()
            assert io.pending == 0
        in_file = np.fromfile(path, np.uint8).reshape(-1, PAGE)
        assert (in_file[blocks.offsets // PAGE] == wanted).all()


@pytest.mark.asyncio
async def test_calls_that_run_at_once_get_their_own_results(backend: str, path: Path) -> None:
    with blocks_at(path, 200) as blocks:
        async with opened(backend, entries=3) as io:
            os.ftruncate(blocks.fd, blocks.num_bytes)
            wanted = blocks.fill(1)
            parts = [blocks.arguments(i, i + 1 + i % 7) for i in range(0, 190, 7)]
            bad = (999_999, *blocks.arguments(190, 195)[1:])
            results = await asyncio.gather(
                *(io.write(*part) for part in parts), io.write(*bad), io.flush(blocks.fd)
            )
            for part, result in zip(parts, results, strict=False):
                assert result.tolist() == part[2].tolist()
            assert results[-2].tolist() == [-errno.EBADF] * 5
            assert results[-1] == 0
            blocks.bytes[:] = 0
            await asyncio.gather(*(io.read(*part) for part in parts))
            for i in range(0, 190, 7):
                assert (blocks.bytes[i : i + 1 + i % 7] == wanted[i : i + 1 + i % 7]).all()
                assert (blocks.bytes[i + 1 + i % 7 : i + 7] == 0).all()


@pytest.mark.asyncio
async def test_call_with_more_requests_than_one_native_call(backend: str, path: Path) -> None:
    with blocks_at(path, 1, flags=0) as blocks:
        async with opened(backend) as io:
            os.ftruncate(blocks.fd, CALL_REQUESTS + 5)
            count = 2 * CALL_REQUESTS + 3
            addresses = np.full(count, blocks.address, np.uint64)
            lengths = np.full(count, 7, np.uint32)
            offsets = np.arange(count, dtype=np.uint64)
            results = await io.read(blocks.fd, addresses, lengths, offsets)
            wanted = [min(7, max(0, CALL_REQUESTS + 5 - i)) for i in range(count)]
            assert results.tolist() == wanted
            with pytest.raises(UsageError, match="their numbers must be equal"):
                await io.read(blocks.fd, addresses, lengths[1:], offsets)


@pytest.mark.asyncio
async def test_call_without_requests_returns_no_results(backend: str, path: Path) -> None:
    with blocks_at(path, 1) as blocks:
        async with opened(backend) as io:
            results = await io.read(*blocks.arguments(0, 0))
            assert (results.dtype, results.shape) == (np.int32, (0,))


@pytest.mark.asyncio
async def test_errors_are_results_of_their_requests(backend: str, path: Path) -> None:
    with blocks_at(path, 4, flags=0) as blocks:
        async with opened(backend) as io:
            os.ftruncate(blocks.fd, 2 * PAGE + 100)
            offsets = np.arange(4, dtype=np.uint64) * PAGE
            read = await io.read(blocks.fd, blocks.addresses, blocks.lengths, offsets)
            assert read.tolist() == [PAGE, PAGE, 100, 0]
            addresses = blocks.addresses.copy()
            addresses[1] = 4096  # not mapped
            read = await io.read(blocks.fd, addresses, blocks.lengths, offsets)
            assert read.tolist() == [PAGE, -errno.EFAULT, 100, 0]
            full = os.open("/dev/full", os.O_WRONLY)
            try:
                written = await io.write(full, *blocks.arguments()[1:])
            finally:
                os.close(full)
            assert written.tolist() == [-errno.ENOSPC] * 4
            assert await io.flush(999_999) == -errno.EBADF


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", ["address", "length", "offset"])
async def test_unaligned_request_of_a_direct_file_is_refused_before_any_byte_moves(
    backend: str, path: Path, wrong: str
) -> None:
    with blocks_at(path, 4) as blocks:
        async with opened(backend) as io:
            fd, addresses, lengths, offsets = blocks.arguments()
            arrays = {"address": addresses, "length": lengths, "offset": offsets}
            arrays[wrong] = arrays[wrong].copy()
            arrays[wrong][2] += 512
            with pytest.raises(LayoutError, match=r"multiples of 4096"):
                await io.write(fd, *arrays.values())
            assert io.pending == 0
            assert os.fstat(fd).st_size == 0


@pytest.mark.asyncio
async def test_wrong_arguments_are_refused(backend: str, path: Path) -> None:
    with blocks_at(path, 4) as blocks:
        async with opened(backend) as io:
            fd, addresses, lengths, offsets = blocks.arguments()
            with pytest.raises(UsageError, match="4 addresses, 3 lengths"):
                await io.read(fd, addresses, lengths[:3], offsets)
            with pytest.raises(LayoutError, match="at most 2147479552 bytes"):
                await io.read(fd, addresses, lengths + np.uint32(1 << 31), offsets)
    with pytest.raises(ConfigError, match="entries is 0"):
        DiskIo(entries=0, backend=backend)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_cancelled_call_ends_when_no_memory_is_accessed(backend: str, path: Path) -> None:
    with blocks_at(path, 3000) as blocks:
        async with opened(backend, entries=1) as io:
            os.ftruncate(blocks.fd, blocks.num_bytes)
            call = asyncio.create_task(io.read(*blocks.arguments()))
            await spin()
            assert io.pending > 0
            call.cancel()
            await spin()
            call.cancel()  # again, while it waits for the kernel
            with pytest.raises(asyncio.CancelledError):
                await call
            assert io.pending == 0
            wanted = blocks.fill(3)
            await spin(100)
            assert (blocks.bytes == wanted).all()
            assert ((await io.write(*blocks.arguments())) == PAGE).all()


@pytest.mark.asyncio
async def test_cancelled_call_does_not_end_before_the_kernel(path: Path) -> None:
    if reason := refusal():
        pytest.skip(reason)
    reader, writer = os.pipe()
    with blocks_at(path, 2) as blocks:
        async with opened("io_uring") as io:
            os.ftruncate(blocks.fd, blocks.num_bytes)
            stuck = asyncio.create_task(io.read(reader, *blocks.arguments(0, 1)[1:]))
            other = asyncio.create_task(io.read(reader, *blocks.arguments(1, 2)[1:]))
            await spin()
            assert (await io.read(*blocks.arguments())).tolist() == [PAGE, PAGE]
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            assert not other.done()
            assert io.pending == 1
            os.write(writer, b"x" * PAGE)
            assert (await other).tolist() == [PAGE]
            assert bytes(blocks.bytes[1]) == b"x" * PAGE
    os.close(reader)
    os.close(writer)


@pytest.mark.asyncio
async def test_close_ends_calls_in_flight(backend: str, path: Path) -> None:
    with blocks_at(path, 3000) as blocks:
        io = DiskIo(entries=2, backend=backend)
        wanted = blocks.fill(4)
        call = asyncio.create_task(io.write(*blocks.arguments()))
        await spin()
        closings = [asyncio.create_task(io.aclose()) for _ in range(2)]
        await spin()
        with pytest.raises(UsageError, match="closed"):
            await io.flush(blocks.fd)
        await asyncio.gather(*closings)
        results = await call
        assert set(results.tolist()) <= {PAGE, -errno.ECANCELED}
        in_file = np.fromfile(path, np.uint8)
        for i in np.flatnonzero(results == PAGE).tolist():
            begin = int(blocks.offsets[i])
            assert (in_file[begin : begin + PAGE] == wanted[i]).all()
        await io.aclose()
        with pytest.raises(UsageError, match="closed"):
            io.register_buffer(blocks.address, blocks.num_bytes)


@pytest.mark.asyncio
async def test_cancelled_close_closes(backend: str, path: Path) -> None:
    with blocks_at(path, 500) as blocks:
        io = DiskIo(entries=1, backend=backend)
        call = asyncio.create_task(io.write(*blocks.arguments()))
        await spin()
        closing = asyncio.create_task(io.aclose())
        await spin()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert io.pending == 0
        await call


def test_queue_whose_loop_has_ended_is_closed_on_another_loop(backend: str, path: Path) -> None:
    with blocks_at(path, 500) as blocks:

        async def start() -> DiskIo:
            io = DiskIo(entries=1, backend=backend)
            call = asyncio.create_task(io.write(*blocks.arguments()))
            await spin()
            call.get_coro().close()  # as when the loop is closed in spite of the task
            call.cancel()
            return io

        loop = asyncio.new_event_loop()
        io = loop.run_until_complete(start())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        asyncio.run(io.aclose())
        asyncio.run(io.aclose())


@pytest.mark.asyncio
async def test_interrupted_reaping_is_repeated(
    backend: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt between two steps of the callback loses no result."""
    real = _native.IoQueue
    interrupts = iter([True, True])

    class Queue:
        def __init__(self, *arguments: object) -> None:
            self.queue = real(*arguments)

        def __getattr__(self, name: str) -> object:
            return getattr(self.queue, name)

        def pop(self, count: int) -> None:
            if next(interrupts, False):
                raise RuntimeError("interrupted")
            self.queue.pop(count)

    monkeypatch.setattr(_native, "IoQueue", Queue)
    errors: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    with blocks_at(path, 8) as blocks:
        async with opened(backend) as io:
            assert ((await io.write(*blocks.arguments())) == PAGE).all()
            assert await io.flush(blocks.fd) == 0
            await run_until_idle(lambda: io.pending == 0)
    assert [str(context["exception"]) for context in errors] == ["interrupted"] * 2


# --- choice of the backend -----------------------------------------------------------------------


@pytest.mark.asyncio
async def test_environment_chooses_the_backend(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, backend)
    io = DiskIo()
    assert io.backend == backend
    await io.aclose()
    monkeypatch.setenv(BACKEND_VARIABLE, "aio")
    with pytest.raises(ConfigError, match="'aio'"):
        DiskIo()
    io = DiskIo(backend="threads")
    assert io.backend == "threads"
    await io.aclose()


@pytest.mark.asyncio
async def test_refused_registration_is_logged_and_io_works(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if reason := refusal():
        pytest.skip(reason)
    with blocks_at(path, 4) as blocks, caplog.at_level(logging.WARNING, "aiokv"):
        async with opened("io_uring") as io:
            io.register_buffer(4096, PAGE)  # not mapped
            assert ((await io.write(*blocks.arguments())) == PAGE).all()
            await run_until_idle(lambda: bool(caplog.records))  # a close may cancel it before
    assert [record.event for record in caplog.records] == ["disk.buffer_not_registered"]
    assert "Bad address" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("part", ["refused", "fork", "imports"])
def test_in_a_process_of_its_own(part: str, loop: str, path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, part, loop, path],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.asyncio
async def test_forgotten_queue_is_closed(backend: str, path: Path) -> None:
    with blocks_at(path, 500) as blocks:
        queue = _native.IoQueue(4, backend)
        tags = np.arange(500, dtype=np.uint64)
        assert queue.submit(blocks.fd, True, *blocks.arguments()[1:], tags) == 500
        del queue
        gc.collect()
