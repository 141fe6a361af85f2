"""DirectoryQuota: which files a sweep removes, when one is due, and what is counted meanwhile."""

from __future__ import annotations

import threading

import pytest

from aiokv.stores.directory import quota as quota_module
from aiokv.stores.directory.files import FileEntry
from aiokv.stores.directory.quota import DirectoryQuota

NEVER = threading.Event()
KEY_BYTES = 32


class Files:
    """A folder with files of 10 bytes; number ``n`` was last used at time ``n``."""

    def __init__(self, *numbers: int) -> None:
        self.kept = dict.fromkeys(numbers, 10)
        self.on_remove = lambda: None

    def entries(self):
        for number in reversed(self.kept):
            yield FileEntry(key_of(number), float(number), 10)
        yield FileEntry("not a key", 0.0, 1000)
        yield FileEntry("abcd", 0.0, 1000)

    def remove(self, key: str) -> None:
        del self.kept[int.from_bytes(bytes.fromhex(key))]
        self.on_remove()

    def remove_abandoned(self) -> int:
        return 0


def key_of(number: int) -> str:
    return number.to_bytes(KEY_BYTES).hex()


def swept(limit: int | None, files: Files, num_bytes: int = 0) -> DirectoryQuota:
    quota = DirectoryQuota(limit)
    quota.sweep(files, num_bytes, NEVER)
    return quota


@pytest.mark.parametrize(
    ("num_bytes", "left"),
    [
        (0, 10),  # at the limit: nothing has to go
        (1, 9),  # the low mark of 90 bytes leaves room for more than this
        (10, 9),
        (11, 8),  # the save needs more room than the low mark leaves
        (25, 7),
        (100, 0),
    ],
)
def test_least_recently_used_files_make_room_for_the_save_and_down_to_the_low_mark(num_bytes, left):
    files = Files(*range(10))
    quota = swept(100, files, num_bytes)
    assert list(files.kept) == list(range(10 - left, 10))
    assert (quota.used_bytes, quota.blocks) == (10 * left, left)
    assert quota.evicted_blocks == 10 - left


def test_folder_without_a_limit_is_listed_and_loses_nothing():
    files = Files(*range(10))
    quota = DirectoryQuota(None)
    assert quota.admits(1 << 60)
    assert quota.is_sweep_due(1)
    quota.sweep(files, 1 << 60, NEVER)
    assert (quota.used_bytes, quota.blocks, len(files.kept)) == (100, 10, 10)
    assert not quota.is_sweep_due(1 << 60)


def test_sweep_that_is_not_wanted_removes_no_more_and_counts_nothing():
    files, unwanted = Files(*range(10)), threading.Event()
    files.on_remove = unwanted.set
    quota = DirectoryQuota(50)
    quota.sweep(files, 0, unwanted)
    assert len(files.kept) == 9
    assert (quota.used_bytes, quota.blocks, quota.evicted_blocks) == (-1, -1, 1)


def test_saves_during_a_sweep_are_added_to_what_was_listed():
    files = Files(*range(10))
    quota = DirectoryQuota(50)
    files.on_remove = lambda: quota.count(1, 3)
    quota.sweep(files, 0, NEVER)
    assert len(files.kept) == 4  # 45 bytes at most
    assert quota.used_bytes == 40 + 6 * 3


def test_writes_and_removals_are_counted_after_the_first_sweep():
    quota = DirectoryQuota(100)
    quota.count(1, 10)
    assert (quota.used_bytes, quota.blocks) == (-1, -1)
    quota.sweep(Files(1, 2), 0, NEVER)
    quota.count(2, 15)
    assert (quota.used_bytes, quota.blocks) == (35, 4)
    quota.count(-1, -10)
    assert (quota.used_bytes, quota.blocks) == (25, 3)
    quota.count(-9, -90)  # another process has removed files that this one has listed
    assert (quota.used_bytes, quota.blocks) == (0, 0)


def test_sweep_is_due_before_the_first_one_when_full_and_after_many_writes_or_a_long_time(
    monkeypatch,
):
    now = [1000.0]
    monkeypatch.setattr(quota_module.time, "monotonic", lambda: now[0])
    quota = DirectoryQuota(160)
    assert quota.is_sweep_due(0)
    quota.sweep(Files(1), 0, NEVER)
    assert not quota.is_sweep_due(150)
    assert quota.is_sweep_due(151)
    quota.count(1, 10)  # a sixteenth of the limit
    assert not quota.is_sweep_due(0)
    quota.count(-1, -10)
    quota.count(1, 1)
    assert quota.is_sweep_due(0)
    quota.sweep(Files(1), 0, NEVER)
    now[0] += 600.0
    assert not quota.is_sweep_due(0)
    now[0] += 0.1
    assert quota.is_sweep_due(0)
