"""DirectoryStore: conformance, failures of its file system, quota, and several processes."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.stores import DirectoryStore
from aiokv.testing.loops import PATIENCE_SECONDS
from tests.stores.conformance import (
    DONE,
    FAILED,
    MISSING,
    REFUSED,
    Blocks,
    StoreConformance,
    eventually,
    ids,
    keys_of,
    opened,
    save,
)
from tests.stores.failures import DEADLINE_SECONDS, ObjectFailures, ObjectRig, guarded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.stores.base import StoreMemory

OBJECT_BYTES = 10_048


class FullDirectory(DirectoryStore):
    """Knows how much it holds and removes nothing, as if other processes filled what it frees."""

    async def open(self, memory: StoreMemory) -> None:
        await super().open(memory)
        self._quota.used_bytes = 0

    def _start_sweep(self) -> None:
        """Do nothing: a sweep may or may not make room before the next save."""


class DirectoryRig(ObjectRig):
    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self) -> DirectoryStore:
        return DirectoryStore(self.path)

    def full(self) -> DirectoryStore:
        return FullDirectory(self.path, bytes=8 * OBJECT_BYTES)

    def replace(self, key: bytes, content: bytes) -> None:
        file_of(self.path, key).write_bytes(content)


def file_of(path: Path, key: bytes) -> Path:
    return path / key.hex()[:2] / key.hex()


@pytest.fixture
def rig(tmp_path: Path) -> DirectoryRig:
    return DirectoryRig(tmp_path / "kv")


@pytest.fixture
def medium(rig: DirectoryRig) -> DirectoryRig:
    return rig


class TestConformance(StoreConformance):
    pass


@pytest.mark.loop("asyncio")
class TestConformanceWithFsync(StoreConformance):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> DirectoryRig:
        rig = DirectoryRig(tmp_path / "kv")
        rig.store = lambda: DirectoryStore(rig.path, fsync=True, threads=1)
        return rig


class TestObjectFailures(ObjectFailures):
    pass


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int = 1 << 30
) -> Iterator[None]:
    """Let a function of ``os`` fail with an error number, some times."""
    original = getattr(os, name)
    left = [times]

    def call(*arguments, **options):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    with monkeypatch.context() as context:
        context.setattr(os, name, call)
        yield


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("pwritev", errno.ENOSPC),
        ("pwritev", errno.EDQUOT),
        ("rename", errno.ENOSPC),
        ("rename", errno.EROFS),
        ("rename", errno.EACCES),
    ],
)
async def test_a_file_system_without_room_refuses_and_is_still_read(
    rig: DirectoryRig, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        await save(store, blocks, [1])
        with failing(monkeypatch, name, number):
            blocks.write(0, keys_of([2]))
            assert (await store.save(keys_of([2]), ids(0))).tolist() == [REFUSED]
            assert (await store.load(keys_of([1, 2]), ids(1, 2))).tolist() == [DONE, MISSING]
        assert (await store.save(keys_of([2]), ids(0))).tolist() == [DONE]
    assert list((rig.path / "incoming").iterdir()) == []


class Mount:
    """A file system of 128 KiB in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this user may not mount a file system")

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def remove(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path / "mount")
    yield mount
    mount.remove()


@pytest.mark.asyncio
@pytest.mark.parametrize("is_read_only", [False, True], ids=["full", "read-only"])
async def test_a_real_file_system_without_room(
    rig: DirectoryRig, mount: Mount, *, is_read_only: bool
) -> None:
    rig.path = mount.path / "kv"
    async with guarded(rig.store()) as requests:
        assert await requests.save([1, 2]) == [DONE, DONE]
        if is_read_only:
            mount.make_read_only()
        results = await requests.save(range(3, 20))
        assert set(results) <= ({REFUSED} if is_read_only else {DONE, REFUSED})
        assert REFUSED in results
        assert await requests.load([1, 2]) == [DONE, DONE]
        assert requests.guard.statistics().saving == "closed"


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_is_an_error(
    rig: DirectoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        await save(store, blocks, [1])
        with (
            failing(monkeypatch, "preadv", errno.EIO),
            pytest.raises(StoreError, match="Input/output error"),
        ):
            await store.load(keys_of([1]), ids(1))
        assert (await store.load(keys_of([1]), ids(1))).tolist() == [DONE]


@pytest.mark.asyncio
async def test_a_stale_folder_is_entered_again(
    rig: DirectoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        await save(store, blocks, [1])
        with failing(monkeypatch, "stat", errno.ESTALE, times=1):
            assert (await store.lookup(keys_of([1]))).tolist() == [True]
        with failing(monkeypatch, "preadv", errno.ESTALE, times=1):  # removed on another machine
            assert (await store.load(keys_of([1]), ids(1))).tolist() == [MISSING]
        with failing(monkeypatch, "stat", errno.ESTALE), pytest.raises(StoreError, match="Stale"):
            await store.lookup(keys_of([1]))


@pytest.mark.asyncio
async def test_a_removed_folder_is_an_error_until_it_is_made_again(rig: DirectoryRig) -> None:
    async with guarded(rig.store()) as requests:
        assert await requests.save([1]) == [DONE]
        shutil.rmtree(rig.path)
        assert await requests.load([1]) == [MISSING]
        assert await requests.save([1]) == [FAILED]
        rig.path.mkdir()
        assert await requests.save([1]) == [DONE]
        assert await requests.load([1]) == [DONE]


@pytest.mark.asyncio
async def test_a_read_that_hangs_is_not_waited_for(rig: DirectoryRig) -> None:
    async with guarded(rig.store()) as requests:
        assert await requests.save([1, 2]) == [DONE, DONE]
        file = file_of(rig.path, keys_of([1]))
        file.unlink()
        os.mkfifo(file)  # opening it waits for a writer, as a file server that does not answer
        requests.have_deadline(DEADLINE_SECONDS)
        reply = await requests.guard.load(keys_of([1]), ids(9))
        requests.have_deadline(PATIENCE_SECONDS)
        assert reply.results.tolist() == [FAILED]
        assert reply.overdue is not None
        assert await requests.load([2]) == [DONE], "a free thread serves other loads"
        os.close(os.open(file, os.O_RDWR))
        await asyncio.wait([reply.overdue])


@pytest.mark.asyncio
async def test_paths_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path, reason in (
        (tmp_path / "file", "Not a directory"),
        (tmp_path / "absent" / "kv", "No such file or directory"),
    ):
        store = DirectoryStore(path)
        with pytest.raises(StoreError, match=reason):
            await store.open(Blocks().memory)
        await store.aclose()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.asyncio
async def test_an_unreachable_file_system_is_no_error_when_opening(
    rig: DirectoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks()
    store = rig.store()
    with failing(monkeypatch, "mkdir", errno.ESTALE, times=1):
        await store.open(blocks.memory)
    with pytest.raises(StoreError, match="No such file"):
        await store.lookup(keys_of([1]))
    rig.path.mkdir()
    await save(store, blocks, [1])
    await store.aclose()


@pytest.mark.asyncio
async def test_the_least_recently_used_files_make_room(rig: DirectoryRig) -> None:
    blocks = Blocks()
    async with opened(rig, blocks) as unlimited:
        await save(unlimited, blocks, range(10))
    for age, number in enumerate((3, 7, 0, 1, 2, 4, 5, 6, 8, 9)):
        used_at = 1_000_000 + age
        os.utime(file_of(rig.path, keys_of([number])), (used_at, used_at))
    store = DirectoryStore(rig.path, bytes=10 * OBJECT_BYTES)
    await store.open(blocks.memory)
    try:
        await save(store, blocks, [10])

        async def is_swept() -> bool:
            return store.statistics().blocks == 9  # 90 % of the limit

        await eventually(is_swept)
        found = await store.lookup(keys_of(range(11)))
        assert np.flatnonzero(~found).tolist() == [3, 7]
        statistics = store.statistics()
        assert statistics.evicted_blocks == 2
        assert statistics.used_bytes == 9 * OBJECT_BYTES
    finally:
        await store.aclose()


@pytest.mark.asyncio
async def test_a_load_counts_as_use(rig: DirectoryRig) -> None:
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        await save(store, blocks, [1])
        os.utime(file_of(rig.path, keys_of([1])), (1_000_000, 1_000_000))
        await store.load(keys_of([1]), ids(1))
    assert file_of(rig.path, keys_of([1])).stat().st_mtime > 1_000_000


@pytest.mark.asyncio
async def test_incomplete_files_of_killed_processes_are_removed(rig: DirectoryRig) -> None:
    incoming = rig.path / "incoming"
    incoming.mkdir(parents=True)
    (incoming / "old").write_bytes(b"torn")
    (incoming / "young").write_bytes(b"being written")
    os.utime(incoming / "old", (1_000_000, 1_000_000))
    blocks = Blocks()
    async with opened(rig, blocks) as store:
        await save(store, blocks, [1])

        async def is_removed() -> bool:
            return not (incoming / "old").exists()

        await eventually(is_removed)
    assert [file.name for file in incoming.iterdir()] == ["young"]


@pytest.mark.asyncio
async def test_files_of_others_are_left_alone(rig: DirectoryRig) -> None:
    key = keys_of([1])
    folder = file_of(rig.path, key).parent
    folder.mkdir(parents=True)
    (folder / "README").write_bytes(bytes(100_000))
    blocks = Blocks()
    store = DirectoryStore(rig.path, bytes=2 * OBJECT_BYTES)
    await store.open(blocks.memory)
    await save(store, blocks, [1])

    async def is_listed() -> bool:
        return store.statistics().blocks == 1

    await eventually(is_listed)
    await store.aclose()
    assert (folder / "README").exists()


PROGRAM = """
import asyncio, sys
import numpy as np
from aiokv.stores import DirectoryStore
from tests.stores.conformance import DONE, MISSING, PRESENT, Blocks, keys_of, object_of

PAYLOAD = 1 << 20  # large enough for others to see a file that is being written
OBJECTS = [object_of(keys_of([number]), PAYLOAD) for number in range(4)]

async def main(path, seed):
    blocks = Blocks(8, PAYLOAD)
    store = DirectoryStore(path)
    await store.open(blocks.memory)
    keys = keys_of(range(4))
    loaded = 0
    for turn in range(150):
        for number in range(4):
            blocks.memory.object(number)[:] = OBJECTS[number]
        if turn % 2 == seed % 2:  # at any time, some processes write and others read
            results = await store.save(keys, np.arange(4, dtype=np.int32))
            assert set(results.tolist()) <= {DONE, PRESENT}, results
            await store.remove(keys[32:])  # the first key stays
        else:
            for _ in range(3):
                results = await store.load(keys, np.arange(4, 8, dtype=np.int32))
                for number, result in enumerate(results):
                    assert result in (DONE, MISSING), result
                    if result == DONE:
                        loaded += 1
                        assert blocks.read(4 + number) == OBJECTS[number]
    await store.aclose()
    assert loaded > 0

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_several_processes_share_a_folder(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    processes = []
    for seed in range(3):
        with (tmp_path / f"{seed}.log").open("wb") as log:
            command = [sys.executable, "-c", PROGRAM, str(tmp_path / "kv"), str(seed)]
            processes.append(
                subprocess.Popen(command, cwd=root, stdout=log, stderr=subprocess.STDOUT)
            )
    codes = [process.wait(60) for process in processes]
    logs = [(tmp_path / f"{seed}.log").read_text() for seed in range(3)]
    assert codes == [0, 0, 0], "\n".join(logs)


def test_arguments_and_url(tmp_path: Path) -> None:
    store = DirectoryStore.from_url(f"directory:{tmp_path}?bytes=1KiB&fsync=true&threads=2")
    assert store.url == f"directory:{tmp_path}"
    assert store.statistics().capacity_bytes == 1024
    for url, reason in (
        ("directory:", "'directory:' has no path"),
        ("directory://mnt/kv", "has a host"),
        ("directory:/kv?size=1", "option 'size' of directory:/kv is unknown"),
        ("directory:/kv?bytes=1XB", "size is '1XB'"),
        ("directory:/kv?fsync=maybe", "value is 'maybe'"),
        ("directory:/kv?threads=0", "threads is 0"),
        ("directory:/kv?threads=1&threads=2", "is given twice"),
    ):
        with pytest.raises(ConfigError, match=reason):
            DirectoryStore.from_url(url)


@pytest.mark.asyncio
async def test_a_limit_below_one_object_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, bytes=10_000)
    with pytest.raises(ConfigError, match="bytes is 10000; one object takes 10048 bytes"):
        await store.open(Blocks().memory)
    await store.aclose()
