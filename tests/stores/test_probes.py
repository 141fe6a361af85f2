"""A medium whose lookups succeed while its loads fail or hang: its probes fail or hang as well."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from aiokv.errors import StoreError
from aiokv.stores import DirectoryStore
from aiokv.stores.breaker import FAILURES
from aiokv.stores.disk.layout import segment_name
from aiokv.stores.guard import StoreGuard
from aiokv.stores.proof import Proof
from aiokv.stores.use import StoreUse
from aiokv.testing import run_until_idle, running_clock, spin
from tests.stores.conformance import DONE, FAILED, Blocks, ids
from tests.stores.disk_medium import keys_of, opened, save, small_blocks, small_store
from tests.stores.disk_volumes import FailingVolume

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from aiokv.stores import Store

DEADLINE_SECONDS: Final = 2.0
STEP_SECONDS: Final = 0.1
KEY: Final = keys_of([1])


class Disk:
    """A disk store whose reads fail or hang.

    Attributes:
        store: the store, not opened.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._volume = FailingVolume(path)
        self.store: Store = small_store(path, volume=self._volume)

    @property
    def hung(self) -> int:
        """Number of reads that hang."""
        return self._volume.io.held

    def fail(self) -> None:
        self._volume.io.fail("read", errno.EIO)

    def hang(self) -> None:
        self._volume.io.hold("read")

    def heal(self) -> None:
        self._volume.heal()


class Directory:
    """A directory store whose reads fail or hang; a cancellation does not end those that hang."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store: Store = DirectoryStore(path)
        self.hung = 0
        self._read = os.preadv
        self._is_failing = False
        self._may_read = threading.Event()
        self._may_read.set()
        self._lock = threading.Lock()
        monkeypatch.setattr(os, "preadv", self._preadv)

    def fail(self) -> None:
        self._is_failing = True

    def hang(self) -> None:
        self._may_read.clear()

    def heal(self) -> None:
        self._is_failing = False
        self._may_read.set()

    def _preadv(self, *arguments: Any) -> int:
        if self._is_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not self._may_read.is_set():
            self._count(1)
            self._may_read.wait()
            self._count(-1)
        return self._read(*arguments)

    def _count(self, change: int) -> None:
        with self._lock:
            self.hung += change


@asynccontextmanager
async def guarded(medium: Disk | Directory) -> AsyncIterator[StoreGuard]:
    """Open a store behind its guard, with one block."""
    blocks = small_blocks()
    proof = Proof(blocks.memory)
    guard = StoreGuard(StoreUse(medium.store, deadline_seconds=DEADLINE_SECONDS))
    try:
        await guard.open(blocks.memory, proof)
        await proof.seal(KEY, ids(0))
        assert (await guard.save(KEY, ids(0))).results.tolist() == [DONE]
        yield guard
    finally:
        medium.heal()
        assert await guard.aclose()
        proof.close()


async def waited(request: Awaitable[Any], medium: Disk | Directory) -> tuple[float, Any]:
    """Return the seconds that a request waits for a medium that hangs, and its answer."""
    clock = running_clock()
    began = clock.now
    task = asyncio.ensure_future(request)
    await spin(5)
    while not task.done():
        await run_until_idle(lambda: task.done() or medium.hung > 0)
        if not task.done():
            await clock.advance(STEP_SECONDS)
    return clock.now - began, task.result()


@pytest.mark.asyncio
@pytest.mark.clock
@pytest.mark.parametrize("fault", ["fail", "hang"])
@pytest.mark.parametrize("make", [Disk, Directory])
async def test_medium_that_cannot_be_read_costs_nothing_until_it_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: type[Disk | Directory], fault: str
) -> None:
    medium = make(tmp_path / "kv", monkeypatch)
    clock = running_clock()
    async with guarded(medium) as guard:
        medium.fail() if fault == "fail" else medium.hang()
        waits = []
        for number in range(100):
            assert (await guard.lookup(KEY)).tolist() == [number < FAILURES]
            seconds, reply = await waited(guard.load(KEY, ids(number % 30 + 1)), medium)
            assert reply.results.tolist() == [FAILED]
            waits.append(seconds)
            await clock.advance(1.0)
            await run_until_idle(lambda: guard.statistics().reading != "probing" or medium.hung > 0)
        statistics = guard.statistics()
        assert statistics.opened == 1, "a probe succeeded though the medium cannot be read"
        longest = DEADLINE_SECONDS + STEP_SECONDS if fault == "hang" else 0.0
        assert max(waits) <= longest
        assert max(waits[FAILURES:]) == 0.0
        medium.heal()
        await run_until_idle(
            lambda: guard.statistics().running == 0 and guard.statistics().reading != "probing"
        )
        await clock.advance(guard.use.retry_seconds)
        await guard.lookup(KEY)  # begins a probe, unless one has succeeded already
        await run_until_idle(lambda: guard.statistics().reading == "closed")
        seconds, reply = await waited(guard.load(KEY, ids(1)), medium)
        assert (seconds, reply.results.tolist()) == (0.0, [DONE])


@pytest.mark.asyncio
async def test_probe_of_a_disk_reads_another_slot_each_time(tmp_path: Path) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(small_store(tmp_path / "kv", slots=4, volume=volume), blocks) as store:
        volume.io.fail("read", errno.EIO)
        await store.probe()  # there is no slot that a load could read
        volume.io.heal()
        await save(store, blocks, range(4))
        memory = bytes(blocks.memory.view)
        offsets = []
        volume.io.fail("read", errno.EIO, covers=lambda request: offsets.append(request.offset))
        for _ in range(4):
            await store.probe()
        assert offsets == [0, 4_096, 2 * 4_096, 3 * 4_096]
        assert bytes(blocks.memory.view) == memory, "a probe wrote a host block"
        volume.io.fail("read", errno.EIO, covers=lambda request: request.offset == 0)
        with pytest.raises(StoreError, match="cannot read: EIO"):
            await store.probe()
        await store.probe()
        volume.io.heal()
        (tmp_path / "kv" / segment_name(0)).write_bytes(b"")
        with pytest.raises(StoreError, match="too short"):
            await store.probe()
        assert store.statistics().details["read_errors"] == 0


@pytest.mark.asyncio
async def test_probe_of_a_directory_that_was_unmounted_or_has_no_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "kv")
    await store.open(Blocks().memory)
    try:
        await store.probe()
        (tmp_path / "kv" / "aiokv-store").unlink()
        await store.probe()
        with monkeypatch.context() as context:
            context.setattr(os, "stat", _stale)
            with pytest.raises(StoreError, match="Stale"):
                await store.probe()
    finally:
        await store.aclose()


def _stale(*arguments: object, **options: object) -> os.stat_result:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
