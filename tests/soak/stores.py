"""Stores of the soak: they outlast the engines of a round, and fail at random."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

from aiokv.stores import DiskStore, StoreUse
from aiokv.stores.base import Result, Store, split_keys
from aiokv.testing import ScriptedStore
from aiokv.testing.loops import PATIENCE_SECONDS

_STORED = (Result.DONE, Result.PRESENT)

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.base.statistics import StoreStatistics
    from aiokv.stores.base import StoreMemory

DEADLINE_SECONDS = 0.05
# Half of the engines have a deadline that faults exceed, the others one that no busy machine does.
DEADLINES = (DEADLINE_SECONDS, PATIENCE_SECONDS)
OPERATIONS: tuple[Any, ...] = ("lookup", "load", "save", "remove")


class RoundStores:
    """Stores of the engines of a round, one engine after the other.

    Args:
        kinds: ``"disk"``, ``"scripted"``, both, or neither.
        rng: the caller's, so that a seed repeats a run.
        path: directory of the disk store.

    Attributes:
        faults: faults of the scripted stores so far.
        acknowledged: by the disk stores.
    """

    def __init__(self, kinds: tuple[str, ...], rng: random.Random, path: Path) -> None:
        self.kinds = kinds
        self.rng = rng
        self.faults = 0
        self._path = path
        self._disk_bytes = rng.choice(("256KiB", "64MiB"))
        self.acknowledged = Acknowledged()
        self._objects: dict[bytes, bytes] = {}
        self._script: ScriptedStore | None = None

    def new(self) -> list[StoreUse]:
        """Return the stores of the next engine, in random order."""
        stores: list[StoreUse] = []
        deadline = self.rng.choice(DEADLINES)
        if "disk" in self.kinds:
            disk = DiskStore(
                self._path,
                bytes=self._disk_bytes,
                min_free_bytes=0,
                fsync_seconds=self.rng.choice((0.0, 0.01, 1.0)),
            )
            stores.append(StoreUse(WitnessedStore(disk, self.acknowledged)))
        if "scripted" in self.kinds:
            self._script = ScriptedStore(
                objects=self._objects,
                capacity_blocks=self.rng.choice((None, 50)),
                max_concurrent=self.rng.choice((1, 4)),
            )
            stores.append(
                StoreUse(
                    self._script,
                    deadline_seconds=deadline,
                    lookup_deadline_seconds=deadline,
                )
            )
        self.rng.shuffle(stores)
        return stores

    def end_faults(self) -> None:
        """Let the scripted store work again."""
        if self._script is not None:
            self._script.end_script()

    def acts(self) -> list[Callable[[], Awaitable[None]]]:
        """Return faults that an operator may cause."""
        if self._script is None:
            return []
        return [self.fail, self.delay, self.hold, self.corrupt, self.misanswer, self.damage]

    async def fail(self) -> None:
        """Let an operation raise."""
        self._next().fail(*self._call())

    async def delay(self) -> None:
        """Delay an operation, perhaps beyond its deadline."""
        self._next().delay(*self._call(), seconds=self.rng.uniform(0.0, 2 * DEADLINE_SECONDS))

    async def hold(self) -> None:
        """Hold an operation that ignores its cancellation."""
        gate = self._next().hold(*self._call())
        await asyncio.sleep(self.rng.uniform(0.0, 2 * DEADLINE_SECONDS))
        gate.open()

    async def corrupt(self) -> None:
        """Change bytes on the way."""
        store, operation = self._next(), self.rng.choice(("load", "save"))
        store.corrupt(operation, store.calls[operation], block=self.rng.choice((None, 0, 1)))

    async def misanswer(self) -> None:
        """Return wrong results, or too few."""
        store, operation = self._next(), self.rng.choice(("lookup", "load", "save"))
        results = [self.rng.randint(0, 4) for _ in range(self.rng.randint(0, 8))]
        if operation == "save":  # a save that is acknowledged, but not stored, is a later miss
            results = [int(Result.FAILED)] * len(results)
        store.answer(operation, store.calls[operation], results=results)

    async def damage(self) -> None:
        """Drop, cut or change objects."""
        self._next()
        for key in self.rng.sample(sorted(self._objects), len(self._objects) // 4):
            data, act = self._objects[key], self.rng.randint(0, 2)
            if act == 0:
                del self._objects[key]
                continue
            place = self.rng.randrange(len(data)) if data else 0
            changed = bytes([data[place] ^ 1]) + data[place + 1 :] if act == 1 and data else b""
            self._objects[key] = data[:place] + changed

    def _next(self) -> ScriptedStore:
        assert self._script is not None
        self.faults += 1
        return self._script

    def _call(self) -> tuple[Any, int]:
        """Return an operation, and the number of one of its next calls."""
        assert self._script is not None
        operation = self.rng.choice(OPERATIONS)
        return operation, self._script.calls[operation] + self.rng.randint(0, 2)


class Acknowledged:
    """Objects that a store has acknowledged, also those of an earlier engine.

    Attributes:
        hashes: hashes of the objects that were given to the store, by key; the padding of a block
            may differ.
        keys: of the objects that the store has acknowledged.
        evicted: blocks that the store has dropped to make room.
        found_again: acknowledged keys that were found after the store was opened again.
        loaded: blocks that were compared after a load.
        violations: descriptions of what a store must not do.
    """

    def __init__(self) -> None:
        self.hashes: dict[bytes, set[bytes]] = {}
        self.keys: set[bytes] = set()
        self.evicted = 0
        self.found_again = 0
        self.loaded = 0
        self.violations: list[str] = []


class WitnessedStore(Store):
    """Store that compares the objects that it loads with those that it has saved (I10).

    Args:
        store: makes no faults by itself.
        acknowledged: of all stores that used the same medium.
    """

    def __init__(self, store: DiskStore, acknowledged: Acknowledged) -> None:
        self.kind, self.url, self.max_concurrent = store.kind, store.url, store.max_concurrent
        self._store = store
        self._acknowledged = acknowledged
        self._memory: StoreMemory | None = None

    async def open(self, memory: StoreMemory) -> None:
        await self._store.open(memory)
        self._memory = memory
        known = self._acknowledged
        if not known.keys:
            return
        found = await self._store.lookup(b"".join(known.keys))
        known.found_again += int(found.sum())
        if not known.evicted and not found.all():
            known.violations.append(
                f"{len(found) - int(found.sum())} of {len(found)} acknowledged blocks are missing"
            )

    async def lookup(self, keys: bytes) -> NDArray[np.bool_]:
        return await self._store.lookup(keys)

    async def load(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        results = await self._store.load(keys, blocks)
        known = self._acknowledged
        for key, block, result in zip(split_keys(keys), blocks.tolist(), results, strict=True):
            if result not in (Result.DONE, Result.MISSING):
                known.violations.append(f"a load without a fault of the disk: {Result(result)!r}")
            if result == Result.DONE and self._hash(block) not in known.hashes.get(key, ()):
                known.violations.append(f"host block {block} does not have the saved bytes")
            known.loaded += 1
        return results

    async def save(self, keys: bytes, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
        known = self._acknowledged
        for key, block in zip(split_keys(keys), blocks.tolist(), strict=True):
            known.hashes.setdefault(key, set()).add(self._hash(block))
        results = await self._store.save(keys, blocks)
        done = zip(split_keys(keys), results, strict=True)
        known.keys.update(key for key, result in done if result in _STORED)
        return results

    async def remove(self, keys: bytes) -> NDArray[np.uint8]:
        self._acknowledged.violations.append("a remove without a fault of the disk")
        return await self._store.remove(keys)

    def statistics(self) -> StoreStatistics:
        return self._store.statistics()

    async def aclose(self) -> None:
        self._acknowledged.evicted += self._store.statistics().evicted_blocks
        await self._store.aclose()
        self._memory = None

    def _hash(self, block: int) -> bytes:
        assert self._memory is not None
        return hashlib.blake2b(self._memory.object(block), digest_size=16).digest()
