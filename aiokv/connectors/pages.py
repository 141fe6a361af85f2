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
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
import uvloop

from aiokv import _native
from aiokv.base.groups import ATTENTION
from aiokv.base.plan import FETCH, SAVE, Priority, Route, TransferPlan, id_bytes
from aiokv.errors import ClosedError, UsageError
from aiokv.layout.host_block import pitch_bytes
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

_open: weakref.WeakSet[PageStore] = weakref.WeakSet()


def _close_at_exit() -> None:
    for pages in list(_open):
        pages.close()


# Not atexit: stores use executors, which the interpreter shuts down before it calls atexit.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]


class PageGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one shape, each in one object of the stores or divided into several.

    A page consists of parts, which need not be adjacent. Each part has the shape ``[rows, objects,
    bytes]``; the objects of a page contain ``part[:, 0]``, ``part[:, 1]`` and so on of all parts.

    Attributes:
        fingerprint: 32 bytes; pages of other fingerprints are not found.
        part_bytes: size of each part of a page, in their order.
        objects: number of objects per page.
        rows: number of rows of each part.
        share: part of the staging memory, and of the limits of the stores, above 0; the shares of
            all groups add up to 1.
    """

    fingerprint: bytes
    part_bytes: tuple[int, ...]
    objects: int = 1
    rows: int = 1
    share: float = 1.0

    @property
    def object_bytes(self) -> int:
        """Size of each object."""
        return sum(self.part_bytes) // self.objects


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
            digests: 32 bytes per object.
        """
        answer = self._call(self._stores.lookup(digests), None)
        return 0 if answer is None else answer.blocks // self._groups[ATTENTION].objects

    def find(self, digests: bytes, group: str = ATTENTION) -> NDArray[np.bool_]:
        """Return which pages of a group the stores have, ``[pages]``; none if they are late.

        Args:
            digests: 32 bytes per object.
            group: name of the group.
        """
        objects = self._groups[group].objects
        found = self._call(self._stores.find(group, digests), None)
        if found is None:
            return np.zeros(len(digests) // KEY_BYTES // objects, np.bool_)
        missing = ~np.isfinite(found.seconds).reshape(-1, objects)
        return np.logical_not(missing.any(axis=1))

    def load(self, digests: bytes, addresses: NDArray[np.int64], group: str = ATTENTION) -> int:
        """Load pages of a group; return how many leading ones were loaded and verified.

        The memory of the other pages has not changed.

        Args:
            digests: 32 bytes per object.
            addresses: where the parts of each page go, ``[pages, parts]``. They are not checked.
            group: name of the group.

        Raises:
            UsageError: the digests or the addresses are those of another number of pages or parts.
                Nothing was loaded.
        """
        staged = self._groups[group]
        staged.check(digests, addresses)
        with staged.loading.lock:
            for pages, some in staged.batches(digests, addresses):
                loaded = self._call(self._fetch(staged.loading, some), 0) // staged.objects
                staged.loading.copy(addresses[pages.start : pages.start + loaded])
                if loaded < len(pages):
                    return pages.start + loaded
        return len(addresses)

    def save(
        self, digests: bytes, addresses: NDArray[np.int64], group: str = ATTENTION
    ) -> list[bool]:
        """Save pages of a group; return for each one whether the stores have all its objects.

        Args:
            digests: 32 bytes per object.
            addresses: where the parts of each page are, ``[pages, parts]``. They are not checked.
            group: name of the group.

        Raises:
            UsageError: the digests or the addresses are those of another number of pages or parts.
                Nothing was saved.
        """
        staged = self._groups[group]
        staged.check(digests, addresses)
        saved: list[bool] = []
        with staged.saving.lock:
            for pages, some in staged.batches(digests, addresses):
                if not self._call(self._is_free(staged.saving), False):
                    break  # a store that has missed its deadline reads the staging blocks
                staged.saving.copy(addresses[pages.start : pages.stop])
                failed = bytes([Result.FAILED]) * len(pages) * staged.objects
                results = self._call(self._save(staged.saving, some), failed)
                done = np.frombuffer(results, np.uint8) == Result.DONE
                saved += done.reshape(-1, staged.objects).all(axis=1).tolist()
        return saved + [False] * (len(addresses) - len(saved))

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
        fetched = await self._stores.fetch(staging.plan(digests), staging.accesses)
        return fetched.blocks

    async def _save(self, staging: _Staging, digests: bytes) -> bytes:
        return (await self._stores.save(staging.plan(digests), staging.accesses)).results


class _StagedGroup:
    """Staging memory of a group.

    Attributes:
        arena: owner of the memory.
        memory: the same memory, as stores see it.
        objects: number of objects per page.
        loading: blocks for loads.
        saving: blocks for saves.
    """

    def __init__(self, name: str, group: PageGroup, staging_bytes: int) -> None:
        pitch = pitch_bytes(group.object_bytes, with_stores=True)
        self.objects = group.objects
        self._num_parts = len(group.part_bytes)
        self._num_pages = max(1, staging_bytes // (pitch * group.objects))
        num_blocks = self._num_pages * group.objects
        self.arena = HostArena(num_blocks=2 * num_blocks, pitch_bytes=pitch)
        self.memory = StoreMemory(
            address=self.arena.pointer,
            num_blocks=2 * num_blocks,
            pitch_bytes=pitch,
            payload_bytes=group.object_bytes,
            view=self.arena.blocks.reshape(-1).data,
            group=name,
            quota_share=group.share,
        )
        self.loading = _Staging(name, group, FETCH, self.memory, range(num_blocks))
        self.saving = _Staging(name, group, SAVE, self.memory, range(num_blocks, 2 * num_blocks))

    def check(self, digests: bytes, addresses: NDArray[np.int64]) -> None:
        """Raise ``UsageError`` unless each object has a digest, and each part has an address."""
        if addresses.ndim != 2 or addresses.shape[1] != self._num_parts:
            raise UsageError(
                f"addresses has the shape {addresses.shape}; it must have the shape "
                f"[pages, {self._num_parts}]"
            )
        if len(digests) != KEY_BYTES * self.objects * len(addresses):
            raise UsageError(
                f"digests has {len(digests)} bytes; it must have {KEY_BYTES} for each of the "
                f"{self.objects * len(addresses)} objects"
            )

    def batches(
        self, digests: bytes, addresses: NDArray[np.int64]
    ) -> Iterator[tuple[range, bytes]]:
        """Yield the numbers of the pages that are staged together, and their digests."""
        step = KEY_BYTES * self.objects
        for begin in range(0, len(addresses), self._num_pages):
            end = min(begin + self._num_pages, len(addresses))
            yield range(begin, end), digests[begin * step : end * step]


class _Staging:
    """Blocks of a group for one direction.

    Attributes:
        lock: held by the thread that uses the blocks.
        accesses: operations of stores that access the blocks.
    """

    def __init__(
        self, name: str, group: PageGroup, route: Route, memory: StoreMemory, blocks: range
    ) -> None:
        self._group = name
        self._route = route
        self._ids = np.arange(blocks.start, blocks.stop, dtype=np.int32)
        self._address = memory.address + blocks.start * memory.pitch_bytes
        self._page_stride = group.objects * memory.pitch_bytes
        self._part_bytes = np.array(group.part_bytes)
        # The objects contain the parts in their order, one behind the other.
        self._offsets = (np.cumsum(self._part_bytes) - self._part_bytes) // group.objects
        self._repacks = {
            size: self._repack(group, size, memory.pitch_bytes) for size in set(group.part_bytes)
        }
        self.lock = threading.Lock()
        self.accesses = Accesses()

    def _repack(self, group: PageGroup, part_bytes: int, pitch: int) -> _native.Repack:
        """Return the copy of a part between a page and the staging blocks of its objects."""
        run = part_bytes // group.rows // group.objects
        lengths = (group.objects, group.rows)
        strides = [(run, run * group.objects), (pitch, run)]  # in the page, in the blocks
        sizes = [part_bytes, (group.objects - 1) * pitch + part_bytes // group.objects]
        if self._route == FETCH:
            strides.reverse()
            sizes.reverse()
        axes = list(zip(lengths, *strides, strict=True))
        no_rows = (1, 1, 0, 0)
        return _native.Repack(
            [(run, axes, 0, no_rows, no_rows, [(0, 0)])], [],
            source_bytes=sizes[0], target_bytes=sizes[1],
        )  # fmt: skip

    def plan(self, digests: bytes) -> TransferPlan:
        """Return the plan of a load to the first blocks, or of a save from them."""
        blocks = id_bytes(self._ids[: len(digests) // KEY_BYTES])
        return TransferPlan(
            transfer_id=0, route=self._route, group=self._group, source_blocks=blocks,
            target_blocks=blocks, priority=Priority.DEMAND, digests=digests,
        )  # fmt: skip

    def copy(self, addresses: NDArray[np.int64]) -> None:
        """Copy pages to the first blocks before a save, or from them after a load.

        Releases the GIL.

        Args:
            addresses: of the parts of each page, ``[pages, parts]``.
        """
        pages = self._page_stride * np.arange(len(addresses))
        staged = self._address + self._offsets + pages[:, np.newaxis]
        source, target = (staged, addresses) if self._route == FETCH else (addresses, staged)
        for size, repack in self._repacks.items():
            of_size = self._part_bytes == size
            parts = np.zeros((len(addresses) * np.count_nonzero(of_size), 5), np.int64)
            parts[:, 0] = source[:, of_size].ravel()
            parts[:, 1] = target[:, of_size].ravel()
            repack.run(parts)
