"""Reading, verifying and cleaning disk stores without an engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from aiokv.stores.disk.inspect import clean_store, read_store, verify_store

from aiokv.errors import ConfigError
from tests.stores.disk_medium import (
    expected,
    key_of,
    keys_of,
    load,
    opened,
    save,
    small_blocks,
    small_store,
)

if TYPE_CHECKING:
    from pathlib import Path


def is_right(content: bytes, key: bytes) -> bool:
    return content == expected(key, len(content)) != b""


async def make(path: Path, *, quarantined: bool = False) -> None:
    blocks = small_blocks()
    async with opened(small_store(path), blocks) as store:
        await save(store, blocks, range(8))
        await store.remove(keys_of([2, 3]))
        if quarantined:
            await store.quarantine(keys_of([4]))


@pytest.mark.asyncio
async def test_listing_names_each_block_and_its_place(tmp_path: Path) -> None:
    began = int(time.time())
    await make(tmp_path, quarantined=True)
    listing = read_store(tmp_path)
    assert [block.key for block in listing.blocks] == [key_of(n) for n in (0, 1, 5, 6, 7)]
    assert (listing.slot_bytes, listing.payload_bytes) == (4_096, 4_032)
    assert listing.quarantined_slots == 1
    assert not listing.damage.needs_new_journal
    for block in listing.blocks:
        content = (tmp_path / block.file).read_bytes()[block.offset :][:4_096]
        assert is_right(content, block.key)
        assert began <= block.saved_at <= time.time()


@pytest.mark.asyncio
async def test_open_store_is_listed_and_not_cleaned(tmp_path: Path) -> None:
    blocks = small_blocks()
    async with opened(small_store(tmp_path), blocks) as store:
        await save(store, blocks, range(3))
        assert len(read_store(tmp_path).blocks) == 3
        assert verify_store(tmp_path, is_right) == ()
        with pytest.raises(ConfigError, match="in use by process"):
            clean_store(tmp_path)


@pytest.mark.asyncio
async def test_verify_names_the_damaged_blocks(tmp_path: Path) -> None:
    await make(tmp_path)
    victim = read_store(tmp_path).blocks[3]
    with (tmp_path / victim.file).open("r+b") as file:
        file.seek(victim.offset + 4_000)
        file.write(b"x")
    counts: list[int] = []
    assert verify_store(tmp_path, is_right, counts.append) == (victim,)
    assert counts == [1, 2, 3, 4, 5, 6]
    (tmp_path / victim.file).unlink()
    assert len(verify_store(tmp_path, is_right)) == 6


@pytest.mark.asyncio
async def test_cleaning_removes_blocks_and_shortens_the_journal(tmp_path: Path) -> None:
    await make(tmp_path, quarantined=True)
    cleaning = clean_store(tmp_path, remove=frozenset([key_of(0), key_of(99)]))
    assert (cleaning.removed_blocks, cleaning.reused_slots) == (1, 0)
    assert cleaning.new_journal_bytes < cleaning.journal_bytes
    assert (tmp_path / "journal").stat().st_size == cleaning.new_journal_bytes
    assert read_store(tmp_path).quarantined_slots == 1
    assert clean_store(tmp_path, reuse_quarantined=True).reused_slots == 1
    blocks = small_blocks()
    async with opened(small_store(tmp_path), blocks) as store:
        assert await load(store, blocks, range(8)) == [1, 5, 6, 7]
        assert store.statistics().quarantined_blocks == 0
    assert clean_store(tmp_path, saved_before=int(time.time()) + 10).removed_blocks == 4
    assert read_store(tmp_path).blocks == ()


def test_other_directories_are_refused(tmp_path: Path) -> None:
    for call in (read_store, clean_store):
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(ConfigError, match="is no disk store"):
                call(path)
    assert [file.name for file in tmp_path.iterdir()] in ([], ["lock"])
    (tmp_path / "journal").write_bytes(b"x" * 5_000)
    with pytest.raises(ConfigError, match="damaged header"):
        read_store(tmp_path)
