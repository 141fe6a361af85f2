"""DiskStore: the promises of every store, and those of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import ConfigError, StoreError, UsageError
from aiokv.stores.base import Result
from aiokv.stores.disk import DiskStore, committer
from aiokv.stores.disk import store as store_module
from aiokv.stores.disk.volume import Volume
from tests.stores.conformance import Medium, StoreConformance
from tests.stores.disk_medium import (
    key_of,
    keys_of,
    load,
    opened,
    save,
    small_blocks,
    small_store,
    until,
)
from tests.stores.disk_volumes import RecordingVolume

if TYPE_CHECKING:
    from pathlib import Path

DONE, REFUSED = Result.DONE, Result.REFUSED


class DiskMedium(Medium):
    """A directory of the test."""

    def __init__(self, path: Path, **options) -> None:
        self.path = path
        self.options = options

    def store(self) -> DiskStore:
        return DiskStore(self.path, bytes="64MiB", min_free_bytes=0, **self.options)


class GatedVolume(RecordingVolume):
    """A volume whose journal is written only while the gate is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.gate.wait(60)
        super().write(fd, data, offset)

    @property
    def written_blocks(self) -> int:
        return sum(
            e.kind == "write" and len(e.data) == 4_096 and bool(e.ended) for e in self.events
        )


class TestDisk(StoreConformance):
    @pytest.fixture(params=["auto", "threads"])
    def medium(self, tmp_path: Path, request, monkeypatch: pytest.MonkeyPatch) -> DiskMedium:
        monkeypatch.setenv("AIOKV_IO", request.param)
        return DiskMedium(tmp_path / "kv")


class TestDurableDisk(StoreConformance):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> DiskMedium:
        return DiskMedium(tmp_path / "kv", fsync_seconds=0)


# --- opening -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_second_store_of_the_process_is_refused_and_leaves_the_first(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path), blocks) as store:
        await save(store, blocks, range(4))
        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}\b"):
            await small_store(tmp_path).open(blocks.memory)
        assert await load(store, blocks, range(4)) == [0, 1, 2, 3]
    async with opened(small_store(tmp_path), blocks) as store:
        assert await load(store, blocks, range(4)) == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_store_of_this_process_names_the_remedy(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path), blocks):
        with pytest.raises(ConfigError, match=r"until aclose\(\) of that engine"):
            await small_store(tmp_path).open(blocks.memory)


@pytest.mark.asyncio
async def test_forked_process_does_not_keep_the_store_of_its_killed_parent(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from aiokv.stores.disk.lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1]))\n"
        "if os.fork():\n"
        "    os.read(int(sys.argv[2]), 1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.write(int(sys.argv[3]), b'x'); sys.stdin.read()\n"
    )
    reading, writing = os.pipe()
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, str(tmp_path), str(reading), str(writing)],
        stdin=subprocess.PIPE,
        pass_fds=(reading, writing),
    ) as process:
        process.wait()
        blocks = small_blocks()
        async with opened(small_store(tmp_path), blocks) as store:
            assert await save(store, blocks, [1]) == [DONE]
    os.close(reading)
    os.close(writing)


@pytest.mark.asyncio
async def test_store_of_another_process_is_refused_with_its_id(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from aiokv.stores.disk.lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        blocks = small_blocks()
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid}\b"):
            await small_store(tmp_path).open(blocks.memory)
        process.stdin.close()
        process.wait()
    async with opened(small_store(tmp_path), blocks) as store:
        assert await save(store, blocks, [1]) == [DONE]


@pytest.mark.asyncio
async def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        await small_store(tmp_path / "file").open(small_blocks().memory)


@pytest.mark.asyncio
async def test_capacity_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one block takes 4096 bytes"):
        await DiskStore(tmp_path, bytes=4_095).open(small_blocks().memory)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes": "many"}, "size is 'many'"),
        ({"bytes": 0}, "size is 0"),
        ({"bytes": 1, "fsync_seconds": -1}, "fsync_seconds is -1"),
        ({"bytes": 1, "ttl_seconds": "x"}, "ttl_seconds is 'x'"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiskStore(tmp_path, **options)


def test_url_gives_path_and_options(tmp_path: Path) -> None:
    store = DiskStore.from_url(
        f"disk:{tmp_path}/a%20b?bytes=400GiB&fsync_seconds=0&min_free_bytes=0"
    )
    assert store.url == f"disk:{tmp_path}/a b"
    assert store.statistics().capacity_bytes == 400 << 30
    for url in ("disk:?bytes=1", f"disk:{tmp_path}", f"disk:{tmp_path}?bytes=1&size=2"):
        with pytest.raises(ConfigError):
            DiskStore.from_url(url)


@pytest.mark.asyncio
async def test_cancelled_open_leaves_nothing_open(tmp_path: Path) -> None:
    blocks = small_blocks()
    for passes in range(12):
        store = small_store(tmp_path)
        task = asyncio.create_task(store.open(blocks.memory))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await store.aclose()
    async with opened(small_store(tmp_path), blocks) as store:
        assert await save(store, blocks, [1]) == [DONE]


@pytest.mark.asyncio
async def test_closed_store_raises_store_error(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    with pytest.raises(StoreError, match="is not open"):
        await store.lookup(key_of(1))
    async with opened(store, small_blocks()):
        pass
    with pytest.raises(StoreError, match="is not open"):
        await store.load(key_of(1), np.zeros(1, np.int32))


@pytest.mark.asyncio
async def test_blocks_outside_of_the_host_memory_are_refused(tmp_path: Path) -> None:
    async with opened(small_store(tmp_path), small_blocks(4)) as store:
        for wrong in ([-1], [4], [0, 1]):
            for move in (store.load, store.save):
                with pytest.raises(UsageError):
                    await move(key_of(1), np.array(wrong, np.int32))


# --- quota, eviction, time to live ---------------------------------------------------------------


@pytest.mark.asyncio
async def test_least_recently_used_blocks_are_evicted(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        await save(store, blocks, range(8))
        assert await load(store, blocks, [0, 2]) == [0, 2]
        assert await save(store, blocks, range(8, 12)) == [DONE] * 4
        assert [store.may_have_any(key_of(n)) for n in (0, 1)] == [True, False]
        assert await load(store, blocks, range(12)) == [0, 2, 6, 7, 8, 9, 10, 11]
        statistics = store.statistics()
        assert (statistics.blocks, statistics.evicted_blocks) == (8, 4)
        assert statistics.used_bytes == statistics.capacity_bytes == 8 * 4_096


@pytest.mark.asyncio
async def test_order_of_use_survives_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "MIN_RECORDS", 10)
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        await save(store, blocks, range(8))
        await load(store, blocks, [0, 2])
        for _ in range(10):
            await store.remove(key_of(7))
            await save(store, blocks, [7])
        assert store.statistics().details["compactions"] > 0
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        await save(store, blocks, range(8, 12))
        assert await load(store, blocks, range(12)) == [0, 2, 6, 7, 8, 9, 10, 11]


@pytest.mark.asyncio
async def test_batch_larger_than_the_store_is_refused_in_part(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        results = await save(store, blocks, range(12))
        assert sorted(results) == [DONE] * 8 + [REFUSED] * 4
        assert await load(store, blocks, range(12)) == list(range(8))


@pytest.mark.asyncio
async def test_smaller_quota_removes_blocks_and_returns_their_space(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=32), blocks) as store:
        await save(store, blocks, range(32))
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        assert store.statistics().blocks == 8
        assert (tmp_path / "segment-00000").stat().st_size == 8 * 4_096
        assert len(await load(store, blocks, range(32))) == 8
        assert await save(store, blocks, range(40, 44)) == [DONE] * 4
    async with opened(small_store(tmp_path, slots=64), blocks) as store:
        present = await load(store, blocks, range(44))
        assert len(present) == 8
        assert {40, 41, 42, 43} <= set(present)


@pytest.mark.asyncio
async def test_blocks_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(store_module.time, "time", lambda: now)
    blocks = small_blocks()
    async with opened(small_store(tmp_path, ttl_seconds=60), blocks) as store:
        await save(store, blocks, range(4))
        now += 59
        assert await load(store, blocks, range(4)) == [0, 1, 2, 3]
        await save(store, blocks, range(4, 6))
        now += 2
        assert (await store.lookup(keys_of(range(6)))).tolist() == [False] * 4 + [True] * 2
        assert await load(store, blocks, range(6)) == [4, 5]
        assert await save(store, blocks, range(2)) == [DONE] * 2, "expired blocks are saved again"
        assert await load(store, blocks, range(6)) == [0, 1, 4, 5]


@pytest.mark.asyncio
async def test_several_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.stores.disk.layout._MIN_SEGMENT_BYTES", 5 * 4_096)
    blocks = small_blocks()
    for _ in range(2):
        async with opened(small_store(tmp_path, slots=32), blocks) as store:
            await save(store, blocks, range(32))
            assert len(await load(store, blocks, range(32))) == 32
    names = sorted(os.listdir(tmp_path))
    assert names == ["journal", "lock", *(f"segment-{n:05d}" for n in range(7))]
    async with opened(small_store(tmp_path, slots=8), blocks) as store:
        assert len(await load(store, blocks, range(32))) == 8
    names = sorted(os.listdir(tmp_path))
    assert names == ["journal", "lock", "segment-00000", "segment-00001"]


# --- writes --------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("fsync_seconds", [0, 1e9])
async def test_concurrent_saves_share_writes_of_the_journal(
    tmp_path: Path, fsync_seconds: float
) -> None:
    volume = GatedVolume(tmp_path)
    blocks = small_blocks()
    store = small_store(tmp_path, volume=volume, fsync_seconds=fsync_seconds)
    async with opened(store, blocks):
        before = store.statistics().details
        volume.gate.clear()
        saves = asyncio.gather(*(store.save(key_of(n), np.array([n], np.int32)) for n in range(32)))
        await until(lambda: volume.written_blocks == 33)  # and the header; all wait for the journal
        volume.gate.set()
        assert all(result == [DONE] for result in await saves)
        after = store.statistics().details
    assert after["journal_writes"] - before["journal_writes"] <= 3
    flushes = after["journal_flushes"] - before["journal_flushes"]
    assert flushes == (0 if fsync_seconds else after["journal_writes"] - before["journal_writes"])


@pytest.mark.asyncio
async def test_neighbouring_blocks_are_written_in_one_request(tmp_path: Path) -> None:
    volume = RecordingVolume(tmp_path)
    blocks = small_blocks()
    async with opened(small_store(tmp_path, volume=volume), blocks) as store:
        segment = None
        ids = np.array([9, 8, 7, 3, 2, 20], np.int32)
        for block in ids.tolist():
            blocks.write(block, key_of(block))
        expected = {block: blocks.read(block) for block in ids.tolist()}
        await store.save(keys_of(ids.tolist()), ids)
        writes = [
            event for event in volume.events if event.kind == "write" and len(event.data) >= 4_096
        ]
        segment = [len(event.data) // 4_096 for event in writes if event.offset or event.file > 0]
        assert sorted(segment) == [1, 2, 3]
        blocks.fill(0)
        await store.load(keys_of(ids.tolist()), ids)
        assert {block: blocks.read(block) for block in ids.tolist()} == expected


@pytest.mark.asyncio
async def test_save_flushes_within_fsync_seconds(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path, fsync_seconds=0.001), blocks) as store:
        before = store.statistics().details["journal_flushes"]
        await save(store, blocks, range(4))
        await until(lambda: store.statistics().details["journal_flushes"] > before)


@pytest.mark.asyncio
async def test_statistics_count(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path), blocks) as store:
        await save(store, blocks, range(4))
        await store.quarantine(key_of(1))
        statistics = store.statistics()
    assert (statistics.blocks, statistics.used_bytes) == (3, 3 * 4_096)
    assert statistics.quarantined_blocks == 1
    assert statistics.details["index_bytes"] > 0
    async with opened(small_store(tmp_path), blocks) as store:
        assert store.statistics().quarantined_blocks == 1
        assert await load(store, blocks, range(4)) == [0, 2, 3]


def test_volume_reads_zeros_where_the_medium_fails(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"a" * 10_000)
    real_pread = os.pread

    def pread(fd: int, num_bytes: int, offset: int) -> bytes:
        if offset <= 5_000 < offset + num_bytes:
            raise OSError(5, "Input/output error")
        return real_pread(fd, num_bytes, offset)

    volume = Volume(tmp_path)
    fd = volume.open("file", write=False)
    monkeypatch.setattr(os, "pread", pread)
    assert volume.read(fd, 20_000, 0)[:10_000] == b"a" * 4_096 + bytes(4_096) + b"a" * 1_808
    volume.close(fd)


@pytest.mark.asyncio
async def test_removal_of_an_evicted_block_waits_for_the_record_of_its_eviction(
    tmp_path: Path,
) -> None:
    volume = GatedVolume(tmp_path)
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=8, volume=volume), blocks) as store:
        await save(store, blocks, range(8))
        volume.gate.clear()
        saving = asyncio.create_task(save(store, blocks, [8]))
        await until(lambda: store.statistics().evicted_blocks > 0)
        removal = asyncio.create_task(store.remove(key_of(0)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not removal.done()
        volume.gate.set()
        assert (await removal).tolist() == await saving == [DONE]
