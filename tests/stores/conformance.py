"""Tests that every store must pass, and the host memory that they use.

A test module of a store subclasses :class:`StoreConformance` and defines a fixture ``medium``::

    class TestDirectory(StoreConformance):
        @pytest.fixture
        def medium(self, tmp_path):
            return DirectoryMedium(tmp_path)
"""

from __future__ import annotations

import asyncio
import mmap
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from aiokv._native import seal_blocks
from aiokv.base.statistics import StoreStatistics
from aiokv.errors import StoreError
from aiokv.layout.host_block import TRAILER_BYTES, pitch_bytes
from aiokv.stores.base import KEY_BYTES, Result, Store, StoreMemory, split_keys
from aiokv.testing.loops import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from numpy.typing import NDArray

_PARTS = ([1, 2], [3, 4])  # numbers of the keys of each pool
DONE, MISSING, WRONG, REFUSED, FAILED, PRESENT = (int(result) for result in Result)


class Blocks:
    """Host blocks of a test: page-aligned, with a writable view."""

    def __init__(self, num_blocks: int = 24, payload_bytes: int = 9_984) -> None:
        pitch = pitch_bytes(payload_bytes, with_stores=True)
        self._map = mmap.mmap(-1, num_blocks * pitch)
        self.array = np.frombuffer(self._map, np.uint8).reshape(num_blocks, pitch)
        self.memory = StoreMemory(
            address=self.array.ctypes.data,
            num_blocks=num_blocks,
            pitch_bytes=pitch,
            payload_bytes=payload_bytes,
            view=memoryview(self._map),
        )

    def write(self, block: int, key: bytes) -> bytes:
        """Write the object of a key into a block and return its bytes."""
        content = object_of(key, self.memory.payload_bytes)
        self.memory.object(block)[:] = content
        return content

    def read(self, block: int) -> bytes:
        """Return the bytes of the object in a block."""
        return bytes(self.memory.object(block))

    def fill(self, value: int) -> None:
        """Set every byte of all blocks."""
        self.array[:] = value


def keys_of(numbers: Iterable[int]) -> bytes:
    """Return distinct keys, one behind the other; equal numbers give equal keys."""
    return b"".join(
        np.random.default_rng(number).integers(0, 256, KEY_BYTES, np.uint8).tobytes()
        for number in numbers
    )


def object_of(key: bytes, payload_bytes: int) -> bytes:
    """Return a sealed object of random bytes."""
    seed = np.frombuffer(key, np.uint32)
    size = payload_bytes + TRAILER_BYTES
    content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    seal_blocks(content.ctypes.data, size, payload_bytes, ids(0), key, num_blocks=1)
    return content.tobytes()


def ids(*blocks: int) -> NDArray[np.int32]:
    return np.array(blocks, np.int32)


class Medium:
    """The medium that the stores of one test share; empty when the test begins."""

    def store(self) -> Store:
        """Return another store on this medium, not opened."""
        raise AssertionError(f"{type(self).__name__} must define store()")

    async def restart(self) -> bool:
        """Kill the server and start it again; return False where there is no server."""
        return False


@asynccontextmanager
async def opened(medium: Medium, blocks: Blocks) -> AsyncIterator[Store]:
    """Open another store of a medium, and close it."""
    store = medium.store()
    try:
        await store.open(blocks.memory)
        yield store
    finally:
        await store.aclose()


async def save(store: Store, blocks: Blocks, numbers: Iterable[int]) -> bytes:
    """Save objects, which may be stored already, from blocks 0, 1, ...; return the keys."""
    keys = keys_of(numbers)
    count = len(keys) // KEY_BYTES
    for block in range(count):
        blocks.write(block, keys[block * KEY_BYTES :][:KEY_BYTES])
    results = (await store.save(keys, np.arange(count, dtype=np.int32))).tolist()
    assert len(results) == count
    assert set(results) <= {DONE, PRESENT}
    return keys


@pytest.mark.asyncio
class StoreConformance:
    """One test per promise of the ``Store`` protocol."""

    async def test_saved_objects_are_found_with_the_same_bytes(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(8))
            expected = [blocks.read(block) for block in range(8)]
            blocks.fill(0xEE)
            found = await store.lookup(keys)
            results = await store.load(keys, np.arange(8, 16, dtype=np.int32))
            assert store.may_have_any(keys)
        assert (found.dtype, found.tolist()) == (np.dtype(np.bool_), [True] * 8)
        assert (results.dtype, results.tolist()) == (np.dtype(np.uint8), [DONE] * 8)
        assert [blocks.read(block) for block in range(8, 16)] == expected
        assert (blocks.array[:8] == 0xEE).all(), "a load wrote a block that it did not name"
        assert (blocks.array[16:] == 0xEE).all(), "a load wrote a block that it did not name"

    async def test_another_store_finds_saved_objects(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(4))
            expected = [blocks.read(block) for block in range(4)]
            if store.kind == "disk":  # one process at a time
                await store.aclose()
            blocks.fill(0)
            async with opened(medium, blocks) as other:
                assert (await other.lookup(keys)).tolist() == [True] * 4
                assert (await other.load(keys, ids(0, 1, 2, 3))).tolist() == [DONE] * 4
        assert [blocks.read(block) for block in range(4)] == expected

    async def test_missing_keys_are_results_and_not_errors(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            assert (await store.lookup(keys_of(range(3)))).tolist() == [False] * 3
            assert (await store.load(keys_of(range(3)), ids(0, 1, 2))).tolist() == [MISSING] * 3
            await save(store, blocks, [1])
            expected = blocks.read(0)
            assert (await store.lookup(keys_of(range(3)))).tolist() == [False, True, False]
            results = await store.load(keys_of(range(3)), ids(3, 4, 5))
        assert results.tolist() == [MISSING, DONE, MISSING]
        assert blocks.read(4) == expected

    async def test_empty_batches(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            assert (await store.lookup(b"")).shape == (0,)
            for answer in (store.load(b"", ids()), store.save(b"", ids()), store.remove(b"")):
                assert (await answer).shape == (0,)

    async def test_saving_a_key_again_is_done_and_keeps_whole_objects(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, [1])
            assert (await store.save(keys, ids(0))).tolist() in ([DONE], [PRESENT])
            first, second = blocks.read(0), blocks.write(1, keys_of([2]))
            assert (await store.save(keys, ids(1))).tolist() in ([DONE], [PRESENT])
            assert (await store.load(keys, ids(2))).tolist() == [DONE]
        assert blocks.read(2) in (first, second)

    async def test_save_does_not_change_blocks(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            blocks.fill(0x11)
            await save(store, blocks, range(3))
            await store.lookup(keys_of(range(3)))
        for block, key in enumerate(np.frombuffer(keys_of(range(3)), np.uint8).reshape(3, -1)):
            assert blocks.read(block) == object_of(key.tobytes(), blocks.memory.payload_bytes)
        assert (blocks.array[:, blocks.memory.object_bytes :] == 0x11).all()

    async def test_removed_keys_are_missing(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(3))
            assert (await store.remove(keys_of([1]))).tolist() == [DONE]
            assert (await store.lookup(keys)).tolist() == [True, False, True]
            assert (await store.load(keys, ids(3, 4, 5))).tolist() == [DONE, MISSING, DONE]
            assert (await store.remove(keys_of([1, 99]))).tolist() == [DONE, DONE]
            await save(store, blocks, [1])
            assert (await store.lookup(keys)).tolist() == [True, True, True]

    async def test_purged_keys_are_missing_and_others_are_kept(self, medium: Medium) -> None:
        blocks, label = Blocks(), b"salt!"
        keys = b"".join(
            key[: -len(label)] + (label if number % 2 else b"other")
            for number, key in enumerate(split_keys(keys_of(range(6))))
        )
        async with opened(medium, blocks) as store:
            await save(store, blocks, [99])
            for block, key in enumerate(split_keys(keys)):
                blocks.write(block, key)
            saved = await store.save(keys, np.arange(6, dtype=np.int32))
            assert saved.tolist() == [DONE] * 6
            assert await store.purge(label) == 3
            assert (await store.lookup(keys)).tolist() == [True, False] * 3
            assert (await store.lookup(keys_of([99]))).tolist() == [True]
            assert await store.purge(label) == 0
            again = await store.save(keys[KEY_BYTES : 2 * KEY_BYTES], ids(1))
            assert again.tolist() == [DONE]
        async with opened(medium, blocks) as store:  # also after the journal was read again
            assert (await store.lookup(keys)).tolist() == [True, True] + [True, False] * 2

    async def test_quarantined_keys_are_missing_until_they_are_saved_again(
        self, medium: Medium
    ) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(3))
            assert (await store.quarantine(keys_of([1, 99]))).tolist() == [DONE, DONE]
            assert (await store.load(keys, ids(3, 4, 5))).tolist() == [DONE, MISSING, DONE]
            await save(store, blocks, [1])
            assert (await store.lookup(keys)).tolist() == [True, True, True]

    async def test_probe_of_a_medium_that_can_be_read(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            await store.probe()
            await save(store, blocks, range(3))
            blocks.fill(0x44)
            await store.probe()
        assert (blocks.array == 0x44).all()
        with pytest.raises(StoreError):
            await store.probe()

    async def test_blocks_in_any_order(self, medium: Medium) -> None:
        blocks = Blocks()
        keys = keys_of(range(6))
        single = [keys[i * KEY_BYTES :][:KEY_BYTES] for i in range(6)]
        sources, targets = ids(11, 2, 7, 0, 23, 5), ids(20, 3, 19, 1, 8, 6)
        expected = [
            blocks.write(int(block), key) for block, key in zip(sources, single, strict=True)
        ]
        async with opened(medium, blocks) as store:
            assert (await store.save(keys, sources)).tolist() == [DONE] * 6
            blocks.fill(0)
            assert (await store.load(keys, targets)).tolist() == [DONE] * 6
        assert [blocks.read(int(block)) for block in targets] == expected

    async def test_many_keys(self, medium: Medium) -> None:
        blocks = Blocks(num_blocks=64, payload_bytes=4_032)
        async with opened(medium, blocks) as store:
            for begin in range(0, 256, 64):
                await save(store, blocks, range(begin, begin + 64))
            found = await store.lookup(keys_of(range(300)))
            assert found.tolist() == [True] * 256 + [False] * 44
            order = np.random.default_rng(0).permutation(256)[:64]
            keys = keys_of(int(number) for number in order)
            assert (await store.load(keys, np.arange(64, dtype=np.int32))).tolist() == [DONE] * 64
        for block, number in enumerate(order):
            assert blocks.read(block) == object_of(keys_of([int(number)]), 4_032)

    async def test_concurrent_operations(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(4))
            blocks.write(4, keys_of([4]))
            targets = np.arange(8, 24, dtype=np.int32).reshape(4, 4)
            loads = [store.load(keys, some) for some in targets]
            loaded, saved, found = await asyncio.gather(
                asyncio.gather(*loads), store.save(keys_of([4]), ids(4)), store.lookup(keys)
            )
        assert [results.tolist() for results in loaded] == [[DONE] * 4] * 4
        assert (saved.tolist(), found.tolist()) == ([DONE], [True] * 4)
        for i in range(4):
            for j in range(4):
                assert blocks.read(8 + 4 * i + j) == blocks.read(j)

    async def test_a_cancelled_load_does_not_write_its_blocks_afterwards(
        self, medium: Medium
    ) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            keys = await save(store, blocks, range(8))
            for passes in range(8):
                load = asyncio.create_task(store.load(keys, np.arange(8, 16, dtype=np.int32)))
                for _ in range(passes):
                    await asyncio.sleep(0)
                load.cancel()
                await asyncio.wait([load])
                blocks.array[8:16] = passes
                assert (await store.lookup(keys)).all()
                assert (await store.load(keys, np.arange(16, 24, dtype=np.int32))).sum() == DONE
                assert (blocks.array[8:16] == passes).all(), "a cancelled load wrote its block"
            blocks.array[8:16] = 0x77
        assert (blocks.array[8:16] == 0x77).all(), "a cancelled load wrote its block"

    async def test_a_cancelled_save_does_not_store_later_bytes(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            for passes in range(8):
                key = keys_of([passes])
                expected = blocks.write(0, key)
                task = asyncio.create_task(store.save(key, ids(0)))
                for _ in range(passes):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                blocks.fill(0)
                (result,) = await store.load(key, ids(1))
                assert result == MISSING or (result == DONE and blocks.read(1) == expected)

    async def test_statistics_are_returned_at_once(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            await save(store, blocks, range(4))
            statistics = store.statistics()
        assert isinstance(statistics, StoreStatistics)
        assert statistics.blocks in (-1, 4)
        assert statistics.used_bytes == -1 or statistics.used_bytes >= 4 * 10_048
        assert all(isinstance(value, int) for value in statistics.details.values())

    async def test_attributes_name_the_store(self, medium: Medium) -> None:
        store = medium.store()
        assert store.kind
        assert store.kind == store.kind.lower()
        assert store.url
        assert store.max_concurrent >= 1

    async def test_aclose_is_idempotent_and_may_come_first(self, medium: Medium) -> None:
        await medium.store().aclose()
        blocks = Blocks()
        store = medium.store()
        await store.open(blocks.memory)
        await save(store, blocks, [1])
        await store.aclose()
        await store.aclose()

    async def test_a_closed_store_is_opened_again_with_other_memory(self, medium: Medium) -> None:
        store = medium.store()
        first, second = Blocks(), Blocks()
        await store.open(first.memory)
        keys = await save(store, first, range(2))
        expected = [first.read(block) for block in range(2)]
        await store.aclose()
        first.fill(0x22)
        try:
            await store.open(second.memory)
            assert (await store.load(keys, ids(5, 6))).tolist() == [DONE, DONE]
            await save(store, second, [2])
        finally:
            await store.aclose()
        assert [second.read(block) for block in (5, 6)] == expected
        assert (first.array == 0x22).all()

    async def test_groups_have_objects_of_different_sizes(self, medium: Medium) -> None:
        """Both parts of a store are open at the same time, and found again by the next store."""
        blocks = [Blocks(), Blocks(num_blocks=4, payload_bytes=150_000)]
        memories = [
            msgspec.structs.replace(some.memory, group=group, quota_share=0.5)
            for some, group in zip(blocks, ("attention", "state"), strict=True)
        ]
        for saves in (True, False):
            store = medium.store()
            stores = [store, store.for_group("state")]
            assert stores[1] is not None
            try:
                for part, memory in zip(stores, memories, strict=True):
                    await part.open(memory)
                if saves:
                    await asyncio.gather(
                        *(
                            save(part, some, n)
                            for part, some, n in zip(stores, blocks, _PARTS, strict=True)
                        )
                    )
                for part, some, numbers in zip(stores, blocks, _PARTS, strict=True):
                    keys = keys_of(numbers)
                    some.fill(0)
                    assert (await part.load(keys, ids(3, 1))).tolist() == [DONE] * 2
                    for block, key in ((3, keys[:KEY_BYTES]), (1, keys[KEY_BYTES:])):
                        assert some.read(block) == object_of(key, some.memory.payload_bytes)
            finally:
                for part in stores:
                    await part.aclose()

    async def test_aclose_ends_operations_in_flight(self, medium: Medium) -> None:
        blocks = Blocks()
        store = medium.store()
        await store.open(blocks.memory)
        keys = await save(store, blocks, range(8))
        loads = [
            asyncio.create_task(store.load(keys, np.arange(8, 16, dtype=np.int32)))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        await store.aclose()
        done, pending = await asyncio.wait(loads, timeout=PATIENCE_SECONDS)
        blocks.fill(0x33)
        assert not pending
        for load in done:
            error = None if load.cancelled() else load.exception()
            assert error is None or isinstance(error, StoreError)
        assert (blocks.array == 0x33).all()

    async def test_a_restarted_server_is_used_again(self, medium: Medium) -> None:
        blocks = Blocks()
        async with opened(medium, blocks) as store:
            await save(store, blocks, range(2))
            if not await medium.restart():
                pytest.skip("this store has no server")
            await eventually(lambda: saved_and_loaded(store, blocks))


async def eventually(attempt: Callable[[], Awaitable[bool]]) -> None:
    """Repeat an attempt until it succeeds; fail after a time that no server should need."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await attempt():
                return
            await asyncio.sleep(0.01)


async def saved_and_loaded(store: Store, blocks: Blocks) -> bool:
    """Return whether a key was saved and loaded; a failed operation is False."""
    key = keys_of([7])
    expected = blocks.write(0, key)
    try:
        saved = (await store.save(key, ids(0))).tolist()
        loaded = (await store.load(key, ids(1))).tolist()
    except StoreError:
        return False
    if saved not in ([DONE], [PRESENT]) or loaded != [DONE]:
        return False
    assert blocks.read(1) == expected
    return True
