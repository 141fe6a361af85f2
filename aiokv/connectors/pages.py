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
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec
import numpy as np
import uvloop

from aiokv import _native
from aiokv.base.groups import ATTENTION
from aiokv.base.plan import FETCH, SAVE, Priority, Route, TransferPlan, id_bytes
from aiokv.errors import ClosedError, UsageError
from aiokv.layout.host_format import pitch_bytes
from aiokv.stores.accesses import Accesses
from aiokv.stores.base import KEY_BYTES, Result, StoreMemory
from aiokv.stores.pools import StorePools
from aiokv.worker.arena import HostArena

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from aiokv.base.statistics import GuardStatistics
    from aiokv.stores.use import StoreUse

T = TypeVar("T")
Page: TypeAlias = "Sequence[NDArray[np.uint8]]"  # views of the parts of a page, in their order

_open: weakref.WeakSet[PageStore] = weakref.WeakSet()


def _close_at_exit() -> None:
    for pages in list(_open):
        pages.close()


# Not atexit: stores use executors, which the interpreter shuts down before it calls atexit.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


class PageGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one size.

    Attributes:
        fingerprint: 32 bytes; pages of other fingerprints are not found.
        page_bytes: size of each page.
        share: part of the staging memory, and of the limits of the stores, above 0; the shares of
            all groups add up to 1.
    """

    fingerprint: bytes
    page_bytes: int
    share: float = 1.0


class PageStore:
    """Stores on a loop in a thread. Each method may be called in any thread.

    After ``os.fork``, every method raises ``ClosedError`` in the child, except ``close``, which has
    no effect there.

    Args:
        stores: in the order in which pages are taken from them.
        groups: groups of pages by name; one of them is ``"attention"``.
        staging_bytes: memory for the pages of loads, and as much for those of saves; at least one
            page per group.

    Raises:
        AiokvError: as ``StorePools.open``; all are closed.
    """

    def __init__(
        self, stores: Sequence[StoreUse], groups: Mapping[str, PageGroup], *, staging_bytes: int
    ) -> None:
        self._process = os.getpid()
        self._groups = {
            name: _StagedGroup(name, group, int(staging_bytes * group.share))
            for name, group in groups.items()
        }
        self._stores = StorePools(stores)
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._posting = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="aiokv-pages", daemon=True)
        self._thread.start()
        memories = {name: group.memory for name, group in self._groups.items()}
        try:
            self._call(self._stores.open(memories, lambda name: groups[name].fingerprint), None)
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def lookup(self, digests: bytes) -> int:
        """Return how many leading pages of ``"attention"`` the stores have; 0 if they are late.

        Args:
            digests: 32 bytes per page.
        """
        answer = self._call(self._stores.lookup(digests), None)
        return 0 if answer is None else answer.blocks

    def find(self, digests: bytes, group: str = ATTENTION) -> NDArray[np.bool_]:
        """Return which pages of a group the stores have, ``[pages]``; none if they are late.

        Args:
            digests: 32 bytes per page.
            group: name of the group.
        """
        found = self._call(self._stores.find(group, digests), None)
        if found is None:
            return np.zeros(len(digests) // KEY_BYTES, np.bool_)
        return np.isfinite(found.seconds)

    def load(self, digests: bytes, pages: Sequence[Page], group: str = ATTENTION) -> int:
        """Load pages of a group; return how many leading ones were loaded and verified.

        The memory of the other pages has not changed.

        Args:
            digests: 32 bytes per page.
            pages: where the bytes of each page go.
            group: name of the group.

        Raises:
            UsageError: a page has not ``page_bytes``. Nothing was loaded.
        """
        staged = self._groups[group]
        staged.check(digests, pages)
        with staged.loading.lock:
            for part in staged.loading.parts(len(pages)):
                some = digests[part.start * KEY_BYTES : part.stop * KEY_BYTES]
                loaded = self._call(self._fetch(staged.loading, some), 0)
                for block, page in enumerate(pages[part.start : part.start + loaded]):
                    staged.loading.copy_out(block, page)
                if loaded < len(part):
                    return part.start + loaded
        return len(pages)

    def save(self, digests: bytes, pages: Sequence[Page], group: str = ATTENTION) -> list[bool]:
        """Save pages of a group; return for each one whether at least one store has it.

        Args:
            digests: 32 bytes per page.
            pages: where the bytes of each page are.
            group: name of the group.

        Raises:
            UsageError: a page has not ``page_bytes``. Nothing was saved.
        """
        staged = self._groups[group]
        staged.check(digests, pages)
        results = np.full(len(pages), Result.FAILED, np.uint8)
        with staged.saving.lock:
            for part in staged.saving.parts(len(pages)):
                if not self._call(self._is_free(staged.saving), False):
                    break  # a store that has missed its deadline reads the staging blocks
                for block, page in enumerate(pages[part.start : part.stop]):
                    staged.saving.copy_in(block, page)
                some = digests[part.start * KEY_BYTES : part.stop * KEY_BYTES]
                failed = bytes([Result.FAILED]) * len(part)
                saved = self._call(self._save(staged.saving, some), failed)
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

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._stopping.wait()
        if not await self._stores.aclose():
            for group in self._groups.values():
                _native.keep_forever(group.arena)

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

    async def _fetch(self, staging: _Staging, digests: bytes) -> int:
        if staging.accesses.in_flight:
            return 0  # a store that has missed its deadline writes to the staging blocks
        plan = staging.plan(FETCH, digests)
        return (await self._stores.fetch(plan, staging.accesses)).blocks

    async def _save(self, staging: _Staging, digests: bytes) -> bytes:
        plan = staging.plan(SAVE, digests)
        return (await self._stores.save(plan, staging.accesses)).results


class _StagedGroup:
    """Staging memory of a group.

    Attributes:
        arena: owner of the memory.
        memory: the same memory, as stores see it.
        loading: blocks for loads.
        saving: blocks for saves.
    """

    def __init__(self, name: str, group: PageGroup, staging_bytes: int) -> None:
        self._page_bytes = group.page_bytes
        pitch = pitch_bytes(group.page_bytes, with_stores=True)
        num_blocks = max(1, staging_bytes // pitch)
        self.arena = HostArena(num_blocks=2 * num_blocks, pitch_bytes=pitch)
        self.memory = StoreMemory(
            address=self.arena.pointer,
            num_blocks=2 * num_blocks,
            pitch_bytes=pitch,
            payload_bytes=group.page_bytes,
            view=self.arena.blocks.reshape(-1).data,
            group=name,
            quota_share=group.share,
        )
        self.loading = _Staging(name, self.arena.blocks, range(num_blocks))
        self.saving = _Staging(name, self.arena.blocks, range(num_blocks, 2 * num_blocks))

    def check(self, digests: bytes, pages: Sequence[Page]) -> None:
        """Raise ``UsageError`` unless there is a digest per page, and each page has its size."""
        if len(digests) != KEY_BYTES * len(pages):
            raise UsageError(
                f"digests has {len(digests)} bytes; it must have {KEY_BYTES} for each of the "
                f"{len(pages)} pages"
            )
        for i, page in enumerate(pages):
            if (num_bytes := sum(part.size for part in page)) != self._page_bytes:
                raise UsageError(
                    f"page {i} has {num_bytes} bytes; it must have {self._page_bytes}, as the host "
                    "pool"
                )


class _Staging:
    """Blocks of a group for one direction.

    Attributes:
        lock: held by the thread that uses the blocks.
        accesses: operations of stores that access the blocks.
    """

    def __init__(self, group: str, arena: NDArray[np.uint8], blocks: range) -> None:
        self._group = group
        self._blocks = arena[blocks.start : blocks.stop]
        self._ids = np.arange(blocks.start, blocks.stop, dtype=np.int32)
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
            transfer_id=0, route=route, group=self._group, source_blocks=blocks,
            target_blocks=blocks, priority=Priority.DEMAND, digests=digests,
        )  # fmt: skip

    def copy_in(self, block: int, page: Page) -> None:
        """Copy a page to a block; releases the GIL."""
        for part, staged in self._places(block, page):
            staged[...] = part

    def copy_out(self, block: int, page: Page) -> None:
        """Copy a block to a page; releases the GIL."""
        for part, staged in self._places(block, page):
            part[...] = staged

    def _places(
        self, block: int, page: Page
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Yield the parts of a page, each with its place in a block."""
        begin = 0
        for part in page:
            end = begin + part.size
            yield part, self._blocks[block, begin:end].reshape(part.shape)
            begin = end
