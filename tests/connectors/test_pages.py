"""PageStore: pages of another server's memory in stores, from plain threads."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from aiokv.connectors.pages import PageGroup, PageStore
from aiokv.errors import ConfigError, StoreError, UsageError
from aiokv.stores import StoreUse, stores_from
from aiokv.testing import ScriptedStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from aiokv.stores import Store, StoreMemory

PAGE_BYTES = 9000
PARTS = (2000, 4000, 3000)  # as the layers of a page, apart in the memory of the server
FINGERPRINT = bytes(range(32))


class HostPool:
    """Memory of a server: a page consists of parts that are not adjacent."""

    def __init__(self, num_pages: int = 16) -> None:
        self.parts = [np.zeros((num_pages, size), np.uint8) for size in PARTS]

    def places(self, pages: Iterable[int]) -> np.ndarray:
        return np.array([[part[page].ctypes.data for part in self.parts] for page in pages])

    def write(self, pages: Iterable[int], numbers: Iterable[int]) -> None:
        for page, number in zip(pages, numbers, strict=True):
            for part, content in zip(self.parts, contents(number), strict=True):
                part[page] = content

    def has(self, pages: Iterable[int], numbers: Iterable[int]) -> list[bool]:
        return [
            all(
                (part[page] == c).all()
                for part, c in zip(self.parts, contents(number), strict=True)
            )
            for page, number in zip(pages, numbers, strict=True)
        ]


def contents(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.integers(1, 256, size, np.uint8) for size in PARTS]


def digests(numbers: Iterable[int]) -> bytes:
    return b"".join(hashlib.sha256(b"%d" % number).digest() for number in numbers)


def opened(
    *stores: Store | StoreUse | str,
    fingerprint: bytes = FINGERPRINT,
    staging_pages: int = 3,
    group: PageGroup | None = None,
) -> closing[PageStore]:
    """Open stores, with deadlines that a busy machine keeps unless they are given as uses."""
    patient = {"deadline_seconds": 60.0, "lookup_deadline_seconds": 60.0}
    pages = PageStore(
        [
            use if isinstance(store, StoreUse) else replace(use, **patient)
            for store, use in zip(stores, stores_from(stores), strict=True)
        ],
        {"attention": group or PageGroup(fingerprint=fingerprint, part_bytes=PARTS)},
        staging_bytes=staging_pages * 12288,
    )
    return closing(pages)


def saved(pages: PageStore, numbers: range) -> list[bool]:
    pool = HostPool()
    pool.write(range(len(numbers)), numbers)
    return pages.save(digests(numbers), pool.places(range(len(numbers))))


@pytest.mark.parametrize("staging_pages", [0, 3, 64])  # at least one page is staged
def test_pages_come_back_with_the_same_bytes_after_a_restart(tmp_path, staging_pages):
    url = f"disk:{tmp_path}?bytes=4MiB"
    with opened(url, staging_pages=staging_pages) as pages:
        assert saved(pages, range(8)) == [True] * 8
    pool = HostPool()
    with opened(url, staging_pages=staging_pages) as pages:
        assert pages.lookup(digests(range(10))) == 8
        assert pages.load(digests(range(8)), pool.places(range(4, 12))) == 8
        (statistics,) = pages.statistics()
    assert pool.has(range(4, 12), range(8)) == [True] * 8
    assert not any(part[[*range(4), *range(12, 16)]].any() for part in pool.parts)
    assert (statistics.kind, statistics.loaded_blocks) == ("disk", 8)


def test_load_ends_at_the_first_missing_page_and_leaves_the_others_as_they_were(tmp_path):
    with opened(f"directory:{tmp_path}") as pages:
        saved(pages, range(4))
        pool = HostPool()
        wanted = [0, 1, 99, 3]
        assert pages.lookup(digests(wanted)) == 2
        assert pages.load(digests(wanted), pool.places(range(4))) == 2
    assert pool.has([0, 1], [0, 1]) == [True, True]
    assert not any(part[2:].any() for part in pool.parts)


def test_corrupt_object_is_a_miss(tmp_path):
    with opened(f"directory:{tmp_path}") as pages:
        saved(pages, range(1))
        (file,) = [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and path.stat().st_size > PAGE_BYTES
        ]
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
        pool = HostPool()
        assert pages.load(digests(range(1)), pool.places(range(1))) == 0
        assert not any(part.any() for part in pool.parts)
        assert pages.statistics()[0].wrong_blocks == 1


def test_pages_of_another_fingerprint_are_missing(tmp_path):
    url = f"directory:{tmp_path}"
    with opened(url) as pages:
        saved(pages, range(2))
    with opened(url, fingerprint=bytes(32)) as pages:
        assert pages.lookup(digests(range(2))) == 0
        assert pages.load(digests(range(2)), HostPool().places(range(2))) == 0


ROWS, HEADS, SIZES = 3, 4, (16, 64, 16)  # sizes of a head in a row of each part


def divided(heads: int) -> PageGroup:
    """Return pages of rows of heads, one object per head."""
    return PageGroup(
        fingerprint=FINGERPRINT, objects=heads, rows=ROWS,
        part_bytes=tuple(ROWS * heads * size for size in SIZES),
    )  # fmt: skip


def heads_of(pages: range, heads: range) -> bytes:
    return digests(page * HEADS + head for page in pages for head in heads)


def parts_of(num_pages: int, heads: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, (num_pages, ROWS, heads, size), np.uint8) for size in SIZES]


def addresses_of(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([[part[page].ctypes.data for part in parts] for page in range(len(parts[0]))])


@pytest.mark.parametrize("heads", [range(4), range(1, 3), range(3, 4)])
@pytest.mark.parametrize("staging_pages", [0, 4, 64])
def test_objects_of_a_page_contain_their_bytes_of_each_row(tmp_path, staging_pages, heads):
    url, pages = f"directory:{tmp_path}", range(5)
    source = parts_of(len(pages), HEADS)
    with opened(url, staging_pages=staging_pages, group=divided(HEADS)) as store:
        assert store.save(heads_of(pages, range(HEADS)), addresses_of(source)) == [True] * 5
    target = [np.zeros_like(part) for part in parts_of(6, len(heads))]
    with opened(url, staging_pages=staging_pages, group=divided(len(heads))) as store:
        wanted = heads_of(range(6), heads)
        assert store.lookup(wanted) == 5
        assert store.find(wanted).tolist() == [True] * 5 + [False]
        assert store.load(wanted, addresses_of(target)) == 5
    for loaded, part in zip(target, source, strict=True):
        assert (loaded[:5] == part[:, :, heads.start : heads.stop]).all()
        assert not loaded[5:].any()


def test_page_without_all_of_its_objects_is_neither_saved_nor_found_nor_loaded():
    keys, source = heads_of(range(3), range(HEADS)), parts_of(3, HEADS)
    target = [np.zeros_like(part) for part in source]
    store = ScriptedStore(capacity_blocks=6)  # the first page, and half of the second
    with opened(store, staging_pages=64, group=divided(HEADS)) as pages:
        assert pages.save(keys, addresses_of(source)) == [True, False, False]
        assert pages.lookup(keys) == 1
        assert pages.find(keys).tolist() == [True, False, False]
        assert pages.load(keys, addresses_of(target)) == 1
    for loaded, part in zip(target, source, strict=True):
        assert (loaded[:1] == part[:1]).all()
        assert not loaded[1:].any()


def test_failing_store_costs_a_miss_and_no_error():
    store = ScriptedStore()
    for operation in ("lookup", "load", "save"):
        store.fail(operation)
    with opened(store) as pages:
        assert saved(pages, range(2)) == [False, False]
        assert pages.lookup(digests(range(2))) == 0
        assert pages.load(digests(range(2)), HostPool().places(range(2))) == 0


class LoopedStore(ScriptedStore):
    """A scripted store whose gates another thread may open."""

    async def open(self, memory: StoreMemory) -> None:
        self.loop = asyncio.get_running_loop()
        await super().open(memory)


@pytest.mark.parametrize("operation", ["load", "save"])
def test_staging_blocks_of_an_overdue_operation_are_not_used_until_it_has_ended(operation):
    store = LoopedStore()
    with opened(StoreUse(store, deadline_seconds=1.0), staging_pages=8) as pages:
        saved(pages, range(4))
        gate = store.hold(operation, call=store.calls[operation])
        pool = HostPool()
        pool.write(range(4), range(4))

        def move(numbers: range) -> int:
            if operation == "save":
                return sum(pages.save(digests(numbers), pool.places(numbers)))
            return pages.load(digests(numbers), pool.places(numbers))

        assert move(range(2)) == 0  # the deadline has passed; the store still has the blocks
        calls = store.calls[operation]
        assert move(range(2, 4)) == 0
        assert store.calls[operation] == calls
        store.loop.call_soon_threadsafe(gate.open)
        while not move(range(2, 4)):  # each call is a pass of the loop
            assert store.calls[operation] == calls
        assert pool.has(range(4), range(4)) == [True] * 4


def test_staging_blocks_of_an_interrupted_caller_are_not_used_until_its_load_has_ended(monkeypatch):
    store = LoopedStore()
    with opened(store, staging_pages=8) as pages:
        saved(pages, range(4))
        gate = store.hold("load", call=0)
        pool = HostPool()
        with monkeypatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pages.load(digests(range(2)), pool.places(range(2)))
        assert pages.load(digests(range(2, 4)), pool.places(range(2, 4))) == 0
        store.loop.call_soon_threadsafe(gate.open)
        while not pages.load(digests(range(2, 4)), pool.places(range(2, 4))):
            pass  # each call is a pass of the loop
        assert pool.has(range(4), range(4)) == [False, False, True, True]


def interrupted(future: object, timeout: float | None = None) -> None:
    raise KeyboardInterrupt


def test_threads_move_pages_at_the_same_time(tmp_path):
    with opened(f"disk:{tmp_path}?bytes=8MiB") as pages, ThreadPoolExecutor(8) as threads:

        def round_trip(first: int) -> bool:
            numbers = range(first, first + 8)
            if not all(saved(pages, numbers)):
                return False
            pool = HostPool()
            loaded = pages.load(digests(numbers), pool.places(range(8)))
            return loaded == 8 and all(pool.has(range(8), numbers))

        assert all(threads.map(round_trip, range(0, 128, 8)))


def test_closed_pages_are_missing(tmp_path):
    with opened(f"directory:{tmp_path}") as pages:
        saved(pages, range(2))
        pages.close()
        assert pages.lookup(digests(range(2))) == 0
        assert saved(pages, range(2)) == [False, False]
        assert pages.load(digests(range(2)), HostPool().places(range(2))) == 0
        assert pages.statistics() == []


def test_close_ends_a_call_of_another_thread():
    asked = asyncio.Event()

    class Asked(LoopedStore):
        async def lookup(self, keys: bytes):
            asked.set()
            return await super().lookup(keys)

    store = Asked()
    store.delay("lookup", seconds=3600.0)
    with (
        opened(StoreUse(store, lookup_deadline_seconds=3600.0)) as pages,
        ThreadPoolExecutor(1) as threads,
    ):
        waiting = threads.submit(pages.lookup, digests(range(2)))
        asyncio.run_coroutine_threadsafe(asked.wait(), store.loop).result()
        pages.close()
        assert waiting.result() == 0


def test_store_that_cannot_be_opened_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        opened(f"directory:{tmp_path}/file/below?required=true")
    with pytest.raises(ConfigError, match="one object takes"):
        opened(f"directory:{tmp_path}/kv?bytes=1")
    with opened(f"directory:{tmp_path}/file/below") as pages:
        assert pages.lookup(digests(range(2))) == 0


@pytest.mark.parametrize(
    ("wanted", "shape", "message"),
    [
        (digests(range(2)), (1, 3), "digests has 64 bytes; it must have 32 for each of the 1 obj"),
        (digests(range(1)), (1, 2), r"shape \(1, 2\); it must have the shape \[pages, 3\]"),
        (digests(range(3)), (3,), r"shape \(3,\); it must have the shape \[pages, 3\]"),
    ],
)
def test_wrong_numbers_of_pages_and_parts_are_errors(wanted, shape, message):
    with opened(ScriptedStore()) as pages:
        for method in (pages.load, pages.save):
            with pytest.raises(UsageError, match=message):
                method(wanted, np.zeros(shape, np.int64))


def test_pages_are_closed_when_the_interpreter_exits(tmp_path: Path):
    program = f"""
import numpy as np
from aiokv.connectors.pages import PageGroup, PageStore
from aiokv.stores import stores_from
pages = PageStore(
    stores_from(["disk:{tmp_path}?bytes=1MiB"]),
    {{"attention": PageGroup(fingerprint=bytes(range(32)), part_bytes=(9000,))}}, staging_bytes=1,
)
page = np.zeros(9000, np.uint8)
assert pages.save(bytes(32), np.array([[page.ctypes.data]])) == [True]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with opened(f"disk:{tmp_path}?bytes=1MiB") as pages:
        assert pages.lookup(bytes(32)) == 1


def test_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path):
    program = f"""
import os, signal
import numpy as np
from aiokv.connectors.pages import PageGroup, PageStore
from aiokv.errors import ClosedError
from aiokv.stores import stores_from
pages = PageStore(
    stores_from(["directory:{tmp_path}"]),
    {{"attention": PageGroup(fingerprint=bytes(range(32)), part_bytes=(9000,))}}, staging_bytes=1,
)
pid = os.fork()
if pid == 0:
    signal.alarm(60)  # ends a child that waits for a thread of its parent
    page = np.zeros(9000, np.uint8)
    addresses = np.array([[page.ctypes.data]])
    calls = [
        lambda: pages.lookup(bytes(32)),
        lambda: pages.load(bytes(32), addresses),
        lambda: pages.save(bytes(32), addresses),
        pages.statistics,
    ]
    refused = 0
    for call in calls:
        try:
            call()
        except ClosedError as error:
            refused += "before os.fork()" in str(error)
    pages.close()
    os._exit(len(calls) - refused)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert pages.lookup(bytes(32)) == 0
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
