"""Disk stores: blocks of several sizes and formats in one directory."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from aiokv.errors import ConfigError, StoreError
from aiokv.stores.base import Result
from aiokv.stores.disk import DiskStore, layout, layouts
from aiokv.stores.disk.volume import Volume
from aiokv.stores.inspection import open_files
from tests.stores.conformance import Blocks
from tests.stores.disk_medium import keys_of, load, opened, save, small_blocks, small_store
from tests.stores.disk_volumes import FailingVolume

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.asyncio

LARGE = "layout-1-8192-8128"


def large_blocks() -> Blocks:
    """Return blocks that take two pages each."""
    return Blocks(32, 2 * 4_096 - 64)


def content_of(path: Path) -> dict[str, bytes]:
    """Return the files of a layout."""
    return {
        file.name: file.read_bytes()
        for file in path.iterdir()
        if file.name.startswith(("journal", "segment"))
    }


async def numbers_in(store: DiskStore, blocks: Blocks, count: int) -> list[int]:
    """Return the numbers below ``count`` that the store finds, all with right bytes."""
    async with opened(store, blocks):
        return await load(store, blocks, range(count))


@pytest.mark.parametrize("payload_bytes", [4_096 - 64 - 1, 2 * 4_096 - 64])
async def test_blocks_of_another_size_are_kept_beside_those_in_use(
    tmp_path: Path, payload_bytes: int
) -> None:
    first, second = small_blocks(), Blocks(32, payload_bytes)
    async with opened(small_store(tmp_path), first) as store:
        await save(store, first, range(4))
    files = content_of(tmp_path)
    async with opened(small_store(tmp_path), second) as store:
        assert await load(store, second, range(8)) == []
        assert await save(store, second, range(2, 6)) == [Result.DONE] * 4
    assert content_of(tmp_path) == files
    assert await numbers_in(small_store(tmp_path), first, 8) == [0, 1, 2, 3]
    assert await numbers_in(small_store(tmp_path), second, 8) == [2, 3, 4, 5]


async def test_files_of_a_later_format_are_kept_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = small_blocks()
    with monkeypatch.context() as later:
        later.setattr(layout, "FORMAT_VERSION", 2)
        async with opened(small_store(tmp_path), blocks) as store:
            await save(store, blocks, range(4))
    async with opened(small_store(tmp_path), blocks) as store:
        assert await load(store, blocks, range(4)) == []
        await save(store, blocks, range(2))
    assert await numbers_in(small_store(tmp_path), blocks, 4) == [0, 1]
    with monkeypatch.context() as later:
        later.setattr(layout, "FORMAT_VERSION", 2)
        later.setattr(layouts, "FORMAT_VERSION", 2)
        assert await numbers_in(small_store(tmp_path), blocks, 4) == [0, 1, 2, 3]


async def test_other_layouts_count_towards_the_limit_and_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_MIN_SEGMENT_BYTES", 8 * 4_096)
    first, second = small_blocks(), large_blocks()
    async with opened(small_store(tmp_path, slots=32), first) as store:
        await save(store, first, range(32))  # 4 segments, all of the limit
    async with opened(small_store(tmp_path, slots=32), second) as store:
        assert store.statistics().details["other_layouts_bytes"] == 32 * 4_096
        assert await save(store, second, range(4)) == [Result.DONE] * 4
        assert store.statistics().details["other_layouts_bytes"] == 24 * 4_096
        assert await load(store, second, range(4)) == [0, 1, 2, 3]
    async with opened(small_store(tmp_path, slots=32), first) as store:
        kept = await load(store, first, range(32))
        assert len(kept) == 24, "only the blocks of the removed segment are gone"
        assert await save(store, first, range(40, 48)) == [Result.DONE] * 8
        assert set(await load(store, first, range(40, 48))) == set(range(40, 48))
    async with opened(small_store(tmp_path, slots=32), second) as store:
        assert store.statistics().details["other_layouts_bytes"] == 32 * 4_096
        await save(store, second, range(16))
        assert store.statistics().details["other_layouts_bytes"] == 0
    assert not content_of(tmp_path)
    assert await numbers_in(small_store(tmp_path, slots=32), second, 16) == list(range(16))


async def test_smaller_limit_removes_other_layouts_at_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_MIN_SEGMENT_BYTES", 8 * 4_096)
    first, second = small_blocks(), large_blocks()
    async with opened(small_store(tmp_path, slots=64), first) as store:
        await save(store, first, range(24))
    async with opened(small_store(tmp_path, slots=64), second) as store:
        await save(store, second, range(4))
    async with opened(small_store(tmp_path, slots=24), second) as store:
        assert store.statistics().details["other_layouts_bytes"] == 16 * 4_096
        assert await load(store, second, range(4)) == [0, 1, 2, 3]
    async with opened(small_store(tmp_path, slots=24), first) as store:
        assert len(await load(store, first, range(24))) == 16


async def test_layout_that_was_used_longest_ago_gives_way_first(tmp_path: Path) -> None:
    sizes = {number: Blocks(8, number * 4_096 - 64) for number in (1, 2, 3)}
    for number, blocks in sizes.items():
        async with opened(small_store(tmp_path, slots=24), blocks) as store:
            await save(store, blocks, range(8 if number == 1 else 2))
    for age, path in ((20, tmp_path / LARGE), (10, tmp_path)):
        used_at = os.stat(tmp_path).st_mtime - age
        os.utime(path / "journal", (used_at, used_at))
    async with opened(small_store(tmp_path, slots=24), sizes[3]) as store:
        seen = []
        for number in range(2, 12):
            await save(store, sizes[3], [number])
            left = [bool(content_of(path)) for path in (tmp_path, tmp_path / LARGE)]
            if left not in seen:
                seen.append(left)
        assert seen == [[True, True], [True, False], [False, False]]


async def test_other_layouts_give_way_on_a_full_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = small_blocks(), large_blocks()
    async with opened(small_store(tmp_path), first) as store:
        await save(store, first, range(8))

    class FullVolume(Volume):
        """A file system whose space the first layout has taken."""

        def free_bytes(self) -> int:
            return 1 << 40 if not content_of(tmp_path) else 0

        def write(self, fd: int, data: bytes, offset: int) -> None:
            if content_of(tmp_path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(fd, data, offset)

    async with opened(small_store(tmp_path, volume=FullVolume(tmp_path)), second) as store:
        assert await save(store, second, range(4)) == [Result.DONE] * 4
        assert await load(store, second, range(4)) == [0, 1, 2, 3]


async def test_full_disk_without_other_layouts_is_a_store_error(tmp_path: Path) -> None:
    volume = FailingVolume(tmp_path)
    volume.fail("journal.write", errno.ENOSPC)
    with pytest.raises(StoreError, match="No space left on device"):
        await small_store(tmp_path, volume=volume).open(small_blocks().memory)


async def test_one_process_at_a_time_uses_the_directory_of_all_layouts(tmp_path: Path) -> None:
    first, second = small_blocks(), large_blocks()
    async with opened(small_store(tmp_path), first):
        with pytest.raises(ConfigError, match="in use by process"):
            await small_store(tmp_path).open(second.memory)


async def test_directory_without_the_layout_that_cannot_be_written_is_a_store_error(
    tmp_path: Path,
) -> None:
    first, second = small_blocks(), large_blocks()
    async with opened(small_store(tmp_path), first) as store:
        await save(store, first, range(2))

    class ReadOnlyVolume(Volume):
        def is_writable(self) -> bool:
            return False

        def make(self) -> None:
            if self.path != tmp_path:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    volume = ReadOnlyVolume(tmp_path)
    with pytest.raises(StoreError, match="Read-only file system"):
        await small_store(tmp_path, volume=volume).open(second.memory)
    assert await numbers_in(small_store(tmp_path, volume=volume), first, 2) == [0, 1]


async def test_damaged_journal_of_a_layout_begins_empty_in_its_place(tmp_path: Path) -> None:
    first, second = small_blocks(), large_blocks()
    for blocks in (first, second):
        async with opened(small_store(tmp_path), blocks) as store:
            await save(store, blocks, range(2))
    (tmp_path / LARGE / "journal").write_bytes(bytes(4_096))
    async with opened(small_store(tmp_path), second) as store:
        assert store.statistics().details["damaged_headers"] == 1
        assert await load(store, second, range(2)) == []
    (tmp_path / "journal").write_bytes(bytes(4_096))
    await save_one(small_store(tmp_path), second)
    assert await numbers_in(small_store(tmp_path), second, 2) == [1]


async def save_one(store: DiskStore, blocks: Blocks) -> None:
    async with opened(store, blocks):
        await save(store, blocks, [1])


async def test_tools_show_and_clean_all_layouts(tmp_path: Path) -> None:
    first, second = small_blocks(), large_blocks()
    for blocks in (first, second):
        async with opened(small_store(tmp_path), blocks) as store:
            await save(store, blocks, range(4))
            assert open_files(tmp_path).listing().used_by == os.getpid()
    files = open_files(tmp_path)
    listing = files.listing()
    assert listing.blocks == 8
    assert [group.name for group in listing.groups] == [
        "segment-00000",
        f"{LARGE}/segment-00000",
    ]
    async with opened(small_store(tmp_path), first) as store:
        with pytest.raises(Exception, match="in use by process"):
            open_files(tmp_path / LARGE).verify(lambda stage, total: lambda done: None, threads=1)
        await store.remove(keys_of(range(4)))
    for name in ("journal", "segment-00000"):
        (tmp_path / name).unlink()
    assert open_files(tmp_path).listing().blocks == 4


async def test_spare_slots_follow_the_slots_that_exist(tmp_path: Path) -> None:
    class SmallVolume(Volume):
        """A file system that is much smaller than the limit of the store."""

        def free_bytes(self) -> int:
            used = sum(file.stat().st_size for file in tmp_path.glob("segment-*"))
            return (1 << 30) + 128 * 4_096 - used

    blocks = small_blocks()
    volume = SmallVolume(tmp_path)
    store = DiskStore(tmp_path, bytes="8GiB", min_free_bytes="1GiB", volume=volume)
    async with opened(store, blocks):
        held = []
        for begin in range(0, 512, 16):
            assert await save(store, blocks, range(begin, begin + 16)) == [Result.DONE] * 16
            held.append(store.statistics().blocks)
        assert max(held) == 128
        assert min(held[8:]) >= 128 - 2 * 16


async def test_blocks_saved_while_the_clock_was_ahead_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    blocks = small_blocks()
    async with opened(small_store(tmp_path, ttl_seconds=60), blocks) as store:
        await save(store, blocks, range(2))
        now += 1_000.0
        await save(store, blocks, range(2, 4))
        assert await load(store, blocks, range(4)) == [2, 3]
        now -= 1_000.0
        assert await load(store, blocks, range(4)) == [0, 1]
        assert (await store.lookup(keys_of(range(4)))).tolist() == [True, True, False, False]
        assert await save(store, blocks, [2]) == [Result.DONE]
        now += 59.0
        assert await load(store, blocks, range(4)) == [0, 1, 2]
    now += 2.0
    async with opened(small_store(tmp_path, ttl_seconds=60), blocks) as store:
        assert await load(store, blocks, range(4)) == []
