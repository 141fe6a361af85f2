"""``aiokv store``: the files of disk and directory stores, listed, verified and cleaned up."""

from __future__ import annotations

import contextlib
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import uvloop

from aiokv import _native, cli
from aiokv.errors import UsageError
from aiokv.layout.host_block import TRAILER_BYTES
from aiokv.stores import DirectoryStore
from aiokv.stores.disk import DiskStore
from aiokv.stores.disk import inspection as inspection_module
from aiokv.stores.disk.inspection import DiskFiles
from aiokv.stores.disk.layout import HEADER_BYTES, RECORD_BYTES
from aiokv.stores.disk.volume import Volume
from aiokv.stores.inspection import StoreFiles, open_files
from tests.stores.conformance import Blocks, keys_of

PAYLOAD_BYTES = 9_984
OBJECT_BYTES = PAYLOAD_BYTES + TRAILER_BYTES
SLOT_BYTES = 12_288
COUNT = 12


def disk_store(path):
    return DiskStore(path, bytes="64MiB", min_free_bytes=0)


def directory_store(path):
    return DirectoryStore(path)


@asynccontextmanager
async def opened(store, blocks=None):
    blocks = Blocks() if blocks is None else blocks
    await store.open(blocks.memory)
    try:
        yield blocks
    finally:
        await store.aclose()


async def save(store, numbers):
    """Save one sealed block per number."""
    async with opened(store) as blocks:
        await save_open(store, blocks, numbers)


async def save_open(store, blocks, numbers):
    keys, ids = keys_of(numbers), np.arange(len(numbers), dtype=np.int32)
    for block, number in enumerate(numbers):
        blocks.array[block] = number
    memory = blocks.memory
    _native.seal_blocks(
        memory.address,
        memory.pitch_bytes,
        memory.payload_bytes,
        ids,
        keys,
        num_blocks=memory.num_blocks,
    )
    assert (await store.save(keys, ids) == 0).all()


async def present(store, numbers):
    """Return those numbers whose blocks are found with the right bytes."""
    async with opened(store) as blocks:
        ids = np.arange(len(numbers), dtype=np.int32)
        results = await store.load(keys_of(numbers), ids)
        return [
            number
            for number, block, result in zip(numbers, ids, results, strict=True)
            if result == 0 and (blocks.array[block, :PAYLOAD_BYTES] == number).all()
        ]


def no_stages(stage, total):
    return lambda count: None


def clean(path, *, older_than_seconds=None, verify=False, dry_run=False):
    return open_files(path).clean(
        no_stages,
        older_than_seconds=older_than_seconds,
        verify=verify,
        threads=2,
        dry_run=dry_run,
    )


def verify(path):
    return open_files(path).verify(no_stages, threads=2)


def snapshot(path):
    """Return all files of a folder with their bytes, apart from the lock."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def flip(file, offset):
    with file.open("r+b") as opened_file:
        opened_file.seek(offset)
        byte = opened_file.read(1)[0]
        opened_file.seek(offset)
        opened_file.write(bytes([byte ^ 1]))


@pytest.fixture
def disk(tmp_path):
    uvloop.run(save(disk_store(tmp_path / "kv"), range(COUNT)))
    return tmp_path / "kv"


@pytest.fixture
def directory(tmp_path):
    uvloop.run(save(directory_store(tmp_path / "kv"), range(COUNT)))
    return tmp_path / "kv"


@pytest.fixture(params=["disk", "directory"])
def store_path(request):
    return request.getfixturevalue(request.param)


# -- every kind of store ---------------------------------------------------------------------


def test_listing_counts_the_blocks_and_changes_nothing(store_path):
    before = snapshot(store_path)
    listing = open_files(store_path).listing()
    assert (listing.blocks, listing.block_bytes) == (COUNT, COUNT * OBJECT_BYTES)
    assert sum(group.blocks for group in listing.groups) == COUNT
    assert listing.disk_bytes >= COUNT * OBJECT_BYTES
    assert (listing.quarantined_blocks, listing.incomplete_files) == (0, 0)
    assert listing.oldest_seconds <= listing.newest_seconds
    assert (listing.damage, listing.notes, listing.used_by) == ([], [], None)
    assert snapshot(store_path) == before


def test_verify_reads_every_block_and_changes_nothing(store_path):
    before = snapshot(store_path)
    result = verify(store_path)
    assert result.is_good
    assert (result.blocks, result.block_bytes) == (COUNT, COUNT * OBJECT_BYTES)
    assert snapshot(store_path) == before


def damage_block(path, number):
    """Flip a bit in the payload of a block."""
    key = keys_of([number]).hex()
    file = path / key[:2] / key
    if file.exists():
        flip(file, 5_000)
    else:
        flip(path / "segment-00000", number * SLOT_BYTES + 5_000)


def test_verify_names_each_wrong_block(store_path):
    for number in (3, 7):
        damage_block(store_path, number)
    result = verify(store_path)
    assert not result.is_good
    assert {block.key for block in result.bad} == {keys_of([n]).hex() for n in (3, 7)}
    assert {block.reason for block in result.bad} == {"length, key or checksum is wrong"}


def test_clean_keeps_the_blocks(store_path):
    store = disk_store if (store_path / "journal").exists() else directory_store
    result = clean(store_path)
    assert (result.selected_blocks, result.bad_blocks, result.kept_blocks) == (0, 0, COUNT)
    assert uvloop.run(present(store(store_path), range(COUNT))) == list(range(COUNT))


def test_clean_with_verify_removes_wrong_blocks_only(store_path):
    store = disk_store if (store_path / "journal").exists() else directory_store
    damage_block(store_path, 4)
    result = clean(store_path, verify=True)
    assert (result.bad_blocks, result.selected_blocks, result.kept_blocks) == (1, 0, COUNT - 1)
    assert verify(store_path).is_good
    found = uvloop.run(present(store(store_path), range(COUNT)))
    assert found == [n for n in range(COUNT) if n != 4]


def test_clean_removes_blocks_older_than_the_limit(store_path):
    store = disk_store if (store_path / "journal").exists() else directory_store
    assert clean(store_path, older_than_seconds=3600).selected_blocks == 0
    result = clean(store_path, older_than_seconds=-60)
    assert (result.selected_blocks, result.kept_blocks) == (COUNT, 0)
    assert result.freed_bytes >= COUNT * OBJECT_BYTES
    assert open_files(store_path).listing().blocks == 0
    assert uvloop.run(present(store(store_path), range(COUNT))) == []
    uvloop.run(save(store(store_path), range(3)))
    assert uvloop.run(present(store(store_path), range(COUNT))) == [0, 1, 2]


def test_dry_run_changes_nothing(store_path):
    damage_block(store_path, 4)
    before = snapshot(store_path)
    result = clean(store_path, older_than_seconds=-60, verify=True, dry_run=True)
    assert (result.selected_blocks, result.bad_blocks, result.freed_bytes) == (COUNT - 1, 1, 0)
    assert snapshot(store_path) == before


# -- disk stores -----------------------------------------------------------------------------


def test_bytes_of_removed_blocks_are_gone_from_the_disk(disk):
    """A prompt can be reconstructed from its blocks: removed ones must not stay in free slots."""

    async def remove():
        store = disk_store(disk)
        async with opened(store):
            await store.remove(keys_of([2, 3, COUNT - 1]))

    uvloop.run(remove())
    segment = disk / "segment-00000"
    assert segment.read_bytes()[2 * SLOT_BYTES] == 2
    clean(disk)
    content = segment.read_bytes()
    assert content[2 * SLOT_BYTES : 4 * SLOT_BYTES] == bytes(2 * SLOT_BYTES)
    assert len(content) == (COUNT - 1) * SLOT_BYTES
    kept = [n for n in range(COUNT) if n not in (2, 3, COUNT - 1)]
    assert uvloop.run(present(disk_store(disk), range(COUNT))) == kept


def test_quarantined_slots_are_listed_and_released(disk):
    async def quarantine():
        store = disk_store(disk)
        async with opened(store):
            await store.quarantine(keys_of([5, 6]))

    uvloop.run(quarantine())
    listing = open_files(disk).listing()
    assert (listing.blocks, listing.quarantined_blocks) == (COUNT - 2, 2)
    assert listing.groups[0].quarantined_blocks == 2
    result = clean(disk)
    assert (result.quarantined_blocks, result.kept_blocks) == (2, COUNT - 2)
    assert open_files(disk).listing().quarantined_blocks == 0
    uvloop.run(save(disk_store(disk), [5, 6]))
    assert uvloop.run(present(disk_store(disk), range(COUNT))) == list(range(COUNT))
    assert os.stat(disk / "segment-00000").st_size <= 64 << 20


def test_recency_survives_a_clean_up(disk):
    def keys():
        reading = DiskFiles(disk).read()
        return [reading.place(block).key for block in range(COUNT)]

    before = keys()
    clean(disk)
    assert keys() == before


def test_store_in_use_is_listed_and_not_changed(disk, capsys):
    async def use():
        store = disk_store(disk)
        async with opened(store) as blocks:
            await save_open(store, blocks, range(COUNT, COUNT + 4))
            listing = open_files(disk).listing()
            assert listing.blocks == COUNT + 4
            assert listing.used_by in (os.getpid(), None)  # None: a system that hides locks
            for action in (verify, clean):
                with pytest.raises(UsageError, match=f"is in use by process {os.getpid()}"):
                    action(disk)
            assert cli.main(["store", "gc", str(disk), "--older-than", "0s"]) == 2
            assert (await store.lookup(keys_of(range(COUNT + 4)))).all()

    uvloop.run(use())
    assert "'aiokv store ls' works meanwhile" in capsys.readouterr().err


def test_lock_is_free_again_after_each_action(disk):
    verify(disk)
    clean(disk)
    assert uvloop.run(present(disk_store(disk), range(COUNT))) == list(range(COUNT))


def test_slot_behind_the_end_of_its_file_is_wrong(disk):
    with (disk / "segment-00000").open("r+b") as file:
        file.truncate(10 * SLOT_BYTES + 100)
    result = verify(disk)
    assert [(block.slot, block.reason) for block in result.bad] == [
        (10, "the file ends within the slot"),
        (11, "the file ends within the slot"),
    ]


def test_missing_segment_makes_its_blocks_wrong(disk):
    (disk / "segment-00000").unlink()
    result = verify(disk)
    assert len(result.bad) == COUNT
    assert {block.reason for block in result.bad} == {
        "the slot cannot be read: No such file or directory"
    }


def test_torn_record_is_a_note_and_a_damaged_one_is_damage(disk):
    journal = disk / "journal"
    with journal.open("ab") as file:
        file.write(b"torn")
    result = verify(disk)
    assert result.is_good
    assert result.notes == ["1 torn records at the end of the journal, of an interrupted save"]
    flip(journal, HEADER_BYTES + RECORD_BYTES + 20)
    result = verify(disk)
    assert not result.is_good
    assert result.damage == ["1 damaged records in the journal"]


def test_unreadable_header_is_damage_and_stops_a_clean_up(disk):
    for offset in (0, HEADER_BYTES // 2):
        flip(disk / "journal", offset)
    listing = open_files(disk).listing()
    assert listing.blocks == 0
    assert listing.damage == [
        "the journal is missing or its header is damaged: no block can be found"
    ]
    assert not verify(disk).is_good
    before = snapshot(disk)
    with pytest.raises(UsageError, match=r"the journal of .* is missing or its header is damaged"):
        clean(disk)
    assert snapshot(disk) == before


def test_incomplete_journal_is_removed(disk):
    (disk / "journal.new").write_bytes(b"x" * 100)
    assert open_files(disk).listing().incomplete_files == 1
    assert clean(disk, dry_run=True).incomplete_files == 1
    assert clean(disk).incomplete_files == 1
    assert not (disk / "journal.new").exists()


class FullVolume(Volume):
    """A file system that has room for a number of writes."""

    writes_left = 0

    def write(self, fd, data, offset):
        if self.writes_left == 0:
            raise OSError(28, "No space left on device")
        self.writes_left -= 1
        super().write(fd, data, offset)


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_clean_up_that_fails_changes_nothing(disk, writes):
    before = snapshot(disk)
    volume = FullVolume(disk)
    volume.writes_left = writes
    with pytest.raises(OSError, match="No space left"):
        StoreFiles(disk, [DiskFiles(disk, volume)]).clean(
            no_stages, older_than_seconds=None, verify=False, threads=1, dry_run=False
        )
    assert snapshot(disk) == before
    assert verify(disk).is_good


class RecordingVolume(Volume):
    """Records the order in which files become durable, get their names, and are cut."""

    def __init__(self, path):
        super().__init__(path)
        self.calls = []

    def open(self, name, **options):
        fd = super().open(name, **options)
        self.calls.append(f"open {name} as {fd}")
        return fd

    def sync(self, fd):
        name = next(c.split()[1] for c in reversed(self.calls) if c.endswith(f" as {fd}"))
        self.calls.append(f"sync {name}")
        super().sync(fd)

    def rename(self, old, new):
        self.calls.append(f"rename {old}")
        super().rename(old, new)

    def sync_directory(self):
        self.calls.append("sync names")
        super().sync_directory()

    def truncate(self, fd, num_bytes):
        self.calls.append("truncate")
        super().truncate(fd, num_bytes)


def test_data_and_new_journal_are_durable_before_bytes_are_removed(disk):
    volume = RecordingVolume(disk)
    StoreFiles(disk, [DiskFiles(disk, volume)]).clean(
        no_stages, older_than_seconds=None, verify=False, threads=1, dry_run=False
    )
    order = [call for call in volume.calls if not call.startswith("open")]
    journal = order.index("rename journal.new")
    assert order.index("sync segment-00000") < journal
    assert order.index("sync journal.new") < journal
    assert journal < order.index("sync names") < order.index("truncate")


# -- directory stores ------------------------------------------------------------------------


def test_old_incomplete_files_are_removed_and_new_ones_are_kept(directory):
    incoming = directory / "incoming"
    for name in ("old", "new"):
        (incoming / name).write_bytes(b"part")
    os.utime(incoming / "old", (0, 0))
    assert open_files(directory).listing().incomplete_files == 2
    assert clean(directory).incomplete_files == 1
    assert [file.name for file in incoming.iterdir()] == ["new"]


def test_other_files_are_left_alone(directory):
    (directory / "00").mkdir(exist_ok=True)
    others = [
        directory / "notes.txt",
        directory / "00" / "notes.txt",
        directory / "00" / ("1" * 64),
    ]
    for file in others:
        file.write_bytes(b"mine")
        os.utime(file, (0, 0))
    assert open_files(directory).listing().blocks == COUNT
    clean(directory, older_than_seconds=-60, verify=True)
    assert all(file.exists() for file in others)


def test_files_are_grouped_by_size(directory):
    key = keys_of([99]).hex()
    (directory / key[:2]).mkdir(exist_ok=True)
    (directory / key[:2] / key).write_bytes(b"short")
    groups = open_files(directory).listing().groups
    assert [(group.name, group.blocks) for group in groups] == [
        ("files of 5 bytes", 1),
        ("files of 9.81 KiB", COUNT),
    ]
    assert [block.reason for block in verify(directory).bad] == [
        "the file has 5 bytes, fewer than a trailer"
    ]


def test_file_that_vanishes_while_it_is_verified_is_not_wrong(directory, monkeypatch):
    path_open = Path.open

    def vanish(path, mode):
        path.unlink()
        return path_open(path, mode)

    monkeypatch.setattr(Path, "open", vanish)
    assert verify(directory).is_good


def test_listing_creates_nothing_in_an_empty_store(tmp_path):
    async def create():
        async with opened(directory_store(tmp_path / "kv")):
            pass

    uvloop.run(create())
    before = snapshot(tmp_path / "kv")
    listing = open_files(tmp_path / "kv").listing()
    assert (listing.blocks, listing.oldest_seconds, listing.groups) == (0, None, [])
    assert snapshot(tmp_path / "kv") == before


# -- the command -----------------------------------------------------------------------------


def test_ls_prints_totals_and_files(disk, tmp_path, capsys):
    result = tmp_path / "result.json"
    assert cli.main(["store", "ls", str(disk), "--json", str(result)]) == 0
    output = capsys.readouterr().out
    assert f"disk store: {disk}\n" in output
    assert "blocks: 12, 118 KiB\n" in output
    assert "segment-00000: 12, 118 KiB, " in output
    report = json.loads(result.read_bytes())
    assert (report["kind"], report["blocks"]) == ("disk", COUNT)


def test_verify_exits_1_and_lists_the_wrong_blocks(disk, tmp_path, capsys):
    assert cli.main(["store", "verify", str(disk)]) == 0
    assert "wrong blocks: 0\n" in capsys.readouterr().out
    damage_block(disk, 3)
    result = tmp_path / "result.json"
    assert cli.main(["store", "verify", str(disk), "--json", str(result)]) == 1
    output = capsys.readouterr().out
    key = keys_of([3]).hex()
    assert f"wrong: segment-00000, slot 3, key {key}: length, key or checksum is wrong\n" in output
    assert "wrong blocks: 1\n" in output
    assert [block["key"] for block in json.loads(result.read_bytes())["bad"]] == [key]


def test_gc_prints_what_it_removed(directory, capsys):
    for file in directory.rglob("*"):
        if file.is_file():
            os.utime(file, (0, 0))
    arguments = ["store", "gc", str(directory), "--older-than", "7d"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "selected blocks to remove: 12\n" in output
    assert "freed" not in output
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert "selected blocks removed: 12\n" in output
    assert "blocks kept: 0\n" in output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not a store: there is no such folder"),
        (lambda path: path.write_bytes(b""), "is not a store: it is not a folder"),
        (lambda path: path.mkdir(), "it has neither the journal of a disk store nor the folders"),
    ],
    ids=["missing", "file", "empty"],
)
@pytest.mark.parametrize("action", ["ls", "verify", "gc"])
def test_path_without_a_store_is_refused(action, make, message, tmp_path, capsys):
    path = tmp_path / "nothing"
    make(path)
    assert cli.main(["store", action, str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["ls"],
        ["gc", "PATH", "--older-than", "7"],
        ["gc", "PATH", "--older-than", "-1d"],
        ["gc", "PATH", "--older-than", "1.5d"],
        ["gc", "PATH", "--older-than", ""],
        ["verify", "PATH", "--threads", "0"],
        ["remove", "PATH"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["store", *arguments])
    assert caught.value.code == 2


def test_unwritable_result_is_refused_before_anything_is_removed(disk, tmp_path, capsys):
    before = snapshot(disk)
    arguments = ["store", "gc", str(disk), "--older-than", "0s", "--json"]
    assert cli.main([*arguments, str(tmp_path / "missing" / "result.json")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert snapshot(disk) == before


def test_another_version_of_the_format_is_refused(disk, capsys, monkeypatch):
    monkeypatch.setattr("aiokv.stores.disk.layout.FORMAT_VERSION", 2)
    for action in ("ls", "verify", "gc"):
        assert cli.main(["store", action, str(disk)]) == 2
        assert "the journal has format 1; this version of aiokv reads 2" in capsys.readouterr().err


def test_help_of_each_action(capsys):
    for action in ("ls", "verify", "gc"):
        with pytest.raises(SystemExit, match="0"):
            cli.main(["store", action, "--help"])
        assert "PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("FLOCK  ADVISORY ", True), ("POSIX  ADVISORY ", False), ("-> FLOCK ", False)],
)
def test_user_of_a_store_is_the_holder_of_its_lock(disk, monkeypatch, kind, shown):
    inode = (disk / "lock").stat().st_ino
    lines = [
        f"1: FLOCK ADVISORY WRITE 111 fe:00:{inode + 1} 0 EOF",
        f"2: OFDLCK ADVISORY READ -1 00:06:{inode} 0 EOF",
        f"3: {kind} WRITE 4242 fe:00:{inode} 0 EOF",
    ]
    monkeypatch.setattr(
        inspection_module, "open", lambda path, **_: contextlib.nullcontext(lines), raising=False
    )
    assert open_files(disk).listing().used_by == (4242 if shown else None)


@pytest.mark.parametrize("lost", ["journal", "header"])
def test_store_without_its_journal_lists_its_files_and_no_block(disk, lost):
    if lost == "journal":
        (disk / "journal").rename(disk / "journal.new")
    else:
        for offset in (0, HEADER_BYTES // 2):  # it is stored twice
            flip(disk / "journal", offset)
    listing = open_files(disk).listing()
    assert (listing.blocks, listing.quarantined_blocks) == (0, 0)
    (group,) = listing.groups
    assert (group.name, group.blocks, group.quarantined_blocks) == ("segment-00000", 0, 0)
    assert group.disk_bytes > 0


@pytest.mark.parametrize("slots", [1, 5])
def test_blocks_are_listed_by_segment_file(tmp_path, monkeypatch, slots):
    monkeypatch.setattr("aiokv.stores.disk.layout._MIN_SEGMENT_BYTES", slots * SLOT_BYTES)
    uvloop.run(save(DiskStore(tmp_path / "kv", bytes=64 * SLOT_BYTES, min_free_bytes=0), range(6)))
    groups = open_files(tmp_path / "kv").listing().groups
    assert [group.blocks for group in groups if group.blocks] == ([1] * 6 if slots == 1 else [5, 1])
