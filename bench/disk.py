"""The disk store: its index, its recovery, and its throughput compared with a plain io_uring loop.

* ``lookup``: a batch of 1,000 keys, the keys of a full index of a million blocks, median.
* ``memory``: bytes per stored block of the index, all in, from the resident size of the process.
* ``recovery``: ``open`` of a store with a journal of a million records, and the longest time that
  it held the loop.
* ``compaction``: the same journal replaced while the store is open, and how long the loop was held.
* ``throughput``: batches of 64 MiB saved (with records and their flushes, at the default policy)
  and loaded, and the loop of ``disk_baselines.cpp`` over one preallocated file, which alternate.
  ``ratio``: bandwidth of the store / bandwidth of the loop.

Set ``AIOKV_BENCH_DISK`` to a folder on the disk to measure; default: ``bench/results``.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import uvloop

from aiokv import _native
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory
from aiokv.stores.disk import DiskStore
from aiokv.stores.disk.journal import Journal
from aiokv.stores.disk.layout import Header
from aiokv.stores.disk.volume import Volume
from bench import harness
from bench.disk_io import FOLDER_VARIABLE, KIB, MIB, PlainLoop

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH_KEYS: Final = 1_000
BATCH_BYTES: Final = 64 * MIB
STORE_FILLS: Final = 8  # as many bytes as are moved at a time
SLOT_BYTES: Final = 4_096  # of the stores without data


def run(quick: bool) -> dict[str, Any]:
    folder = Path(os.environ.get(FOLDER_VARIABLE) or harness.RESULTS)
    blocks = 20_000 if quick else 1_000_000
    table, bytes_per_block = _full_table(blocks)
    results: dict[str, Any] = {
        "memory": {"bytes_per_block": bytes_per_block},
        "lookup": _lookup(table, blocks, 20 if quick else 1_000),
    }
    del table
    with tempfile.TemporaryDirectory(dir=folder, prefix="disk-") as path:
        gc.disable()  # one pass over the objects of this process takes longer than the store
        uvloop.run(_recovery(Path(path) / "first", 10_000))  # imports what is imported late
        results["recovery"] = uvloop.run(_recovery(Path(path) / "kv", blocks))
        gc.enable()
    num_bytes = (64 if quick else 512) * MIB
    for block_bytes in (128 * KIB, MIB, 4 * MIB):
        with tempfile.TemporaryDirectory(dir=folder, prefix="disk-") as path:
            results[f"{block_bytes // KIB}_kib"] = uvloop.run(
                _throughput(Path(path), num_bytes, block_bytes, 1 if quick else 9)
            )
    return results


def random_keys(count: int, seed: int) -> bytes:
    """Return ``count`` keys, one behind the other."""
    return np.random.default_rng(seed).bytes(count * KEY_BYTES)


def _full_table(blocks: int) -> tuple[_native.SlotTable, float]:
    """Return a full table and its resident bytes per block."""
    keys = random_keys(blocks, 0)
    before = _resident_bytes()
    table = _native.SlotTable(blocks)
    table.grow(blocks)
    step = BATCH_KEYS
    for first in range(0, blocks, step):
        part = keys[first * KEY_BYTES : (first + step) * KEY_BYTES]
        table.commit(part, table.reserve(step), 0)
    return table, (_resident_bytes() - before) / blocks


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _lookup(table: _native.SlotTable, blocks: int, rounds: int) -> dict[str, float]:
    """Measure batches of keys all over the index: all present, and all missing."""
    stored = np.frombuffer(random_keys(blocks, 0), np.uint8).reshape(-1, KEY_BYTES)
    rng = np.random.default_rng(1)
    found, missing, pinned = [], [], []
    for number in range(rounds):
        batch = stored[rng.integers(0, blocks, BATCH_KEYS)].tobytes()
        others = random_keys(BATCH_KEYS, number + 2)
        found.append(_microseconds(lambda batch=batch: table.contains(batch)))
        missing.append(_microseconds(lambda others=others: table.contains(others)))
        pinned.append(_microseconds(lambda batch=batch: table.unpin(table.pin(batch))))
    return {
        "found_1000_us": statistics.median(found),
        "missing_1000_us": statistics.median(missing),
        "pin_and_unpin_1000_us": statistics.median(pinned),
    }


def _microseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began) / 1e3


async def _recovery(path: Path, blocks: int) -> dict[str, float]:
    """Open a store whose journal has one record per block, and then replace this journal."""
    _write_journal(Volume(path), blocks)
    _, memory = _memory(16, SLOT_BYTES)
    store = DiskStore(path, bytes=blocks * SLOT_BYTES, min_free_bytes=0)
    held = _Held()
    began = time.perf_counter()
    await store.open(memory)
    seconds = time.perf_counter() - began
    results = {"open_seconds": seconds, "open_held_ms": held.stop()}
    if store.statistics().blocks != blocks:
        raise RuntimeError(f"{store.statistics().blocks} blocks came back of {blocks}")
    # Removals make the journal longer than it need be; the store replaces it.
    keys = random_keys(blocks, 0)
    removed = blocks * 3 // 5 // BATCH_KEYS * BATCH_KEYS
    held = _Held()
    began = time.perf_counter()
    for first in range(0, removed, BATCH_KEYS):
        await store.remove(keys[first * KEY_BYTES : (first + BATCH_KEYS) * KEY_BYTES])
    results["remove_us_per_key"] = (time.perf_counter() - began) * 1e6 / removed
    await store.remove(keys[-KEY_BYTES:])  # its record comes after the journal was replaced
    results["remove_and_compact_held_ms"] = held.stop()
    await store.aclose()
    return results


def _write_journal(volume: Volume, blocks: int) -> None:
    volume.make()
    header = Header.new(SLOT_BYTES, SLOT_BYTES - 64, blocks * SLOT_BYTES)
    journal = Journal.create(volume, header)
    keys = random_keys(blocks, 0)
    journal.append(_native.session_record(volume.boot()))
    for first in range(0, blocks, BATCH_KEYS):
        part = keys[first * KEY_BYTES : (first + BATCH_KEYS) * KEY_BYTES]
        slots = np.arange(first, first + BATCH_KEYS, dtype=np.int32)
        journal.append(_native.add_records(part, slots, 0))
    journal.replace()
    journal.close()


class _Held:
    """CPU time of the loop's thread between two passes of the loop, at most."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._stopped = False
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        last = time.thread_time()
        while not self._stopped:
            await asyncio.sleep(0)
            now = time.thread_time()
            self._worst = max(self._worst, now - last)
            last = now

    def stop(self) -> float:
        """Return the longest one in milliseconds."""
        self._stopped = True
        return self._worst * 1e3


def _memory(num_blocks: int, pitch_bytes: int) -> tuple[mmap.mmap, StoreMemory]:
    buffer = mmap.mmap(-1, num_blocks * pitch_bytes)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    memory = StoreMemory(
        address=address,
        num_blocks=num_blocks,
        pitch_bytes=pitch_bytes,
        payload_bytes=pitch_bytes - 64,
        view=memoryview(buffer),
    )
    np.frombuffer(buffer, np.uint8)[:] = 1
    return buffer, memory


async def _throughput(
    path: Path, num_bytes: int, block_bytes: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Save and load; the store is full, so that each save evicts."""
    count = num_bytes // block_bytes
    _, memory = _memory(count, block_bytes)
    store = DiskStore(path, bytes=STORE_FILLS * num_bytes, min_free_bytes=0)
    await store.open(memory)
    loop = PlainLoop(path, memory.address, num_bytes)
    ids = np.array_split(np.arange(count, dtype=np.int32), num_bytes // BATCH_BYTES)

    async def move(operation: Callable[..., Any], keys: bytes) -> float:
        began = time.perf_counter()
        all_results = await asyncio.gather(
            *(
                operation(keys[part[0] * KEY_BYTES : (part[-1] + 1) * KEY_BYTES], part)
                for part in ids
            )
        )
        seconds = time.perf_counter() - began
        if any((results != Result.DONE).any() for results in all_results):
            raise RuntimeError("a block was not moved")
        return seconds

    def plain(*, write: bool) -> float:
        began = time.perf_counter()
        loop.move(write=write, block_bytes=block_bytes)
        return time.perf_counter() - began

    for number in range(STORE_FILLS + 1):  # fills the store, and writes each slot
        await move(store.save, random_keys(count, number))
    seconds: dict[str, list[float]] = {"save": [], "load": [], "write": [], "read": []}
    for number in range(rounds):
        keys = random_keys(count, 100 + number)
        seconds["save"].append(await move(store.save, keys))
        seconds["write"].append(plain(write=True))
        seconds["load"].append(await move(store.load, keys))
        seconds["read"].append(plain(write=False))
    await store.aclose()
    loop.close()
    gbps = {name: num_bytes / 1e9 / statistics.median(all_) for name, all_ in seconds.items()}
    return {
        "save": _compared(gbps["save"], gbps["write"]),
        "load": _compared(gbps["load"], gbps["read"]),
    }


def _compared(store_gbps: float, loop_gbps: float) -> dict[str, float]:
    return {
        "store_gbps": store_gbps,
        "loop_gbps": loop_gbps,
        "ratio": store_gbps / loop_gbps,
    }
