"""PageStore: aiokv's stores for the pages of a server that has plain threads and its own host tier.

A store needs room for a trailer behind each page, and may access its memory after its deadline. So
pages are copied through staging blocks: from the memory of the server before a save, and to it
after a load, when their bytes are verified. A store never accesses the memory of the server.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from concurrent.futures import CancelledError
from ctypes import memmove
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import uvloop

from aiokv import _native
from aiokv.base.plan import FETCH, SAVE, Priority, Route, TransferPlan, id_bytes
from aiokv.errors import ClosedError, UsageError
from aiokv.layout.host_format import pitch_bytes
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory
from aiokv.stores.store_set import StoreSet
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.use import StoreUse

T = TypeVar("T")
Page: TypeAlias = "Sequence[tuple[int, int]]"  # address and bytes of each part, in their order

_open: weakref.WeakSet[PageStore] = weakref.WeakSet()


def _close_at_exit() -> None:
    for pages in list(_open):
        pages.close()


# Not atexit: stores use executors, which the interpreter shuts down before it calls atexit.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


class PageStore:
    """Stores on a loop in a thread. Each method may be called in any thread.

    After ``os.fork``, every method raises ``ClosedError`` in the child, except ``close``, which has
    no effect there.

    Args:
        stores: in the order in which pages are taken from them.
        fingerprint: 32 bytes; pages of other fingerprints are not found.
        page_bytes: size of each page.
        staging_bytes: memory for the pages of a load, and as much for those of a save; at least
            one page.

    Raises:
        AiokvError: as ``StoreSet.open``; all are closed.
    """

    def __init__(
        self, stores: Sequence[StoreUse], *, fingerprint: bytes, page_bytes: int, staging_bytes: int
    ) -> None:
        self._page_bytes = page_bytes
        self._process = os.getpid()
        pitch = pitch_bytes(page_bytes, with_stores=True)
        num_blocks = max(1, staging_bytes // pitch)
        self._arena = HostArena(num_blocks=2 * num_blocks, pitch_bytes=pitch)
        self._loading = _Staging(self._arena, 0, num_blocks)
        self._saving = _Staging(self._arena, num_blocks, num_blocks)
        self._stores = StoreSet(stores)
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._posting = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="aiokv-pages", daemon=True)
        self._thread.start()
        memory = StoreMemory(
            address=self._arena.pointer,
            num_blocks=2 * num_blocks,
            pitch_bytes=pitch,
            payload_bytes=page_bytes,
            view=self._arena.blocks.reshape(-1).data,
        )
        try:
            self._call(self._stores.open(memory, fingerprint), None)
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def lookup(self, digests: bytes) -> int:
        """Return how many leading pages the stores have; 0 without an answer in time.

        Args:
            digests: 32 bytes per page.
        """
        answer = self._call(self._stores.lookup(digests), None)
        return 0 if answer is None else answer.blocks

    def load(self, digests: bytes, pages: Sequence[Page]) -> int:
        """Load pages; return how many leading ones were loaded and verified.

        The memory of the other pages has not changed.

        Args:
            digests: 32 bytes per page.
            pages: where the bytes of each page go.

        Raises:
            UsageError: a page has not ``page_bytes``. Nothing was loaded.
        """
        self._check(digests, pages)
        with self._loading.lock:
            for part in self._loading.parts(len(pages)):
                some = digests[part.start * KEY_BYTES : part.stop * KEY_BYTES]
                loaded = self._call(self._fetch(some), 0)
                for block, page in enumerate(pages[part.start : part.start + loaded]):
                    self._loading.copy_out(block, page)
                if loaded < len(part):
                    return part.start + loaded
        return len(pages)

    def save(self, digests: bytes, pages: Sequence[Page]) -> list[bool]:
        """Save pages; return for each one whether at least one store has it.

        Args:
            digests: 32 bytes per page.
            pages: where the bytes of each page are.

        Raises:
            UsageError: a page has not ``page_bytes``. Nothing was saved.
        """
        self._check(digests, pages)
        results = np.full(len(pages), Result.FAILED, np.uint8)
        with self._saving.lock:
            for part in self._saving.parts(len(pages)):
                if not self._call(self._is_free(self._saving), False):
                    break  # a store that has missed its deadline reads the staging blocks
                for block, page in enumerate(pages[part.start : part.stop]):
                    self._saving.copy_in(block, page)
                some = digests[part.start * KEY_BYTES : part.stop * KEY_BYTES]
                saved = self._call(self._save(some), bytes([Result.FAILED]) * len(part))
                results[part.start : part.stop] = np.frombuffer(saved, np.uint8)
        return [bool(done) for done in results == Result.DONE]

    def statistics(self) -> list[GuardStatistics]:
        """Return the statistics of each store, in order; an empty list after ``close``."""

        async def read() -> list[GuardStatistics]:
            return self._stores.statistics()

        return self._call(read(), [])

    def close(self) -> None:
        """End the operations in flight, and close the stores. Idempotent."""
        if os.getpid() != self._process:
            return  # a fork: the parent has the thread
        with self._posting:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _check(self, digests: bytes, pages: Sequence[Page]) -> None:
        if len(digests) != KEY_BYTES * len(pages):
            raise UsageError(
                f"digests has {len(digests)} bytes; it must have {KEY_BYTES} for each of the "
                f"{len(pages)} pages"
            )
        for i, page in enumerate(pages):
            if (num_bytes := sum(size for _, size in page)) != self._page_bytes:
                raise UsageError(
                    f"page {i} has {num_bytes} bytes; it must have {self._page_bytes}, as the host "
                    "pool"
                )

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stopping.wait()
        if not await self._stores.aclose():
            _native.keep_forever(self._arena)

    def _call(self, coroutine: Coroutine[object, object, T], default: T) -> T:
        """Return the value of a coroutine on the loop; ``default`` when the stores are closed.

        Raises:
            ClosedError: this process is a fork of the process of the stores.
        """
        if os.getpid() != self._process:
            coroutine.close()
            raise ClosedError(
                "the stores belong to the parent process, which opened them before os.fork()",
                hint="make a PageStore in the child",
            )
        with self._posting:
            if self._is_closed:
                coroutine.close()
                return default
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            return default

    async def _is_free(self, staging: _Staging) -> bool:
        return not staging.accesses.in_flight

    async def _fetch(self, digests: bytes) -> int:
        if self._loading.accesses.in_flight:
            return 0  # a store that has missed its deadline writes to the staging blocks
        plan = self._loading.plan(FETCH, digests)
        return (await self._stores.fetch(plan, self._loading.accesses)).blocks

    async def _save(self, digests: bytes) -> bytes:
        plan = self._saving.plan(SAVE, digests)
        return (await self._stores.save(plan, self._saving.accesses)).results


class _Staging:
    """Blocks of an arena for one direction.

    Attributes:
        lock: held by the thread that uses the blocks.
        accesses: operations of stores that access the blocks.
    """

    def __init__(self, arena: HostArena, first: int, num_blocks: int) -> None:
        self._address = arena.pointer + first * arena.pitch_bytes
        self._pitch_bytes = arena.pitch_bytes
        self._ids = np.arange(first, first + num_blocks, dtype=np.int32)
        self.lock = threading.Lock()
        self.accesses = Accesses()

    def parts(self, num_pages: int) -> Iterator[range]:
        """Yield the numbers of the pages that find room at a time."""
        step = len(self._ids)
        return (range(i, min(i + step, num_pages)) for i in range(0, num_pages, step))

    def plan(self, route: Route, digests: bytes) -> TransferPlan:
        """Return the plan of a load to the first blocks, or of a save from them."""
        blocks = id_bytes(self._ids[: len(digests) // KEY_BYTES])
        return TransferPlan(
            transfer_id=0, route=route, source_blocks=blocks, target_blocks=blocks,
            priority=Priority.DEMAND, digests=digests,
        )  # fmt: skip

    def copy_in(self, block: int, page: Page) -> None:
        """Copy a page to a block; releases the GIL."""
        target = self._address + block * self._pitch_bytes
        for address, num_bytes in page:
            memmove(target, address, num_bytes)
            target += num_bytes

    def copy_out(self, block: int, page: Page) -> None:
        """Copy a block to a page; releases the GIL."""
        source = self._address + block * self._pitch_bytes
        for address, num_bytes in page:
            memmove(address, source, num_bytes)
            source += num_bytes
