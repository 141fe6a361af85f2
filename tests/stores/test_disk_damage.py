"""DiskStore with flipped and cut files: never a wrong block, and no exception."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv import _native
from aiokv.stores.base import Result
from aiokv.stores.disk.layout import HEADER_BYTES, JOURNAL, RECORD_BYTES, segment_name
from aiokv.stores.disk.recovery import recover
from aiokv.stores.disk.volume import Volume
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
    from collections.abc import Iterable
    from pathlib import Path

    from aiokv.stores.disk.recovery import Damage

NUMBERS = range(6)
SLOTS = 16


async def make(path: Path) -> None:
    """Make a store that has removed one block, and quarantined another."""
    blocks = small_blocks()
    async with opened(small_store(path, slots=SLOTS), blocks) as store:
        await save(store, blocks, NUMBERS[:4])
        await store.remove(keys_of([1]))
        await save(store, blocks, NUMBERS[4:])
        await store.quarantine(keys_of([2]))


PRESENT = {0, 3, 4, 5}
WITHOUT_REMOVALS = PRESENT | {1, 2}  # a flipped removal brings the block back, with its bytes


class DamagedVolume(Volume):
    """A volume whose journal has other bytes than its file."""

    def __init__(self, path: Path, journal: bytes) -> None:
        super().__init__(path)
        self.journal = journal
        self._journal_fd = -1

    def open(self, name: str, *, write: bool, create: bool = False, direct: bool = False) -> int:
        fd = super().open(name, write=write, create=create, direct=direct)
        if name == JOURNAL:
            self._journal_fd = fd
        return fd

    def read(self, fd: int, num_bytes: int, offset: int) -> bytes:
        if fd == self._journal_fd:
            return self.journal[offset : offset + num_bytes]
        return super().read(fd, num_bytes, offset)


def recovered(path: Path, journal: bytes) -> tuple[set[int], Damage]:
    """Recover from other bytes of the journal; return the blocks found, all of them right."""
    blocks = small_blocks()
    state = recover(DamagedVolume(path, journal), blocks.memory, SLOTS * 4_096, write=False)
    with ExitStack() as stack:
        stack.callback(state.segments.close)
        assert state.table.check() == ""
        slots = state.table.pin(keys_of(NUMBERS))
        segment = (path / segment_name(0)).read_bytes()
        found = set()
        for number, slot in zip(NUMBERS, slots.tolist(), strict=True):
            if slot >= 0:
                content = segment[slot * 4_096 :][: blocks.memory.object_bytes]
                assert content == expected(key_of(number), blocks.memory.object_bytes)
                found.add(number)
        return found, state.damage


def damage_count(damage: Damage) -> int:
    return (
        damage.damaged_records
        + damage.torn_records
        + damage.unproven_records
        + damage.outside_records
    )


@pytest.mark.asyncio
async def test_each_flipped_byte_of_the_journal_costs_at_most_one_record(tmp_path: Path) -> None:
    await make(tmp_path)
    journal = (tmp_path / JOURNAL).read_bytes()
    assert recovered(tmp_path, journal)[0] == PRESENT
    for byte in range(len(journal)):
        flipped = bytearray(journal)
        flipped[byte] ^= 1 << (byte % 8)
        found, damage = recovered(tmp_path, bytes(flipped))
        assert len(PRESENT - found) <= 1
        assert found <= WITHOUT_REMOVALS
        if byte < HEADER_BYTES:
            assert (found, damage_count(damage)) == (PRESENT, 0), "the other copy is valid"
        else:
            assert damage_count(damage) == 1


@pytest.mark.asyncio
async def test_each_length_of_a_cut_journal_is_a_state_that_the_store_had(tmp_path: Path) -> None:
    await make(tmp_path)
    journal = (tmp_path / JOURNAL).read_bytes()
    states = []
    for length in range(len(journal) + 1):
        found, damage = recovered(tmp_path, journal[:length])
        assert found <= set(NUMBERS)
        assert damage.torn_records == (length > HEADER_BYTES and length % RECORD_BYTES > 0)
        assert damage.damaged_headers == (length < HEADER_BYTES // 2)
        if not states or states[-1] != found:
            states.append(found)
    assert set() in states
    assert {0, 2, 3} in states
    assert states[-1] == PRESENT


@pytest.mark.asyncio
async def test_journal_of_another_store_is_not_read(tmp_path: Path) -> None:
    await make(tmp_path / "a")
    await make(tmp_path / "b")
    records = (tmp_path / "b" / JOURNAL).read_bytes()[HEADER_BYTES:]
    header = (tmp_path / "a" / JOURNAL).read_bytes()[:HEADER_BYTES]
    found, damage = recovered(tmp_path / "a", header + records)
    assert found == set()
    assert damage.torn_records == len(records) // RECORD_BYTES


@pytest.mark.asyncio
async def test_store_with_two_damaged_headers_begins_empty_and_is_used(tmp_path: Path) -> None:
    await make(tmp_path)
    blocks = small_blocks()
    journal = bytearray((tmp_path / JOURNAL).read_bytes())
    journal[5] ^= 1
    journal[HEADER_BYTES // 2 + 5] ^= 1
    (tmp_path / JOURNAL).write_bytes(journal)
    async with opened(small_store(tmp_path, slots=SLOTS), blocks) as store:
        assert await load(store, blocks, NUMBERS) == []
        assert store.statistics().details["damaged_headers"] == 1
        assert await save(store, blocks, NUMBERS) == [Result.DONE] * 6
    async with opened(small_store(tmp_path, slots=SLOTS), blocks) as store:
        assert await load(store, blocks, NUMBERS) == list(NUMBERS)
        assert store.statistics().details["damaged_headers"] == 0


@pytest.mark.asyncio
async def test_damaged_records_are_counted_once_and_then_gone(tmp_path: Path) -> None:
    await make(tmp_path)
    blocks = small_blocks()
    journal = bytearray((tmp_path / JOURNAL).read_bytes())
    position = next(
        p
        for p in range(HEADER_BYTES, len(journal), RECORD_BYTES)
        if key_of(3) in journal[p : p + 64]
    )
    journal[position + 20] ^= 4
    (tmp_path / JOURNAL).write_bytes(journal)
    async with opened(small_store(tmp_path, slots=SLOTS), blocks) as store:
        assert set(await load(store, blocks, NUMBERS)) == PRESENT - {3}
        assert store.statistics().details["damaged_records"] == 1
        assert store.statistics().quarantined_blocks == 1
    async with opened(small_store(tmp_path, slots=SLOTS), blocks) as store:
        assert set(await load(store, blocks, NUMBERS)) == PRESENT - {3}
        assert store.statistics().details["damaged_records"] == 0
        assert store.statistics().quarantined_blocks == 1


@pytest.mark.asyncio
async def test_each_flipped_byte_of_a_trailer_is_detected_and_its_slot_quarantined(
    tmp_path: Path,
) -> None:
    blocks = small_blocks()
    memory = blocks.memory
    ids = np.arange(1, dtype=np.int32)
    sealed = {"pitch_bytes": memory.pitch_bytes, "payload_bytes": memory.payload_bytes}
    async with opened(small_store(tmp_path, slots=100), blocks) as store:
        for byte in range(64):
            key = key_of(byte)
            _native.seal_blocks(
                memory.address, **sealed, blocks=ids, keys=key, num_blocks=memory.num_blocks
            )
            assert (await store.save(key, ids)).tolist() == [Result.DONE]
            content = blocks.read(0)
            _flip(tmp_path / segment_name(0), content, len(content) - 64 + byte)
            assert (await store.load(key, ids)).tolist() == [Result.DONE]
            (proof,) = _native.verify_blocks(
                memory.address, **sealed, blocks=ids, keys=key, num_blocks=memory.num_blocks
            )
            assert proof == Result.WRONG, f"byte {byte} of the trailer"
            await store.quarantine(key)
            assert not (await store.lookup(key)).any()
        assert store.statistics().quarantined_blocks == 64


def _flip(path: Path, content: bytes, byte: int) -> None:
    """Flip a byte of the only object in a file that has this content."""
    data = path.read_bytes()
    position = data.index(content) + byte
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([data[position] ^ 0x40]))


def lengths(size: int) -> Iterable[int]:
    return sorted({0, 1, 511, 512, 4_095, 4_096, 4_097, size // 2, size - 1})


@pytest.mark.asyncio
async def test_cut_segment_gives_no_bytes_of_other_blocks(tmp_path: Path) -> None:
    await make(tmp_path / "whole")
    blocks = small_blocks()
    keys = keys_of(sorted(PRESENT))
    size = (tmp_path / "whole" / segment_name(0)).stat().st_size
    for length in [*lengths(3 * 4_096), size]:
        path = tmp_path / f"cut{length}"
        shutil.copytree(tmp_path / "whole", path)
        with (path / segment_name(0)).open("r+b") as file:
            file.truncate(length)
        async with opened(small_store(path, slots=SLOTS), blocks) as store:
            results = await store.load(keys, np.arange(len(PRESENT), dtype=np.int32))
            assert results.tolist() == [Result.DONE] * len(PRESENT)
            for block, number in enumerate(sorted(PRESENT)):
                right = expected(key_of(number), blocks.memory.object_bytes)
                content = blocks.read(block)
                # What was cut off is zero, which the proof of the guard detects.
                kept = len(content.rstrip(b"\0")) if content != right else len(right)
                assert content[:kept] == right[:kept]
            assert await save(store, blocks, range(10, 14)) == [Result.DONE] * 4
            assert await load(store, blocks, range(10, 14)) == list(range(10, 14))


@pytest.mark.asyncio
async def test_missing_segment_and_read_only_store_are_wrong_and_not_errors(tmp_path: Path) -> None:
    await make(tmp_path)
    (tmp_path / segment_name(0)).unlink()
    volume = Volume(tmp_path)
    volume.is_writable = lambda: False  # type: ignore[method-assign]
    blocks = small_blocks()
    async with opened(small_store(tmp_path, slots=SLOTS, volume=volume), blocks) as store:
        results = await store.load(keys_of([0, 1]), np.arange(2, dtype=np.int32))
        assert results.tolist() == [Result.WRONG, Result.MISSING]
