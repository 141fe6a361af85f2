"""File I/O: DiskIo compared with the simplest io_uring loop, and with 8 threads.

All move the same blocks, in random order, between one preallocated file that is open with O_DIRECT
and one buffer. ``loop`` is a C loop over io_uring with the queue depth of DiskIo and the same
registered buffer; ``threads`` are 8 threads with ``preadv`` or ``pwritev``. The variants alternate
within each round, because the disk of a virtual machine changes its speed. ``ratio`` and
``threads_ratio``: bandwidth of DiskIo / bandwidth of the other, from medians over the rounds.
``cpu_share_of_*``: CPU time of DiskIo / CPU time of the other, all threads of this process. Work of
the kernel outside of the process, such as interrupts while a core is idle, is not counted. Without
io_uring there is no ``loop``.

Set ``AIOKV_BENCH_DISK`` to a folder on the disk to measure; default: ``bench/results``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import uvloop

from aiokv.stores.disk.io import ENTRIES, DiskIo
from bench import harness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB: Final = 1 << 10
MIB: Final = 1 << 20
THREADS: Final = 8
FOLDER_VARIABLE: Final = "AIOKV_BENCH_DISK"

_SOURCE: Final = Path(__file__).with_name("disk_baselines.cpp")


class _Blocks(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int),
        ("writes", ctypes.c_int),
        ("block_bytes", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("addresses", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
    )


@cache
def _library() -> ctypes.CDLL:
    target = Path(tempfile.mkdtemp(prefix="aiokv-bench-")) / "disk_baselines.so"
    subprocess.run(
        ["c++", "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", _SOURCE, "-o", target],
        check=True,
    )
    library = ctypes.CDLL(str(target), use_errno=True)
    library.ring_open.argtypes = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t)
    library.ring_open.restype = ctypes.c_void_p
    library.ring_close.argtypes = (ctypes.c_void_p,)
    library.ring_run.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Blocks))
    library.threads_run.argtypes = (ctypes.c_uint, ctypes.POINTER(_Blocks))
    return library


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


def run(quick: bool) -> dict[str, Any]:
    num_bytes = (32 if quick else 256) * MIB
    rounds = 2 if quick else 11
    with _buffer(num_bytes) as address, _file(num_bytes) as fd:
        return {
            f"{block_bytes // KIB}_kib": uvloop.run(
                _measure(fd, address, num_bytes, block_bytes, rounds)
            )
            for block_bytes in (128 * KIB, MIB, 4 * MIB)
        }


@contextmanager
def _buffer(num_bytes: int) -> Iterator[int]:
    memory = mmap.mmap(-1, num_bytes)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    yield array.ctypes.data
    del array
    memory.close()


@contextmanager
def _file(num_bytes: int) -> Iterator[int]:
    """Open a file that is written once: its extents are allocated and known to have data."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or harness.RESULTS)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="disk_io-") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        for _ in range(num_bytes // MIB):
            file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
        fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            yield fd
        finally:
            os.close(fd)


async def _measure(
    fd: int, address: int, num_bytes: int, block_bytes: int, rounds: int
) -> dict[str, Any]:
    count = num_bytes // block_bytes
    order = np.random.default_rng(0).permutation(count).astype(np.uint64)
    addresses = address + np.arange(count, dtype=np.uint64) * block_bytes
    offsets = order * block_bytes
    lengths = np.full(count, block_bytes, np.uint32)
    library = _library()
    io = DiskIo()
    io.register_buffer(address, num_bytes)
    ring = None
    if io.backend == "io_uring" and not (ring := library.ring_open(ENTRIES, address, num_bytes)):
        _check(ctypes.get_errno())
    results = {}
    for direction in ("read", "write"):
        write = direction == "write"
        blocks = _Blocks(fd, write, block_bytes, count, addresses.ctypes.data, offsets.ctypes.data)
        move = io.write if write else io.read

        async def through_disk_io(move: Any = move) -> None:
            moved = await move(fd, addresses, lengths, offsets)
            if (moved != block_bytes).any():
                raise OSError(f"DiskIo moved {moved.min()} bytes of {block_bytes}")

        variants: dict[str, Callable[[], Any]] = {
            "aiokv": through_disk_io,
            "threads": lambda blocks=blocks: _check(library.threads_run(THREADS, blocks)),
        }
        if ring is not None:
            variants["loop"] = lambda blocks=blocks: _check(library.ring_run(ring, blocks))
        results[direction] = await _compare(variants, num_bytes, rounds)
    await io.aclose()
    if ring is not None:
        library.ring_close(ring)
    return results


async def _compare(
    variants: dict[str, Callable[[], Any]], num_bytes: int, rounds: int
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        names = list(variants)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            cpu_began, began = time.process_time(), time.perf_counter()
            if (running := variants[name]()) is not None:
                await running
            seconds[name].append(time.perf_counter() - began)
            cpu_seconds[name].append(time.process_time() - cpu_began)
    wall = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    cpu = {name: statistics.median(values[1:]) for name, values in cpu_seconds.items()}
    gigabytes = num_bytes / 1e9
    found = {f"{name}_gbps": gigabytes / wall[name] for name in variants}
    found |= {f"{name}_cpu_seconds_per_gb": cpu[name] / gigabytes for name in variants}
    if "loop" in variants:
        found["ratio"] = wall["loop"] / wall["aiokv"]
        found["cpu_share_of_loop"] = cpu["aiokv"] / cpu["loop"]
    found["threads_ratio"] = wall["threads"] / wall["aiokv"]
    found["cpu_share_of_threads"] = cpu["aiokv"] / cpu["threads"]
    return found


class PlainLoop:
    """The io_uring loop of ``disk_baselines.cpp`` over a file, for other benches.

    Args:
        folder: where the file is made; it is removed by ``close``.
        address: page-aligned memory of ``num_bytes``, as many as the file has.

    Raises:
        OSError: io_uring is refused.
    """

    def __init__(self, folder: Path, address: int, num_bytes: int) -> None:
        self._address = address
        self._num_bytes = num_bytes
        self._ring = _library().ring_open(ENTRIES, address, num_bytes)
        if not self._ring:
            _check(ctypes.get_errno())
        with tempfile.NamedTemporaryFile(dir=folder, prefix="disk-loop-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            self._fd = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        self.move(write=True, block_bytes=MIB)

    def move(self, *, write: bool, block_bytes: int) -> None:
        """Move the whole file, block by block."""
        offsets = np.arange(self._num_bytes // block_bytes, dtype=np.uint64) * block_bytes
        addresses = self._address + offsets
        _check(
            _library().ring_run(
                self._ring,
                _Blocks(
                    self._fd,
                    write,
                    block_bytes,
                    len(offsets),
                    addresses.ctypes.data,
                    offsets.ctypes.data,
                ),
            )
        )

    def close(self) -> None:
        """Close the ring and the file."""
        _library().ring_close(self._ring)
        os.close(self._fd)
