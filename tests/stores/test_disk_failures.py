"""DiskStore on full, failing, read-only and slow disks."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import StoreError
from aiokv.stores.base import Result
from aiokv.stores.disk import DiskStore, committer
from aiokv.stores.disk.layout import segment_name
from aiokv.stores.disk.recovery import recover
from aiokv.stores.disk.volume import Volume
from tests.stores.conformance import Blocks
from tests.stores.conformance import keys_of as keys_of_numbers
from tests.stores.disk_medium import (
    keys_of,
    load,
    opened,
    save,
    small_blocks,
    small_store,
    until,
)
from tests.stores.disk_volumes import FailingVolume
from tests.stores.failures import ObjectFailures, ObjectRig, guarded, sealed_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from aiokv.stores.disk.io import DiskIo


class DiskRig(ObjectRig):
    """A directory whose slots a test overwrites."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self) -> DiskStore:
        return DiskStore(self.path, bytes="1MiB", min_free_bytes=0)

    def replace(self, key: bytes, content: bytes) -> None:
        memory = Blocks().memory
        state = recover(Volume(self.path), memory, 1 << 20, write=False)
        (slot,) = state.table.pin(key).tolist()
        state.segments.close()
        if slot < 0:
            return
        with (self.path / segment_name(0)).open("r+b") as file:
            file.seek(slot * memory.pitch_bytes)
            file.write(content[: memory.pitch_bytes].ljust(memory.pitch_bytes, b"\0"))
            os.fsync(file.fileno())

    def full(self) -> DiskStore:
        return DiskStore(self.path, bytes="1MiB", min_free_bytes=0, volume=FullVolume(self.path))


class FullVolume(FailingVolume):
    """A volume that has room for ten slots."""

    def open_io(self) -> DiskIo:
        io = super().open_io()
        self.io.fail("write", errno.ENOSPC, covers=lambda request: request.offset >= 10 * 12_288)
        return io


class TestDiskObjects(ObjectFailures):
    test_values_of_other_lengths_are_wrong = None  # a slot has one length; see test_disk_damage

    @pytest.fixture
    def rig(self, tmp_path: Path) -> DiskRig:
        return DiskRig(tmp_path / "kv")

    async def test_the_slot_of_wrong_bytes_is_not_used_again(self, rig: DiskRig) -> None:
        slots = 8

        def store() -> DiskStore:
            return DiskStore(rig.path, bytes=slots * 12_288, min_free_bytes=0)

        async with guarded(store()) as requests:
            assert await requests.save(range(slots)) == [Result.DONE] * slots
            sealed = bytearray(await sealed_object(3))
            sealed[5_000] ^= 1
            rig.replace(keys_of_numbers([3]), bytes(sealed))
            assert await requests.load([2, 3]) == [Result.DONE, Result.WRONG]
            await until(lambda: requests.guard.statistics().store.quarantined_blocks == 1)
            assert requests.guard.statistics().wrong_blocks == 1
            assert await requests.lookup([2, 3]) == [True, False]
        for first in (100, 200):  # also after a restart
            async with guarded(store()) as requests:
                for number in range(first, first + 5 * slots):
                    assert await requests.save([number]) == [Result.DONE]
                last = range(first + 4 * slots + 1, first + 5 * slots)
                assert await requests.load(last) == [Result.DONE] * (slots - 1)
                statistics = requests.guard.statistics().store
                assert (statistics.blocks, statistics.quarantined_blocks) == (slots - 1, 1)
            medium = (rig.path / segment_name(0)).read_bytes()
            assert len(medium) == slots * 12_288
            assert medium.count(sealed) == 1, "the slot was written to"


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    """Mount something on a directory; skip where that is not permitted."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.asyncio
@pytest.mark.parametrize("operation", ["read", "write", "journal.write", "flush", "allocate"])
async def test_failed_operation_is_a_store_error_and_the_store_recovers(
    tmp_path: Path, operation: str
) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    store = small_store(tmp_path / "kv", volume=volume, fsync_seconds=0)
    async with opened(store, blocks):
        if operation != "allocate":
            await save(store, blocks, range(4))
        volume.fail(operation, errno.EIO)
        failing = load if operation == "read" else save
        numbers = range(4) if operation == "read" else range(4, 8)
        with pytest.raises(StoreError, match=r"EIO|Input/output error"):
            await failing(store, blocks, numbers)
        assert not (await store.lookup(keys_of(range(4, 8)))).any()
        if operation not in ("read", "allocate"):
            assert await load(store, blocks, range(4)) == [0, 1, 2, 3], "reads still work"
        volume.heal()
        assert await save(store, blocks, range(4, 8)) == [Result.DONE] * 4
        assert await load(store, blocks, range(4, 8)) == [4, 5, 6, 7]
    async with opened(small_store(tmp_path / "kv"), blocks) as store:
        assert await load(store, blocks, range(4, 8)) == [4, 5, 6, 7]


@pytest.mark.asyncio
async def test_save_to_a_deleted_directory_is_a_store_error(tmp_path: Path) -> None:
    path = tmp_path / "store"
    blocks = small_blocks()
    async with opened(small_store(path), blocks) as store:
        assert await save(store, blocks, [1]) == [Result.DONE]
        shutil.rmtree(path)
        with pytest.raises(StoreError, match="the journal was deleted"):
            await save(store, blocks, [2])
        assert (await store.lookup(keys_of([1, 2]))).tolist() == [True, False]


@pytest.mark.asyncio
async def test_failed_flush_of_the_journal_replaces_the_journal(tmp_path: Path) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(
        small_store(tmp_path / "kv", volume=volume, fsync_seconds=0), blocks
    ) as store:
        await save(store, blocks, range(4))
        volume.fail("journal.sync", errno.EIO)
        with pytest.raises(StoreError, match="Input/output error"):
            await save(store, blocks, range(4, 8))
        volume.heal()
        assert await save(store, blocks, range(8, 12)) == [Result.DONE] * 4
        assert store.statistics().details["compactions"] == 1
        assert await load(store, blocks, range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]
    async with opened(small_store(tmp_path / "kv"), blocks) as store:
        assert await load(store, blocks, range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.asyncio
async def test_failed_compaction_keeps_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "MIN_RECORDS", 20)
    volume = FailingVolume(tmp_path / "kv")
    volume_store = small_store(tmp_path / "kv", slots=8, volume=volume)
    blocks = small_blocks()
    async with opened(volume_store, blocks) as store:
        volume.fail("rename", errno.ENOSPC)
        for first in range(0, 80, 4):
            assert await save(store, blocks, range(first, first + 4)) == [Result.DONE] * 4
        assert store.statistics().details["compactions"] == 0
        assert "journal.new" not in os.listdir(tmp_path / "kv")
        volume.heal()
        for first in range(80, 200, 4):
            assert await save(store, blocks, range(first, first + 4)) == [Result.DONE] * 4
        assert store.statistics().details["compactions"] > 0
        before = await load(store, blocks, range(200))
    async with opened(small_store(tmp_path / "kv", slots=8), blocks) as store:
        assert await load(store, blocks, range(200)) == before


@pytest.mark.asyncio
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_write_without_room_is_refused(tmp_path: Path, code: int) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(small_store(tmp_path / "kv", volume=volume), blocks) as store:
        volume.fail("write", code)
        assert await save(store, blocks, range(4)) == [Result.REFUSED] * 4
        volume.heal()
        volume.fail("allocate", code)
        # Slots that exist are used, further ones cannot be made: blocks are evicted for them.
        assert await save(store, blocks, range(4)) == [Result.DONE] * 4


@pytest.mark.asyncio
async def test_full_file_system(tmp_path: Path) -> None:
    path = tmp_path / "small"
    blocks = small_blocks()
    with mounted(path, "-t", "tmpfs", "-o", "size=6m", "tmpfs"):
        async with opened(small_store(path, slots=1_200), blocks) as store:
            for first in range(0, 1_200, 8):
                assert await save(store, blocks, range(first, first + 8)) == [Result.DONE] * 8
            statistics = store.statistics()
            assert 100 <= statistics.blocks < 600
            assert statistics.evicted_blocks > 100
            present = await load(store, blocks, range(1_200))
            assert len(present) == statistics.blocks
            (path / "other").write_bytes(bytes(4_096) * (os.statvfs(path).f_bavail - 0))
        async with opened(small_store(path, slots=1_000), blocks) as store:
            assert await load(store, blocks, range(1_200)) == present, "a full disk is still read"
            with suppress(StoreError):  # the journal may have no room for another record
                results = await save(store, blocks, range(3_000, 3_008))
                assert set(results) <= {Result.DONE, Result.REFUSED}
            (path / "other").unlink()
            assert await save(store, blocks, range(3_008, 3_016)) == [Result.DONE] * 8


class SmallVolume(Volume):
    """A volume of a file system with 1 GiB of free space."""

    def free_bytes(self) -> int:
        return 1 << 30


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("size", "min_free", "reason"),
    [
        ("4MiB", "1000000TiB", "the file system has no more space"),
        ("60GiB", 0, "free for the journal .* its option bytes allows; use a smaller one"),
    ],
)
async def test_store_that_cannot_grow_says_why_once(
    size: str, min_free: str | int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = small_blocks()
    store = DiskStore(tmp_path, bytes=size, min_free_bytes=min_free, volume=SmallVolume(tmp_path))
    async with opened(store, blocks):
        for first in (0, 8):
            assert await save(store, blocks, range(first, first + 8)) == [Result.REFUSED] * 8
    (warning,) = [record for record in caplog.records if record.event == "disk.cannot_grow"]
    assert "min_free_bytes" in warning.getMessage()
    assert re.search(reason, warning.reason)


@pytest.mark.asyncio
async def test_growth_leaves_space_to_others(tmp_path: Path) -> None:
    path = tmp_path / "small"
    blocks = small_blocks()
    with mounted(path, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        store = DiskStore(path, bytes="4MiB", min_free_bytes="6MiB")
        async with opened(store, blocks):
            for first in range(0, 800, 8):
                assert await save(store, blocks, range(first, first + 8)) == [Result.DONE] * 8
            space = os.statvfs(path)
            used = 800 * 3 * 64 + 4_096  # at most, by the journal
            assert space.f_bavail * space.f_frsize >= (6 << 20) - used


@pytest.mark.asyncio
async def test_read_only_directory_is_read_and_refuses_saves(tmp_path: Path) -> None:
    path, view = tmp_path / "kv", tmp_path / "view"
    blocks = small_blocks()
    async with opened(small_store(path), blocks) as store:
        await save(store, blocks, range(4))
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    with mounted(view, "--bind", "-o", "ro", str(path)):
        async with opened(small_store(view), blocks) as store:
            assert await load(store, blocks, range(6)) == [0, 1, 2, 3]
            assert await save(store, blocks, range(4)) == [Result.PRESENT] * 4
            with pytest.raises(StoreError, match="not writable"):
                await save(store, blocks, range(4, 8))
            with pytest.raises(StoreError, match="not writable"):
                await store.remove(keys_of([1]))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == files


@pytest.mark.asyncio
async def test_slow_disk_does_not_delay_lookups_and_cancelled_operations_return_their_slots(
    tmp_path: Path,
) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(small_store(tmp_path / "kv", slots=8, volume=volume), blocks) as store:
        await save(store, blocks, range(4))
        volume.io.hold("read")
        volume.io.hold("write")
        slow_save = asyncio.create_task(save(store, blocks, range(4, 8)))
        slow_load = asyncio.create_task(store.load(keys_of(range(4)), np.arange(4, dtype=np.int32)))
        await until(lambda: volume.io.held == 2)
        assert (await store.lookup(keys_of(range(5)))).tolist() == [True] * 4 + [False]
        # Both hold all slots: a save finds no room, and does not evict blocks that are read.
        assert await save(store, blocks, range(8, 10)) == [Result.REFUSED] * 2
        for task in (slow_save, slow_load):
            task.cancel()
        await asyncio.wait([slow_save, slow_load])
        volume.io.heal()
        assert await save(store, blocks, range(8, 12)) == [Result.DONE] * 4
        assert await load(store, blocks, range(12)) == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.asyncio
async def test_reused_slots_wait_for_their_readers(tmp_path: Path) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(small_store(tmp_path / "kv", slots=4, volume=volume), blocks) as store:
        await save(store, blocks, range(4))
        volume.io.hold("read")
        reading = asyncio.create_task(load(store, blocks, [0]))
        await until(lambda: volume.io.held == 1)
        await store.remove(keys_of([0]))
        volume.io.heal()
        assert await reading == [0]
        assert await save(store, blocks, [4]) == [Result.DONE]
        assert await load(store, blocks, range(5)) == [1, 2, 3, 4]


@pytest.mark.asyncio
async def test_short_transfers_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    volume = FailingVolume(tmp_path / "kv")
    blocks = small_blocks()
    async with opened(small_store(tmp_path / "kv", volume=volume), blocks) as store:
        volume.io.cut("write", 2 * 4_096, times=1)  # of one request for four blocks
        assert await save(store, blocks, range(4)) == [Result.DONE] * 2 + [Result.FAILED] * 2
        assert await load(store, blocks, range(4)) == [0, 1]
        assert await save(store, blocks, range(4)) == [Result.PRESENT] * 2 + [Result.DONE] * 2
        volume.io.cut("read", 4_096, times=1)
        ids = np.arange(2, dtype=np.int32)
        assert (await store.load(keys_of([0, 1]), ids)).tolist() == [Result.DONE, Result.WRONG]
        volume.io.fail("read", times=1, covers=lambda request: request.offset > 0)
        ids = np.arange(0, 8, 2, dtype=np.int32)  # four requests
        results = await store.load(keys_of(range(4)), ids)
        assert sorted(results.tolist()) == [Result.DONE] * 3 + [Result.FAILED]
        assert store.statistics().details["read_errors"] == 2
        assert store.statistics().details["write_errors"] == 2
