"""Bytes per second between host blocks and the shared memory of ``aiokv store serve``.

Loads and saves of ``HostStore`` behind its guard, from the request to the results, and thus with
the verification of each object, per size of an object. In turns with ``memcpy``: as many threads
that copy as many bytes between the same blocks and private memory, one ``memmove`` per object, and
look at nothing.

Each number is the median of the rounds. A ``ratio`` is the median of the ratios within each round:
the bandwidth of the store over that of ``memcpy``. ``cpu_ratio`` divides the CPU time of ``memcpy``
by that of the store in the engine's process, and so does not depend on other load of the machine.
``lookup_us`` is the time of a lookup of 1,000 keys, ``lookup_1_us`` that of one key.
"""

from __future__ import annotations

import asyncio
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from aiokv.layout.host_block import TRAILER_BYTES, pitch_bytes
from aiokv.stores import HostStore, StoreMemory, StoreUse
from aiokv.stores.base import KEY_BYTES, Result
from aiokv.stores.guard import StoreGuard
from aiokv.stores.proof import Proof
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"128_kib": 128 << 10, "1_mib": 1 << 20, "2_mib": 2 << 20}
TOTAL_BYTES = 256 << 20
THREADS = 2
LOOKUP_KEYS = 1_000
DEADLINE_SECONDS = 60.0


def run(quick: bool) -> dict[str, Any]:
    """Return the results by size of an object."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "host.sock"
        command = [sys.executable, "-m", "aiokv", "store", "serve", str(path), "--bytes", "1GiB"]
        service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert service.stderr is not None
            assert "host://" in service.stderr.readline()
            return {
                name: uvloop.run(_measure(path, payload_bytes, quick))
                for name, payload_bytes in SIZES.items()
            }
        finally:
            service.kill()
            service.wait()


async def _measure(path: Path, payload_bytes: int, quick: bool) -> dict[str, float]:
    total = TOTAL_BYTES // 16 if quick else TOTAL_BYTES
    bench = _Bench(path, payload_bytes - TRAILER_BYTES, total // payload_bytes)
    async with asyncio.timeout(600):
        try:
            await bench.open()
            return await bench.measure(2 if quick else 41)
        finally:
            await bench.aclose()


class _Bench:
    """One size of objects."""

    def __init__(self, path: Path, payload_bytes: int, count: int) -> None:
        pitch = pitch_bytes(payload_bytes, with_stores=True)
        self.arena = HostArena(num_blocks=count, pitch_bytes=pitch)
        self.arena.blocks[:] = np.random.default_rng(0).integers(0, 256, pitch, np.uint8)
        self.memory = StoreMemory(
            address=self.arena.pointer,
            num_blocks=count,
            pitch_bytes=pitch,
            payload_bytes=payload_bytes,
            view=memoryview(self.arena.blocks.reshape(-1)),
        )
        self.proof = Proof(self.memory)
        store = HostStore(path, threads=THREADS)
        use = StoreUse(
            store, deadline_seconds=DEADLINE_SECONDS, lookup_deadline_seconds=DEADLINE_SECONDS
        )
        self.guard = StoreGuard(use)
        self.store = store
        self.keys = np.random.default_rng(count).bytes(count * KEY_BYTES)
        self.ids = np.arange(count, dtype=np.int32)
        self.threads = ThreadPoolExecutor(THREADS)
        self.num_bytes = count * self.memory.object_bytes

    async def open(self) -> None:
        await self.guard.open(self.memory, self.proof)
        await self.proof.seal(self.keys, self.ids)
        self.private = self.arena.blocks.copy()
        await self.save()  # from now on, the pages of the slots exist

    async def aclose(self) -> None:
        await self.guard.aclose()
        self.proof.close()
        self.threads.shutdown()
        self.memory.view.release()
        self.arena.close()

    async def measure(self, rounds: int) -> dict[str, float]:
        ways: dict[str, Callable[[], Any]] = {
            "load": self.load,
            "memcpy_load": lambda: self.memcpy(self.arena.blocks, self.private),
            "save": self.save,
            "memcpy_save": lambda: self.memcpy(self.private, self.arena.blocks),
        }
        wall: dict[str, list[float]] = defaultdict(list)
        cpu: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for name, way in ways.items():
                if name == "save":
                    await self.store.remove(self.keys)
                began = time.perf_counter(), time.process_time()
                await way()
                ended = time.perf_counter(), time.process_time()
                if number > 0:  # the first round warms up
                    wall[name].append(ended[0] - began[0])
                    cpu[name].append(ended[1] - began[1])
        results = {
            f"{name}_gbps": self.num_bytes / 1e9 / statistics.median(s) for name, s in wall.items()
        }
        for name in ("load", "save"):
            results[f"{name}_ratio"] = _median_ratio(wall[f"memcpy_{name}"], wall[name])
            results[f"{name}_cpu_ratio"] = _median_ratio(cpu[f"memcpy_{name}"], cpu[name])
        results["lookup_us"] = await self.lookup_us(LOOKUP_KEYS)
        results["lookup_1_us"] = await self.lookup_us(1)
        return results

    async def load(self) -> None:
        results, _ = await self.guard.load(self.keys, self.ids)
        assert (results == Result.DONE).all()

    async def save(self) -> None:
        results, _ = await self.guard.save(self.keys, self.ids)
        assert (results == Result.DONE).all()

    async def memcpy(self, target: np.ndarray, source: np.ndarray) -> None:
        loop = asyncio.get_running_loop()
        indices = iter(range(len(target)))  # the threads take turns
        size = self.memory.object_bytes
        to, by, pitch = target.ctypes.data, source.ctypes.data, self.memory.pitch_bytes

        def copy() -> None:
            for index in indices:
                ctypes.memmove(to + index * pitch, by + index * pitch, size)

        await asyncio.gather(*(loop.run_in_executor(self.threads, copy) for _ in range(THREADS)))

    async def lookup_us(self, count: int) -> float:
        keys = np.random.default_rng(1).bytes(count * KEY_BYTES)
        seconds = []
        for _ in range(50):
            began = time.perf_counter()
            await self.guard.lookup(keys)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds) * 1e6


def _median_ratio(others: list[float], own: list[float]) -> float:
    return statistics.median(other / mine for other, mine in zip(others, own, strict=True))
